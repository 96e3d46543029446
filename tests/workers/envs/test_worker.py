"""Rollouts: ends of episodes, what they depend on, and going on elsewhere to the last bit."""

from __future__ import annotations

import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.roles.environment import Trajectories
from penstock.dataflow.errors import StateError
from penstock.dataflow.runtime.call_context import call_scope
from penstock.workers.envs.live import Normalization
from penstock.workers.envs.spec import EnvSpec, why_not_exact
from penstock.workers.envs.task import EnvRowSource

from .acting import NoisyActor, alike, env_worker, roll, shown

COUNTING = EnvSpec(id="toys/Counting-v0", options={"length": 3})
CARTPOLE = EnvSpec(id="CartPole-v1")
SINGLE = EnvSpec(id="CartPole-v1", vectorized=False)
SCALED = EnvSpec(
    id="CartPole-v1", vectorized=False, normalization=Normalization(observations=True, rewards=True)
)
PENDULUM = EnvSpec(id="Pendulum-v1", options={})
ALL = pytest.mark.parametrize(
    "spec", [COUNTING, CARTPOLE, SINGLE, SCALED, PENDULUM], ids=lambda s: s.id
)


def actor_for(spec: EnvSpec) -> NoisyActor:
    return NoisyActor(None if spec is PENDULUM else 2)


