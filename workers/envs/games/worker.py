"""The worker of a `BoardGame` role: whole games side by side, and the loop of moving in them.

Every call begins games anew, and a sample belongs to (seed, role, step, ordinal, game, move). So
the worker keeps nothing from call to call, and games depend neither on the number of workers nor
on what was played before.

A side is 0 for the player who begins and 1 for the other. Two modules have boards: `mnk_games.py`
our own rules in numpy, and `libraries.py` games of EnvPool and PettingZoo.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....algorithms.roles.environment import ActionSpace, Actor, BoardGame, Trajectories
from ....dataflow.errors import WorkerError
from ....dataflow.graph.role import Metric, add_metrics
from ....dataflow.runtime.call_context import CallKey, call_key
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...rollout.sampling import row_uniforms, stream_key
from ..group import StepAlarm, StepTooLong, described, env_seed, groups_of, step_columns

T = TypeVar("T")


@dataclass
class GameNames:
    """The games of a group, as messages name them."""

    role: str  # that plays them
    seed: int  # the run's
    key: CallKey  # the call that they belong to
    numbers: NDArray[np.int64]  # i64[games], unique in the call
    title: str  # which game they are of, as `GameSpec.title`
    move: int = 0  # how many each that goes on has had, both players together

    def of(self, index: int) -> str:
        return f"game {self.numbers[index]} of {self._where()}"

    def own(self, index: int) -> str:
        """One game with the seed of its own, to say what it did."""
        return f"{self.of(index)}: {self.title} (seed {self.own_seed(index)})"

    def together(self) -> str:
        return f"games {self.numbers.tolist()!s:.60} of {self._where()}"

    def _where(self) -> str:
        return f"'{self.role}' (seed {self.seed}), move {self.move}"

    def own_seed(self, index: int) -> int:
        """The seed below 2^31 of one game's dice and cards."""
        step, ordinal = self.key.step, self.key.ordinal
        return env_seed(self.seed, self.role, "game", step, ordinal, int(self.numbers[index]))

    def refuse(self, bad: NDArray[np.bool_], what: Callable[[int], str]) -> None:
        """Raise where something went wrong in games."""
        if bad.any():
            index = int(bad.argmax())
            raise WorkerError(f"{self.of(index)}: {what(index)}")

    def blame(self, bad: NDArray[np.bool_], what: Callable[[int], str]) -> None:
        """Raise as `refuse`, for what the games did themselves."""
        if bad.any():
            index = int(bad.argmax())
            raise WorkerError(f"{self.own(index)} {what(index)}")


def answered(named: Callable[[], str], alarm: StepAlarm, ask: Callable[[], T]) -> T:
    """Call a library's game; its exceptions become `WorkerError`s."""
    alarm.arm()
    try:
        return ask()
    except (Exception, StepTooLong) as error:
        raise WorkerError(f"{named()} {described(error)}") from error
    finally:
        alarm.disarm()


class Boards(Protocol):
    """Games side by side, each of which has begun when they are made and is played once."""

    @property
    def over(self) -> NDArray[np.bool_]:
        """bool[games]: ended, by the rules or a limit of the game's own."""
        ...

    @property
    def ended(self) -> NDArray[np.bool_]:
        """bool[games, 2]: sides for which it has ended by the rules; a limit only cuts it off."""
        ...

    @property
    def turn(self) -> NDArray[np.int64]:
        """i64[games]: the side to move, where the game goes on."""
        ...

    def obs(self, side: NDArray[np.int64]) -> NDArray[np.float32]:
        """f32[games, features], as `side` of each game, i64[games], sees it."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """bool[games, choices] of who is to move, where the game goes on."""
        ...

    def move(self, choice: NDArray[np.int64], live: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Move in some games; the others stay as they are, and are not asked for again.

        Args:
            choice: i64[games], allowed in those.
            live: bool[games]: which; each goes on.

        Returns:
            f32[games, 2]: what the move earned each side.
        """
        ...

    def close(self) -> None:
        """Give up what they hold."""


class GameSpec(Protocol):
    """The specification of a game that `BoardGameWorker` plays."""

    @property
    def title(self) -> str: ...

    @property
    def max_turns(self) -> int:
        """Turns of a player in the longest game."""
        ...

    def spaces(self) -> tuple[int, ActionSpace]:
        """Numbers of an observation, and what can be done: one choice, of which some are not."""
        ...

    def boards(self, names: GameNames) -> Boards:
        """Begin games, at least one, as many as there are names."""
        ...


