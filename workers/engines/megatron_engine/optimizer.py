"""AdamW over this process's weights, its state shared out over the data-parallel ranks.

The formula and the clipping are the torch engine's own (`optimizer.py`). megatron-core's optimizer
computes the same, but cuts its state where its gradient buckets end; here a rank has an equal run
of the flat buffer, and the whole is put together again by parameter when a state is saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...training.data_parallel import RankGroup
from ...training.optimizer import AdamW, OptimizerSpec, optimizer_buffers

__all__ = ["SharedAdamW"]

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
        model_group: The processes that hold the other parts of the model of one rank.
        shared: Whether ranks share out the optimizer's state (ZeRO stage 1), or each has all of it.
    """

    def __init__(
        self,
        data: Tensor,
        spec: OptimizerSpec,
        ranks: RankGroup,
        *,
        counted: Sequence[tuple[int, int]],
        model_group: dist.ProcessGroup,
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
        self._norm_group = None if self._shared else model_group

    def _own(self, grad: Tensor) -> Tensor:
        """This rank's run of the gradient, added up over ranks."""
        if not self._shared:
            return self._ranks.sum_(grad)
        mine = grad.new_empty(self._length)
        padded = F.pad(grad, (0, self._length * self._ranks.num_ranks - len(grad)))
        _REDUCE_SCATTER(mine, padded, group=self._ranks.group)
        return mine[: self._end - self._begin]

    def _norm(self, own: Tensor) -> float:
        lengths = [torch.linalg.vector_norm(own[a:b]) for a, b in self._counted]
        square = torch.stack([*lengths, own.new_zeros(())]).double().square().sum()
        dist.all_reduce(square, group=self._norm_group)
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
