"""The interface of a model for training and evaluation, whichever engine computes it.

A `Network` is one process's part of a model. The engines differ in how a micro-batch goes through
it, in who holds which weights, and in how gradients are added up; what a worker does with a call is
the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ...dataflow.runtime.worker_protocol import WorkerContext
from ...planner.resharding.sharding import Sharding, unsharded
from .data_parallel import RankGroup, rank_group
from .flat_parameters import FlatParameters
from .host_memory import give_back_freed
from .optimizer import AdamW, OptimizerSpec

M = TypeVar("M")
R = TypeVar("R")


@dataclass(frozen=True)
class MicroBatches(Generic[M, R]):
    """The micro-batches of a call, and what is computed of each."""

    parts: Sequence[M]  # All of the rank, the same on all of its processes
    load: Callable[[M], R]  # To rows on the device, which have `tokens`, i64[rows, T]
    # To the scalar to go backward from; called where outputs are computed, of this process's rows.
    compute: Callable[[R], Tensor]


class Network(Protocol):
    """A process's part of a model, and how micro-batches go through it."""

    # Where a worker would live that computed alone what this process does: one that has rows of
    # its own is a data-parallel rank there. Its `process` is this one.
    context: WorkerContext
    device: torch.device  # Where the weights lie
    layout: Sharding  # Which process of the group stores what; devices are numbered like processes
    rank_layout: Sharding  # The same of this data-parallel rank's processes alone
    replicas: RankGroup  # With the same weights; together they have all rows of a batch
    # Whether micro-batches should bring rows of similar length together, as padding is computed.
    sort_by_length: bool
    shares_prompts: bool  # Whether a prompt is computed once for consecutive rows that have it

    def tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        """Views of a flat buffer (of the weights by default) by the names in `layout`."""
        ...

    @property
    def is_divided(self) -> bool:
        """True if this process has only a part of the model."""
        ...

    def held_tensors(self) -> list[Tensor]:
        """All that lies on the device between calls: weights and gradients."""
        ...

    def frozen_weights(self) -> tuple[Sharding, dict[str, Tensor]] | None:
        """The weights below adapters, with their layout; None without adapters."""
        ...

    def gradients(self) -> list[Tensor]:
        """Those of `held_tensors` that `start_gradient` zeroes, as far as they exist."""
        ...

    def weights_changed(self) -> None:
        """Weights were written from outside."""

    def make_optimizer(self, spec: OptimizerSpec) -> AdamW:
        """The optimizer of these weights."""
        ...

    def micro_batch_limit(self, limit: int, num_tokens: int) -> int:
        """A bound on micro-batches of a call of `num_tokens` that leaves no process idle."""
        ...

    def run(self, given: MicroBatches[M, R], *, backward: bool) -> None:
        """Take a rank's micro-batches through the model.

        Gradients, if they are wanted, are added to `start_gradient`'s buffer.
        """

    def together(self, result: Tensor) -> Tensor:
        """Add up what `compute` wrote in all processes, each its own rows and zero elsewhere."""
        ...

    def start_gradient(self) -> Tensor:
        """A zeroed f32[size] buffer, to which each `run` adds gradients until it is asked again."""
        ...

    def finish_gradient(self, grad: Tensor) -> Tensor:
        """Add what other processes computed of the same weights' gradients, once, after all runs.

        What the optimizer adds itself is not added here.
        """
        ...


@dataclass(frozen=True)
class Outputs:
    """A model's outputs after some tokens."""

    # f[U, width]: what its `token_logprob` reads, be it the states before the head or logits of
    # this process's part of the vocabulary; or a scalar head's one number each.
    values: Tensor
    entry: Tensor | None = None  # i64[n]; of each token asked for. None if they are as asked
    # f32[], a zero that depends on the weights, for rows of which nothing is read: their loss has a
    # gradient then, which is zero. None if there is no need of it.
    anchor: Tensor | None = None

    def spread(self, found: Tensor) -> Tensor:
        """From one row per value to one per token asked for, [n, ...]."""
        return found if self.entry is None else found[self.entry]

    def column(self) -> Tensor:
        """The one number of a scalar head, f32[n]."""
        return self.spread(self.values[:, 0].float())

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """f32 zeros to write results into."""
        zero = torch.zeros(*shape, dtype=torch.float32, device=self.values.device)
        return zero if self.anchor is None else zero + self.anchor


