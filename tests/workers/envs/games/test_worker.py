"""The worker of games, whoever keeps the rules: odd turns, rewards, games cut off, bad games."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from penstock.algorithms.roles.environment import ActionSpace, Acts
from penstock.dataflow.errors import WorkerError
from penstock.workers.envs.games.worker import GameNames
from penstock.workers.envs.group import env_seed

from ..acting import targets
from .playing import Random, play


@dataclass(frozen=True)
class Told:
    """Games that go as they are told: each shows how many moves it has had, and to whom."""

    order: tuple[str, ...]
    """Of each game, who is to move, move by move; it is over then."""
    rewards: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict[Any, Any])
    """Of a game and a move, what it earns both."""
    max_turns: int = 4
    ends: str = "over"
    wrong: str = ""
    """What goes wrong in the second game's second move."""
    title: str = "a told game"

    def spaces(self) -> tuple[int, ActionSpace]:
        return 2, ActionSpace("discrete", sizes=(3,), masked=True)

    def boards(self, names: GameNames) -> ToldBoards:
        return ToldBoards(self, len(names.numbers))


class ToldBoards:
    """Boards that give the sides turns in the order of a `Told`, and fail as it says."""

    def __init__(self, spec: Told, count: int) -> None:
        self.spec, self.count = spec, count
        self.moves = np.zeros(count, np.int64)
        self.closed = False

    def _wrong(self, what: str) -> NDArray[np.bool_]:
        second = np.arange(self.count) == 1
        return second & (self.moves == 1) & (self.spec.wrong == what)

    @property
    def over(self) -> NDArray[np.bool_]:
        lengths = [len(self.spec.order[game]) for game in range(self.count)]
        return self.moves >= lengths

    @property
    def ended(self) -> NDArray[np.bool_]:
        return np.repeat(self.over & (self.spec.ends != "cut"), 2).reshape(-1, 2)

    @property
    def turn(self) -> NDArray[np.int64]:
        orders = [self.spec.order[game] + "9" for game in range(self.count)]
        turn = np.array([int(order[at]) for order, at in zip(orders, self.moves, strict=True)])
        return np.where(self._wrong("turn"), 2, turn)

    def obs(self, side: NDArray[np.int64]) -> NDArray[np.float32]:
        seen = np.stack([self.moves, side], axis=1).astype(np.float32)
        return np.where(self._wrong("obs")[:, None], np.float32(np.nan), seen)

    def allowed(self) -> NDArray[np.bool_]:
        return ~self._wrong("allowed")[:, None].repeat(3, axis=1)

    def move(self, choice: NDArray[np.int64], live: NDArray[np.bool_]) -> NDArray[np.float32]:
        rewards = [self.spec.rewards.get((g, int(at)), (0, 0)) for g, at in enumerate(self.moves)]
        reward = np.where(live[:, None], np.array(rewards, np.float32), 0)
        reward[self._wrong("reward")] = [np.inf, 0]
        self.moves += live
        return reward.astype(np.float32)

    def close(self) -> None:
        self.closed = True


def test_a_player_may_move_twice_and_each_is_shown_its_own_turns() -> None:
    games, worker = play(Told(("001", "0110")), Random(), Random(), games=2)
    assert games.mask.sum(1).tolist() == [2, 1, 2, 2]
    assert games.obs[:, :2].tolist() == [
        [[0, 0], [1, 0]], [[2, 1], [0, 0]], [[0, 0], [3, 0]], [[1, 1], [2, 1]],
    ]  # fmt: skip
    assert games.terminated.nonzero().tolist() == [[0, 1], [1, 0], [2, 1], [3, 1]]
    assert not games.truncated.any()
    assert worker.metrics["num_moves"].value == 3.5


def test_reward_belongs_to_the_turn_before_it() -> None:
    rewards = {(0, 0): (1.0, 5.0), (0, 1): (2.0, -1.0), (0, 2): (0.5, 4.0)}
    games, worker = play(Told(("0110",), rewards), Random(), Random())
    assert games.reward[:, :2].tolist() == [[3.5, 0.0], [-1.0, 4.0]]
    # What was earned before the first turn is nobody's doing, and counts all the same.
    assert worker.metrics["first_return"].value == 3.5
    assert worker.metrics["second_wins"].value == 1


