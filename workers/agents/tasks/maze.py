"""A maze to walk through by words, after the maze of LMRL-Gym.

The seed makes one maze; a problem is a start and a goal in it. The prompt says the goal, where the
policy stands and which walls are around it: `4,0 at 1,3 walls ul`. Each turn is one move: u, d, l
or r. Every step is worth -1, the one that reaches the goal 0, and a conversation of `max_steps`
without it is over.

As in LMRL-Gym (Abdulhai et al., 2023, arXiv:2311.18232, section 4), the maze may be partially
observed: after the prompt only walls are told, so the policy must remember where it went. Unlike
there, the prompt always says where the start is, because no prompt may stand both in training and
held out.

The expert takes the shortest path, except for a share of random moves: what it shows can be
improved on.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from annotated_types import Ge, Le

from ....dataflow.options import Fraction, Int, NonNegativeInt, PositiveInt, option_class
from ...data.task import Message
from ..environment import Reply, TurnResult
from .generated_task import GeneratedSpec, GeneratedTask, PlainEnvironment

Cell = tuple[int, int]
"""Column and row."""

MOVES: Mapping[str, Cell] = {"u": (0, -1), "d": (0, 1), "l": (-1, 0), "r": (1, 0)}
"""Letter of a move -> how column and row change."""


class Maze:
    """A square of cells with walls between them, made at random."""

    def __init__(self, size: int, rng: random.Random) -> None:
        self.size = size
        self._open: dict[Cell, dict[str, Cell]] = {cell: {} for cell in self.cells}
        stack = [(rng.randrange(size), rng.randrange(size))]
        seen = set(stack)
        while stack:
            near = self._inside(stack[-1])
            new = [(move, cell) for move, cell in near.items() if cell not in seen]
            if not new:
                stack.pop()
                continue
            move, cell = rng.choice(new)
            self._open[stack[-1]][move] = cell
            self._open[cell][_BACK[move]] = stack[-1]
            seen.add(cell)
            stack.append(cell)

    @cached_property
    def cells(self) -> list[Cell]:
        return [(x, y) for y in range(self.size) for x in range(self.size)]

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

    def _inside(self, cell: Cell) -> dict[str, Cell]:
        near = {move: (cell[0] + dx, cell[1] + dy) for move, (dx, dy) in MOVES.items()}
        return {m: c for m, c in near.items() if min(c) >= 0 and max(c) < self.size}


_BACK: Mapping[str, str] = {"u": "d", "d": "u", "l": "r", "r": "l"}


_WORDS = {"u": "up", "d": "down", "l": "left", "r": "right"}


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
    """How many of the expert's moves are random ones."""

    def build(self) -> MazeTask:
        return MazeTask(self)


@dataclass(frozen=True)
class MazeProblem:
    """The cell where the policy stands first, and another one, the goal."""

    start: Cell
    goal: Cell


class MazeTask(GeneratedTask[MazeProblem]):
    """Pairs of a start and a goal in one maze."""

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
    """One walk."""

    def __init__(self, spec: MazeTaskSpec, maze: Maze, problem: MazeProblem) -> None:
        self._spec, self._maze, self._problem = spec, maze, problem
        self._cell = problem.start
        self._steps = 0

    def reset(self, problem: int, seed: int) -> None:
        self._cell, self._steps = self._problem.start, 0

    def step(self, reply: Reply) -> TurnResult:
        move = _move_of(reply.text)
        if not reply.finished:
            return TurnResult(
                reward=-float(self._spec.max_steps - self._steps),
                done=True,
                counts={"bad_replies": 1.0},
            )
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
    if walls:
        sentences.append(f"There are walls: {', '.join(_WORDS[wall] for wall in walls)}.")
    else:
        sentences.append("There are no walls around you.")
    return " ".join(sentences)


_RULES = (
    "You are in a maze of square cells, numbered by column and row from 0, 0 at the upper left. "
    "Answer with one move: up, down, left or right."
)


def _bad(spec: MazeTaskSpec) -> str:
    return "That is no move: answer up, down, left or right." if spec.words else "?"
