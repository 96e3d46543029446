"""Columns and tables of language-model RL: what passes between the calls of a step.

Conventions (they hold for every table here):

- `tokens` is a row's whole sequence, prompt first, padded on the right with -1.
- `mask` is True exactly on tokens that the policy sampled and that may be trained, the first
  end-of-sequence token included; False on prompt, on tool output and on padding.
- Per-token columns are indexed by action: entry t belongs to emitting `tokens[t]` given all before
  it. A value at t is the critic's at the state *before* token t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from ...dataflow.graph.axes import Axis, Behavior, GroupId, boolean, f32, i64
from ...dataflow.graph.proxies import standins_in
from ...dataflow.graph.role import Metric
from ...dataflow.options import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    option_class,
)
from ...dataflow.runtime.call_context import call_version

PROMPT = Axis("prompt")
SAMPLE = Axis("sample", within=PROMPT)
TOKEN = Axis("token", ragged=True)
ROW = Axis("row", free=True)
"""Samples, or whatever else a column has rows of: what is written over it serves all of them."""
STEP = Axis("step", free=True)
"""Tokens of a sample, or whatever else a row has steps of."""
WORD = Axis("word")
"""Words of the vocabulary that might stand in a token's place, as many everywhere."""

PromptTokenIds = Annotated[Tensor, i64(PROMPT, TOKEN)]
"""Token ids of a prompt, padded on the right with -1."""
PromptKey = Annotated[Tensor, i64(PROMPT), GroupId()]
"""Number of a prompt's problem in the data; unique within a step."""
PromptId = Annotated[Tensor, i64(SAMPLE), GroupId()]
"""The `PromptKey` a sample answers: the sample's group."""
TokenIds = Annotated[Tensor, i64(SAMPLE, TOKEN)]
"""Token ids of prompt and response, padded on the right with -1."""
TokenMask = Annotated[Tensor, boolean(SAMPLE, TOKEN)]
"""True on tokens the policy sampled."""
PerToken = Annotated[Tensor, f32(SAMPLE, TOKEN)]
"""One number per token; meaningful where the mask is True."""
BehaviorLogprob = Annotated[Tensor, f32(SAMPLE, TOKEN), Behavior()]
"""Log-probability of each sampled token under the weights and temperature that sampled it."""
TokenVersion = Annotated[Tensor, i64(SAMPLE, TOKEN)]
"""Version of the weights that sampled each token; 0 on other tokens of a row, -1 on padding."""
WordIds = Annotated[Tensor, i64(SAMPLE, TOKEN, WORD)]
"""Several words per token; -1 where the mask is False."""
PerWord = Annotated[Tensor, f32(SAMPLE, TOKEN, WORD)]
"""One number for each of several words per token; meaningful where the mask is True."""
PerSample = Annotated[Tensor, f32(SAMPLE)]
"""One number per sample."""
StepMask = Annotated[Tensor, boolean(ROW, STEP)]
"""True on steps that count, or that something is true of."""
PerStep = Annotated[Tensor, f32(ROW, STEP)]
"""One number per step of any rows."""
PerRow = Annotated[Tensor, f32(ROW)]
"""One number per row of any kind."""
SampleFlag = Annotated[Tensor, boolean(SAMPLE)]
"""One boolean per sample."""


