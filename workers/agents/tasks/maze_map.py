"""A maze of square cells: made at random, with exactly one path between any two of them.

Cells are (column, row) from (0, 0) at the upper left. It is made by a depth-first walk that goes
back where it is stuck, which gives long corridors.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from functools import cached_property

Cell = tuple[int, int]
"""Column and row."""

MOVES: Mapping[str, Cell] = {"u": (0, -1), "d": (0, 1), "l": (-1, 0), "r": (1, 0)}
"""Letter of a move -> how column and row change."""


class Maze:
    """Where walls are.

    Args:
        size: Cells in a row, and rows.
        rng: All the randomness there is.
    """

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
        """All of them, row by row."""
        return [(x, y) for y in range(self.size) for x in range(self.size)]

    def after(self, cell: Cell, move: str) -> Cell:
        """Where a move ends: in the same cell if there is a wall."""
        return self._open[cell].get(move, cell)

    def walls(self, cell: Cell) -> str:
        """Letters of the moves that a wall stops, in the order of `MOVES`."""
        return "".join(move for move in MOVES if move not in self._open[cell])

    def shortest(self, start: Cell, goal: Cell) -> list[str]:
        """The moves of the shortest path."""
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
