"""Role contracts of language-model RL: the words that algorithms are written in.

Their tables and columns, and the conventions that hold for them, are in `language_tables`.

In a conversation a policy speaks, something answers, and it goes on. Conventions of
`Conversations`, beside those of `language_tables`:

- A row is one conversation: the prompt, then turns of the policy and what it was shown after each.
  One that branches, as a program's may, is several rows.
- `mask` is True exactly on what the policy sampled, the token that ends a turn included, so it has
  holes. Tokens are those that were sampled, never the text of them encoded again.
- `turn` numbers the policy's turns from 0; what follows a turn, and the prompt, has -1.
- `reward` is earned at the last token of a turn. A conversation's score is its sum; one without a
  score is not to be learned from.

The conversation is one node, `Policy.converse`, because speaking and being answered go round in a
circle. It is a call of the policy: it runs where the policy generates, with the weights that it
generates with. The policy is given the `Agent`, whatever answers it, which holds the conversations:
`Agent.hold` is called there, by no step function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar

from torch import Tensor

from ...dataflow.graph.axes import i64
from ...dataflow.graph.role import Loss, Role, call
from .language_tables import (
    SAMPLE,
    TOKEN,
    PerSample,
    PerToken,
    PolicyOutput,
    PromptId,
    PromptKey,
    PromptTokenIds,
    Rollout,
    Sampling,
    ScoreOutput,
    StepScores,
    TokenIds,
    TokenMask,
    TopWords,
    TrainMetrics,
    ValueOutput,
)

ENDINGS = ("done", "last turn", "out of tokens", "failed")
"""Why a conversation ended: the other side said so, it had as many turns or tokens as it may have,
or the other side broke."""

TurnIndex = Annotated[Tensor, i64(SAMPLE, TOKEN)]
"""Number of the policy's turn that a token belongs to; -1 on all that it did not say."""

TurnNumber = Annotated[Tensor, i64(SAMPLE)]
"""A turn of each conversation."""

PieceNumber = Annotated[Tensor, i64(SAMPLE)]
"""Number of a row in its conversation, from 0."""


@dataclass(frozen=True, kw_only=True)
class Conversations(Rollout):
    """Conversations, with the log-probabilities that the policy's turns were sampled with.

    `finished` is True where the other side ended it or the policy ended its last turn.

    Example:
        Prompt `[5]`, a turn `[8, 2]`, the answer `[9]`, a turn `[7, 2]` that earns 1:
        `tokens = [[5, 8, 2, 9, 7, 2]]`, `mask = [[F, T, T, F, T, T]]`,
        `turn = [[-1, 0, 0, -1, 1, 1]]`, `reward = [[0, 0, 0, 0, 0, 1]]`, `ending = [0]`.
    """

    turn: TurnIndex
    reward: PerToken
    score: PerSample
    """Sum of the row's rewards; nan where the other side failed or gave no reward."""
    ending: Annotated[Tensor, i64(SAMPLE)]
    """Index into `ENDINGS`."""
    branch: TurnNumber
    """The turn up to which a row is the same as its partner's; 0 where rows have no partners."""
    piece: PieceNumber
    """Number of the row in its conversation. What a program asked for may be no single text, and
    then its rows stand next to each other, each with the whole score."""


@dataclass(frozen=True)
class TurnRequest:
    """A turn to sample.

    Attributes:
        row: The conversation; one turn of it is sampled at a time.
        text: All tokens before the turn: prompt, turns, and what was shown.
        max_new_tokens: Longest turn, the token that ends it included.
        uniform: f64[max_new_tokens]; the random numbers of an engine that takes some.
        seed: 63 bits, for one that has its own.
    """

    row: int
    text: Sequence[int]
    max_new_tokens: int
    uniform: Tensor
    seed: int


@dataclass(frozen=True)
class Turn:
    """A sampled turn.

    Attributes:
        row: The conversation.
        token: i64[n].
        logprob: f32[n], of the distribution that each was sampled from.
        version: i64[n]; of the weights that sampled each.
        finished: Whether a token ended it, and not its length.
    """

    row: int
    token: Tensor
    logprob: Tensor
    version: Tensor
    finished: bool


class Turns(Protocol):
    """Samples turns of several conversations as they are asked for, all that are open at once.

    What is sampled depends on the request and the weights, not on the other rows.

    Attributes:
        num_read: Tokens of texts that were computed.
        num_reused: Tokens of texts that were not, because they had been computed in earlier turns.
    """

    num_read: int
    num_reused: int

    @property
    def num_open(self) -> int:
        """Turns that are being sampled, or wait to be."""
        ...

    def ask(self, request: TurnRequest) -> None:
        """Have a turn sampled."""

    def step(self) -> list[Turn]:
        """Go on by a token; those turns that have ended with it. Only while some are open."""
        ...

    def release(self, row: int) -> None:
        """Forget a conversation that is over; nothing of it is open."""

    def close(self) -> None:
        """Give up what is open."""


class Agent(Role):
    """The other side of a policy's conversations: an environment, tools, or both.

    Attributes:
        max_pieces: Most rows of one conversation.
    """

    max_pieces: int = 1

    def hold(
        self,
        turns: Turns,
        prompt: Tensor,
        prompt_id: Tensor,
        sampling: Sampling,
        *,
        max_turns: int,
        branch: bool,
    ) -> Conversations:
        """Hold conversations; called by the policy's worker, not by a step.

        Args:
            turns: Samples the policy's turns.
            prompt: i64[P, T], right padded with -1.
            prompt_id: i64[P].
            sampling: See `Policy.converse`, as for the rest.
            max_turns: Most turns of the policy in a conversation.
            branch: Whether rows come in pairs that are the same up to a turn.

        Returns:
            Rows of one prompt are adjacent, in the order of the prompts.
        """
        raise NotImplementedError


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
    """A model that scores every step of a response."""

    model_head = "scalar"

    @call("forward")
    def score_steps(self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId) -> StepScores:
        """Find the steps of each response, and score each given all before it.

        `prompt_id` lets a model with a tokenizer of its own find the prompt's text.
        """
        raise NotImplementedError


class Observer(Role):
    """A worker that looks at scored responses, to show or keep some."""

    @call("forward", scope="batch")
    def observe(
        self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId, *, score: PerSample
    ) -> PerSample:
        """Look at all responses; returns `score` as it came."""
        raise NotImplementedError
