"""Workers of networks that only say values: a Q-network, and the critic of a team."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....algorithms.roles.environment import ActionSpace, Acts, QNetwork, TeamCritic, Values
from ....algorithms.roles.language_tables import TrainMetrics, ValueOutput
from ....dataflow.errors import ConfigError
from ....dataflow.graph.role import Loss, Metric
from ....dataflow.options import Fraction, PositiveInt, option_class
from ....dataflow.runtime.call_context import call_piece
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...training.data_parallel import rank_group
from ...training.microbatch import columns
from ..spec import EnvSpec
from .numpy_actor import NumpyActor, OnHost
from .perceptron import (
    PerceptronSpec,
    PerceptronWorker,
    PerceptronWorkerSpec,
    check_plain,
    perceptron,
    single_steps,
    state_values,
)

B = TypeVar("B")


@option_class
class QNetworkSpec(PerceptronWorkerSpec):
    """Recipe for a `TorchQNetwork`; it refuses a recurrent network and value bins.

    One that begins with weights of a folder acts at random as often as that one did until it is
    trained; one without an optimizer only follows another one.
    """

    env: EnvSpec
    """What it acts in, for the numbers of observations and actions."""
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
    """Values of all choices, and the share of random ones."""

    def __init__(self, spec: QNetworkSpec, num_features: int, num_choices: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(spec.network.init_seed)
        self.layers = perceptron(spec.network, num_features, num_choices, 1.0, random)
        self.epsilon = nn.Parameter(torch.tensor([spec.epsilon_start]), requires_grad=False)


class TorchQNetwork(PerceptronWorker, QNetwork):
    """A perceptron over observations, and acting by its best choice.

    How often it acts at random is one of its weights, which training moves by a schedule. So
    whoever acts by a version of the weights explores as that version does, wherever it is.
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

    def _any_counts(self, batch: object) -> bool:
        """Return whether any rank has a step to learn from; all of them must ask."""
        mask = columns(batch).get("mask")
        if mask is None:
            return True
        count = mask.sum().double().to(self.device)
        return bool(rank_group(self.context, self.device).sum_(count) > 0)


@option_class
class TeamCriticSpec(PerceptronWorkerSpec):
    """Recipe for a `TorchTeamCritic`; it refuses a recurrent network and value bins."""

    env: EnvSpec
    """What the team acts in, for the numbers of observations and agents."""

    def __post_init__(self) -> None:
        check_plain(self.network, "a team's critic", "it is shown single states")

    def build(self, context: WorkerContext) -> TorchTeamCritic:
        return TorchTeamCritic(self, context)


class TorchTeamCritic(PerceptronWorker, TeamCritic):
    """A perceptron over what all agents of a team see."""

    model_type = "perceptron_team_critic"

    def __init__(self, spec: TeamCriticSpec, context: WorkerContext) -> None:
        self.spec = spec
        num_features, num_agents = spec.env.spaces()[0], spec.env.num_agents
        self._width = num_features * num_agents
        random = torch.Generator().manual_seed(spec.network.init_seed)
        layers = perceptron(spec.network, self._width, 1, 1.0, random)
        self.module = nn.ModuleDict({"critic": layers}).to(context.device)
        spaces = {"num_features": num_features, "num_agents": num_agents}
        super().__init__(spec, context, self.module, spaces)

    def _value(self, obs: Tensor) -> Tensor:
        """f32[rows] from f32[rows, features]."""
        return self.module["critic"](obs)[:, 0]

    def value(self, obs: Tensor, last_obs: Tensor) -> Values:
        width, agents = self._width, self.spec.env.num_agents
        if obs.shape[-1] != width:
            raise ConfigError(
                f"role '{self.context.role}' sees {agents} agent(s) of '{self.spec.env.id}', "
                f"{width} numbers in all, but the step shows it {obs.shape[-1]}\n"
                f"    set algorithm.cfg.num_agents={agents}, or task.num_agents"
            )
        return state_values(self._value, obs, last_obs, self.device)

    def train(
        self, loss: Loss[B, ValueOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        def forward(rows: Any, needs_entropy: bool) -> ValueOutput:
            return ValueOutput(value=self._value(rows.obs[:, 0])[:, None])

        return self._train(forward, loss, single_steps(batch), epochs, num_minibatches)