class GameColumns:
    """Room for both sides of games, [games, 2, turns, ...], filled turn by turn.

    What a player earns between two turns of its own belongs to the first of them, and what it earns
    before its first turn to none.
    """

    def __init__(
        self, num_games: int, max_turns: int, num_features: int, actions: ActionSpace
    ) -> None:
        shape = (num_games, 2, max_turns)
        self.turns = np.zeros(shape[:2], np.int64)  # how many each side has had
        self.earned = np.zeros(shape[:2], np.float64)  # all that each has
        self._max_turns = max_turns
        self._columns = step_columns(shape, num_features, actions)
        self._columns["action_mask"][:] = True
        self._columns["last_obs"] = np.zeros((num_games, 2, num_features), np.float32)
        self._columns["recurrent_state"] = np.zeros((num_games, 2, 0), np.float32)  # none to begin

    def has_room(self, turn: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool[games]: whether the side to move, i64[games], may have another turn."""
        return self.turns[np.arange(len(turn)), turn] < self._max_turns

    def add(self, moved: NDArray[np.bool_], side: int, **shown: NDArray[Any]) -> None:
        """Add one more turn of a side in some games."""
        at = self.turns[moved, side]
        for name, column in shown.items():
            self._columns[name][moved, side, at] = column[moved]
        self._columns["mask"][moved, side, at] = True
        self.turns[moved, side] += 1

    def add_reward(self, reward: NDArray[np.float32]) -> None:
        """Give both sides what a move earned them, f32[games, 2]; 0 where neither moved."""
        self.earned += reward
        game, side = np.nonzero((reward != 0) & (self.turns > 0))
        self._columns["reward"][game, side, self.turns[game, side] - 1] += reward[game, side]

    def end(self, cut: NDArray[np.bool_], left: NDArray[np.float32] | None) -> None:
        """End all games, with the last turn that each side has had."""
        game, side = np.nonzero(self.turns)
        last = self.turns[game, side] - 1
        self._columns["terminated"][game, side, last] = ~cut[game, side]
        self._columns["truncated"][game, side, last] = cut[game, side]
        if left is None:
            return
        self._columns["last_obs"][cut] = left[cut]
        game, side = np.nonzero((self.turns < self._max_turns) & cut)
        self._columns["obs"][game, side, self.turns[game, side]] = left[game, side]

    def rows(self, numbers: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return columns of `Trajectories`: two rows for each game of `numbers`, i64[games]."""
        env = np.stack([2 * numbers, 2 * numbers + 1], axis=1)
        return {
            name: column.reshape(2 * len(numbers), *column.shape[2:])
            for name, column in {"env": env, **self._columns}.items()
        }


_SIDES = ("first player", "second player")


class BoardGameWorker(BoardGame):
    """Plays the games of a specification.

    Metrics are the shares of games in which the first and the second player earned more than the
    other, and which were cut off; what the first earned; how many moves a game took, and how many
    all of them (`env_steps`).
    """

    def __init__(self, spec: GameSpec, context: WorkerContext) -> None:
        self.spec = spec
        self.context = context
        self.metrics: dict[str, Metric] = {}

    def play(self, game: Tensor, group: Tensor, first: Actor, second: Actor) -> Trajectories:
        key = call_key(self.context.role, "play")
        players = (first, second)
        parts = [
            self._group(np.array(numbers), players, key) for _, numbers in groups_of(game, group)
        ]
        if not parts:
            parts = [self._room(0).rows(np.zeros(0, np.int64))]
        columns = {
            name: torch.from_numpy(np.concatenate([part[name] for part in parts]))
            for name in parts[0]
        }
        return Trajectories(**columns)

    def _room(self, num_games: int) -> GameColumns:
        num_features, actions = self.spec.spaces()
        return GameColumns(num_games, self.spec.max_turns, num_features, actions)

    def _group(
        self, numbers: NDArray[np.int64], players: tuple[Actor, Actor], key: CallKey
    ) -> dict[str, NDArray[Any]]:
        context, title = self.context, self.spec.title
        names = GameNames(context.role, context.seed, key, numbers, title)
        with closing(self.spec.boards(names)) as boards:
            played = _Played(boards, self._room(len(numbers)), names, players)
            stream = stream_key(context.seed, context.role, "noise", key)
            length = 2 * self.spec.max_turns
            noise = row_uniforms(stream, numbers, np.zeros_like(numbers), length).numpy()
            while played.live.any():
                played.move(noise[:, names.move : names.move + 1])
            cut = played.end()
        self._count(played.columns, cut)
        return played.columns.rows(numbers)

    def _count(self, columns: GameColumns, cut: NDArray[np.bool_]) -> None:
        first, second = columns.earned.T
        count, num_moves = float(len(first)), float(columns.turns.sum())
        add_metrics(
            self.metrics,
            {
                "first_wins": Metric.mean(float((first > second).sum()), count),
                "second_wins": Metric.mean(float((second > first).sum()), count),
                "first_return": Metric.mean(float(first.sum()), count),
                "cut_off": Metric.mean(float(cut.any(axis=1).sum()), count),
                "num_moves": Metric.mean(num_moves, count),
                "games": Metric.sum(count),
                "env_steps": Metric.sum(num_moves),
            },
        )


class _Played:
    def __init__(
        self, boards: Boards, columns: GameColumns, names: GameNames, players: tuple[Actor, Actor]
    ) -> None:
        self.columns = columns
        self._boards, self._names, self._players = boards, names, players
        self._recurrent_states: list[NDArray[np.float32] | None] = [None, None]
        self.live = self._still_live()

    def _still_live(self) -> NDArray[np.bool_]:
        boards = self._boards
        side = np.where(boards.over, 0, boards.turn)  # a game that is over names no player
        self._names.blame(
            (side != 0) & (side != 1),
            lambda index: f"says it is the turn of player {side[index]}; expected 0 or 1",
        )
        return ~boards.over & self.columns.has_room(side)

    def move(self, noise: NDArray[np.float64]) -> None:
        """One move in every game that goes on, sampled by `noise`, f64[games, 1]."""
        live, turn = self.live, self._boards.turn * self.live
        obs, allowed = self._seen(turn), self._allowed()
        choice = np.zeros(len(live), np.int64)
        for side in range(2):
            asked = live & (turn == side)
            if not asked.any():
                continue
            action, logprob, recurrent_state = self._players[side].act(
                obs, noise, allowed, self._recurrent_states[side]
            )
            self._check_numbers(asked, action, logprob)
            choice[asked] = action[asked, 0]
            self._check_choice(asked, allowed, choice)
            self._remember(side, asked, recurrent_state)
            self.columns.add(
                asked,
                side,
                obs=obs,
                action=action,
                action_mask=allowed,
                behavior_logprob=logprob,
            )
        self.columns.add_reward(self._reward(self._boards.move(choice, live)))
        self._names.move += 1
        self.live = live & self._still_live()

    def end(self) -> NDArray[np.bool_]:
        """End all games; for which sides they were cut off, bool[games, 2]."""
        cut = ~self._boards.ended
        left = None
        if cut.any():
            sides = [self._seen(np.full(len(cut), side)) for side in range(2)]
            left = np.stack(sides, axis=1)
        self.columns.end(cut, left)
        return cut

    def _seen(self, side: NDArray[np.int64]) -> NDArray[np.float32]:
        obs = self._boards.obs(side)
        bad = ~np.isfinite(obs)

        def shown(index: int) -> str:
            at = int(bad[index].argmax())
            return (
                f"showed the {_SIDES[side[index]]} {obs[index, at]} as number {at + 1} of "
                f"{obs.shape[1]} that it sees; expected finite numbers"
            )

        self._names.blame(np.any(bad, axis=1), shown)
        return obs

    def _allowed(self) -> NDArray[np.bool_]:
        """`Boards.allowed`, and all choices where no move follows: some choice must be allowed."""
        allowed = self._boards.allowed()
        self._names.blame(
            self.live & ~np.any(allowed, axis=1),
            lambda index: (
                f"allows the {_SIDES[self._boards.turn[index]]} no choice, and it goes on; "
                "expected at least one, or an end"
            ),
        )
        return allowed | ~self.live[:, None]

    def _reward(self, reward: NDArray[np.float32]) -> NDArray[np.float32]:
        bad = ~np.isfinite(reward)

        def described(index: int) -> str:
            side = int(bad[index].argmax())
            return (
                f"rewards the {_SIDES[side]} with {reward[index, side]}; expected a finite number"
            )

        self._names.blame(np.any(bad, axis=1), described)
        return reward

    def _remember(
        self, side: int, asked: NDArray[np.bool_], recurrent_state: NDArray[np.float32] | None
    ) -> None:
        if recurrent_state is None:
            return
        before = self._recurrent_states[side]
        kept = np.zeros_like(recurrent_state) if before is None else before
        self._recurrent_states[side] = np.where(asked[:, None], recurrent_state, kept)

    def _check_numbers(
        self,
        asked: NDArray[np.bool_],
        action: NDArray[np.float32],
        logprob: NDArray[np.float32],
    ) -> None:
        for found, what in ((action[:, 0], "action"), (logprob, "log-probability of an action")):
            bad = asked & ~np.isfinite(found)
            self._names.refuse(bad, lambda _, what=what: f"the actor's {what} is not finite")

    def _check_choice(
        self, asked: NDArray[np.bool_], allowed: NDArray[np.bool_], choice: NDArray[np.int64]
    ) -> None:
        there = (choice >= 0) & (choice < allowed.shape[1])
        bad = asked & ~(there & allowed[np.arange(len(choice)), choice * there])
        self._names.refuse(
            bad,
            lambda index: (
                f"choice {choice[index]} is not allowed, which are "
                f"{allowed[index].nonzero()[0].tolist()}; an actor must heed its action_mask"
            ),
        )
