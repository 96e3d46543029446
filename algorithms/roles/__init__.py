"""Roles that a step may call: contracts and tables. No formula and no worker stands here.

Those of language models are importable from this package; `environment` has those of environments,
games, replays and teams.
"""

from __future__ import annotations

from .language import (
    Agent,
    Conversations,
    Observer,
    Policy,
    ProcessReward,
    Reward,
    RewardModel,
    ValueModel,
)
from .language_tables import (
    PROMPT,
    ROW,
    SAMPLE,
    STEP,
    TOKEN,
    WORD,
    BehaviorLogprob,
    DemonstrationBatch,
    Demonstrations,
    DistillationBatch,
    FeedbackBatch,
    PairBatch,
    PerRow,
    PerSample,
    PerStep,
    PerToken,
    PerWord,
    PolicyBatch,
    PolicyColumns,
    PolicyOutput,
    PreferencePairs,
    PromptId,
    PromptKey,
    Prompts,
    PromptTokenIds,
    ReferencePairBatch,
    ReferencePolicyBatch,
    Rollout,
    SampleFlag,
    Sampling,
    ScoredPairBatch,
    ScoredPairs,
    ScoreOutput,
    StepMask,
    StepScores,
    TokenIds,
    TokenMask,
    TokenVersion,
    TopWords,
    TrainMetrics,
    Unfinished,
    ValueBatch,
    ValueColumns,
    ValueOutput,
    WordIds,
)

__all__ = ["PROMPT", "ROW", "SAMPLE", "STEP", "TOKEN", "WORD"]
__all__ += ["Agent", "Conversations", "Observer", "Policy", "ProcessReward", "Prompts", "Reward"]
__all__ += ["RewardModel", "Rollout", "Sampling", "TrainMetrics", "Unfinished", "ValueModel"]
__all__ += ["BehaviorLogprob", "PerRow", "PerSample", "PerStep", "PerToken", "PerWord", "PromptId"]
__all__ += ["PromptKey", "PromptTokenIds", "SampleFlag", "StepMask", "TokenIds", "TokenMask"]
__all__ += ["TokenVersion", "WordIds", "Demonstrations", "PreferencePairs", "ScoredPairs"]
__all__ += ["DemonstrationBatch", "DistillationBatch", "FeedbackBatch", "PairBatch", "PolicyBatch"]
__all__ += ["PolicyColumns", "ReferencePairBatch", "ReferencePolicyBatch", "ScoredPairBatch"]
__all__ += ["ValueBatch", "ValueColumns", "PolicyOutput", "ScoreOutput", "StepScores", "TopWords"]
__all__ += ["ValueOutput"]
