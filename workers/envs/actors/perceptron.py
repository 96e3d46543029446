"""Small networks that act and criticize: multilayer perceptrons over flat observations.

An actor-critic may have a recurrent network beside its perceptrons. A worker of any such network
may begin with the weights of a folder, saves them to one, and may inherit another worker's.

Initialized as in Huang et al., "The 37 Implementation Details of Proximal Policy Optimization",
2022: orthogonal weights of gain sqrt(2), 0.01 for the actor's last layer and 1 for the critic's,
biases 0, and a deviation of continuous actions that does not depend on the observation. Networks
see one state at a time: rows of many steps are taken apart for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, cast, get_type_hints

import numpy as np
import torch
from annotated_types import Ge
from pydantic import SkipValidation
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ....algorithms.ops.value_transforms import two_hot_value, value_bins
from ....algorithms.roles.environment import TIME, ActionSpace, Values
from ....dataflow.errors import ConfigError
from ....dataflow.graph.axes import spec_of
from ....dataflow.graph.role import Worker
from ....dataflow.options import Int, NonNegativeInt, PositiveInt, option_class
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...training.flat_parameters import read_tensors, write_tensors
from ...training.microbatch import columns
from ...training.model_worker import ModelWorker
from ...training.network import WholeNetwork
from ...training.optimizer import OptimizerSpec
from ...training.weight_checks import take_tensors


class HasSpaces(Protocol):
    """The specification of an environment or a game."""

    def spaces(self) -> tuple[int, ActionSpace]:
        """Return the numbers of an observation, and the actions that there are."""
        ...


_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


@option_class
class PerceptronSpec:
    """Layers of an actor and of its critic, who share none but the recurrent ones."""

    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
    """Width of each hidden layer."""
    activation: Literal["tanh", "relu"] = "tanh"
    """After each hidden layer."""
    recurrent_units: NonNegativeInt = 0
    """Units of a recurrent state (GRU) of what was observed in an episode, which actor and critic
    see beside the observation; 0 for none. Training unrolls it over whole rows."""
    init_seed: int = 0
    """Seeds the weights."""
    value_bins: Annotated[Int, Ge(2)] | None = None
    """Let the critic weigh so many values between -20 and 20, in the scale of `symlog`, instead of
    saying one; 255 is usual. Its loss is `two_hot` then."""


def check_plain(spec: PerceptronSpec, who: str, why: str) -> None:
    """Require a network without a recurrent state that says each value as one number."""
    if spec.recurrent_units:
        raise ConfigError(
            f"{who} cannot have a recurrent state (of {spec.recurrent_units} units): {why}\n"
            "    leave out model.architecture.recurrent_units; env_ppo, a2c, impala, self_play and "
            "population learn with one"
        )
    if spec.value_bins is not None:
        raise ConfigError(
            f"{who} cannot weigh values ({spec.value_bins} of them): its loss is a squared error\n"
            "    leave out model.architecture.value_bins; env_ppo, a2c, self_play and population "
            "have a loss for it, two_hot"
        )


def perceptron(
    spec: PerceptronSpec, num_in: int, num_out: int, gain: float, random: torch.Generator
) -> nn.Sequential:
    """A perceptron whose last layer has gain `gain`; weights are sampled from `random` in order."""
    sizes = (num_in, *spec.hidden_sizes)
    layers: list[nn.Module] = []
    for width_in, width_out in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [_linear(width_in, width_out, math.sqrt(2), random),
                   _ACTIVATIONS[spec.activation]()]  # fmt: skip
    return nn.Sequential(*layers, _linear(sizes[-1], num_out, gain, random))


def _linear(num_in: int, num_out: int, gain: float, random: torch.Generator) -> nn.Linear:
    layer = nn.Linear(num_in, num_out)
    nn.init.orthogonal_(layer.weight, gain, generator=random)
    nn.init.zeros_(layer.bias)
    return layer


class RecurrentNetwork(nn.Module):
    """A gated recurrent unit that reads observations: orthogonal weights, biases 0.

    Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
    Translation", 2014, in the form of torch's `nn.GRUCell`. Actor and critic see its state beside
    the observation. The state is a column: it goes into every step and comes out of it, so the
    worker that acts keeps nothing. An episode begins after each step that does not count, and with
    nothing remembered.
    """

    def __init__(self, num_features: int, units: int, random: torch.Generator) -> None:
        super().__init__()
        self.cell = nn.GRUCell(num_features, units)
        for weight in (self.cell.weight_ih, self.cell.weight_hh):
            nn.init.orthogonal_(weight, generator=random)
        for bias in (self.cell.bias_ih, self.cell.bias_hh):
            nn.init.zeros_(bias)

    def beside(self, obs: Tensor, recurrent_state: Tensor, mask: Tensor) -> Tensor:
        """Observations, and beside each of them the state once it has been read."""
        cell, length = self.cell, obs.shape[1]
        state = (
            recurrent_state
            if recurrent_state.shape[1]
            else obs.new_zeros(len(obs), cell.hidden_size)
        )
        keeps = mask[:, : length - 1].t().to(obs.dtype)[..., None]
        read = nn.functional.linear(obs, cell.weight_ih, cell.bias_ih).transpose(0, 1)
        states = cast("Tensor", _Unrolled.apply(read, state, keeps, cell.weight_hh, cell.bias_hh))
        return torch.cat([obs, states.transpose(0, 1)], dim=-1)


class _Unrolled(Function):
    """The unit over all steps, with its gradient: in a quarter of the time that autograd takes.

    Of a step: `r, z = sigmoid(read_rz + kept_rz)`, `n = tanh(read_n + r kept_n)` and
    `h = n + z (h_before - n)`, where `kept = W h_before + b`.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - it names its arguments
        ctx: Any, read: Tensor, state: Tensor, keeps: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        """All states, f32[T, rows, units]."""
        units, turned = weight.shape[1], weight.t()
        states: list[Tensor] = []
        steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for t, new in enumerate(read.unbind()):
            before = state * keeps[t - 1] if t else state
            kept = torch.addmm(bias, before, turned)
            gates = (new[:, : 2 * units] + kept[:, : 2 * units]).sigmoid_()
            recalled = kept[:, 2 * units :]
            fresh = torch.addcmul(new[:, 2 * units :], gates[:, :units], recalled).tanh_()
            state = torch.lerp(fresh, before, gates[:, units:])
            states.append(state)
            steps.append((before, gates, recalled, fresh))
        ctx.save_for_backward(
            keeps, weight, *(torch.stack(part) for part in zip(*steps, strict=True))
        )
        return torch.stack(states)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - as the decorator types it
        ctx: Any, *wanted: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of `read`, `weight` and `bias`; none of the state that rows begin with."""
        keeps, weight, before, gates, recalled, fresh = ctx.saved_tensors
        recalls, stays = gates.chunk(2, dim=-1)
        # By how much each gate's input moves with the state after the step.
        by_fresh = (1 - stays) * (1 - fresh.square())
        by_stays = (before - fresh) * stays * (1 - stays)
        by_recalls = by_fresh * recalled * recalls * (1 - recalls)
        by_kept = torch.stack([by_recalls, by_stays, by_fresh * recalls], dim=2)
        after = wanted[0].unbind()
        moved: list[Tensor] = []
        carried: Tensor | None = None
        for t in range(len(after) - 1, -1, -1):
            total = after[t] if carried is None else after[t] + carried
            moved.append(total)
            if t:
                kept = (by_kept[t] * total[:, None]).flatten(1)
                carried = torch.addmm(total * stays[t], kept, weight) * keeps[t - 1]
        all_moved = torch.stack(moved[::-1])[:, :, None]
        kept = (by_kept * all_moved).flatten(0, 1).flatten(1)
        by_read = torch.stack([by_recalls, by_stays, by_fresh], dim=2)
        read = (by_read * all_moved).flatten(2)
        return read, None, None, kept.t() @ before.flatten(0, 1), kept.sum(dim=0)


class ActorCriticNetwork(nn.Module):
    """Actor and critic: logits of all choices or means of all numbers, and a value."""

    def __init__(self, spec: PerceptronSpec, num_features: int, actions: ActionSpace) -> None:
        super().__init__()
        self.spec = spec
        random = torch.Generator().manual_seed(spec.init_seed)
        continuous = actions.kind == "continuous"
        num_out = actions.num_components if continuous else sum(actions.sizes)
        # A critic that weighs values starts with equal weights: 0.
        count = spec.value_bins
        width = num_features + spec.recurrent_units
        self.critic = perceptron(spec, width, count or 1, 0.0 if count else 1.0, random)
        self.actor = perceptron(spec, width, num_out, 0.01, random)
        units = spec.recurrent_units
        # Its state both see beside the observation. Saved weights have this name.
        self.memory = RecurrentNetwork(num_features, units, random) if units else None
        self.log_std = nn.Parameter(torch.zeros(num_out)) if continuous else None

    def value(self, obs: Tensor) -> Tensor:
        """f32[rows] from f32[rows, features], or features and units."""
        return self.value_and_logits(obs)[0]

    def value_and_logits(self, obs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Also the weights of the values, f32[rows, bins], if there are any."""
        found = self.critic(obs)
        if self.spec.value_bins is None:
            return found[:, 0], None
        return two_hot_value(found, value_bins(found.shape[1]).to(found)), found