class LanguageNetwork(Network, Protocol):
    """A transformer under a head."""

    engine: str  # What computes it, for messages: "the FSDP engine"
    num_words: int | None  # Of distributions: the first of the vocabulary; None for all

    def whole_module(self, first: Callable[[], nn.Module]) -> nn.Module | None:
        """The model under the checkpoint's names, adapters merged; all processes must take part.

        A divided one is gathered into `first`, the model with its first weights, and is None in
        processes that have nothing to write.
        """
        ...

    def save_adapter(self, folder: Path, base: str | None) -> None:
        """Write adapters beside a model that they have been merged into, if there are any.

        All processes of the rank must take part. `base` is the folder of the model below them; None
        if it was made of an architecture.
        """

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None = None) -> Outputs:
        """Head outputs after the tokens at `reads`; called once in a `compute`.

        Args:
            tokens: i64[rows, T], right padded with -1.
            reads: bool[rows, T].
            shared: i64[rows]; prompt lengths. Equal prompts of consecutive rows may be computed
                once.
        """
        ...

    def token_logprob(
        self, outputs: Outputs, target: Tensor, temperature: float, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities of targets, and entropies, f32[n], of the distributions they are of.

        `target` is i64[n], or i64[n, m] for m words of each distribution.
        """
        ...

    def top_words(
        self, outputs: Outputs, num_words: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities f32[n, num_words] and words, i64[n, num_words], the likeliest first."""
        ...


_LARGE = 1 << 24
"""Weights from which on a backward pass is long beside giving freed memory back."""


class WholeNetwork:
    """A `Network` that is computed in one process; ranks are replicas, which begin as rank 0."""

    sort_by_length = False
    shares_prompts = False
    is_divided = False

    def __init__(
        self, module: nn.Module, context: WorkerContext, flat: FlatParameters | None = None
    ) -> None:
        self.module = module
        self.flat = FlatParameters(module) if flat is None else flat  # The buffer
        self.context = context
        self.device = self.flat.data.device
        self._is_large = sum(weight.numel() for weight in module.parameters()) > _LARGE
        self.replicas = rank_group(context, self.device)
        if not context.places:  # a view's weights come later, to each process
            self.replicas.broadcast_(self.flat.data)
        shapes = {name: tuple(self.flat.parameter(name).shape) for name in self.flat.names}
        dtype = str(self.flat.data.dtype).removeprefix("torch.")
        self.layout = unsharded(shapes, range(context.num_processes), dtype=dtype)
        # Exported as they lie in the buffer: noise that is sampled for one after another sees that.
        lying = {name: shapes[name] for name in sorted(shapes, key=self.flat.span)}
        self.rank_layout = unsharded(lying, [context.process], dtype=dtype)

    def tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        if buffer is None:
            return {name: self.flat.parameter(name).detach() for name in self.flat.names}
        return {name: self.flat.view(buffer, name) for name in self.flat.names}

    def held_tensors(self) -> list[Tensor]:
        return [self.flat.data, *self.gradients()]

    def frozen_weights(self) -> tuple[Sharding, dict[str, Tensor]] | None:
        return None

    def gradients(self) -> list[Tensor]:
        return [] if self.flat.grad is None else [self.flat.grad]

    def weights_changed(self) -> None:
        """Nothing here is derived from the weights."""

    def make_optimizer(self, spec: OptimizerSpec) -> AdamW:
        return AdamW(self.flat.data, spec)

    def micro_batch_limit(self, limit: int, num_tokens: int) -> int:
        """There is one process."""
        return limit

    def run(self, given: MicroBatches[M, R], *, backward: bool) -> None:
        for part in given.parts:
            total = given.compute(given.load(part))
            if backward:
                if self._is_large:
                    # The peak is now, and what the forward pass freed would lie beside it.
                    give_back_freed(self.device)
                total.backward()

    def together(self, result: Tensor) -> Tensor:
        """There is one process."""
        return result

    def start_gradient(self) -> Tensor:
        return self.flat.enable_gradients()

    def finish_gradient(self, grad: Tensor) -> Tensor:
        """All ranks' are added up."""
        return self.replicas.sum_(grad)
