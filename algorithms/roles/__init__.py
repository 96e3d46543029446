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
    BehaviorLogprob,
    Demonstrations,
    DistillationBatch,
    Feedback,
    FeedbackBatch,
    PerSample,
    PerStep,
    PerToken,
    PolicyBatch,
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
    ScoredPairs,
    ScoreOutput,
    StepMask,
    StepScores,
    TokenIds,
    TokenMask,
    TrainMetrics,
    Unfinished,
    ValueBatch,
    ValueOutput,
)

__all__ = ["Agent", "Conversations", "Observer", "Policy", "ProcessReward", "Prompts", "Reward"]
__all__ += ["RewardModel", "Rollout", "Sampling", "TrainMetrics", "Unfinished", "ValueModel"]
__all__ += ["BehaviorLogprob", "PerSample", "PerStep", "PerToken", "PromptId", "PromptKey"]
__all__ += ["PromptTokenIds", "SampleFlag", "StepMask", "TokenIds", "TokenMask", "Demonstrations"]
__all__ += ["PreferencePairs", "ScoredPairs", "DistillationBatch", "FeedbackBatch", "PolicyBatch"]
__all__ += ["PolicyOutput", "ReferencePairBatch", "ReferencePolicyBatch", "ScoreOutput"]
__all__ += ["StepScores", "Feedback", "ValueBatch", "ValueOutput"]
