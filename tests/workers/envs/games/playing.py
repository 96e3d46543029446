"""Players that tests need, and a call of the worker that lets them play."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from penstock.algorithms.roles.environment import Actor, Acts, Trajectories
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.games.worker import BoardGameWorker


class Scripted(Actor):
    def __init__(self, *choices: int) -> None:
        self.choices = list(choices)
        self.seen: list[NDArray[np.float32]] = []

    def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
        self.seen.append(obs.copy())
        choice = np.full((len(obs), 1), self.choices.pop(0), np.float32)
        return Acts(choice, np.full(len(obs), -1.0, np.float32))


class Random(Actor):
    def act(self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None) -> Acts:
        assert action_mask is not None
        count = action_mask.sum(axis=1)
        place = np.minimum((noise[:, 0] * count).astype(int), count - 1)
        choice = (action_mask.cumsum(axis=1) > place[:, None]).argmax(axis=1)
        return Acts(choice[:, None].astype(np.float32), -np.log(count).astype(np.float32))


def play(
    spec: Any,
    first: Actor,
    second: Actor,
    *,
    games: int = 1,
    seed: int = 0,
    step: int = 0,
    group_size: int = 8,
) -> tuple[Trajectories, BoardGameWorker]:
    worker = BoardGameWorker(spec, WorkerContext("board", seed))
    number = torch.arange(games)
    with call_scope(step, 0):
        return worker.play(number, number // group_size, first, second), worker