def test_a_player_without_a_turn_has_an_empty_row() -> None:
    games, _ = play(Told(("00",), {(0, 1): (1.0, -1.0)}), Random(), Random())
    assert games.mask.sum(1).tolist() == [2, 0]
    assert not (games.terminated[1] | games.truncated[1]).any()
    assert games.reward[1].abs().sum() == 0


@pytest.mark.parametrize("spec", [Told(("0101011",), max_turns=3), Told(("010101",), ends="cut")])
def test_a_game_that_is_cut_off_is_worth_what_the_critics_say_of_it(spec: Told) -> None:
    games, worker = play(replace(spec, rewards={(0, 5): (0.0, 2.0)}), Random(), Random())
    assert worker.metrics["cut_off"].value == 1
    assert worker.metrics["num_moves"].value == 6
    assert not games.terminated.any()
    assert games.truncated.nonzero().tolist() == [[0, 2], [1, 2]]
    assert games.last_obs.tolist() == [[6, 0], [6, 1]]
    if spec.max_turns > 3:  # where an environment that resets shows the end
        assert games.obs[:, 3].tolist() == [[6, 0], [6, 1]]
        assert not games.mask[:, 3:].any()
    value, bootstrap = 10.0 + games.obs[:, :, 0], 10.0 + games.last_obs[:, 0]
    target = targets(games, value, bootstrap)
    assert target.value_target[:, :3].tolist() == [[16.0] * 3, [18.0] * 3]


def test_what_a_player_remembers_is_of_its_own_turns() -> None:
    class Counts(Random):
        seen: list[NDArray[np.float32] | None]

        def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
            self.seen = [*getattr(self, "seen", []), recurrent_state]
            acts = super().act(obs, noise, action_mask)
            before = (
                np.zeros((len(obs), 1), np.float32) if recurrent_state is None else recurrent_state
            )
            return Acts(acts.action, acts.logprob, before + 1)

    first, second = Counts(), Counts()
    play(Told(("0010", "0110")), first, second, games=2)
    told = [None if m is None else m[:, 0].tolist() for m in first.seen]
    assert told == [None, [1, 1], [2, 1]]
    told = [None if m is None else m[:, 0].tolist() for m in second.seen]
    assert told == [None, [0, 1]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("turn", "says it is the turn of player 2; expected 0 or 1"),
        (
            "obs",
            "showed the second player nan as number 1 of 2 that it sees; expected finite numbers",
        ),
        (
            "allowed",
            "allows the second player no choice, and it goes on; expected at least one, or an end",
        ),
        ("reward", "rewards the first player with inf; expected a finite number"),
    ],
)
def test_a_game_that_goes_wrong_is_named(wrong: str, said: str) -> None:
    with pytest.raises(WorkerError) as raised:
        play(Told(("0101",) * 3, wrong=wrong), Random(), Random(), games=3, seed=7)
    own = env_seed(7, "board", "game", 0, 0, 1)
    assert str(raised.value) == (
        f"game 1 of 'board' (seed 7), move 1: a told game (seed {own}) {said}"
    )


def test_boards_are_given_up_whatever_happens() -> None:
    made: list[ToldBoards] = []

    class Kept(Told):
        def boards(self, names: GameNames) -> ToldBoards:
            made.append(super().boards(names))
            return made[-1]

    play(Kept(("01",) * 4), Random(), Random(), games=4, group_size=2)
    with pytest.raises(WorkerError):
        play(Kept(("01",) * 2, wrong="obs"), Random(), Random(), games=2)
    assert [boards.closed for boards in made] == [True] * 3


def test_rows_are_whole_whatever_the_groups() -> None:
    spec = Told(("001", "0110", "01"))
    one, _ = play(spec, Random(), Random(), games=3)
    assert one.env.tolist() == [0, 1, 2, 3, 4, 5]
    assert one.obs.shape == (6, 4, 2)
    assert one.recurrent_state.shape == (6, 0)
    assert one.action_mask[one.mask].all()
    assert torch.equal(one.behavior_logprob != 0, one.mask)
