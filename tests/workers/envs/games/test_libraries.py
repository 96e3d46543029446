"""Games of EnvPool and PettingZoo: the rules are ours where we have them, and games repeat."""

from __future__ import annotations

import functools
import importlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.workers.envs.games.libraries import LibraryGameSpec
from penstock.workers.envs.games.mnk_games import CONNECT_FOUR, TIC_TAC_TOE, BoardSpec
from penstock.workers.envs.group import env_seed

from ....copies import copies_end, fork
from ..acting import alike
from .playing import Random, Scripted, play

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="requirements-engines.txt is installed on Linux"
)


def pool(game: str, max_turns: int = 40, **options: Any) -> LibraryGameSpec:
    return LibraryGameSpec(id=game, max_turns=max_turns, options=options)


def zoo(game: str, max_turns: int = 40, **options: Any) -> LibraryGameSpec:
    return LibraryGameSpec(id=game, backend="pettingzoo", max_turns=max_turns, options=options)


RULES = [
    (TIC_TAC_TOE, pool("TicTacToe-v1", 5)),
    (TIC_TAC_TOE, zoo("tictactoe_v3", 5)),
    (CONNECT_FOUR, pool("ConnectFour-v1", 21)),
    (CONNECT_FOUR, zoo("connect_four_v3", 21)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), RULES)
@given(seed=st.integers(0, 2**31))
def test_the_rules_are_ours(ours: BoardSpec, theirs: LibraryGameSpec, seed: int) -> None:
    """Equal choices move by move: the same are allowed and win, and it is over at the same time."""
    one, _ = play(ours, Random(), Random(), games=8, seed=seed)
    other, _ = play(theirs, Random(), Random(), games=8, seed=seed)
    assert alike(one, other, but=("obs", "last_obs"))
    places = other.obs.unflatten(-1, (ours.num_places, 2))  # ours has one player's after another
    assert torch.equal(places.transpose(-1, -2).flatten(-2), one.obs)


@pytest.mark.slow
@pytest.mark.parametrize("game", ["Hex-v1", "Othello-v1", "LeducHoldem-v1", "Backgammon-v1"])
def test_games_depend_on_seed_and_step_and_neither_on_threads_nor_on_company(game: str) -> None:
    one, _ = play(pool(game, num_threads=1), Random(), Random(), games=12, group_size=12)
    other, _ = play(pool(game, num_threads=3), Random(), Random(), games=12, group_size=5)
    assert alike(one, other)
    for options in ({"step": 1}, {"seed": 1}):
        later, _ = play(pool(game, num_threads=1), Random(), Random(), games=12, **options)
        assert not torch.equal(one.action, later.action)


def test_every_game_is_paid_for_what_happens_in_it() -> None:
    games, worker = play(pool("KuhnPoker-v1", 2), Random(), Random(), games=256, group_size=64)
    assert games.obs.shape == (512, 2, 7)
    assert games.mask.sum(1).unique().tolist() == [1, 2]
    total = games.reward.sum(1).reshape(-1, 2)
    assert torch.equal(total[:, 0], -total[:, 1])
    assert total[:, 0].unique().tolist() == [-2, -1, 1, 2]
    assert games.terminated.sum(1).unique().tolist() == [1]
    assert worker.metrics["first_return"].value == total[:, 0].mean()


def test_the_same_player_may_move_again() -> None:
    """Of two dice, one player plays both; a game of 12 turns is hardly ever over."""
    games, worker = play(pool("Backgammon-v1", 12), Random(), Random(), games=8)
    assert worker.metrics["cut_off"].value == 1
    turns = games.mask.sum(1)
    assert turns.max() == 12
    assert turns.min() < 12  # strictly in turn, both would have had 12
    assert games.truncated.sum(1).tolist() == [1] * 16