def test_the_step_after_an_episode_shows_where_it_ended_and_does_not_count() -> None:
    traj = roll(env_worker(COUNTING), 0, num_envs=1, group_size=1)
    assert traj.obs[0, :, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert traj.terminated[0].tolist() == [False, False, True, False, False, False, True, False]
    assert traj.mask[0].tolist() == [True, True, True, False, True, True, True, False]
    assert traj.reward[0].tolist() == [1, 1, 1, 0, 1, 1, 1, 0]
    assert not traj.truncated.any()
    assert traj.last_obs[0, 0] == 0


def test_an_episode_that_ends_with_a_rollout_is_reset_in_the_next() -> None:
    worker = env_worker(COUNTING)
    first = roll(worker, 0, num_envs=1, group_size=1, horizon=3)
    assert first.terminated[0, -1]
    assert first.last_obs[0, 0] == 3
    second = roll(worker, 1, num_envs=1, group_size=1, horizon=3)
    assert second.mask[0].tolist() == [False, True, True]
    assert second.obs[0, :, 0].tolist() == [3, 0, 1]


def test_an_environment_may_come_with_the_module_that_registers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        import gymnasium as gym
        from gymnasium.envs.classic_control.cartpole import CartPoleEnv
        gym.register("OwnCartPole-v0", CartPoleEnv, max_episode_steps=500)
    """
    (tmp_path / "own_cartpole.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    own = roll(env_worker(EnvSpec(id="own_cartpole:OwnCartPole-v0")), 0)
    assert alike(own, roll(env_worker(SINGLE), 0))


def test_time_limits_truncate() -> None:
    limited = EnvSpec(id="toys/Counting-v0", options={"length": 3, "truncates": True})
    traj = roll(env_worker(limited), 0, num_envs=1, group_size=1, horizon=4)
    assert traj.truncated[0].tolist() == [False, False, True, False]
    assert not traj.terminated.any()


def test_metrics_count_whole_episodes_over_rollouts_without_resets() -> None:
    worker = env_worker(COUNTING)
    roll(worker, 0, num_envs=1, group_size=1, horizon=2)
    assert worker.metrics["episodes"].value == 0
    worker.metrics.clear()
    roll(worker, 1, num_envs=1, group_size=1, horizon=6)
    assert shown(worker) == {
        "episode_return": 3.0,
        "episode_length": 3.0,
        "episodes": 2.0,
        "env_steps": 4.0,
        "env_restarts": 0.0,
    }


def test_returns_are_counted_before_rewards_are_scaled() -> None:
    worker = env_worker(SCALED)
    traj = roll(worker, 0, horizon=64)
    assert worker.metrics["episode_return"].value == worker.metrics["episode_length"].value
    assert set(traj.reward.unique().tolist()) != {0.0, 1.0}
    assert traj.obs.abs().max() <= 10


@ALL
def test_another_seed_does_something_else(spec: EnvSpec) -> None:
    one = roll(env_worker(spec, 1), 0, actor=actor_for(spec))
    other = roll(env_worker(spec, 2), 0, actor=actor_for(spec))
    assert not torch.equal(one.obs, other.obs)


def test_groups_that_nobody_asked_for_stay_in_checkpoints(tmp_path: Path) -> None:
    long = EnvSpec(id="toys/Counting-v0", options={"length": 100})
    worker, one, other = (env_worker(long) for _ in range(3))
    roll(worker, 0, horizon=5)
    worker.save_state(tmp_path / "first")
    for rank in (one, other):
        rank.load_state(tmp_path / "first")
    roll(other, 1, horizon=5, groups=(1,))
    for order in ((one, other), (other, one)):
        folder = tmp_path / str(order.index(one))
        for rank in order:  # every rank writes to the same folder
            rank.save_state(folder)
        last = env_worker(long)
        last.load_state(folder)
        assert sorted(file.name for file in folder.iterdir()) == ["group-0.json", "group-1.json"]
        assert roll(last, 1, groups=(0,)).obs[:, 0, 0].tolist() == [5, 5]
        assert roll(last, 2, groups=(1,)).obs[:, 0, 0].tolist() == [10, 10]


def test_a_group_that_a_checkpoint_lacks_is_not_begun_anew(tmp_path: Path) -> None:
    worker = env_worker(COUNTING)
    roll(worker, 0, groups=(0,))
    worker.save_state(tmp_path)
    worker.load_state(tmp_path)
    with pytest.raises(
        StateError,
        match=r"^the checkpoint has no state of group 1 of role 'env', environments \[2, 3\]; "
        "resume with the number of environments and the group size that the run was started with$",
    ):
        roll(worker, 1)


def test_no_step_may_be_left_out() -> None:
    worker = env_worker(COUNTING)
    roll(worker, 0)
    with pytest.raises(StateError, match="asked for call 0 of step 2 after call 0 of step 0"):
        roll(worker, 2)


def test_no_step_may_be_done_twice(tmp_path: Path) -> None:
    worker = env_worker(COUNTING)
    for step in (0, 1):
        roll(worker, step)
    worker.save_state(tmp_path)
    resumed = env_worker(COUNTING)
    resumed.load_state(tmp_path)
    for one in (worker, resumed):
        with pytest.raises(
            StateError,
            match=r"^environments \[0, 1\] were asked for call 0 of step 1 after call 0 of step 1; "
            "what they do depends on all steps before, so none may be left out or done twice$",
        ):
            roll(one, 1)
        rows = EnvRowSource(4, 2).batch(1)
        with call_scope(1, 1):  # a second call of the same step, as its graph may have
            one.rollout(rows.env, rows.group, NoisyActor(), horizon=8)
    roll(worker, 0)  # 0 begins a run


def test_a_group_keeps_its_environments() -> None:
    worker = env_worker(COUNTING)
    roll(worker, 0)
    with pytest.raises(StateError, match=r"group 0 of role 'env' has environments \[0, 1\], but"):
        roll(worker, 1, num_envs=3, group_size=3)


def test_no_rows_make_no_rows() -> None:
    traj = roll(env_worker(COUNTING), 0, groups=())
    assert traj.obs.shape == (0, 8, 2)
    assert traj.action_mask.shape == (0, 8, 0)


def test_allowed_choices_are_a_column() -> None:
    masked = EnvSpec(id="toys/Counting-v0", masked=True)
    traj = roll(env_worker(masked), 0, horizon=4)
    assert traj.action_mask.tolist() == [[[True, False, True]] * 4] * 4


MOMENTS = Normalization(observations=True, rewards=True)
EXACT = [
    EnvSpec(id="toys/Counting-v0", options={"length": 5}),
    EnvSpec(id="toys/Masks-v0", masked=True),
    EnvSpec(id="CartPole-v1", normalization=MOMENTS),
    EnvSpec(id="CartPole-v1", vectorized=False, normalization=MOMENTS),
    EnvSpec(id="Pendulum-v1", options={}),
    EnvSpec(id="penstock.workers.envs.cover:penstock/Cover-v0", num_agents=3),
]


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


@pytest.mark.slow
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
    apart = [env_worker(spec, seed) for _ in range(2)]  # with a group each
    with TemporaryDirectory() as folder:
        first.save_state(Path(folder))
        for worker in apart:
            worker.load_state(Path(folder))
    options: dict[str, Any] = {"actor": actor, "num_envs": 2 * size, "group_size": size}
    expected = roll(whole, len(before), horizon=after, **options)
    parts = [
        roll(worker, len(before), horizon=after, groups=(group,), **options)
        for group, worker in enumerate(apart)
    ]
    joined = {name: torch.cat([vars(part)[name] for part in parts]) for name in vars(expected)}
    assert alike(expected, Trajectories(**joined))
    for name in ("episodes", "env_steps", "episode_return", "episode_length"):
        *sums, total = (worker.metrics[name].total for worker in (first, *apart, whole))
        assert sum(sums) == pytest.approx(total, abs=1e-9), name  # one sum in parts
