"""Actors without weights, and rollouts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from penstock.algorithms.ops.returns import GaeTargets, gae
from penstock.algorithms.roles.environment import Actor, Acts, Trajectories
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorker, EnvWorkerSpec


class NoisyActor(Actor):
    """Takes the choice that the noise falls on, whatever it sees, or the noise itself."""

    def __init__(self, num_choices: int | None = 2) -> None:
        self._num_choices = num_choices

    def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
        scale = self._num_choices or 1
        action = np.floor(noise * scale) if self._num_choices else noise
        return Acts(action.astype(np.float32), np.full(len(obs), -0.5, np.float32))


def env_worker(spec: EnvSpec, seed: int = 1) -> EnvWorker:
    return EnvWorkerSpec(env=spec).build(WorkerContext("env", seed))


def roll(
    worker: EnvWorker,
    step: int,
    *,
    num_envs: int = 4,
    group_size: int = 2,
    horizon: int = 8,
    actor: Actor | None = None,
    groups: tuple[int, ...] | None = None,
) -> Trajectories:
    """One rollout of all environments, or of some groups of them."""
    rows = EnvRowSource(num_envs, group_size).batch(step)
    env, group = rows.env, rows.group
    if groups is not None:
        chosen = (group[:, None] == group.new_tensor(groups)).any(dim=1)
        env, group = env[chosen], group[chosen]
    with step_scope(step):
        return worker.rollout(env, group, actor or NoisyActor(), horizon=horizon)


def alike(one: Any, other: Any, rows: Any = slice(None), *, but: tuple[str, ...] = ()) -> bool:
    """Whether two tables have equal columns, all but some of them."""
    names = vars(one).keys() - set(but)
    return all(torch.equal(vars(one)[name][rows], vars(other)[name][rows]) for name in names)


def shown(worker: EnvWorker) -> dict[str, float]:
    return {name: metric.value for name, metric in worker.metrics.items()}


def targets(traj: Trajectories, value: torch.Tensor, bootstrap: torch.Tensor) -> GaeTargets:
    """What steps are worth if nothing is discounted."""
    return gae(
        traj.mask,
        reward=traj.reward,
        value=value,
        bootstrap_value=bootstrap,
        terminated=traj.terminated,
        truncated=traj.truncated,
        lam=1.0,
    )
