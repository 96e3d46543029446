"""Requests with one instruction that can be checked, made by a seed.

"Write one sentence about tea. Use no commas." is one of them. Every prompt is one topic, one
request and one instruction of `instruction_kinds`. What is held out are two suites: seen kinds of
instruction with new topics, and unseen kinds, also with new topics.

An answer of fewer than five words is no sentence, and counts as not kept.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...dataflow.errors import ConfigError
from ...dataflow.option_checks import check_range
from ..verifiers.instructions.instructions import instruction_score
from ..verifiers.pool import VerifierSpec
from .instruction_kinds import HELD_OUT_TOPICS, REQUESTS, SEEN, TRAIN_TOPICS, UNSEEN, Kind
from .row_report import DataReport

_MOST_TRIES = 5000
"""Draws in a row that may all be known already, before they count as all that there are."""
_SENTENCE = {
    "id": "length_constraints:number_words",
    "kwargs": {"num_words": 5, "relation": "at least"},
}
"""What every answer must be besides: without it a policy learns to answer with one word."""
SEEN_SUITE, UNSEEN_SUITE = "seen_kinds", "unseen_kinds"


@dataclass(frozen=True, kw_only=True)
class InstructionTaskSpec:
    """How many requests to make."""

    num_train: int = 1000
    """Training prompts."""
    num_held_out: int = 240
    """Held-out prompts with the kinds of instruction that are trained on, and new topics."""
    num_unseen: int = 480
    """Held-out prompts with other kinds of instruction, and new topics."""
    seed: int = 0
    """Seed of the prompts; the run's seed does not change them."""

    def __post_init__(self) -> None:
        check_range(self, "num_train", at_least=1)
        check_range(self, "num_held_out", at_least=0)
        check_range(self, "num_unseen", at_least=0)

    def build(self) -> InstructionTask:
        """Make the prompts.

        Raises:
            ConfigError: If more are asked for than there are.
        """
        return InstructionTask(self)


@dataclass(frozen=True)
class _Problem:
    prompt: str
    kind: str
    answer: str


class InstructionTask:
    """The requests; see `Task` for the methods, and `HasSuites` for `suites`."""

    task_id = "instructions"
    correct_score = 1.0
    verifier: VerifierSpec | None = None

    def __init__(self, spec: InstructionTaskSpec) -> None:
        self.spec = spec
        parts = [
            _problems(spec.seed, "train", spec.num_train, SEEN, TRAIN_TOPICS),
            _problems(spec.seed, SEEN_SUITE, spec.num_held_out, SEEN, HELD_OUT_TOPICS),
            _problems(spec.seed, UNSEEN_SUITE, spec.num_unseen, UNSEEN, HELD_OUT_TOPICS),
        ]
        self._problems = [problem for part in parts for problem in part]
        first_unseen = spec.num_train + spec.num_held_out
        self.train = range(spec.num_train)
        self.held_out = range(spec.num_train, len(self._problems))
        suites = {
            SEEN_SUITE: range(spec.num_train, first_unseen),
            UNSEEN_SUITE: range(first_unseen, len(self._problems)),
        }
        self._suites: Mapping[str, Sequence[int]] = {n: part for n, part in suites.items() if part}
        self.report = DataReport(f"task '{self.task_id}'")
        self.report.keep(len(self._problems))

    def suites(self) -> Mapping[str, Sequence[int]]:
        """Kinds that were trained on, with other topics, and kinds that were not."""
        return self._suites

    def prompt_text(self, index: int) -> str:
        """The request and the instruction."""
        return self._problems[index].prompt

    def answer_text(self, index: int) -> str | None:
        """None: there is no one sentence to imitate."""
        return None

    def reward_answer(self, index: int) -> str:
        """What is checked, as JSON that `instructions_of` reads."""
        return self._problems[index].answer

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        """None: there are no pairs."""
        return None

    def score(self, index: int, response: str) -> float:
        """1 if the response keeps the instruction and is long enough for a sentence, else 0."""
        return instruction_score(*self.verifier_call(index, response), score="all")

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """Prompt, response and what is checked, as JSON."""
        problem = self._problems[index]
        return (problem.prompt, response, problem.answer)

    def where(self, index: int) -> str:
        """The problem's index and its kind of instruction."""
        return f"{self.task_id}[{index}], {self._problems[index].kind}"


def _problems(
    seed: int, part: str, count: int, kinds: Sequence[Kind], topics: Sequence[str]
) -> list[_Problem]:
    """`count` different prompts, the kinds taking turns."""
    rng = random.Random(f"instructions/{seed}/{part}")
    found: dict[str, _Problem] = {}
    tries = 0
    while len(found) < count:
        tries += 1
        if tries > _MOST_TRIES:
            raise ConfigError(
                f"task 'instructions' has only about {len(found)} different prompts of this part "
                f"({part}), and {count} are asked for\n"
                "    lower task.num_train, task.num_held_out or task.num_unseen"
            )
        problem = _problem(rng, kinds[len(found) % len(kinds)], rng.choice(topics))
        if problem.prompt not in found:
            found[problem.prompt], tries = problem, 0
    return list(found.values())


def _problem(rng: random.Random, kind: Kind, topic: str) -> _Problem:
    options = {name: rng.choice(values) for name, values in kind.options.items()}
    request = rng.choice(REQUESTS).format(topic=topic)
    instruction = rng.choice(kind.phrasings).format(**options)
    answer = json.dumps([{"id": kind.check, "kwargs": options}, _SENTENCE])
    return _Problem(f"{request} {instruction}", kind.name, answer)
