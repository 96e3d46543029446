"""A recurrent memory beside a perceptron: unrolled over rows with torch, stepped with numpy to act.

It is a gated recurrent unit (Cho et al., "Learning Phrase Representations using RNN
Encoder-Decoder for Statistical Machine Translation", 2014, in the form of torch's `nn.GRUCell`)
that reads observations. Actor and critic see its state beside the observation. The state is a
column: it goes into every step and comes out of it, so whoever acts keeps nothing.

An episode begins after each step that does not count, and with nothing remembered.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..dataflow.errors import ConfigError

__all__ = ["Memory", "NumpyMemory", "refuse_memory"]


def refuse_memory(units: int, who: str, why: str) -> None:
    """Require a network without memory.

    Args:
        units: Of the memory it was given.
        who: Whose network it is.
        why: What does not go with one.

    Raises:
        ConfigError: If there is one.
    """
    if units:
        raise ConfigError(
            f"{who} cannot have a memory (of {units} units): {why}\n"
            "    leave out model.architecture.memory; env_ppo, a2c, impala and self_play learn "
            "with one"
        )


class Memory(nn.Module):
    """The unit: orthogonal weights, biases 0.

    Args:
        num_features: Numbers of an observation.
        units: Numbers of the state.
        random: Where weights are drawn from.
    """

    def __init__(self, num_features: int, units: int, random: torch.Generator) -> None:
        super().__init__()
        self.cell = nn.GRUCell(num_features, units)
        for weight in (self.cell.weight_ih, self.cell.weight_hh):
            nn.init.orthogonal_(weight, generator=random)
        for bias in (self.cell.bias_ih, self.cell.bias_hh):
            nn.init.zeros_(bias)

    def beside(self, obs: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Observations, and beside each of them the state once it has been read.

        Args:
            obs: f32[rows, T, features].
            memory: f32[rows, units], the state each row begins with; of width 0 if all begin with
                nothing remembered.
            mask: bool[rows, T], the steps that count; that of the last one is not looked at, and
                may be missing.

        Returns:
            f32[rows, T, features + units].
        """
        state = memory if memory.shape[1] else obs.new_zeros(len(obs), self.cell.hidden_size)
        keeps = mask.to(obs.dtype)[..., None].unbind(dim=1)
        states: list[Tensor] = []
        for t, before in enumerate(obs.unbind(dim=1)):
            state = self.cell(before, state * keeps[t - 1] if t else state)
            states.append(state)
        return torch.cat([obs, torch.stack(states, dim=1)], dim=-1)


class NumpyMemory:
    """The same step by step, following the weights wherever they are changed in place.

    Args:
        memory: On the CPU.
    """

    def __init__(self, memory: Memory) -> None:
        cell = memory.cell
        self._units = cell.hidden_size
        self._read, self._read_bias, self._keep, self._keep_bias = (
            weight.detach().numpy().T
            for weight in (cell.weight_ih, cell.bias_ih, cell.weight_hh, cell.bias_hh)
        )

    def blank(self, num_envs: int) -> NDArray[np.float32]:
        """The state where nothing is remembered, f32[envs, units]."""
        return np.zeros((num_envs, self._units), np.float32)

    def step(
        self, obs: NDArray[np.float32], memory: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """The state once an observation has been read, f32[..., envs, units].

        Args:
            obs: f32[..., envs, features].
            memory: f32[..., envs, units], the state before; None, for f32[envs, features], where
                nothing is remembered.
        """
        units = self._units
        if memory is None:
            memory = self.blank(len(obs))
        read = obs @ self._read
        read += self._read_bias
        kept = memory @ self._keep
        kept += self._keep_bias
        gates = _sigmoid(read[..., : 2 * units] + kept[..., : 2 * units])
        recalls, stays = gates[..., :units], gates[..., units:]
        new = np.tanh(read[..., 2 * units :] + recalls * kept[..., 2 * units :])
        return new + stays * (memory - new)


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """By way of tanh, which cannot overflow."""
    half = np.float32(0.5)
    return half * np.tanh(half * x) + half
