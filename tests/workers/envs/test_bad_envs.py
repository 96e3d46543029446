"""Environments that go wrong: restarted, named in an error, and closed in the end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import gymnasium.envs.registration as registered
import pytest
import torch
from penstock.algorithms.roles.environment import Acts
from penstock.dataflow.errors import ConfigError, StateError, WorkerError
from penstock.dataflow.runtime.call_context import step_scope
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource

from ...copies import copies_end, fork
from .acting import NoisyActor, env_worker, roll
from .toys import Bad, Counting, register

SAID = {
    "raises": r"raised RuntimeError: out of coffee \(toys.py:\d+\)",
    "nan": r"showed an observation that is not finite: \[nan, nan\]",
    "shape": r"showed an observation of shape \[5\], 5 numbers; expected 2",
    "reward": "gave a reward of nan",
    "hangs": r"did not answer in time \(task.step_limit_s\)",
}


def bad(how: str, share: float, **options: Any) -> EnvSpec:
    return EnvSpec(id="toys/Bad-v0", options={"how": how, "share": share}, **options)


class Forks(Counting):
    """Goes on twice from everything that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        fork()

    def reset(self, **options: Any) -> Any:
        fork()
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        fork()
        return super().step(action)

    def close(self) -> None:
        fork()


@pytest.mark.slow
def test_one_that_forks_neither_doubles_the_run_nor_fills_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = registered.EnvSpec("Forks-v0", entry_point=lambda **_: Forks())
    monkeypatch.setitem(gym.registry, "Forks-v0", spec)
    with copies_end():
        assert EnvSpec(id="Forks-v0").spaces()[0] == 2
    worker = env_worker(EnvSpec(id="Forks-v0"))
    with copies_end():
        roll(worker, 0, num_envs=2, group_size=2, horizon=4)
    with copies_end():
        worker.close()


@pytest.mark.parametrize("how", SAID)
def test_one_that_always_fails_is_named_with_seed_and_step(how: str) -> None:
    worker = env_worker(bad(how, 1.1, max_restarts=1, step_limit_s=0.2))
    with pytest.raises(
        WorkerError,
        match=rf"^environment \d of 'toys/Bad-v0' \(seed \d+\) {SAID[how]} at step 2 of its "
        r"episode, failure 2 of its group in one rollout; 1 may be made good by a restart "
        r"\(task.max_restarts\)$",
    ):
        roll(worker, 0)


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_one_of_many_is_restarted_and_counted(how: str) -> None:
    worker = env_worker(bad(how, 0.1, max_restarts=8, step_limit_s=0.2))
    begun_s = time.monotonic()
    traj = roll(worker, 0, num_envs=8, group_size=8, horizon=20)
    restarts = worker.metrics["env_restarts"].value
    assert 1 <= restarts <= 8
    assert time.monotonic() - begun_s < 20
    # The step that failed does not count, and its episode is cut off with the step before it.
    assert int(traj.truncated.sum()) == restarts
    row, t = (int(at[0]) for at in torch.nonzero(traj.truncated, as_tuple=True))
    assert traj.mask[row, t]
    assert not traj.mask[row, t + 1]
    assert traj.obs[row, t + 2, 0] == 0
    assert worker.metrics["episode_length"].value == 5


class Lost(NoisyActor):
    """Gives no numbers for environment 1, and then no choice that there is."""

    def __init__(self, *, action: bool, logprob: bool) -> None:
        super().__init__()
        self._action, self._logprob = action, logprob

    def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
        acts = super().act(obs, noise, action_mask)
        acts.action[1] = float("nan") if self._action else 99
        if self._logprob:
            acts.logprob[1] = float("nan")
        return acts


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "toys/Counting-v0"])
@pytest.mark.parametrize("action", [True, False])
def test_what_the_actor_says_must_be_numbers(env: str, action: bool) -> None:
    """And nobody else is blamed, as environments that raise where they are given no numbers."""
    worker = env_worker(EnvSpec(id=env))
    said = "the actor's action" if action else "the actor's log-probability of an action"
    with pytest.raises(
        WorkerError,
        match=rf"^environment 1 \(seed \d+\), step 0 of the rollout of step 0: {said} is not "
        "finite$",
    ):
        roll(worker, 0, actor=Lost(action=action, logprob=not action))


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_one_that_fails_where_it_did_not_before_is_not_resumed(how: str, tmp_path: Path) -> None:
    worker = env_worker(bad(how, 0))
    roll(worker, 0, horizon=3)
    worker.save_state(tmp_path)
    worse = env_worker(bad(how, 1.1, step_limit_s=0.2))
    worse.load_state(tmp_path)
    with pytest.raises(
        StateError,
        match=rf"^environment 0 of 'toys/Bad-v0' \(seed \d+\) {SAID[how]} at step 2 of its "
        "episode, where its 3 actions since it was seeded were taken again; it had not "
        "when it was saved$",
    ):
        roll(worse, 1)


