"""The critic of a team as a worker: a perceptron over what all its agents see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ....algorithms.roles.environment import TeamCritic, Values
from ....algorithms.roles.language_tables import TrainMetrics, ValueOutput
from ....dataflow.errors import ConfigError
from ....dataflow.graph.role import Loss
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...training.model_worker import ModelWorker
from ...training.network import WholeNetwork
from ...training.optimizer import OptimizerSpec
from ..spec import EnvSpec
from .network_weights import load_network, save_network
from .perceptron import (
    PerceptronSpec,
    perceptron,
    refuse_value_bins,
    single_steps,
    state_values,
)
from .recurrent import refuse_recurrence

B = TypeVar("B")

_MODEL_TYPE = "perceptron_team_critic"


@dataclass(frozen=True, kw_only=True)
class TeamCriticSpec:
    """Recipe for a `TorchTeamCritic`; it refuses a recurrent network and value bins."""

    network: PerceptronSpec = PerceptronSpec()
    """Its layers."""
    env: EnvSpec
    """What the team acts in, for the numbers of observations and agents."""
    start: str | None = None
    """A folder that such a worker saved, whose weights it begins with: of the same layers, for the
    same observations and agents. None for random ones."""
    optimizer: OptimizerSpec | None = None
    """None for one that is never trained."""

    def __post_init__(self) -> None:
        refuse_recurrence(
            self.network.recurrent_units, "a team's critic", "it is shown single states"
        )
        refuse_value_bins(self.network, "a team's critic")

    def build(self, context: WorkerContext) -> TorchTeamCritic:
        """Make it on the context's device."""
        return TorchTeamCritic(self, context)


class _Network(nn.Module):
    """From what a team sees to a value."""

    def __init__(self, spec: TeamCriticSpec) -> None:
        super().__init__()
        self.width = spec.env.spaces()[0] * spec.env.num_agents
        random = torch.Generator().manual_seed(spec.network.init_seed)
        self.critic = perceptron(spec.network, self.width, 1, 1.0, random)

    def value(self, obs: Tensor) -> Tensor:
        """f32[rows] from f32[rows, features]."""
        return self.critic(obs)[:, 0]


class TorchTeamCritic(ModelWorker, TeamCritic):
    def __init__(self, spec: TeamCriticSpec, context: WorkerContext) -> None:
        self.spec = spec
        self.module = _Network(spec).to(context.device)
        if spec.start is not None:
            load_network(spec.start, self.module, _MODEL_TYPE, spec.network, self._spaces())
        self.network = WholeNetwork(self.module, context)
        super().__init__(context, self.network, spec.optimizer, micro_batch_tokens=1 << 16)

    def value(self, obs: Tensor, last_obs: Tensor) -> Values:
        width, agents = self.module.width, self.spec.env.num_agents
        if obs.shape[-1] != width:
            raise ConfigError(
                f"role '{self.context.role}' sees {agents} agent(s) of '{self.spec.env.id}', "
                f"{width} numbers in all, but the step shows it {obs.shape[-1]}\n"
                f"    set algorithm.cfg.num_agents={agents}, or task.num_agents"
            )
        return state_values(self.module.value, obs, last_obs, self.device)

    def train(
        self, loss: Loss[B, ValueOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:

        def forward(rows: Any, needs_entropy: bool) -> ValueOutput:
            return ValueOutput(value=self.module.value(rows.obs[:, 0])[:, None])

        return self._train(forward, loss, single_steps(batch), epochs, num_minibatches)

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` (only rank 0 does)."""
        if self.context.rank == 0:
            save_network(folder, self.module, _MODEL_TYPE, self.spec.network, self._spaces())

    def _spaces(self) -> dict[str, Any]:
        env = self.spec.env
        return {"num_features": env.spaces()[0], "num_agents": env.num_agents}
