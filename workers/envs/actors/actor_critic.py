"""Perceptrons that act and criticize: an actor with a critic, and the critic of a team."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ....algorithms.ops.distributions import action_logprob, entropy_of_logits
from ....algorithms.roles.environment import (
    ActionEvaluation,
    ActorCritic,
    ActorCriticOutput,
    Acts,
    TeamCritic,
    Values,
)
from ....algorithms.roles.language_tables import TrainMetrics, ValueOutput
from ....dataflow.errors import ConfigError, WorkerError
from ....dataflow.graph.role import Loss, Metric
from ....dataflow.options import PositiveInt, option_class
from ....dataflow.runtime.call_context import call_key
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...rollout.sampling import stream_generator
from ...training.data_parallel import rank_group
from ..spec import EnvSpec
from .numpy_actor import NumpyActor, NumpyRecurrent, OnHost
from .perceptron import (
    ActorCriticNetwork,
    PerceptronWorker,
    PerceptronWorkerSpec,
    check_plain,
    inherit_weights,
    perceptron,
    single_steps,
    state_values,
)

B = TypeVar("B")


@option_class
class TorchActorCriticSpec(PerceptronWorkerSpec):
    """Recipe for a `TorchActorCritic`; without an optimizer it only acts."""

    micro_batch_steps: PositiveInt = 65536
    """Steps computed at once in training."""

    def build(self, context: WorkerContext) -> TorchActorCritic:
        return TorchActorCritic(self, context)


class TorchActorCritic(PerceptronWorker, ActorCritic):
    model_type = "perceptron_actor_critic"

    def __init__(self, spec: TorchActorCriticSpec, context: WorkerContext) -> None:
        num_features, actions = spec.env.spaces()
        self.spec, self.actions = spec, actions
        self.module = ActorCriticNetwork(spec.network, num_features, actions).to(context.device)
        spaces = {"num_features": num_features, "actions": asdict(actions)}
        super().__init__(spec, context, self.module, spaces, spec.micro_batch_steps)
        self._on_host = OnHost(self.module, self.network.flat)
        acting = self._on_host.module
        recurrent = None if acting.memory is None else NumpyRecurrent(acting.memory)
        self._numpy = NumpyActor(acting.actor, actions, acting.log_std, recurrent)

    def act(
        self,
        obs: NDArray[np.float32],
        noise: NDArray[np.float64],
        action_mask: NDArray[np.bool_] | None,
        recurrent_state: NDArray[np.float32] | None = None,
    ) -> Acts:
        self._on_host.follow()
        return self._numpy.act(obs, noise, action_mask, recurrent_state)

    def answer_all(self, method: str, calls: Sequence[tuple[Any, ...]]) -> Sequence[Acts]:
        """Compute all waiting requests together."""
        if method != "act":
            return [getattr(self, method)(*arguments) for arguments in calls]
        self._on_host.follow()
        return self._numpy.act_all(calls)

    def weights_changed(self) -> None:
        super().weights_changed()
        self._on_host.is_stale = True

    def evaluate(
        self,
        obs: Tensor,
        action: Tensor,
        action_mask: Tensor,
        recurrent_state: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> ActionEvaluation:
        logprob, entropy = torch.zeros(obs.shape[:2]), torch.zeros(obs.shape[:2])
        with torch.no_grad():
            seen = self._seen(obs, recurrent_state, mask)
            for row, columns_ in enumerate(zip(seen, action, action_mask, strict=True)):
                part = [column.to(self.device) for column in columns_]
                logprob[row], its = self._policy(*part, needs_entropy=True)
                assert its is not None  # as asked
                entropy[row] = its
        return ActionEvaluation(logprob=logprob, entropy=entropy)

    def value(
        self,
        obs: Tensor,
        last_obs: Tensor,
        recurrent_state: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Values:
        if self.module.memory is not None:
            with torch.no_grad():
                seen = self._seen(torch.cat([obs, last_obs[:, None]], dim=1), recurrent_state, mask)
            obs, last_obs = seen[:, :-1], seen[:, -1]
        return state_values(self.module.value, obs, last_obs, self.device)

    def _seen(self, obs: Tensor, recurrent_state: Tensor | None, mask: Tensor | None) -> Tensor:
        """Inputs of actor and critic, a row at a time as in `state_values`."""
        net = self.module.memory
        if net is None or not len(obs):
            return obs
        if recurrent_state is None or mask is None:
            raise WorkerError(
                f"'{self.context.role}' has a recurrent state, and was not told what rows begin "
                "with; pass on recurrent_state=traj.recurrent_state, mask=traj.mask"
            )
        columns_ = zip(
            *(c.to(self.device).split(1) for c in (obs, recurrent_state, mask)), strict=True
        )
        return torch.cat([net.beside(*row) for row in columns_])

    def train(
        self,
        loss: Loss[B, ActorCriticOutput],
        batch: B,
        *,
        epochs: int = 1,
        num_minibatches: int = 1,
    ) -> TrainMetrics:
        """Every step is a row of its own if nothing is remembered."""
        rows = single_steps(batch) if self.module.memory is None else batch
        try:
            return self._train(self._forward, loss, rows, epochs, num_minibatches)
        finally:  # and not before: who is asked meanwhile would copy what is half trained
            self._on_host.is_stale = True

    def inherit(
        self,
        rival: ActorCritic,
        *,
        fitness: Tensor,
        rival_fitness: Tensor,
        mutation: float = 0.0,
        every: int = 1,
    ) -> TrainMetrics:
        """Moments of the optimizer stay."""
        key = call_key(self.context.role, "inherit")
        own, its = self._means(fitness, rival_fitness)
        gives_way = (key.step + 1) % every == 0 and its > own
        if gives_way:
            random = stream_generator(self.context.seed, self.context.role, "mutation", key)
            inherit_weights(self, rival, mutation=mutation, random=random)
        replaced = Metric.mean(float(gives_way), 1.0)
        return TrainMetrics({"fitness": Metric.mean(own, 1.0), "replaced": replaced})

    def _means(self, *columns_: Tensor) -> list[float]:
        """Means of columns f32[rows] over all ranks, which must come to the same decision."""
        sums = torch.tensor(
            [[float(column.double().sum()), len(column)] for column in columns_],
            dtype=torch.float64,
            device=self.device,
        )
        table: list[list[float]] = rank_group(self.context, self.device).sum_(sums).tolist()
        if not all(rows for _, rows in table):
            raise WorkerError(
                f"'{self.context.role}.inherit' compares two that have both acted, and was given "
                f"{' and '.join(f'{rows:g}' for _, rows in table)} rows of fitness; raise the "
                "number of rows, or lower the rows of a group"
            )
        return [total / rows for total, rows in table]

    def _forward(self, rows: Any, needs_entropy: bool) -> ActorCriticOutput:
        shape, net = rows.mask.shape, self.module.memory
        seen = rows.obs if net is None else net.beside(rows.obs, rows.recurrent_state, rows.mask)
        seen, action, allowed = (c.flatten(0, 1) for c in (seen, rows.action, rows.action_mask))
        logprob, entropy = self._policy(seen, action, allowed, needs_entropy=needs_entropy)
        value, logits = self.module.value_and_logits(seen)
        return ActorCriticOutput(
            value=value.unflatten(0, shape),
            value_logits=None if logits is None else logits.unflatten(0, shape),
            logprob=logprob.unflatten(0, shape),
            entropy=None if entropy is None else entropy.unflatten(0, shape),
        )

    def _policy(
        self, obs: Tensor, action: Tensor, action_mask: Tensor, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability and entropy, f32[rows] each; components add up."""
        found = self.module.actor(obs)
        if self.module.log_std is not None:
            return _numbers(found, self.module.log_std, action, needs_entropy)
        logprobs: list[Tensor] = []
        entropies: list[Tensor] = []
        begin = 0
        for component, size in enumerate(self.actions.sizes):
            span = slice(begin, begin + size)
            valid = action_mask[:, span] if self.actions.masked else None
            logits = found[:, span]
            logprobs.append(action_logprob(logits, action[:, component].long(), valid))
            if needs_entropy:
                entropies.append(entropy_of_logits(logits, valid))
            begin += size
        if len(logprobs) == 1:
            return logprobs[0], entropies[0] if needs_entropy else None
        entropy = torch.stack(entropies).sum(dim=0) if needs_entropy else None
        return torch.stack(logprobs).sum(dim=0), entropy


def _numbers(
    mean: Tensor, log_std: Tensor, action: Tensor, needs_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probability under a normal distribution with independent components."""
    half_log = 0.5 * math.log(2 * math.pi)
    deviation = (action - mean) * (-log_std).exp()
    logprob = (-0.5 * deviation.square() - log_std - half_log).sum(dim=-1)
    if not needs_entropy:
        return logprob, None
    return logprob, (0.5 + half_log + log_std).sum().expand(len(mean))


@option_class
class TeamCriticSpec(PerceptronWorkerSpec):
    """Recipe for a `TorchTeamCritic`; it refuses a recurrent network and value bins."""

    env: EnvSpec
    """The team's environment, for the numbers of observations and agents."""

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