@pytest.mark.parametrize("spec", [pool("Hex-v1", 10), zoo("connect_four_v3", 2)])
def test_a_game_that_is_cut_off_shows_both_players_how_it_stands(spec: LibraryGameSpec) -> None:
    games, worker = play(spec, Random(), Random(), games=4)
    assert worker.metrics["cut_off"].value == 1
    assert worker.metrics["num_moves"].value == 2 * spec.max_turns
    assert not games.terminated.any()
    assert games.truncated.nonzero()[:, 1].tolist() == [spec.max_turns - 1] * 8
    planes = 4 if spec.id == "Hex-v1" else 2  # own stones, the other's, and what else there is
    one, other = games.last_obs.reshape(4, 2, -1, planes)[..., :2].unbind(1)
    assert torch.equal(one[..., 0], other[..., 1])
    assert torch.equal(one[..., 1], other[..., 0])
    stones = one.sum((1, 2))  # one less where the second player took the first's stone instead
    assert ((stones >= 2 * spec.max_turns - 1) & (stones <= 2 * spec.max_turns)).all()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (pool("CartPole-v1"), "'CartPole-v1' of EnvPool has 1 player; expected a game of two "
         "players, who choose in turn from what is allowed\n"
         "    such are ConnectFour-v1, Hex-v1 and Go9x9-v1"),
        (pool("SparrowMahjong-v1"), "'SparrowMahjong-v1' of EnvPool has 3 players; expected a game "
         "of two players, who choose in turn from what is allowed\n"
         "    such are ConnectFour-v1, Hex-v1 and Go9x9-v1"),
        (pool("Hexx-v1"), "EnvPool has no game 'Hexx-v1'; did you mean 'Hex-v1'?"),
        (pool("Hex-v1", size=5), "game 'Hex-v1' cannot be made by EnvPool: Config.__new__() got an "
         "unexpected keyword argument 'size'"),
        (zoo("rps_v2"), "'rps_v2' of PettingZoo shows Discrete(4); expected a game of two players, "
         "who choose in turn from what is allowed, a Dict with observation and action_mask\n"
         "    such are connect_four_v3, tictactoe_v3 and go_v5"),
        (zoo("conect_four_v3"), "PettingZoo has no game 'conect_four_v3'; did you mean "
         "'connect_four_v3'?\n    a game of your own is task.id=module:function"),
        (zoo("nim"), "PettingZoo has no game 'nim'\n"
         "    a game of your own is task.id=module:function"),
        (zoo("chess"), "PettingZoo has no game 'chess'; did you mean 'chess_v6'?\n"
         "    a game of your own is task.id=module:function"),
        (zoo("no_such_games:env"), "there is no module for game 'no_such_games:env'"),
        (zoo("no_such.games:env"), "there is no module for game 'no_such.games:env'"),
        (zoo("connect_four_v3", size=5), "game 'connect_four_v3' cannot be made: it raised "
         "TypeError: raw_env.__init__() got an unexpected keyword argument 'size' "
         "(connect_four.py:88)"),
    ],
)  # fmt: skip
def test_what_is_no_game_for_two_is_refused(spec: LibraryGameSpec, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        spec.spaces()
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("spec", "package", "said"),
    [
        (pool("Hex-v1"), "envpool", "backend=envpool needs the package envpool, which is "
         "not installed\n    pip install penstock-rl[envpool]"),
        (zoo("tictactoe_v3"), "pettingzoo", "game 'tictactoe_v3' needs the package pettingzoo, "
         "which is not installed\n    pip install penstock-rl[pettingzoo]; for card games also "
         "rlcard, for chess also chess"),
    ],
)  # fmt: skip
def test_a_package_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, spec: LibraryGameSpec, package: str, said: str
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as raised:
        spec.spaces()
    assert str(raised.value) == said


@pytest.fixture
def nim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A game of a user's own, which may go wrong."""
    shutil.copy(Path(__file__).with_name("nim.py"), tmp_path / "own_nim.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_nim", raising=False)
    return functools.partial(zoo, "own_nim:env", 6)


def test_a_game_of_ones_own(nim: Any) -> None:
    """Who begins is the first player, whatever the game calls it."""
    games, worker = play(nim(), Scripted(2, 0), Scripted(0, 1), games=6)
    assert games.obs[:2].tolist() == [
        [[7, 1], [3, 1], [0, 0], [0, 0], [0, 0], [0, 0]],
        [[4, 1], [2, 1], [0, 0], [0, 0], [0, 0], [0, 0]],
    ]
    assert games.action_mask[1, 1].tolist() == [True, True, False]
    assert games.reward[:2, 1].tolist() == [-1, 1]
    assert worker.metrics["second_wins"].value == 1
    assert alike(games, play(nim(), Scripted(2, 0), Scripted(0, 1), games=6)[0])


