"""A recurrent network beside a perceptron: unrolled by torch over rows, stepped by numpy to act.

It is a gated recurrent unit (Cho et al., "Learning Phrase Representations using RNN
Encoder-Decoder for Statistical Machine Translation", 2014, in the form of torch's `nn.GRUCell`)
that reads observations. Actor and critic see its state beside the observation. The state is a
column: it goes into every step and comes out of it, so whoever acts keeps nothing.

An episode begins after each step that does not count, and with nothing remembered.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ....dataflow.errors import ConfigError


def refuse_recurrence(units: int, who: str, why: str) -> None:
    """Require a network without a recurrent state."""
    if units:
        raise ConfigError(
            f"{who} cannot have a recurrent state (of {units} units): {why}\n"
            "    leave out model.architecture.recurrent_units; env_ppo, a2c, impala, self_play and "
            "population learn with one"
        )


class RecurrentNetwork(nn.Module):
    """The unit: orthogonal weights, biases 0.

    Args:
        num_features: Numbers of an observation.
        units: Numbers of the state.
        random: Where weights are sampled from.
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


class NumpyRecurrent:
    """The unit step by step in numpy; it follows weights that change in place.

    Args:
        network: The recurrent network, on the CPU.
    """

    def __init__(self, network: RecurrentNetwork) -> None:
        cell = network.cell
        self._units = cell.hidden_size
        self._read, self._read_bias, self._keep, self._keep_bias = (
            weight.detach().numpy().T
            for weight in (cell.weight_ih, cell.bias_ih, cell.weight_hh, cell.bias_hh)
        )

    def blank(self, num_envs: int) -> NDArray[np.float32]:
        """The state where nothing is remembered, f32[envs, units]."""
        return np.zeros((num_envs, self._units), np.float32)

    def step(
        self, obs: NDArray[np.float32], recurrent_state: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """The state once an observation has been read, f32[..., envs, units]."""
        units = self._units
        if recurrent_state is None:
            recurrent_state = self.blank(len(obs))
        read = obs @ self._read
        read += self._read_bias
        kept = recurrent_state @ self._keep
        kept += self._keep_bias
        gates = _sigmoid(read[..., : 2 * units] + kept[..., : 2 * units])
        recalls, stays = gates[..., :units], gates[..., units:]
        new = np.tanh(read[..., 2 * units :] + recalls * kept[..., 2 * units :])
        return new + stays * (recurrent_state - new)


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sigmoid, computed by tanh, which cannot overflow."""
    half = np.float32(0.5)
    return half * np.tanh(half * x) + half
