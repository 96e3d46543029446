"""Overlapped groups: the same rollout however many, and what happens when a slot fails or hangs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from penstock.algorithms.roles.environment import Acts
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.runtime.call_context import current_step
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.live import Normalization
from penstock.workers.envs.overlapped_groups import NumOverlapped
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.worker import EnvWorker, EnvWorkerSpec

from .acting import NoisyActor, alike, roll
from .toys import Counting, register


class Sleepy(Counting):
    def __init__(self, sleep_s: float = 2e-3) -> None:
        super().__init__(length=7)
        self._sleep_s = sleep_s

    def step(self, action: Any) -> Any:
        time.sleep(self._sleep_s)
        return super().step(action)


class Raises(Counting):
    def step(self, action: Any) -> Any:
        raise RuntimeError("out of tea")


class Staged(Counting):
    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, float(current_step()), *rest


register(Sleepy=Sleepy, Raises=Raises, Staged=Staged)


def worker(env: EnvSpec, num_overlapped: NumOverlapped) -> EnvWorker:
    return EnvWorkerSpec(env=env, num_overlapped=num_overlapped).build(WorkerContext("env", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "env",
    [
        EnvSpec(id="CartPole-v1"),
        EnvSpec(id="toys/Sleepy-v0", normalization=Normalization(observations=True, rewards=True)),
    ],
    ids=lambda env: env.id,
)
def test_a_rollout_does_not_depend_on_how_many_are_overlapped(env: EnvSpec) -> None:
    found: list[Any] = []
    for num_overlapped in (1, 2, 3, 8, "auto"):
        one = worker(env, num_overlapped)
        rolls = [roll(one, step, num_envs=8, group_size=2) for step in range(3)]
        found.append((rolls, dict(one.metrics)))
        one.close()
    for rolls, metrics in found[1:]:
        assert metrics == found[0][1]
        assert all(alike(*pair) for pair in zip(rolls, found[0][0], strict=True))


@pytest.mark.parametrize("num_overlapped", [1, 2])
def test_environments_know_the_step_in_every_slot(num_overlapped: int) -> None:
    one = worker(EnvSpec(id="toys/Staged-v0"), num_overlapped)
    paid = roll(one, 5, num_envs=4, group_size=2).reward
    one.close()
    assert paid.max(dim=1).values.tolist() == [5.0] * 4


def test_slots_wait_at_the_same_time() -> None:
    took_s: dict[NumOverlapped, float] = {}
    for num_overlapped in (1, 4):
        one = worker(EnvSpec(id="toys/Sleepy-v0", options={"sleep_s": 0.02}), num_overlapped)
        roll(one, 0, num_envs=4, group_size=1, horizon=1)
        begin_s = time.perf_counter()
        roll(one, 1, num_envs=4, group_size=1, horizon=10)
        took_s[num_overlapped] = time.perf_counter() - begin_s
        one.close()
    assert took_s[1] > 2 * took_s[4]


def test_the_planner_chooses_from_the_first_rollout() -> None:
    sleeps = worker(EnvSpec(id="toys/Sleepy-v0", options={"sleep_s": 0.02}), "auto")
    roll(sleeps, 0, num_envs=3, group_size=1, horizon=5)
    assert sleeps.num_overlapped() == 3
    alone = worker(EnvSpec(id="toys/Sleepy-v0"), "auto")
    roll(alone, 0, num_envs=3, group_size=3, horizon=5)
    assert alone.num_overlapped() == "auto"  # There is nothing to choose from.
    computes = worker(EnvSpec(id="CartPole-v1"), "auto")
    roll(computes, 0, num_envs=6, group_size=2, horizon=200)
    assert computes.num_overlapped() == 1  # However busy the machine is.
    for one in (sleeps, alone, computes):
        one.close()
    with pytest.raises(ValueError, match="num_overlapped is 0; expected at least 1"):
        EnvWorkerSpec(env=EnvSpec(id="CartPole-v1"), num_overlapped=0)


def test_a_slot_that_fails_ends_the_others() -> None:
    class Waits(NoisyActor):
        def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
            if threading.current_thread().name == "penstock-overlap-1":
                raise ValueError("no answer")
            return super().act(obs, noise, action_mask)

    one = worker(EnvSpec(id="toys/Sleepy-v0"), 2)
    with pytest.raises(ValueError, match="no answer"):
        roll(one, 0, num_envs=2, group_size=1, horizon=100_000, actor=Waits())
    one.close()
    bad = worker(EnvSpec(id="toys/Raises-v0"), 2)
    with pytest.raises(WorkerError, match="out of tea"):
        roll(bad, 0, num_envs=2, group_size=1)
    bad.close()


@pytest.mark.slow
def test_a_step_that_hangs_ends_the_rollout() -> None:
    env = EnvSpec(id="toys/Sleepy-v0", options={"sleep_s": 0.4}, step_limit_s=0.1)
    one = worker(env, 2)
    with pytest.raises(WorkerError) as caught:
        roll(one, 0, num_envs=4, group_size=2)
    assert str(caught.value).startswith("a step of environments [")
    assert (
        "took longer than 0.2 s (step_limit_s=0.1 for each of them); with num_overlapped=1"
        in str(caught.value)
    )
    time.sleep(1.0)  # What hung goes on to its next question, and ends there.
    one.close()
