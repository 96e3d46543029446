"""Board games: who wins, what each player is shown and given, and that a seed reproduces games."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from penstock.algorithms.papers.self_play import side_of
from penstock.algorithms.roles.environment import Acts
from penstock.dataflow.errors import WorkerError
from penstock.workers.envs.games.mnk_games import CONNECT_FOUR, TIC_TAC_TOE, BoardSpec

from ..acting import alike
from .playing import Random, Scripted, play


def test_a_row_of_three_wins() -> None:
    one, two = Scripted(0, 1, 2), Scripted(3, 4)
    games, worker = play(TIC_TAC_TOE, one, two)
    assert games.env.tolist() == [0, 1]
    assert games.mask.tolist() == [[True] * 3 + [False] * 2, [True] * 2 + [False] * 3]
    assert games.reward.tolist() == [[0, 0, 1, 0, 0], [0, -1, 0, 0, 0]]
    assert games.terminated.int().tolist() == [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0]]
    assert not bool(games.truncated.any())
    assert worker.metrics["first_wins"].value == 1
    assert worker.metrics["num_moves"].value == 5


def test_the_second_player_can_win_and_the_first_is_paid_for_its_last_turn() -> None:
    games, worker = play(TIC_TAC_TOE, Scripted(0, 1, 8), Scripted(3, 4, 5))
    assert games.reward.tolist() == [[0, 0, -1, 0, 0], [0, 0, 1, 0, 0]]
    assert worker.metrics["second_wins"].value == 1


def test_a_full_board_is_a_draw() -> None:
    games, worker = play(TIC_TAC_TOE, Scripted(0, 1, 5, 6, 8), Scripted(2, 3, 4, 7))
    assert games.reward.tolist() == [[0.0] * 5, [0.0] * 5]
    assert games.terminated.int().tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0]]
    assert worker.metrics["first_wins"].value == worker.metrics["second_wins"].value == 0


def test_each_player_sees_its_own_stones_first() -> None:
    one, two = Scripted(0, 1, 2), Scripted(3, 4)
    games, _ = play(TIC_TAC_TOE, one, two)
    assert two.seen[1][0].nonzero()[0].tolist() == [3, 9 + 0, 9 + 1]
    assert one.seen[2][0].nonzero()[0].tolist() == [0, 1, 9 + 3, 9 + 4]
    assert torch.equal(games.obs[0, 2], torch.from_numpy(one.seen[2][0]))
    allowed = games.action_mask[0, 2].nonzero().flatten().tolist()
    assert allowed == [2, 5, 6, 7, 8]


def test_stones_fall_in_connect_four() -> None:
    """The first player's diagonal: columns 0 to 3, one place higher each."""
    one = Scripted(0, 1, 2, 2, 3, 3)
    two = Scripted(1, 2, 3, 3, 6)
    games, worker = play(CONNECT_FOUR, one, two)
    assert worker.metrics["first_wins"].value == 1
    last = one.seen[-1][0].reshape(2, 6, 7)
    assert last[0, :, 3].nonzero()[0].tolist() == [3]
    assert last[1, :, 3].nonzero()[0].tolist() == [4, 5]
    assert games.obs.shape == (2, 21, 84)


@pytest.mark.parametrize(("spec", "lines"), [(TIC_TAC_TOE, 8), (CONNECT_FOUR, 69)])
def test_all_lines_are_known(spec: BoardSpec, lines: int) -> None:
    assert spec.lines().shape == (lines, spec.in_line)


def test_random_games_are_won_as_often_as_they_should_be() -> None:
    """Uniform play wins 58.5 % of tic-tac-toe for the first player and 28.8 % for the second."""
    games, worker = play(TIC_TAC_TOE, Random(), Random(), games=4000, group_size=500)
    assert abs(worker.metrics["first_wins"].value - 0.585) < 0.03
    assert abs(worker.metrics["second_wins"].value - 0.288) < 0.03
    total = games.reward.sum(1).reshape(-1, 2)
    assert torch.equal(total[:, 0], -total[:, 1])
    assert games.terminated.sum(1).tolist() == [1] * len(games.env)
    assert bool((games.terminated <= games.mask).all())


def test_games_belong_to_seed_step_and_number() -> None:
    whole, _ = play(TIC_TAC_TOE, Random(), Random(), games=12)
    apart, _ = play(TIC_TAC_TOE, Random(), Random(), games=12, group_size=3)
    other, _ = play(TIC_TAC_TOE, Random(), Random(), games=12, seed=1)
    later, _ = play(TIC_TAC_TOE, Random(), Random(), games=12, step=1)
    assert alike(whole, apart)
    assert not torch.equal(whole.obs, other.obs)
    assert not torch.equal(whole.obs, later.obs)


def test_the_rows_of_one_player() -> None:
    games, _ = play(TIC_TAC_TOE, Random(), Random(), games=3)
    second = side_of(games, side=1)
    assert second.env.tolist() == [1, 3, 5]
    assert torch.equal(second.reward, games.reward[1::2])


def test_no_games_are_no_rows() -> None:
    games, _ = play(TIC_TAC_TOE, Random(), Random(), games=0)
    assert games.obs.shape == (0, 5, 18)
    assert games.last_obs.shape == (0, 18)


def test_a_move_that_is_not_allowed_names_game_and_move() -> None:
    with pytest.raises(WorkerError) as raised:
        play(TIC_TAC_TOE, Scripted(0), Scripted(0), seed=7)
    assert str(raised.value) == (
        "game 0 of 'board' (seed 7), move 1: choice 0 is not allowed, which are [1, 2, 3, 4, 5, 6, "
        "7, 8]; an actor must heed its action_mask"
    )


@pytest.mark.parametrize("action", [True, False])
def test_what_a_player_says_must_be_numbers(action: bool) -> None:
    class Lost(Random):
        def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
            acts = super().act(obs, noise, action_mask)
            (acts.action[:, 0] if action else acts.logprob)[2] = np.nan
            return acts

    said = "action" if action else "log-probability of an action"
    with pytest.raises(WorkerError) as raised:
        play(TIC_TAC_TOE, Random(), Lost(), games=4, seed=7)
    assert (
        str(raised.value) == f"game 2 of 'board' (seed 7), move 1: the actor's {said} is not finite"
    )