NO_FORM = "environment 'Acrobot-v1' has no vectorized form; leave"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (EnvSpec(id="Cartpool-v7", vectorized=True), "'Cartpool-v7' cannot be made: .*Cartpool"),
        (EnvSpec(id="Cartpool-v7", vectorized=False), "'Cartpool-v7' cannot be made: .*Cartpool"),
        (
            EnvSpec(id="toys/Counting-v0", options={"actions": "text"}),
            r"'toys/Counting-v0' takes actions of Text\(1, 3, ",
        ),
        (EnvSpec(id="Acrobot-v1", vectorized=True), NO_FORM),
    ],
)
def test_what_is_refused_before_anything_is_built(spec: EnvSpec, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spec.spaces()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            EnvSpec(id="toys/Counting-v0", options={"actions": "multi"}, masked=True),
            r"environment 0 of 'toys/Counting-v0' \(seed \d+\) allows \[True, False, True\] at "
            "step 0 of its episode; expected 5 booleans, one True for every component",
        ),
        (
            EnvSpec(id="toys/Masks-v0", options={"at": 2}, masked=True, max_restarts=2),
            r"^environment 0 of 'toys/Masks-v0' \(seed \d+\) raised RuntimeError: out of tea "
            r"\(toys.py:\d+\) at step 2 of its episode, failure 3 of its group in one rollout; 2 "
            r"may be made good by a restart \(task.max_restarts\)$",
        ),
        (
            EnvSpec(id="Acrobot-v1", masked=True),
            r"^environment 0 of 'Acrobot-v1' \(seed \d+\) has no method action_masks, and no "
            "action_mask among what it says, which is nothing; set task.masked=false$",
        ),
    ],
    ids=["nothing is allowed", "the method fails", "no masks"],
)
def test_masks_that_are_none(spec: EnvSpec, said: str) -> None:
    with pytest.raises(WorkerError, match=said):
        roll(env_worker(spec), 0)


def test_when_an_episode_is_over_nothing_need_be_allowed() -> None:
    traj = roll(env_worker(EnvSpec(id="toys/Masks-v0", masked=True)), 0)
    assert traj.action_mask.all()


class Licensed(Bad):
    """Only so many can be made."""

    left = 0
    closed = 0

    def __init__(self) -> None:
        if not Licensed.left:
            raise OSError("no more licenses")
        Licensed.left -= 1
        super().__init__(how="raises", share=1.1)

    def close(self) -> None:
        Licensed.closed += 1


@pytest.fixture
def licensed() -> EnvSpec:
    register(Licensed=Licensed)
    Licensed.left = Licensed.closed = 0
    return EnvSpec(id="toys/Licensed-v0", max_restarts=3)


def test_one_that_cannot_be_made_anew_is_named(licensed: EnvSpec) -> None:
    Licensed.left = 4
    with pytest.raises(
        WorkerError,
        match=r"^environment 0 of 'toys/Licensed-v0' \(seed \d+\) could not be made anew: "
        r"environment 'toys/Licensed-v0' cannot be made: it raised OSError: no more licenses "
        r"\(test_bad_envs.py:\d+\), at step 2 of its episode, failure 4 of its group in one",
    ):
        roll(env_worker(licensed), 0, num_envs=2)


STUCK = r"it is stuck \(test_bad_envs.py:\d+\) at step 0"


class Door(Counting):
    """Counts how many of it are open. Where it is told to it raises: `make`, `reset` or `close`."""

    num_open = 0
    may_open = 10**9
    where = ""

    def __init__(self, actions: str = "discrete") -> None:
        super().__init__(actions=actions)
        if not Door.may_open:
            raise OSError("no more doors")
        Door.may_open -= 1
        Door.num_open += 1
        self._is_open = True

    def reset(self, **options: Any) -> Any:
        if Door.where == "reset":
            raise RuntimeError("it is stuck")
        return super().reset(**options)

    def close(self) -> None:
        Door.num_open -= self._is_open
        self._is_open = False
        if Door.where == "close":
            raise RuntimeError("it is stuck")


@pytest.fixture
def door() -> EnvSpec:
    register(Door=Door)
    Door.num_open, Door.may_open, Door.where = 0, 10**9, ""
    return EnvSpec(id="toys/Door-v0", max_restarts=1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no more doors"),
        ({"options": {"actions": "text"}}, "takes actions of Text"),  # in which nobody can act
        ({"num_agents": 2}, "equal agents"),
    ],
)
def test_those_made_before_it_is_refused_are_closed(
    door: EnvSpec, given: dict[str, Any], said: str
) -> None:
    Door.may_open = 10**9 if given else 1
    with pytest.raises(ConfigError, match=said):
        roll(env_worker(EnvSpec(id=door.id, **given)), 0)
    assert Door.num_open == 0


def test_those_that_cannot_begin_are_closed(door: EnvSpec) -> None:
    Door.where = "reset"
    worker, rows = env_worker(door), EnvRowSource(4, 2).batch(0)
    with pytest.raises(WorkerError, match=STUCK):
        roll(worker, 0)
    assert Door.num_open == 0
    with step_scope(0), pytest.raises(WorkerError, match=STUCK):
        worker.evaluate(rows.env, rows.group, NoisyActor(), num_episodes=1, max_episode_steps=9)
    assert Door.num_open == 0


def test_those_that_are_not_resumed_are_closed_and_their_state_stays(
    door: EnvSpec, tmp_path: Path
) -> None:
    worker = env_worker(door)
    roll(worker, 0, horizon=2)
    worker.save_state(tmp_path)
    file = tmp_path / "group-0.json"
    state = json.loads(file.read_text())
    state["envs"]["envs"][1]["obs"] = "of another run"
    file.write_text(json.dumps(state))
    worker.load_state(tmp_path)
    for _ in range(2):
        with pytest.raises(
            StateError,
            match=r"environment 1 of 'toys/Door-v0' \(seed \d+\) shows something else after the 2 "
            "actions of its episode",
        ):
            roll(worker, 1)
        assert Door.num_open == 0


def test_one_that_cannot_be_closed_does_not_keep_the_others_open(door: EnvSpec) -> None:
    worker = env_worker(door)
    roll(worker, 0)
    assert Door.num_open == 4
    Door.where = "close"
    with pytest.raises(RuntimeError, match="it is stuck"):
        worker.close()
    assert Door.num_open == 0
    worker.close()
