"""Role contracts of language-model RL: the words that algorithms are written in.

Their tables and columns, and the conventions that hold for them, are in `language_tables`; they can
be imported from here as well.
"""

from __future__ import annotations

from typing import TypeVar

from ...dataflow.graph.role import Loss, Role, call
from .agents import Agent, Conversations
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

__all__ = [
    "BehaviorLogprob",
    "DemonstrationBatch",
    "Demonstrations",
    "DistillationBatch",
    "FeedbackBatch",
    "Observer",
    "PROMPT",
    "PairBatch",
    "PerRow",
    "PerSample",
    "PerStep",
    "PerToken",
    "PerWord",
    "Policy",
    "PolicyBatch",
    "PolicyColumns",
    "PolicyOutput",
    "PreferencePairs",
    "ProcessReward",
    "PromptId",
    "PromptKey",
    "PromptTokenIds",
    "Prompts",
    "ROW",
    "ReferencePairBatch",
    "ReferencePolicyBatch",
    "Reward",
    "RewardModel",
    "Rollout",
    "SAMPLE",
    "STEP",
    "SampleFlag",
    "Sampling",
    "ScoreOutput",
    "ScoredPairBatch",
    "ScoredPairs",
    "StepMask",
    "StepScores",
    "TOKEN",
    "TokenIds",
    "TokenMask",
    "TokenVersion",
    "TopWords",
    "TrainMetrics",
    "Unfinished",
    "ValueBatch",
    "ValueColumns",
    "ValueModel",
    "ValueOutput",
    "WORD",
    "WordIds",
]

B = TypeVar("B")


class Policy(Role):
    """A language model that can be sampled from, evaluated and trained."""

    model_head = "vocabulary"

    @call("rollout")
    def generate(self, prompt: PromptTokenIds, prompt_id: PromptKey, sampling: Sampling) -> Rollout:
        """Sample `sampling.num_samples` responses per prompt, grouped by `prompt_id`."""
        raise NotImplementedError

    @call("rollout")
    def converse(
        self,
        prompt: PromptTokenIds,
        prompt_id: PromptKey,
        agent: Agent,
        sampling: Sampling,
        *,
        max_turns: int = 8,
        branch: bool = False,
    ) -> Conversations:
        """Hold `sampling.num_samples` conversations per prompt with what an agent answers.

        Args:
            prompt: i64[P, T], what the policy reads before it first speaks.
            prompt_id: i64[P]; the agent finds the problem by it.
            agent: Answers each turn.
            sampling: How turns are sampled. `max_new_tokens` is the longest turn, and
                `max_total_tokens`, which must be given, the longest conversation with its prompt.
            max_turns: Most turns of the policy in a conversation.
            branch: Whether samples 2n and 2n + 1 of a prompt are the same up to a turn, which is
                chosen at random below `max_turns`, and go on from there each by itself. It asks for
                an even number of samples and for an agent that answers the same to the same.
        """
        raise NotImplementedError

    @call("forward")
    def logprob(self, tokens: TokenIds, mask: TokenMask, *, temperature: float = 1.0) -> PerToken:
        """Log-probability of each masked token; 0 elsewhere."""
        raise NotImplementedError

    @call("forward")
    def top_words(
        self, tokens: TokenIds, mask: TokenMask, *, num_words: int, temperature: float = 1.0
    ) -> TopWords:
        """The likeliest words in the place of each masked token, given all before it.

        As many as `num_words`, or the whole vocabulary where that has fewer.
        """
        raise NotImplementedError

    @call("train")
    def train(
        self,
        loss: Loss[B, PolicyOutput],
        batch: B,
        *,
        epochs: int = 1,
        num_minibatches: int = 1,
        temperature: float = 1.0,
    ) -> TrainMetrics:
        """Take `epochs * num_minibatches` optimizer steps and make the next weight version."""
        raise NotImplementedError

    @call("train")
    def follow(self, leader: Policy, *, share: float = 1.0, every: int = 1) -> TrainMetrics:
        """Move the weights towards another policy's, and make the next weight version.

        `w + share * (leader - w)`: a reference that follows the trained policy as an exponential
        moving average with decay `1 - share`, or as a copy that is renewed now and then.

        Args:
            leader: The role whose weights are read, as they are at this line of the step.
            share: How far, above 0: 1 copies them.
            every: Only in steps whose number it divides, the first of a run included.

        Its metric:

        - `followed`: 1 if the weights have been moved in this step, else 0.
        """
        raise NotImplementedError


class ValueModel(Role):
    """A critic: one value per token."""

    model_head = "scalar"

    @call("forward")
    def value(self, tokens: TokenIds, mask: TokenMask) -> PerToken:
        """Value of the state before each masked token; 0 elsewhere."""
        raise NotImplementedError

    @call("train")
    def train(
        self, loss: Loss[B, ValueOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        """Take `epochs * num_minibatches` optimizer steps and make the next weight version."""
        raise NotImplementedError

    @call("train")
    def follow(self, leader: ValueModel, *, share: float = 1.0, every: int = 1) -> TrainMetrics:
        """Move the weights towards another critic's: a slower copy; see `Policy.follow`.

        Its metric:

        - `followed`: 1 if the weights have been moved in this step, else 0.
        """
        raise NotImplementedError


class Reward(Role):
    """Anything that scores whole responses: a rule, a reward model, a judge."""

    model_head = "scalar"

    @call("forward")
    def score(self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId) -> PerSample:
        """One score per response. `prompt_id` lets a rule find the problem's answer."""
        raise NotImplementedError


class RewardModel(Reward):
    """A learned reward: scores like any `Reward`, and can be trained on preferences."""

    @call("train")
    def train(
        self, loss: Loss[B, ScoreOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        """Take `epochs * num_minibatches` optimizer steps and make the next weight version."""
        raise NotImplementedError


class ProcessReward(Role):
    """Somebody who scores every step of a response."""

    model_head = "scalar"

    @call("forward")
    def score_steps(self, tokens: TokenIds, mask: TokenMask) -> StepScores:
        """Find the steps of each response, and score each given all before it."""
        raise NotImplementedError


class Observer(Role):
    """Somebody who looks at scored responses, to show or keep some."""

    @call("forward", scope="batch")
    def observe(
        self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId, *, score: PerSample
    ) -> PerSample:
        """Look at all responses; returns `score` as it came."""
        raise NotImplementedError
