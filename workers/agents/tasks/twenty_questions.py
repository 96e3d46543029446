"""Find a hidden object by questions, after the 20 Questions of LMRL-Gym, without a language model.

The seed makes a world: objects with numbers, each with a yes or a no for every attribute. The
policy never sees that table; it learns it from answers. A problem is a set of candidates and the
hidden one of them: the prompt lists them, `03 17 25 40`. A turn is a question, `a7?`, which is
answered with `y` or `n`, or a guess, `=17`. Every turn is worth -1 and the right guess 0, and after
`max_turns` turns the conversation is over.

This is the reward of LMRL-Gym (Abdulhai et al., 2023, arXiv:2311.18232, section 4). Its prompt is
always the same; here it lists candidates, because no prompt may stand both in training and held
out.

The expert asks what splits the remaining candidates best, except for a share of random questions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from ....dataflow.errors import ConfigError
from ....dataflow.options import Fraction, Int, PositiveInt, option_class
from ...data.task import Message
from ..environment import Reply, TurnResult
from .generated_task import GeneratedSpec, GeneratedTask, PlainEnvironment

World = Sequence[Sequence[bool]]
"""Object -> attribute -> whether it has it; no two objects have the same."""

_QUESTION = re.compile(r"a([0-9]{1,4})\?", re.ASCII)
_GUESS = re.compile(r"=([0-9]{1,6})", re.ASCII)


@option_class
class TwentyQuestionsTaskSpec(GeneratedSpec):
    """Size of the world, and number of candidates."""

    num_objects: Annotated[Int, Ge(2), Le(1000)] = 32
    """Objects of the world."""
    num_attributes: Annotated[Int, Ge(1), Le(1000)] = 10
    """Attributes that may be asked for."""
    num_candidates: Int = 8
    """Objects of which one is hidden."""
    max_turns: PositiveInt = 20
    """Questions and guesses together."""
    random_share: Fraction = 0.5
    """How many of the expert's questions are random ones."""
    prompt_template: str = "{objects}"
    """The prompt, with `{objects}` where the candidates stand: a model that knows language needs to
    be told what to do."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_candidates <= self.num_objects:
            raise ValueError(
                f"num_candidates is {self.num_candidates}; expected at least 2 and at most "
                f"{self.num_objects:g}"
            )

    def build(self) -> TwentyQuestionsTask:
        if "{objects}" not in self.prompt_template:
            raise ConfigError(
                f"'task.prompt_template' is {self.prompt_template!r}, which has no place for the "
                "candidates\n    write {objects} where they stand"
            )
        return TwentyQuestionsTask(self)


@dataclass(frozen=True)
class HiddenObject:
    """Numbers of the candidates, rising, and the one that is hidden."""

    candidates: tuple[int, ...]
    hidden: int


def make_world(num_objects: int, num_attributes: int, rng: random.Random) -> World:
    """A table in which no two objects have the same attributes."""
    needed = (num_objects - 1).bit_length()
    if num_attributes < needed:
        raise ConfigError(
            f"{num_attributes} attributes cannot tell {num_objects} objects apart\n"
            f"    give at least {needed}: task.num_attributes"
        )
    # One number per object, its bits being the attributes.
    codes: dict[int, None] = {}
    while len(codes) < num_objects:
        codes[rng.getrandbits(num_attributes)] = None
    return [[bool(code >> bit & 1) for bit in range(num_attributes)] for code in codes]


class TwentyQuestionsTask(GeneratedTask[HiddenObject]):
    """Sets of candidates, with one hidden."""

    further_characters = "0123456789a?=yn\n"

    def __init__(self, spec: TwentyQuestionsTaskSpec) -> None:
        self.spec = spec
        rng = random.Random(f"twenty_questions/{spec.seed}/world")
        self.world = make_world(spec.num_objects, spec.num_attributes, rng)
        self.correct_score = 1.0 - spec.max_turns
        self.unfinished_score = -float(spec.max_turns)
        self._width = len(str(spec.num_objects - 1))
        super().__init__("twenty_questions", spec)

    def make(self, number: int, rng: random.Random) -> HiddenObject:
        candidates = sorted(rng.sample(range(self.spec.num_objects), self.spec.num_candidates))
        return HiddenObject(tuple(candidates), rng.choice(candidates))

    def prompt_of(self, problem: HiddenObject) -> str:
        listed = " ".join(self._name(number) for number in problem.candidates)
        return self.spec.prompt_template.replace("{objects}", listed)

    def begin(self, index: int) -> PlainEnvironment:
        problem = self.problem(index)
        return TwentyQuestionsEnvironment(
            self.world[problem.hidden], problem.hidden, self.spec.max_turns
        )

    def turns(self, problem: HiddenObject, rng: random.Random) -> list[str] | None:
        left = list(problem.candidates)
        said: list[str] = []
        while len(left) > 1 and len(said) + 1 < self.spec.max_turns:
            lost = rng.random() < self.spec.random_share
            asked = rng.randrange(self.spec.num_attributes) if lost else self._best(left)
            answer = self.world[problem.hidden][asked]
            left = [number for number in left if self.world[number][asked] == answer]
            said.append(f"a{asked}?")
        return [*said, f"={self._name(rng.choice(left))}"]

    def _best(self, left: Collection[int]) -> int:
        def uneven(attribute: int) -> int:
            return abs(2 * sum(self.world[number][attribute] for number in left) - len(left))

        return min(range(self.spec.num_attributes), key=uneven)

    def _name(self, number: int) -> str:
        return f"{number:0{self._width}d}"


class TwentyQuestionsEnvironment(PlainEnvironment):
    """Answers truthfully."""

    def __init__(self, attributes: Sequence[bool], hidden: int, max_turns: int) -> None:
        self._attributes, self._hidden, self._max_turns = attributes, hidden, max_turns
        self._turns = 0

    def reset(self, problem: int, seed: int) -> None:
        self._turns = 0

    def step(self, reply: Reply) -> TurnResult:
        """Answer `y` or `n`, or `?` to what is neither a question nor a guess.

        A reply that was cut off ends the conversation and costs all turns that are left.
        """
        if not reply.finished:
            return TurnResult(
                reward=-float(self._max_turns - self._turns), done=True, counts={"bad_replies": 1.0}
            )
        self._turns += 1
        text = reply.text.strip().lower()
        asked, guessed = _QUESTION.fullmatch(text), _GUESS.fullmatch(text)
        counts = {"questions": float(bool(asked)), "guesses": float(bool(guessed))}
        if guessed and int(guessed[1]) == self._hidden:
            return TurnResult(reward=0.0, done=True, counts=counts)
        answer = "n" if guessed else "?"
        if asked and int(asked[1]) < len(self._attributes):
            answer = "y" if self._attributes[int(asked[1])] else "n"
        counts["bad_replies"] = float(answer == "?")
        said: Message = {"role": "user", "content": answer}
        done = self._turns >= self._max_turns
        return TurnResult(messages=() if done else [said], reward=-1.0, done=done, counts=counts)
