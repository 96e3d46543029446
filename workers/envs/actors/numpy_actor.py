"""Acting with numpy on the host: a perceptron's weights as views, and samples by given noise.

An environment of few numbers steps in microseconds; torch needs more than that to begin a call.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ....algorithms.roles.environment import ActionSpace, Acts
from ...training.flat_parameters import FlatParameters
from .perceptron import RecurrentNetwork

N = TypeVar("N", bound=nn.Module)

_Call = tuple[
    NDArray[np.float32], NDArray[np.float64], NDArray[np.bool_] | None, NDArray[np.float32] | None
]
"""Arguments of `act`."""

_LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)


class NumpyRecurrent:
    """The recurrent network step by step; it follows weights that change in place."""

    def __init__(self, network: RecurrentNetwork) -> None:
        cell = network.cell
        self._units = cell.hidden_size
        self._read, self._read_bias, self._keep, self._keep_bias = (
            weight.detach().numpy().T
            for weight in (cell.weight_ih, cell.bias_ih, cell.weight_hh, cell.bias_hh)
        )

    def blank(self, num_envs: int) -> NDArray[np.float32]:
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


class NumpyActor:
    """Samples actions from a network's actor; follows its weights wherever they change in place.

    `actor` has linear layers with activations between them, on the CPU.
    """

    def __init__(
        self,
        actor: nn.Sequential,
        actions: ActionSpace,
        log_std: nn.Parameter | None,
        recurrent: NumpyRecurrent | None = None,
    ) -> None:
        self._actions, self._recurrent = actions, recurrent
        linear = [layer for layer in actor if isinstance(layer, nn.Linear)]
        self._layers = [
            (layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in linear
        ]
        self._tanh = any(isinstance(layer, nn.Tanh) for layer in actor)
        self._log_std = None if log_std is None else log_std.detach().numpy()
        ends = np.cumsum((0, *actions.sizes)).tolist()
        self._spans = list(zip(ends[:-1], ends[1:], strict=True))

    def outputs(self, obs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits or means, f32[..., envs, outputs], of f32[..., envs, features]."""
        found = obs
        for weight, bias in self._layers[:-1]:
            found = found @ weight
            found += bias
            if self._tanh:
                np.tanh(found, out=found)
            else:
                np.maximum(found, 0.0, out=found)
        weight, bias = self._layers[-1]
        found = found @ weight
        found += bias
        return found

    def act(
        self,
        obs: NDArray[np.float32],
        noise: NDArray[np.float64],
        action_mask: NDArray[np.bool_] | None,
        recurrent_state: NDArray[np.float32] | None = None,
    ) -> Acts:
        if self._recurrent is None:
            return self._sample(self.outputs(obs), noise, action_mask)
        held = self._recurrent.step(obs, recurrent_state)
        acts = self._sample(self.outputs(np.concatenate([obs, held], axis=-1)), noise, action_mask)
        return acts._replace(recurrent_state=held)

    def _sample(
        self,
        found: NDArray[np.float32],
        noise: NDArray[np.float64],
        action_mask: NDArray[np.bool_] | None,
    ) -> Acts:
        if self._log_std is not None:
            action = (found + np.exp(self._log_std) * noise).astype(np.float32)
            logprob = -0.5 * np.square(noise) - self._log_std - _LOG_ROOT_2PI
            return Acts(action, logprob.sum(axis=1).astype(np.float32))
        if action_mask is not None:
            found = np.where(action_mask, found, np.finfo(np.float32).min)
        if len(self._spans) == 1:
            choice, logprob = _sample_choice(found, noise[:, 0])
            return Acts(choice[:, None].astype(np.float32), logprob)
        action = np.empty((len(found), len(self._spans)), np.float32)
        total = np.zeros(len(found), np.float32)
        for component, (begin, end) in enumerate(self._spans):
            choice, its = _sample_choice(found[:, begin:end], noise[:, component])
            action[:, component] = choice
            total += its
        return Acts(action, total)

    def act_all(self, calls: Sequence[_Call]) -> list[Acts]:
        """Answer each of these arguments as `act` does, bit for bit; equal shapes together.

        Groups are stacked, not joined: numpy multiplies each by the weights as it would alone, so
        that the order of its sums is the same. All else concerns single rows.
        """
        alike: dict[tuple[object, ...], list[int]] = {}
        for index, (obs, _, mask, _) in enumerate(calls):
            alike.setdefault((obs.shape, mask is None), []).append(index)
        found: dict[int, Acts] = {}
        for indices in alike.values():
            some = [calls[index] for index in indices]
            for index, acts in zip(indices, self._act_alike(some), strict=True):
                found[index] = acts
        return [found[index] for index in range(len(calls))]

    def _act_alike(self, calls: Sequence[_Call]) -> list[Acts]:
        if len(calls) == 1:
            return [self.act(*calls[0])]
        obs, noise, masks, states = zip(*calls, strict=True)
        seen, count = np.stack(obs), len(calls)
        held: Sequence[NDArray[np.float32] | None] = [None] * count
        if self._recurrent is not None:
            before = [self._recurrent.blank(len(obs[0])) if m is None else m for m in states]
            after = self._recurrent.step(seen, np.stack(before))
            seen, held = np.concatenate([seen, after], axis=-1), list(after)
        found = self.outputs(seen)
        allowed = [mask for mask in masks if mask is not None]
        acts = self._sample(
            found.reshape(-1, found.shape[-1]),
            np.concatenate(noise),
            np.concatenate(allowed) if allowed else None,
        )
        parts = np.split(acts.action, count), np.split(acts.logprob, count), held
        return [Acts(*one) for one in zip(*parts, strict=True)]


def _sample_choice(
    logits: NDArray[np.float32], uniform: NDArray[np.float64]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The choice whose stretch of the cumulative distribution the number falls in."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    cumulative = np.exp(shifted).cumsum(axis=1, dtype=np.float64)
    total = cumulative[:, -1]
    # The first choice strictly above the target: one of probability 0 is never sampled.
    choice = (cumulative <= (uniform * total)[:, None]).sum(axis=1)
    chosen = shifted[np.arange(len(choice)), choice]
    return choice, (chosen - np.log(total)).astype(np.float32)


class OnHost(Generic[N]):
    """A network's copy in host memory, taken anew when it has changed; itself if it lies there."""

    def __init__(self, module: N, flat: FlatParameters, *, always: bool = False) -> None:
        self.module = module  # what the host reads
        self.is_stale = False  # whether the network may have changed since the copy was taken
        self._flat = flat
        self._copy: FlatParameters | None = None
        if always or flat.data.device.type != "cpu":
            self.module = copy.deepcopy(module).to("cpu")
            self._copy = FlatParameters(self.module)

    def follow(self) -> None:
        """Take the copy anew if need be: one transfer for all weights.

        A change of the network meanwhile, by another thread, is not missed: the copy counts as
        fresh before it is taken, so the change makes it stale again.
        """
        stale, self.is_stale = self.is_stale, False
        if self._copy is not None and stale:
            self._copy.data.copy_(self._flat.data)
