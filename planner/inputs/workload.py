"""How much one step computes: prompts, lengths and updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...dataflow.errors import PlanError

AtLeastOne = Annotated[int, Field(ge=1)]


class Lengths(BaseModel):
    """A distribution of lengths in tokens, as a histogram; a constant is one bin."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tokens: tuple[AtLeastOne, ...] = Field(min_length=1)
    """Length of each bin, ascending."""
    weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """How often each occurs, in any unit; equally often if empty."""

    @model_validator(mode="after")
    def _fits(self) -> Lengths:
        if self.weights and len(self.weights) != len(self.tokens):
            raise PlanError(
                f"a length histogram has {len(self.tokens)} tokens= but {len(self.weights)} "
                "weights=; give one weight per bin"
            )
        if list(self.tokens) != sorted(set(self.tokens)):
            raise PlanError(
                f"a length histogram's tokens= must ascend without repeats, got {self.tokens}"
            )
        return self

    @staticmethod
    def constant(tokens: int) -> Lengths:
        return Lengths(tokens=(tokens,))

    @property
    def shares(self) -> tuple[float, ...]:
        weights = self.weights or (1.0,) * len(self.tokens)
        return tuple(weight / sum(weights) for weight in weights)

    @property
    def mean(self) -> float:
        return sum(t * share for t, share in zip(self.tokens, self.shares, strict=True))

    @property
    def longest(self) -> int:
        return self.tokens[-1]

    @property
    def mean_square(self) -> float:
        return sum(t * t * share for t, share in zip(self.tokens, self.shares, strict=True))


class Workload(BaseModel):
    """One step of the algorithm, in rows and tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    num_prompts: AtLeastOne
    """Prompts per step."""
    samples_per_prompt: AtLeastOne | None = None
    """Responses per prompt; by default what the graph's rollout says (`Sampling.num_samples`)."""
    prompt: Lengths
    """Prompt lengths."""
    response: Lengths
    """Response lengths."""
    segment_tokens: AtLeastOne | None = None
    """How far a response grows in one step; what has not ended goes on in the next. None: to its
    end."""
    updates_per_train: AtLeastOne | None = None
    """Optimizer steps of one train call; by default the graph's `epochs * num_minibatches`."""
    passes_per_train: AtLeastOne | None = None
    """Times a train call goes over its rows; by default the graph's `epochs`."""

    @property
    def num_rows(self) -> int:
        return self.num_prompts * (self.samples_per_prompt or 1)


# With segments every step begins equally many rows and goes on with what is unfinished. Once as
# many rows end in a step as begin in one, a step has, of the rows that began a steps ago, those
# that are longer than a segments; all of them start from what they have and grow together, until
# they end or the segment does. Everything here is of that steady state, per row that a step begins.
@dataclass(frozen=True)
class Stretch:
    """Decode steps of a generation in which the same rows run."""

    begin: int  # tokens that each row has grown by before, in this step
    end: int  # the same after
    rows: float  # rows that run, per row that a step begins
    before: float  # mean tokens that they have from earlier steps


@dataclass(frozen=True)
class Begun:
    """What steps before have left unfinished, of one age."""

    tokens: int  # tokens of each row
    rows: float  # rows, per row that a step begins


def stretches(response: Lengths, segment_tokens: int | None = None) -> tuple[Stretch, ...]:
    """The decode steps of one generation in order, the first token included."""
    segment = min(segment_tokens or response.longest, response.longest)
    ends = {(tokens - 1) % segment + 1 for tokens in response.tokens} | {segment}
    found: list[Stretch] = []
    begin = 0
    for end in sorted(ends):
        running = [(age, _longer(response, age + begin)) for age in _ages(response, segment)]
        rows = sum(share for _, share in running)
        before = sum(age * share for age, share in running) / rows
        found.append(Stretch(begin, end, rows, before))
        begin = end
    return tuple(found)


def begun_before(response: Lengths, segment_tokens: int | None = None) -> tuple[Begun, ...]:
    segment = segment_tokens or response.longest
    ages = [age for age in _ages(response, segment) if age]
    return tuple(Begun(age, _longer(response, age)) for age in ages)


def _ages(response: Lengths, segment: int) -> Iterator[int]:
    return iter(range(0, response.longest, segment))


def _longer(response: Lengths, tokens: int) -> float:
    left = 1.0
    for length, share in zip(response.tokens, response.shares, strict=True):
        if length > tokens:
            return left
        left -= share
    return 0.0