@pytest.mark.slow
def test_a_game_that_forks_does_not_double_the_run(
    nim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = importlib.import_module("own_nim").Nim
    for name in ("__init__", "action_space", "reset", "observe", "step", "close"):
        whole = getattr(game, name)

        def twice(*given: Any, whole: Callable[..., Any] = whole, **options: Any) -> Any:
            fork()
            return whole(*given, **options)

        monkeypatch.setattr(game, name, twice)
    with copies_end():
        games, _ = play(nim(), Scripted(2, 0), Scripted(0, 1), games=2)
    assert games.reward[:2, 1].tolist() == [-1, 1]


def test_a_limit_of_the_games_own_cuts_it_off(nim: Any) -> None:
    games, worker = play(nim(wrong="limit"), Scripted(0, 0), Scripted(0))
    assert worker.metrics["cut_off"].value == 1
    assert games.truncated.nonzero().tolist() == [[0, 1], [1, 0]]
    assert games.last_obs.tolist() == [[4, 0], [4, 1]]


@pytest.mark.parametrize("wrong", ["", "limit"])
def test_the_other_plays_on_where_one_is_out_early(nim: Any, wrong: str) -> None:
    """The player who leaves at its third move earns no more; the other earns 1 five times."""
    spec = replace(nim(wrong=wrong), id="own_nim:leaves", max_turns=9)
    games, worker = play(spec, Scripted(*[0] * 9), Scripted(*[1] * 9), games=2)
    assert games.mask.sum(1).tolist() == [8, 3] * 2
    assert games.reward.sum(1).tolist() == [5, 0] * 2
    assert games.terminated.nonzero().tolist() == (
        [[0, 7], [2, 7]] if wrong else [[0, 7], [1, 2], [2, 7], [3, 2]]
    )
    assert games.truncated.nonzero().tolist() == ([[1, 2], [3, 2]] if wrong else [])
    assert games.last_obs[1].tolist() == [6 if wrong else 0]  # after its third move
    assert worker.metrics["cut_off"].value == bool(wrong)


def test_a_game_that_does_not_let_a_player_go_is_refused(nim: Any) -> None:
    spec = replace(nim(wrong="stays"), id="own_nim:leaves", max_turns=9)
    with pytest.raises(WorkerError, match="says it is the turn of 'second' again, who is out and"):
        play(spec, Scripted(*[0] * 9), Scripted(*[1] * 9))


@pytest.mark.parametrize(
    ("wrong", "move", "said"),
    [
        ("raises", 2, r"raised RuntimeError: no stones any more \(own_nim.py:\d+\)"),
        ("shape", 2, r"showed \w+ as observation float64\[1\]; expected 2 numbers"),
        ("text", 2, r"showed \w+ as observation <U6\[2\]; expected 2 numbers"),
        ("bare", 2, r"showed \w+ \[0. 0.\]; expected a dict with observation and action_mask"),
        ("nan", 2, "showed the first player nan as number 2 of 2 that it sees; expected finite "
         "numbers"),
        ("stuck", 2, "allows the first player no choice, and it goes on; expected at least one, or "
         "an end"),
        ("reward", 2, "rewards the first player with nan; expected a finite number"),
        ("none", 2, r"raised TypeError: float\(\) argument must be a string or a real number, not "
         r"'NoneType' \(libraries.py:\d+\)"),
        ("stranger", 2, "says it is the turn of 'nobody'; expected '(one' or 'two|two' or 'one)'"),
        ("hangs", 2, r"did not answer in time \(task.step_limit_s\)"),
    ],
)  # fmt: skip
def test_a_game_that_goes_wrong(nim: Any, wrong: str, move: int, said: str) -> None:
    own = env_seed(7, "board", "game", 0, 0, 0)
    where = (
        rf"^game 0 of 'board' \(seed 7\), move {move}: 'own_nim:env' of PettingZoo \(seed {own}\) "
    )
    spec = replace(nim(wrong=wrong), step_limit_s=0.2 if wrong == "hangs" else 10.0)
    with pytest.raises(WorkerError, match=where + said + "$"):
        play(spec, Scripted(0, 0, 0), Scripted(0, 0, 0), games=2, seed=7)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"players": 3}, "has 3 players"),
        ({"players": 1}, "has 1 player"),
        ({"players": 0}, "has 0 players"),
        ({"wrong": "start"}, r"takes Discrete\(3, start=1\)"),
        ({"wrong": "spaces"}, "shows its players things of other shapes"),
    ],
)
def test_what_our_players_cannot_play(nim: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^'own_nim:env' of PettingZoo {said}; expected a gam"):
        nim(**options).spaces()


FORM = (
    "expected a game in PettingZoo's AEC form (possible_agents, agent_selection, observe, step "
    "...)\n    return an AECEnv whose players choose in turn; games in which all move at once, as "
    "a ParallelEnv's, are not played here"
)
NAMES = "    task.id=module:function names a function that returns a game"


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("gym_env", {}, "'own_nim:gym_env' of PettingZoo returned a TimeLimit, which has no "
         f"possible_agents; {FORM}"),
        ("nothing", {}, "'own_nim:nothing' of PettingZoo returned None, which has no "
         f"possible_agents; {FORM}"),
        ("parallel", {}, f"'own_nim:parallel' of PettingZoo returned a Rain, which has no observe; "
         f"{FORM}"),
        ("nosuch", {}, "game 'own_nim:nosuch' cannot be made: module own_nim has no 'nosuch'\n"
         f"{NAMES}"),
        ("envs", {}, "game 'own_nim:envs' cannot be made: module own_nim has no 'envs'; did you "
         f"mean 'env'?\n{NAMES}"),
        ("NUMBER", {}, "game 'own_nim:NUMBER' cannot be made: 'NUMBER' of module own_nim is 7\n"
         f"{NAMES}"),
        ("nothing", {"size": 5}, "game 'own_nim:nothing' cannot be made: it raised TypeError: "
         "nothing() got an unexpected keyword argument 'size'"),
    ],
)  # fmt: skip
def test_what_is_no_game_of_ones_own(
    nim: Any, function: str, options: dict[str, Any], said: str
) -> None:
    spec = replace(nim(**options), id=f"own_nim:{function}")
    with pytest.raises(ConfigError) as raised:
        spec.spaces()
    assert str(raised.value) == said