@option_class
class Sampling:
    """Sampling of responses; every engine that generates does the same with it.

    The options apply in the order of vLLM: `min_new_tokens`, `repetition_penalty`, `temperature`,
    `min_p`, `top_k`, `top_p`. A token's behavior log-probability is of the distribution that it was
    sampled from, when all of them have been applied (vLLM's `processed_logprobs`).

    A trainer's log-probabilities are of the whole vocabulary at the temperature. Where
    `filtered_by` says that the two distributions differ, a train call that reads behavior
    log-probabilities is refused when its step is recorded: the ratio of the two is not 1 on the
    weights that sampled, and no weight makes up for tokens that are never sampled. TRL and verl
    take the ratio between two passes of the trainer, and so leave the truncation uncorrected; with
    `RolloutCorrection(mode="none")` a step here does the same.

    A response ends with the end-of-sequence token, a token of `stop_token_ids`, or the token that
    completes a string of `stop`. That token is kept, sampled and trained like the others.
    """

    num_samples: PositiveInt = 1
    """Responses per prompt."""
    temperature: NonNegativeFloat = 1.0
    """Logits are divided by it before the softmax; 0 takes the most likely token."""
    max_new_tokens: PositiveInt = 16
    """Longest response in tokens, end-of-sequence included."""
    max_total_tokens: NonNegativeInt = 0
    """Longest prompt and response together: after a long prompt the response is cut off earlier; 0
    for no such limit."""
    min_new_tokens: NonNegativeInt = 0
    """Tokens of a response before one that may end it."""
    top_p: PositiveFraction = 1.0
    """Sample among the likeliest tokens whose probabilities first add up to this; 1 for all."""
    top_k: NonNegativeInt = 0
    """Sample among so many likeliest tokens; 0 for all."""
    min_p: Fraction = 0.0
    """Sample among tokens at least this share as likely as the likeliest; 0 for all."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides positive logits of tokens that are in the prompt or the response already, and
    multiplies negative ones; 1 for none."""
    stop: tuple[str, ...] = ()
    """Strings that end a response whose text comes to hold one."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Tokens that end a response, besides the end-of-sequence token."""

    def __post_init__(self) -> None:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens} and max_new_tokens "
                f"{self.max_new_tokens}; expected at most as many"
            )
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(
                f"stop is {self.stop!r}; expected strings of at least one character: "
                'stop=("\\n\\n",)'
            )

    def longest_response(self, prompt_length: int) -> int:
        """Tokens that a response to a prompt of this length may have."""
        if not self.max_total_tokens:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.max_total_tokens - prompt_length)

    @property
    def filtered_by(self) -> str:
        """Options that make the sampled distribution another than the softmax at the temperature.

        Such as "top_p=0.9, min_p=0.05"; "" if nothing does.
        """
        values = {
            "top_p": (self.top_p, 1.0),
            "top_k": (self.top_k, 0),
            "min_p": (self.min_p, 0.0),
            "repetition_penalty": (self.repetition_penalty, 1.0),
            "min_new_tokens": (self.min_new_tokens, 0),
        }
        return ", ".join(f"{name}={x:g}" for name, (x, none) in values.items() if x != none)

    def check_explores(self) -> None:
        """Require responses to be sampled at random, as learning from their scores does.

        Raises:
            ValueError: If the temperature is 0, or one token alone may be sampled.
        """
        if self.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0, which always gives the likeliest response, so there "
                "is nothing to learn from and no distribution to train; set it above 0, 1 is usual"
            )
        if self.top_k == 1:
            raise ValueError(
                "sampling.top_k is 1, which always gives the likeliest response, so there is "
                "nothing to learn from; set it to 0, for all tokens"
            )


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """One step's prompts.

    Example:
        Two prompts of 3 and 2 tokens: `prompt = [[5, 6, 7], [5, 9, -1]]`, `prompt_id = [17, 4]`.
    """

    prompt: PromptTokenIds
    prompt_id: PromptKey


_OF_THE_CALL = torch.empty(0, dtype=torch.int64)
"""Default of a column that was not given."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Sampled responses with the log-probabilities they were sampled with.

    Example:
        Prompt `[5, 6]`, response `[8, 2]` where 2 ends the sequence:
        `tokens = [[5, 6, 8, 2]]`, `mask = [[F, F, T, T]]`, `finished = [T]`.
    """

    prompt_id: PromptId
    tokens: TokenIds
    mask: TokenMask
    behavior_logprob: BehaviorLogprob
    """Under the weights and the temperature that sampled each token."""
    finished: SampleFlag
    """True if the response ended with the end-of-sequence token, False if it was cut off."""
    version: TokenVersion = _OF_THE_CALL
    """By default that of the weights with which the call being served is made. An op, which is
    served with none, passes on its input's."""

    def __post_init__(self) -> None:
        # While a step is recorded there is nothing to take it from, and it must be given.
        if self.version is _OF_THE_CALL and next(standins_in(self.mask), None) is None:
            version = torch.where(self.mask, call_version(), 0).where(self.tokens >= 0, -1)
            object.__setattr__(self, "version", version)


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """Groups with a response that goes on in a later step, and what there is of their responses.

    Responses to a prompt are adjacent, in the order of the prompts, and as many to each. Their
    columns are of the response alone, without the prompt.

    Example:
        A prompt of step 3, whose first response has ended; its second goes on:
        `prompt = [[5, 6]]`, `began = [3]`, `response = [[8, 2, -1], [9, 4, 7]]`,
        `version = [[3, 3, -1], [3, 3, 4]]`, `ended = [T, F]`, `finished = [T, F]`.
    """

    prompt: PromptTokenIds
    prompt_id: PromptKey
    began: Annotated[Tensor, i64(PROMPT)]
    """The step whose prompt it is; its responses go on with that step's random numbers."""
    response: Annotated[Tensor, i64(SAMPLE, TOKEN)]
    """Tokens so far, padded on the right with -1; a row may have none yet."""
    behavior_logprob: BehaviorLogprob
    version: TokenVersion
    ended: SampleFlag
    """True where nothing more is sampled."""
    finished: SampleFlag
    """True if a token ended the response, False if it goes on or is as long as it may be."""


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """Prompts with a response to imitate; `mask` is True on the response and its end."""

    tokens: TokenIds
    mask: TokenMask


