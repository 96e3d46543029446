"""A replay of environments' steps in one process's memory: a ring of columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....algorithms.roles.environment import Replay, Trajectories, Transitions
from ....dataflow.errors import PlanError, StateError
from ....dataflow.graph.role import Metric
from ....dataflow.options import PositiveInt, option_class
from ....dataflow.runtime.call_context import call_key
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...rollout.sampling import stream_generator
from ...training.flat_parameters import read_tensors, write_tensors

_FORMAT = 1
_STATE, _COLUMNS = "replay.json", "replay.safetensors"


@option_class
class ReplaySpec:
    """Recipe for a `ReplayMemory`."""

    capacity: PositiveInt = 10_000
    """Steps it holds; the oldest ones make room for new ones."""

    def build(self, context: WorkerContext) -> ReplayMemory:
        if context.num_ranks > 1:
            raise PlanError(
                f"role '{context.role}' is one replay, but its group has {context.num_ranks} "
                "ranks; place it on a group of one"
            )
        return ReplayMemory(self, context)


class ReplayMemory(Replay):
    """Steps in memory; they depend on what was added, and in which order."""

    def __init__(self, spec: ReplaySpec, context: WorkerContext) -> None:
        self.spec = spec
        self.context = context
        self.metrics: dict[str, Metric] = {}
        self._ring: dict[str, Tensor] = {}
        self._added = 0
        self._step = 0

    @property
    def num_stored(self) -> int:
        return min(self._added, self.spec.capacity)

    def add(self, steps: Trajectories) -> Tensor:
        self._check_order(call_key(self.context.role, "add").step)
        if steps.action_mask.shape[-1]:
            raise ValueError(
                "the environments say which choices are allowed, and a replay does not keep that; "
                "use an environment without masks, or an algorithm that learns from fresh steps"
            )
        self._keep(_transitions(steps))
        self.metrics["stored"] = Metric.mean(float(self.num_stored), 1.0)
        return torch.full((len(steps.env),), self.num_stored, dtype=torch.int64)

    def _check_order(self, step: int) -> None:
        if 0 < step < self._step:
            raise StateError(
                f"'{self.context.role}' was given step {step} after step {self._step}; what it "
                "samples depends on the order, so its calls must come in the order of steps"
            )
        self._step = step

    def _keep(self, new: dict[str, Tensor]) -> None:
        capacity = self.spec.capacity
        count = len(new["reward"])
        if not self._ring:
            self._ring = {
                name: torch.zeros(capacity, *column.shape[1:], dtype=column.dtype)
                for name, column in new.items()
            }
        kept = min(count, capacity)
        at = torch.arange(self._added + count - kept, self._added + count) % capacity
        for name, column in new.items():
            self._ring[name][at] = column[count - kept :]
        self._added += count

    def sample(self, stored: Tensor, *, num_steps: int, at_least: int = 1) -> Transitions:
        """Nothing but zeros comes of a replay that nothing was added to."""
        key = call_key(self.context.role, "sample")
        random = stream_generator(self.context.seed, self.context.role, "sample", key)
        there = self.num_stored >= max(at_least, 1)
        sampled = random.integers(max(self.num_stored, 1), size=num_steps)
        at = torch.from_numpy(sampled)
        columns = {name: column[at][:, None] for name, column in self._ring.items()}
        return Transitions(**columns, mask=torch.full((num_steps, 1), there))

    def save_state(self, folder: Path) -> None:
        """Write what it holds as safetensors, and how much of it there was as JSON."""
        folder.mkdir(parents=True, exist_ok=True)
        held = {name: column[: self.num_stored] for name, column in self._ring.items()}
        write_tensors(folder / _COLUMNS, held)
        state = {
            "format": _FORMAT,
            "capacity": self.spec.capacity,
            "added": self._added,
            "step": self._step,
        }
        (folder / _STATE).write_text(json.dumps(state, indent=2) + "\n")

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, bit for bit."""
        state: dict[str, Any] = json.loads((folder / _STATE).read_text())
        if state["format"] != _FORMAT:
            raise ValueError(f"'{folder}' has format {state['format']}, this version {_FORMAT}")
        if state["capacity"] != self.spec.capacity:
            raise ValueError(
                f"'{folder}' holds a replay of {state['capacity']} steps, and '{self.context.role}'"
                f" has room for {self.spec.capacity}; resume with the capacity it was saved with"
            )
        self._ring.clear()
        self._added, self._step = int(state["added"]), int(state["step"])
        for name, held in read_tensors(folder / _COLUMNS).items():
            room = torch.zeros(self.spec.capacity, *held.shape[1:], dtype=held.dtype)
            room[: len(held)] = held
            self._ring[name] = room


def _transitions(steps: Trajectories) -> dict[str, Tensor]:
    """The steps that count as rows, environment by environment: columns of `Transitions`.

    After an episode's last step the next column shows the state it was left in.
    """
    next_obs = torch.cat([steps.obs[:, 1:], steps.last_obs[:, None]], dim=1)
    columns = {
        "obs": steps.obs,
        "action": steps.action,
        "reward": steps.reward,
        "next_obs": next_obs,
        "terminated": steps.terminated,
    }
    return {name: column[steps.mask] for name, column in columns.items()}