def test_a_game_that_does_not_say_what_it_shows(nim: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^game 'own_nim:env' does not say what it shows and takes: it raised KeyError: "
        r"'one' \(own_nim.py:\d+\)$",
    ):
        nim(wrong="silent").spaces()


def test_a_game_that_begins_without_a_turn(nim: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        play(replace(nim(), id="own_nim:stateless"), Random(), Random())
    assert str(raised.value) == (
        "'own_nim:stateless' of PettingZoo returned a Stateless, which has no agent_selection; "
        f"{FORM}"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nosuchdep", "game 'needy:env' needs the package nosuchdep, which is not "
         "installed\n    module needy imports it; install it"),
        ("raise OSError('no cards')", "game 'needy:env' cannot be imported: it raised OSError: no "
         "cards (needy.py:1)"),
    ],
)  # fmt: skip
def test_a_module_of_ones_own_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    (tmp_path / "needy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as raised:
        zoo("needy:env").spaces()
    assert str(raised.value) == said


def test_limits_are_numbers_above_nothing() -> None:
    with pytest.raises(ValueError, match="max_turns"):
        LibraryGameSpec(id="Hex-v1", max_turns=0)
    with pytest.raises(ValueError, match="step_limit_s"):
        LibraryGameSpec(id="Hex-v1", step_limit_s=0)


def test_no_games_are_no_rows() -> None:
    games, _ = play(pool("Hex-v1", 3), Random(), Random(), games=0)
    assert games.obs.shape == (0, 3, 484)
    assert np.prod(games.recurrent_state.shape) == 0