@dataclass(frozen=True, kw_only=True)
class TopWords:
    """The likeliest words in the place of each token, most likely first.

    Example:
        Two words in the place of the response `[8, 2]` to the prompt `[5]`:
        `words = [[[-1, -1], [8, 3], [2, 7]]]`, `logprob = [[[0, 0], [-0.2, -1.8], [-0.1, -2.6]]]`.
    """

    words: WordIds
    logprob: PerWord
    """Over the whole vocabulary."""


@dataclass(frozen=True, kw_only=True)
class PreferencePairs:
    """Pairs of responses: two rows with the same `pair_id`, `chosen` True in one of them."""

    pair_id: PromptId
    tokens: TokenIds
    mask: TokenMask
    chosen: SampleFlag


@dataclass(frozen=True, kw_only=True)
class Feedback(PreferencePairs):
    """Single responses, `chosen` True for good ones; those of one problem share a `pair_id`."""


@dataclass(frozen=True, kw_only=True)
class ScoredPairs(PreferencePairs):
    """Pairs whose responses have scores: the data's ratings or labels, a verifier's, a reward's."""

    score: PerSample


class PolicyColumns(Protocol):
    """Columns [rows, T] of a policy-gradient loss, whatever its rows and steps are."""

    @property
    def mask(self) -> Tensor: ...

    @property
    def behavior_logprob(self) -> Tensor: ...

    @property
    def advantage(self) -> Tensor: ...


class ValueColumns(Protocol):
    """Columns [rows, T] of a value loss, whatever its rows and steps are."""

    @property
    def mask(self) -> Tensor: ...

    @property
    def old_value(self) -> Tensor: ...

    @property
    def value_target(self) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """Columns of a policy-gradient loss."""

    tokens: TokenIds
    mask: TokenMask
    behavior_logprob: PerToken
    advantage: PerToken


@dataclass(frozen=True, kw_only=True)
class ReferencePolicyBatch(PolicyBatch):
    """A `PolicyBatch` with reference log-probabilities, for a KL term inside the loss."""

    ref_logprob: PerToken


@dataclass(frozen=True, kw_only=True)
class ValueBatch:
    """Columns of a value loss; `old_value` is the critic's own prediction before the update."""

    tokens: TokenIds
    mask: TokenMask
    old_value: PerToken
    value_target: PerToken


@dataclass(frozen=True, kw_only=True)
class DistillationBatch:
    """Columns of distillation: some words in the place of each token, and a teacher's view of them.

    `words` is what a policy is asked for by this name in any batch; see `PolicyOutput`.
    """

    tokens: TokenIds
    mask: TokenMask
    words: WordIds
    teacher_logprob: PerWord


@dataclass(frozen=True, kw_only=True)
class ReferencePairBatch(PreferencePairs):
    """Pairs with reference log-probabilities, for direct preference optimization."""

    ref_logprob: PerToken


@dataclass(frozen=True, kw_only=True)
class FeedbackBatch:
    """Single responses that people liked or did not, and the reference point to judge them by."""

    tokens: TokenIds
    mask: TokenMask
    desirable: SampleFlag
    ref_logprob: PerToken
    kl: PerSample


@dataclass(frozen=True)
class PolicyOutput:
    """A policy's forward pass over some rows; zero where the mask is False.

    Attributes:
        logprob: f32[rows, T], differentiable, at the training temperature.
        entropy: f32[rows, T] if the loss asked for it.
        word_logprob: f32[rows, T, k], differentiable, of the batch's column `words` if it has one.
    """

    logprob: Tensor
    entropy: Tensor | None = None
    word_logprob: Tensor | None = None


@dataclass(frozen=True)
class ValueOutput:
    """A value model's forward pass: f32[rows, T], the value of the state before each token."""

    value: Tensor


@dataclass(frozen=True)
class ScoreOutput:
    """A reward model's forward pass: f32[rows], read at each row's last masked token."""

    score: Tensor


@dataclass(frozen=True)
class TrainMetrics:
    """Metrics of one train call, already merged over its minibatches and ranks."""

    metrics: dict[str, Metric]


@dataclass(frozen=True, kw_only=True)
class StepScores:
    """A process reward model's scores of the steps of responses.

    Example:
        A response of two steps, `[8, 3]` and `[9, 2]`, to the prompt `[5]`:
        `step_end = [[F, F, T, F, T]]`, `step_score = [[0, 0, 0.9, 0, 0.4]]`.
    """

    step_score: PerToken
    """The score of the step that ends at a token; 0 elsewhere."""
    step_end: TokenMask
    """True on the last token of every step."""