def single_steps(batch: Any) -> Any:
    """The steps that count as rows of one step each: [rows, T, ...] to [steps, 1, ...].

    Columns without steps, [rows, ...], become [steps, ...].
    """
    found, stepless = columns(batch), _stepless(type(batch))
    width = found["mask"].shape[1]
    kept = found["mask"].flatten().nonzero()[:, 0]
    parts = {
        name: column[kept // width] if name in stepless else column.flatten(0, 1)[kept, None]
        for name, column in found.items()
    }
    return replace(batch, **parts)


@cache
def _stepless(kind: type) -> frozenset[str]:
    specs = {name: spec_of(hint) for name, hint in get_type_hints(kind, None, None, True).items()}
    return frozenset(name for name, spec in specs.items() if spec and TIME not in spec.axes)


def state_values(
    value: Callable[[Tensor], Tensor], obs: Tensor, last_obs: Tensor, device: torch.device
) -> Values:
    """A critic's value of every state, without gradients."""
    every = torch.zeros(obs.shape[0], obs.shape[1] + 1)
    with torch.no_grad():
        # A row at a time: what a product of matrices rounds to may depend on how many there are,
        # and rows are batched differently with another number of workers.
        for row, (before, last) in enumerate(zip(obs, last_obs, strict=True)):
            every[row] = value(torch.cat([before, last[None]]).to(device))
    return Values(value=every[:, :-1].contiguous(), bootstrap_value=every[:, -1].contiguous())


@option_class
class PerceptronWorkerSpec:
    """Fields that the recipes of all small networks have."""

    env: SkipValidation[HasSpaces]
    """Its environment, for the numbers of observations and actions."""
    network: PerceptronSpec = PerceptronSpec()
    """Its layers. Networks of one seed start alike."""
    start: str | None = None
    """A folder that such a worker saved, whose weights it begins with: of the same layers, for the
    same observations and actions. None for random ones."""
    optimizer: OptimizerSpec | None = None
    """None for one that is never trained."""


class PerceptronWorker(ModelWorker):
    """A small network; `spaces` are its numbers of inputs and outputs, as they are saved."""

    model_type: ClassVar[str]  # in the config of a saved network

    def __init__(
        self,
        spec: PerceptronWorkerSpec,
        context: WorkerContext,
        module: nn.Module,
        spaces: Mapping[str, Any],
        micro_batch_steps: int = 1 << 16,
    ) -> None:
        self._layers, self._spaces = spec.network, spaces
        if spec.start is not None:
            load_network(spec.start, module, self.model_type, spec.network, spaces)
        self.network = WholeNetwork(module, context)
        super().__init__(context, self.network, spec.optimizer, micro_batch_steps)

    def save_pretrained(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` (only rank 0 does)."""
        if self.context.rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / "model.safetensors", self.network.module.state_dict())
        config = {"model_type": self.model_type, **asdict(self._layers), **self._spaces}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_network(
    folder: str | Path,
    network: nn.Module,
    model_type: str,
    spec: PerceptronSpec,
    more: Mapping[str, Any],
) -> None:
    """Give a network the weights of a folder that `PerceptronWorker.save_pretrained` wrote."""
    folder = Path(folder)
    found = _configuration(folder, model_type)
    wanted: dict[str, Any] = json.loads(json.dumps({**asdict(spec), **more}))
    # A field that a folder does not know was not there yet, and so at its default.
    found = {**json.loads(json.dumps(asdict(PerceptronSpec()))), **found}
    if "memory" in found:  # as folders called it before
        found["recurrent_units"] = found.pop("memory")
    differing = [
        f"{key}: {json.dumps(found.get(key))}, and here {json.dumps(value)}"
        for key, value in wanted.items()
        # The seed says nothing about weights that were trained since.
        if key != "init_seed" and found.get(key) != value
    ]
    if differing:
        raise ConfigError(
            f"the network in '{folder}' was made for something else:\n    "
            + "\n    ".join(differing)
            + "\n    use the task that it was trained on, and model.architecture as in its "
            "config.json"
        )
    file, owner = folder / "model.safetensors", "the network that the config.json beside it says"
    take_tensors(file, owner, read_tensors(file), network.state_dict())


def _configuration(folder: Path, model_type: str) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        found: Any = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(
            f"'{folder}' has no config.json to read ({error.strerror})\n"
            "    give the folder of one role below a run's models/, as models/actor"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{file}' is not JSON: {error}") from error
    kind = found.get("model_type") if isinstance(found, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if kind != model_type:
        raise ConfigError(
            f"'{folder}' holds a model of type {kind!r}, and '{model_type}' is needed\n"
            "    give a folder that such a role of another run left below its models/"
        )
    return found


def inherit_weights(
    worker: ModelWorker,
    other: Worker,
    *,
    mutation: float = 0.0,
    random: np.random.Generator | None = None,
) -> None:
    """Take another worker's weights, each times `1 + mutation * noise`."""
    taken = dict(other.export_weights())
    if mutation and random is not None:
        for name, weight in taken.items():
            noise = torch.from_numpy(random.standard_normal(tuple(weight.shape)))
            taken[name] = (weight * (1 + mutation * noise)).to(weight.dtype)
    worker.load_weights(taken)
