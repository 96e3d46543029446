"""States are exact: whatever was saved goes on to the last bit, and what cannot is found out."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import gymnasium as gym
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.workers.envs.live import Normalization
from penstock.workers.envs.spec import EnvSpec, why_not_exact

from .acting import NoisyActor, env_worker, roll
from .toys import Worldly

MOMENTS = Normalization(observations=True, rewards=True)
EXACT = [
    EnvSpec(id="toys/Counting-v0", options={"length": 5}),
    EnvSpec(id="toys/Masks-v0", masked=True),
    EnvSpec(id="CartPole-v1", normalization=MOMENTS),
    EnvSpec(id="CartPole-v1", vectorized=False, normalization=MOMENTS),
    EnvSpec(id="Pendulum-v1", options={}),
    EnvSpec(id="penstock.workers.envs.cover:penstock/Cover-v0", num_agents=3),
]


@pytest.fixture(autouse=True)
def _worldly() -> None:  # pyright: ignore[reportUnusedFunction]
    if "toys/Worldly-v0" not in gym.registry:
        gym.register("toys/Worldly-v0", lambda **options: Worldly(**options))


@pytest.mark.parametrize("spec", EXACT, ids=lambda spec: spec.id)
def test_those_that_can_go_on_exactly_are_told_so(spec: EnvSpec) -> None:
    assert why_not_exact(spec) is None


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("global", "do not come to where they were: environment 0 of 'toys/Worldly-v0'"),
        ("episodes", "show something else "),
    ],
)
def test_what_depends_on_more_is_found_out(on: str, said: str) -> None:
    found = why_not_exact(EnvSpec(id="toys/Worldly-v0", options={"on": on}))
    assert found is not None
    assert found.startswith(said)


@pytest.mark.parametrize("spec", EXACT, ids=lambda spec: spec.id)
@settings(max_examples=8, deadline=None)
@given(
    before=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    after=st.integers(1, 20),
    seed=st.integers(0, 3),
)
def test_what_is_saved_at_any_step_goes_on_to_the_last_bit(
    spec: EnvSpec, before: list[int], after: int, seed: int
) -> None:
    actor = NoisyActor(None if "Pendulum" in spec.id else 2)
    size = spec.num_agents
    whole, first = env_worker(spec, seed), env_worker(spec, seed)
    for step, horizon in enumerate(before):
        for worker in (whole, first):
            roll(worker, step, horizon=horizon, actor=actor, num_envs=2 * size, group_size=size)
    with TemporaryDirectory() as folder:
        first.save_state(Path(folder))
        again = env_worker(spec, seed)
        again.load_state(Path(folder))
    expected, found = (
        roll(one, len(before), horizon=after, actor=actor, num_envs=2 * size, group_size=size)
        for one in (whole, again)
    )
    for name, column in vars(expected).items():
        assert torch.equal(column, getattr(found, name)), name
    total, last = first.metrics, again.metrics
    for name in ("episodes", "env_steps"):
        assert total[name].total + last[name].total == whole.metrics[name].total, name
    for name in ("episode_return", "episode_length"):
        sums = [worker.metrics[name].total for worker in (first, again, whole)]
        assert sums[0] + sums[1] == pytest.approx(sums[2], abs=1e-9), name  # one sum in two parts
