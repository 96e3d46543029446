"""AdamW over this process's weights, its state shared out over the data-parallel ranks.

The formula and the clipping are the torch engine's own (`optimizer.py`). megatron-core's optimizer
computes the same, but cuts its state where its gradient buckets end; here a rank has an equal run
of the flat buffer, and the whole is put together again by parameter when a state is saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...training.data_parallel import RankGroup
from ...training.optimizer import AdamW, OptimizerSpec, optimizer_buffers, square_sum

_DIST: Any = dist
# torch 2.13 renamed both and warns of the old names, which are all that torch 2.11 has.
_RENAMED = hasattr(dist, "all_gather_single")
_REDUCE_SCATTER: Any = _DIST.reduce_scatter_single if _RENAMED else _DIST.reduce_scatter_tensor
_ALL_GATHER: Any = _DIST.all_gather_single if _RENAMED else _DIST.all_gather_into_tensor


class SharedAdamW(AdamW):
    """Steps `data`, which all ranks of `ranks` hold alike.

    Args:
        data: The weights, [size].
        spec: Options.
        ranks: The data-parallel ranks with the same weights.
        counted: Spans of `data` that count in the global norm: of weights that several processes
            of a model hold, one process counts.
        model_groups: The processes that hold the other parts of the model of one rank, as groups
            whose sums are summed in turn.
        shared: Whether ranks share out the optimizer's state (ZeRO stage 1), or each has all of it.
    """

    def __init__(
        self,
        data: Tensor,
        spec: OptimizerSpec,
        ranks: RankGroup,
        *,
        counted: Sequence[tuple[int, int]],
        model_groups: Sequence[dist.ProcessGroup | None],
        shared: bool,
    ) -> None:
        super().__init__(data, spec)
        self._ranks = ranks
        self._shared = shared and not ranks.alone
        # Every rank's run is as long; the last one's may reach beyond the weights.
        self._length = -(-len(data) // ranks.num_ranks) if self._shared else len(data)
        self._begin = self._length * ranks.rank if self._shared else 0
        self._end = min(self._begin + self._length, len(data))
        clipped = [(max(a, self._begin), min(b, self._end)) for a, b in counted]
        self._counted = [(a - self._begin, b - self._begin) for a, b in clipped if a < b]
        # Runs are disjoint, so then every process adds its own; else every rank has the same.
        self._norm_groups = [None] if self._shared else model_groups

    def _own(self, grad: Tensor) -> Tensor:
        """This rank's run of the gradient, added up over ranks."""
        if not self._shared:
            return self._ranks.sum_(grad)
        mine = grad.new_empty(self._length)
        padded = F.pad(grad, (0, self._length * self._ranks.num_ranks - len(grad)))
        _REDUCE_SCATTER(mine, padded, group=self._ranks.group)
        return mine[: self._end - self._begin]

    def _norm(self, own: Tensor) -> float:
        square = square_sum(own, self._counted)
        for group in self._norm_groups:
            dist.all_reduce(square, group=group)
        return math.sqrt(float(square))

    def _update(self, own: Tensor, lr: float) -> None:
        super()._update(own, lr)
        if self._shared:
            self._data.copy_(self._whole(self._weights()))

    def _weights(self) -> Tensor:
        return self._data[self._begin : self._end]

    def _whole(self, run: Tensor) -> Tensor:
        """All ranks' runs, [size]."""
        if not self._shared:
            return run
        padded = F.pad(run, (0, self._length - len(run)))
        whole = run.new_empty(self._length * self._ranks.num_ranks)
        _ALL_GATHER(whole, padded, group=self._ranks.group)
        return whole[: len(self._data)]

    def state(self) -> dict[str, Tensor]:
        """The optimizer's buffers, f32[size] each, laid out as the weights; none before a step.

        All ranks must ask.
        """
        return {kind: self._whole(buffer) for kind, buffer in self._buffers.items()}

    def new_state(self) -> dict[str, Tensor]:
        """Buffers to fill and hand to `load_state`, laid out as the weights."""
        return optimizer_buffers(self._data)

    def load_state(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Load what `state` gave, in this layout or another; load the weights first."""
        self._buffers = {
            kind: buffer[self._begin : self._end].clone() for kind, buffer in state.items()
        }
        self.steps = steps


class JoinedAdamW(AdamW):
    """Several optimizers of neighboring parts of the weights, under one norm.

    Parts are shared by different ranks: each by those that hold the same of it.

    Args:
        data: The weights, [size].
        spec: Options.
        parts: The optimizers of all parts of `data`, in order.
        sizes: Weights of each part.
    """

    def __init__(
        self, data: Tensor, spec: OptimizerSpec, parts: Sequence[AdamW], sizes: Sequence[int]
    ) -> None:
        super().__init__(data, spec)
        self._parts, self._sizes = parts, list(sizes)
        self._lengths = self._sizes  # of what this process steps of each

    def freeze(self, spans: Sequence[tuple[int, int]]) -> None:
        """See `AdamW.freeze`."""
        super().freeze(spans)
        begin = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            clipped = [(max(a - begin, 0), min(b - begin, size)) for a, b in spans]
            part.freeze([span for span in clipped if span[0] < span[1]])
            begin += size

    def _own(self, grad: Tensor) -> Tensor:
        grads = zip(self._parts, grad.split(self._sizes), strict=True)
        own = [part._own(of) for part, of in grads]
        self._lengths = [len(one) for one in own]
        return torch.cat(own)

    def _norm(self, own: Tensor) -> float:
        return math.hypot(*(part._norm(of) for part, of in self._each(own)))

    def _update(self, own: Tensor, lr: float) -> None:
        for part, of in self._each(own):
            part.steps = self.steps
            part._update(of, lr)

    def _each(self, own: Tensor) -> Iterator[tuple[AdamW, Tensor]]:
        """Parts, and what each steps of the gradient."""
        return zip(self._parts, own.split(self._lengths), strict=True)

    def restart(self) -> None:
        """See `AdamW.restart`."""
        self.steps = 0
        for part in self._parts:
            part.restart()

    @property
    def buffers(self) -> list[Tensor]:
        """See `AdamW.buffers`."""
        return [buffer for part in self._parts for buffer in part.buffers]

    def refresh(self) -> None:
        """See `AdamW.refresh`."""
        for part in self._parts:
            part.refresh()

    def state(self) -> dict[str, Tensor]:
        """See `SharedAdamW.state`."""
        states = [part.state() for part in self._parts]
        return {kind: torch.cat([state[kind] for state in states]) for kind in states[0]}

    def new_state(self) -> dict[str, Tensor]:
        """See `SharedAdamW.new_state`."""
        return optimizer_buffers(self._data)

    def load_state(self, state: Mapping[str, Tensor], steps: int) -> None:
        """See `SharedAdamW.load_state`."""
        split = {kind: buffer.split(self._sizes) for kind, buffer in state.items()}
        for index, part in enumerate(self._parts):
            part.load_state({kind: buffers[index] for kind, buffers in split.items()}, steps)
        self.steps = steps
