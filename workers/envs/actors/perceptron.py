"""Small networks that act and criticize: multilayer perceptrons over flat observations.

Initialized as in Huang et al., "The 37 Implementation Details of Proximal Policy Optimization",
2022: orthogonal weights of gain sqrt(2), 0.01 for the actor's last layer and 1 for the critic's,
biases 0, and a deviation of continuous actions that does not depend on the observation. Networks
see one state at a time: rows of many steps are taken apart for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from typing import Annotated, Any, Literal, Protocol, get_type_hints

import torch
from annotated_types import Ge
from torch import Tensor, nn

from ....algorithms.ops.value_transforms import two_hot_value, value_bins
from ....algorithms.roles.environment import TIME, ActionSpace, Values
from ....dataflow.errors import ConfigError
from ....dataflow.graph.axes import spec_of
from ....dataflow.options import Int, NonNegativeInt, PositiveInt, option_class
from ...training.microbatch import columns
from .recurrent import RecurrentNetwork


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

    def __post_init__(self) -> None:
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}; choose 'tanh' or 'relu'")


def refuse_value_bins(spec: PerceptronSpec, who: str) -> None:
    """Require a network that says each value as one number."""
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


class ActorCriticNetwork(nn.Module):
    """Actor and critic.

    Args:
        spec: Layers.
        num_features: Numbers of an observation.
        actions: What can be done.

    Attributes:
        actor: From observations to the logits of all choices, or the means of all numbers.
        critic: From observations to a value.
        memory: The recurrent network, whose state both see beside the observation; None if there
            is none. Saved weights have this name.
        log_std: f32[components] of continuous actions, else None.
    """

    def __init__(self, spec: PerceptronSpec, num_features: int, actions: ActionSpace) -> None:
        super().__init__()
        self.spec, self.num_features, self.actions = spec, num_features, actions
        random = torch.Generator().manual_seed(spec.init_seed)
        continuous = actions.kind == "continuous"
        num_out = actions.num_components if continuous else sum(actions.sizes)
        # A critic that weighs values starts with equal weights: 0.
        count = spec.value_bins
        width = num_features + spec.recurrent_units
        self.critic = perceptron(spec, width, count or 1, 0.0 if count else 1.0, random)
        self.actor = perceptron(spec, width, num_out, 0.01, random)
        units = spec.recurrent_units
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

    def spaces(self) -> dict[str, Any]:
        """Numbers of inputs and outputs, as `save_network` writes them."""
        return {"num_features": self.num_features, "actions": asdict(self.actions)}


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
    """The columns of a batch dataclass that have no axis of time."""
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
