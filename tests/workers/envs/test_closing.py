"""That nothing is left open when something goes wrong, and everything is closed in the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from penstock.dataflow.errors import ConfigError, StateError, WorkerError
from penstock.dataflow.runtime.call_context import step_scope
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource

from .acting import NoisyActor, env_worker, roll
from .toys import Counting

STUCK = r"it is stuck \(test_closing.py:\d+\) at step 0"


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
    """Of which none is open."""
    if "toys/Door-v0" not in gym.registry:
        gym.register("toys/Door-v0", lambda **options: Door(**options))
    Door.num_open, Door.may_open, Door.where = 0, 10**9, ""
    return EnvSpec(id="toys/Door-v0", max_restarts=1)


def test_those_made_before_one_that_cannot_be_made_are_closed(door: EnvSpec) -> None:
    Door.may_open = 1
    with pytest.raises(ConfigError, match="no more doors"):
        roll(env_worker(door), 0)
    assert Door.num_open == 0


def test_those_in_which_nobody_can_act_are_closed(door: EnvSpec) -> None:
    with pytest.raises(ConfigError, match="takes actions of Text"):
        roll(env_worker(EnvSpec(id=door.id, options={"actions": "text"})), 0)
    assert Door.num_open == 0


def test_teams_that_are_none_are_closed(door: EnvSpec) -> None:
    with pytest.raises(ConfigError, match="equal agents"):
        roll(env_worker(EnvSpec(id=door.id, num_agents=2)), 0)
    assert Door.num_open == 0


def test_those_that_cannot_begin_are_closed(door: EnvSpec) -> None:
    Door.where = "reset"
    worker, rows = env_worker(door), EnvRowSource(4, 2).batch(0)
    with pytest.raises(WorkerError, match=STUCK):
        roll(worker, 0)
    assert Door.num_open == 0
    with (
        step_scope(0),
        pytest.raises(WorkerError, match=STUCK),
    ):
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
        with pytest.raises(StateError, match="shows something else"):
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
