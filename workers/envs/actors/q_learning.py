"""Q-learning: a Q-network as a worker, and a replay of steps in one process's memory."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....algorithms.roles.environment import (
    ActionSpace,
    Acts,
    QNetwork,
    Replay,
    Trajectories,
    Transitions,
)
from ....algorithms.roles.language_tables import TrainMetrics, ValueOutput
from ....dataflow.errors import ConfigError, PlanError, StateError
from ....dataflow.graph.role import Loss, Metric
from ....dataflow.options import Fraction, PositiveInt, option_class
from ....dataflow.runtime.call_context import call_key, call_piece
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...rollout.sampling import stream_generator
from ...training.data_parallel import rank_group
from ...training.flat_parameters import read_tensors, write_tensors
from ...training.microbatch import columns
from ..spec import EnvSpec
from .numpy_actor import NumpyActor, OnHost
from .perceptron import (
    PerceptronSpec,
    PerceptronWorker,
    PerceptronWorkerSpec,
    check_plain,
    perceptron,
)

B = TypeVar("B")

_FORMAT = 1
_STATE, _COLUMNS = "replay.json", "replay.safetensors"


@option_class
class QNetworkSpec(PerceptronWorkerSpec):
    """Recipe for a `TorchQNetwork`; it refuses a recurrent network and value bins.

    One that begins with weights of a folder acts at random as often as that one did until it is
    trained; one without an optimizer only follows another one.
    """

    env: EnvSpec
    """Its environment, for the numbers of observations and actions."""
    network: PerceptronSpec = PerceptronSpec(hidden_sizes=(120, 84), activation="relu")
    """Its layers. Networks of one seed start alike."""
    epsilon_start: Fraction = 1.0
    """Share of choices sampled at random, before the first training."""
    epsilon_end: Fraction = 0.05
    """The share that it falls to."""
    epsilon_calls: PositiveInt = 1
    """Train calls over which it falls, in a straight line."""

    def __post_init__(self) -> None:
        check_plain(self.network, "a Q-network", "a replay keeps single steps")

    def epsilon(self, calls: int) -> float:
        """The share of random choices after so many train calls."""
        past = min(calls / self.epsilon_calls, 1.0)
        return self.epsilon_start + past * (self.epsilon_end - self.epsilon_start)

    def build(self, context: WorkerContext) -> TorchQNetwork:
        num_features, actions = self.env.spaces()
        if actions.kind != "discrete" or len(actions.sizes) != 1 or actions.masked:
            raise ConfigError(
                f"role '{context.role}' values every choice there is: it needs an environment "
                f"with one discrete action, never masked, and '{self.env.id}' has {actions}"
            )
        return TorchQNetwork(self, context, num_features, actions)


class _QLayers(nn.Module):
    def __init__(self, spec: QNetworkSpec, num_features: int, num_choices: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(spec.network.init_seed)
        self.layers = perceptron(spec.network, num_features, num_choices, 1.0, random)
        self.epsilon = nn.Parameter(torch.tensor([spec.epsilon_start]), requires_grad=False)


class TorchQNetwork(PerceptronWorker, QNetwork):
    """A perceptron over observations, and acting by its best choice.

    How often it acts at random is one of its weights, which training moves by a schedule. So
    what acts by a version of the weights explores as that version does, wherever it is.
    """

    model_type = "perceptron_q_network"

    def __init__(
        self, spec: QNetworkSpec, context: WorkerContext, num_features: int, actions: ActionSpace
    ) -> None:
        self.spec = spec
        self.module = _QLayers(spec, num_features, actions.sizes[0]).to(context.device)
        spaces = {"num_features": num_features, "actions": asdict(actions)}
        super().__init__(spec, context, self.module, spaces)
        self._on_host = OnHost(self.module, self.network.flat)
        self._numpy = NumpyActor(self._on_host.module.layers, actions, None)

    def act(
        self,
        obs: NDArray[np.float32],
        noise: NDArray[np.float64],
        action_mask: NDArray[np.bool_] | None,
        recurrent_state: NDArray[np.float32] | None = None,
    ) -> Acts:
        """One number decides whether a choice is random, and which one then."""
        self._on_host.follow()
        value = self._numpy.outputs(obs)
        count, best = value.shape[1], value.argmax(axis=1)
        epsilon, uniform = float(self._on_host.module.epsilon), noise[:, 0]
        at_random = np.minimum(uniform / max(epsilon, 1e-12) * count, count - 1).astype(np.int64)
        choice = np.where(uniform < epsilon, at_random, best)
        probability = epsilon / count + (1 - epsilon) * (choice == best)
        return Acts(choice[:, None].astype(np.float32), np.log(probability).astype(np.float32))

    def weights_changed(self) -> None:
        super().weights_changed()
        self._on_host.is_stale = True

    def best(self, obs: Tensor) -> Tensor:
        with torch.no_grad():
            choice = self.module.layers(obs.to(self.device)).argmax(-1, keepdim=True)
        return choice.float().to(obs.device)

    def value(self, obs: Tensor, action: Tensor) -> Tensor:
        with torch.no_grad():
            return self._value(obs.to(self.device), action.to(self.device)).to(obs.device)

    def _value(self, obs: Tensor, action: Tensor) -> Tensor:
        return self.module.layers(obs).gather(-1, action.long()).squeeze(-1)

    def train(
        self, loss: Loss[B, ValueOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        if call_piece() != "whole":
            raise ConfigError(
                f"role '{self.context.role}' is given its batch in pieces, but a Q-network skips a "
                "batch without steps, so it must see all of it\n"
                "    have the step wait for the whole batch"
            )

        def forward(rows: Any, needs_entropy: bool) -> ValueOutput:
            return ValueOutput(value=self._value(rows.obs, rows.action))

        try:
            if self._trainer is None or self._any_counts(batch):
                found = self._train(forward, loss, batch, epochs, num_minibatches)
            else:
                found = self._trainer.skip()
            epsilon = self.spec.epsilon(self._trainer.calls if self._trainer else 0)
            self._state_files.keep()  # which is not told of `data`
            self.module.epsilon.data.fill_(epsilon)
        finally:  # and not before: who is asked meanwhile would copy what is half trained
            self._on_host.is_stale = True
        return TrainMetrics({**found.metrics, "epsilon": Metric.mean(epsilon, 1.0)})

    def _any_counts(self, batch: object) -> bool:  # all ranks must ask
        mask = columns(batch).get("mask")
        if mask is None:
            return True
        count = mask.sum().double().to(self.device)
        return bool(rank_group(self.context, self.device).sum_(count) > 0)


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
        step = call_key(self.context.role, "add").step
        if 0 < step < self._step:
            raise StateError(
                f"'{self.context.role}' was given step {step} after step {self._step}; what it "
                "samples depends on the order, so its calls must come in the order of steps"
            )
        self._step = step
        if steps.action_mask.shape[-1]:
            raise ValueError(
                "the environments say which choices are allowed, and a replay does not keep that; "
                "use an environment without masks, or an algorithm that learns from fresh steps"
            )
        new, capacity = _transitions(steps), self.spec.capacity
        if not self._ring:
            self._ring = {
                name: torch.zeros(capacity, *column.shape[1:], dtype=column.dtype)
                for name, column in new.items()
            }
        count = len(new["reward"])
        kept = min(count, capacity)
        at = torch.arange(self._added + count - kept, self._added + count) % capacity
        for name, column in new.items():
            self._ring[name][at] = column[count - kept :]
        self._added += count
        self.metrics["stored"] = Metric.mean(float(self.num_stored), 1.0)
        return torch.full((len(steps.env),), self.num_stored, dtype=torch.int64)

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
