"""A maze and twenty questions, after LMRL-Gym, without a language model.

This is Abdulhai et al., 2023, arXiv:2311.18232, section 4, with its rewards. The seed makes one
world; a problem is a place in it, and its prompt says which, because no prompt may stand both in
training and held out.

- Maze: a problem is a start and a goal. The prompt says the goal, where the policy stands and which
  walls are around it: `4,0 at 1,3 walls ul`. Each turn is one move: u, d, l or r. Every step is
  worth -1, the one that reaches the goal 0, and a conversation of `max_steps` without it is over.
  The maze may be partially observed: after the prompt only walls are told, so the policy must
  remember where it went. The expert takes the shortest path, except for a share of random moves:
  what it shows can be improved on.
- Twenty questions: the world is objects with numbers, each with a yes or a no for every attribute.
  The policy never sees that table; it learns it from answers. A problem is a set of candidates and
  the hidden one of them: the prompt lists them, `03 17 25 40`. A turn is a question, `a7?`, which
  is answered with `y` or `n`, or a guess, `=17`. Every turn is worth -1 and the right guess 0, and
  after `max_turns` turns the conversation is over. The expert asks what splits the remaining
  candidates best, except for a share of random questions.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from ....dataflow.errors import ConfigError
from ....dataflow.options import Fraction, Int, NonNegativeInt, PositiveInt, option_class
from ...data.task import Message
from ..environment import Reply, TurnResult
from .generated_task import GeneratedSpec, GeneratedTask, PlainEnvironment, check_template

Cell = tuple[int, int]  # column and row

MOVES: Mapping[str, Cell] = {"u": (0, -1), "d": (0, 1), "l": (-1, 0), "r": (1, 0)}
"""Letter of a move -> how column and row change."""


class Maze:
    """A square of cells with walls between them, made at random."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self.size = size
        self.cells = [(x, y) for y in range(size) for x in range(size)]
        self._open: dict[Cell, dict[str, Cell]] = {cell: {} for cell in self.cells}
        stack = [(rng.randrange(size), rng.randrange(size))]
        seen = set(stack)
        while stack:
            x, y = stack[-1]
            near = {move: (x + dx, y + dy) for move, (dx, dy) in MOVES.items()}
            new = [(m, c) for m, c in near.items() if c in self._open and c not in seen]
            if not new:
                stack.pop()
                continue
            move, cell = rng.choice(new)
            self._open[stack[-1]][move] = cell
            self._open[cell][_BACK[move]] = stack[-1]
            seen.add(cell)
            stack.append(cell)

    def after(self, cell: Cell, move: str) -> Cell:
        """Return the cell in which a move ends: the same one if there is a wall."""
        return self._open[cell].get(move, cell)

    def walls(self, cell: Cell) -> str:
        """Return the letters of the moves that a wall stops, in the order of `MOVES`."""
        return "".join(move for move in MOVES if move not in self._open[cell])

    def shortest(self, start: Cell, goal: Cell) -> list[str]:
        came: dict[Cell, tuple[Cell, str]] = {}
        waiting = deque([start])
        while waiting:
            cell = waiting.popleft()
            for move, following in self._open[cell].items():
                if following not in came and following != start:
                    came[following] = (cell, move)
                    waiting.append(following)
        path: list[str] = []
        while goal != start:
            goal, move = came[goal]
            path.append(move)
        return path[::-1]


_BACK: Mapping[str, str] = {"u": "d", "d": "u", "l": "r", "r": "l"}
_WORDS = {"u": "up", "d": "down", "l": "left", "r": "right"}
_RULES = (
    "You are in a maze of square cells, numbered by column and row from 0, 0 at the upper left. "
    "Answer with one move: up, down, left or right."
)


@option_class
class MazeTaskSpec(GeneratedSpec):
    """Size of the maze, and observations in it."""

    num_train: PositiveInt = 400
    """Training problems: pairs of a start and a goal."""
    num_held_out: NonNegativeInt = 100
    """Held-out pairs of the same maze."""
    size: Annotated[Int, Ge(2), Le(100)] = 5
    """Cells in a row, and rows. There are size^2 (size^2 - 1) pairs of start and goal."""
    max_steps: PositiveInt = 50
    """Steps after which a conversation is over."""
    observed: bool = True
    """Whether every observation says where the policy stands, and not its walls alone."""
    words: bool = False
    """Whether to speak in sentences, for a model that knows language. Moves are `up` or `move up`
    then, and letters are understood as well."""
    random_share: Fraction = 0.25
    """Share of the expert's moves that are random."""

    def build(self) -> MazeTask:
        return MazeTask(self)


@dataclass(frozen=True)
class MazeProblem:
    """The cell where the policy stands first, and another one, the goal."""

    start: Cell
    goal: Cell


class MazeTask(GeneratedTask[MazeProblem]):
    def __init__(self, spec: MazeTaskSpec) -> None:
        self.spec = spec
        self.maze = Maze(spec.size, random.Random(f"maze/{spec.seed}/map"))
        self.correct_score = 1.0 - spec.max_steps
        self.unfinished_score = -float(spec.max_steps)
        shown = [_observation(spec, self.maze, cell, None) for cell in self.maze.cells]
        self.further_characters = "\n" + "".join([*MOVES, *_WORDS.values(), *shown, _bad(spec)])
        super().__init__("maze", spec)

    def make(self, number: int, rng: random.Random) -> MazeProblem:
        start, goal = rng.sample(self.maze.cells, 2)
        return MazeProblem(start, goal)

    def prompt_of(self, problem: MazeProblem) -> str:
        return _observation(self.spec, self.maze, problem.start, problem.goal)

    def begin(self, index: int) -> PlainEnvironment:
        return MazeEnvironment(self.spec, self.maze, self.problem(index))

    def turns(self, problem: MazeProblem, rng: random.Random) -> list[str] | None:
        cell = problem.start
        moves: list[str] = []
        while cell != problem.goal and len(moves) < self.spec.max_steps:
            lost = rng.random() < self.spec.random_share
            best = self.maze.shortest(cell, problem.goal)[0]
            moves.append(rng.choice(list(MOVES)) if lost else best)
            cell = self.maze.after(cell, moves[-1])
        return [_WORDS[move] for move in moves] if self.spec.words else moves


class MazeEnvironment(PlainEnvironment):
    def __init__(self, spec: MazeTaskSpec, maze: Maze, problem: MazeProblem) -> None:
        self._spec, self._maze, self._problem = spec, maze, problem
        self._cell = problem.start
        self._steps = 0

    def reset(self, problem: int, seed: int) -> None:
        self._cell, self._steps = self._problem.start, 0

    def step(self, reply: Reply) -> TurnResult:
        move = _move_of(reply.text)
        if not reply.finished:
            lost = -float(self._spec.max_steps - self._steps)
            return TurnResult(reward=lost, done=True, counts={"bad_replies": 1.0})
        self._steps += 1
        counts = {"steps": 1.0, "bad_replies": float(move is None)}
        if move is not None:
            self._cell = self._maze.after(self._cell, move)
        if self._cell == self._problem.goal:
            return TurnResult(reward=0.0, done=True, counts=counts)
        if self._steps >= self._spec.max_steps:
            return TurnResult(reward=-1.0, done=True, counts=counts)
        told = _observation(self._spec, self._maze, self._cell, None)
        said: Message = {"role": "user", "content": told if move else _bad(self._spec)}
        return TurnResult(messages=[said], reward=-1.0, counts=counts)


def _move_of(text: str) -> str | None:
    word = text.strip().lower().removeprefix("move ").strip()
    if word in MOVES:
        return word
    return next((letter for letter, name in _WORDS.items() if name == word), None)


def _observation(spec: MazeTaskSpec, maze: Maze, cell: Cell, goal: Cell | None) -> str:
    """Describe a cell; with the goal it is the prompt."""
    walls = maze.walls(cell)
    where = goal is not None or spec.observed
    if not spec.words:
        aim = "" if goal is None else f"{goal[0]},{goal[1]} "
        return aim + (f"{cell[0]},{cell[1]} " if where else "") + (walls or "-")
    sentences = [] if goal is None else [_RULES, f"The goal is at {goal[0]}, {goal[1]}."]
    sentences += [f"You are at {cell[0]}, {cell[1]}."] if where else []
    named = ", ".join(_WORDS[wall] for wall in walls)
    sentences.append(f"There are walls: {named}." if walls else "There are no walls around you.")
    return " ".join(sentences)


def _bad(spec: MazeTaskSpec) -> str:
    return "That is no move: answer up, down, left or right." if spec.words else "?"


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
    """Share of the expert's questions that are random."""
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
        check_template(self.prompt_template, "{objects}", "candidates")
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
    codes: dict[int, None] = {}  # a number per object, its bits being the attributes
    while len(codes) < num_objects:
        codes[rng.getrandbits(num_attributes)] = None
    return [[bool(code >> bit & 1) for bit in range(num_attributes)] for code in codes]


class TwentyQuestionsTask(GeneratedTask[HiddenObject]):
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
            lost = -float(self._max_turns - self._turns)
            return TurnResult(reward=lost, done=True, counts={"bad_replies": 1.0})
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
