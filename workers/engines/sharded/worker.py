"""What workers share whose model is spread over the processes of a rank: weights in and out.

A data-parallel rank is tensor_parallel x pipeline_parallel processes. Every method is called on all
of them at the same time with the same arguments; outputs are those of the process that answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ....algorithms.roles.language import TrainMetrics
from ....dataflow.graph.role import Loss, Metric
from ....dataflow.runtime.placement import DeviceGroup
from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.resharding.sharding import Sharding
from ...models.spec import ModelSpec
from ...training.checkpoint_files import (
    TensorSource,
    WholeTensors,
    box_key,
    open_state,
    read_state_json,
)
from ...training.flat_parameters import tensors_sha256, write_tensors
from ...training.logprob_mismatch import MismatchLimits
from ...training.train_calls import train_call
from ...training.trainer import Forward
from ..megatron_engine.layout import pieces_on, stored_view
from .gather import gather_weights

__all__ = ["ShardedNetwork", "ShardedWorker", "chunks_of", "group_of"]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741 - O for output, as in Loss[B, O]

_FORMAT = 2


class ShardedNetwork(Protocol):
    """A process's part of a model."""

    def engine_tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        """Views of a flat buffer (of the weights by default) by the engine's names."""
        ...


class ShardedWorker:
    """This process's part of a model, and a trainer unless it is frozen. Implements `Trainable`.

    Args:
        context: Where the worker lives.
        model: Architecture and first weights.
        network: The part.
        layout: Who in the group stores what; devices are numbered as its processes.
        rank_layout: The same of this rank's processes alone.
        device: Where the weights lie.

    Attributes:
        metrics: Numbers about the last calls; see `drain_metrics`.
    """

    def __init__(
        self,
        context: WorkerContext,
        model: ModelSpec,
        network: ShardedNetwork,
        layout: Sharding,
        rank_layout: Sharding,
        device: torch.device,
    ) -> None:
        self.context = context
        self.model = model
        self.device = device
        self.metrics: dict[str, Metric] = {}
        self._stored = network
        self._layout = layout
        self._rank_layout = rank_layout
        self._pieces = list(pieces_on(rank_layout, context.process))
        self._trainer: Any = None

    def weights_layout(self) -> Sharding:
        """Who in the group stores what; device numbers are those of `WorkerContext.process`."""
        return self._layout

    def local_tensors(self) -> dict[str, Tensor]:
        """This process's weights by the names `weights_layout` gives them: views, not copies.

        Whoever writes to them calls `weights_changed` afterwards.
        """
        return self._stored.engine_tensors()

    def weights_changed(self) -> None:
        """Tell the optimizer that weights were written from outside."""
        if self._trainer is not None:
            self._trainer.optimizer.refresh()

    def export_weights(self) -> dict[str, Tensor]:
        """Copies of all weights by Hugging Face name, on the CPU of the process that answers.

        The other processes of the rank send theirs and get nothing.
        """
        return self._gathered(group_of(self.context).processes(self.context.rank)[0])

    def weights_to_write(self) -> dict[str, Tensor]:
        """The same on process 0, the one where transformers writes files; nothing elsewhere."""
        return self._gathered(0) if self.context.rank == 0 else {}

    def _gathered(self, lead: int) -> dict[str, Tensor]:
        tensors = self._stored.engine_tensors()
        return gather_weights(self._rank_layout, tensors, self.context, self.device, lead=lead)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights in place, each process its part.

        Raises:
            ValueError: If names or shapes differ; nothing has been changed then.
        """
        self._load(WholeTensors(weights), exact=True)
        self.weights_changed()

    def weights_sha256(self) -> str:
        """Hash of all weights, as the torch engine's; of nothing where no weights are exported."""
        return tensors_sha256(self.export_weights())

    def save_state(self, folder: Path) -> None:
        """Write weights and optimizer state in format 2 of `state_files`.

        Each process of data-parallel rank 0 writes what no process before it has.
        """
        moments = {} if self._trainer is None else self._trainer.optimizer.state()
        if self.context.rank != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / _file("weights", self.context.process), self._boxes())
        state: dict[str, Any] = {"format": _FORMAT, "weights": self._files("weights")}
        if self._trainer is not None:
            boxes = {
                f"{kind}/{key}": box
                for kind, buffer in moments.items()
                for key, box in self._boxes(buffer).items()
            }
            write_tensors(folder / _file("optimizer", self.context.process), boxes)
            state["optimizer"] = self._files("optimizer")
            state["optimizer_steps"] = self._trainer.optimizer.steps
            state["train_calls"] = self._trainer.calls
        if self.context.process == 0:
            (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")

    def _boxes(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        tensors = self._stored.engine_tensors(buffer)
        return {
            box_key(piece.name, piece.box): stored_view(tensors, piece)
            for piece in self._pieces
            if piece.first
        }

    def _files(self, kind: str) -> list[str]:
        return [_file(kind, process) for process in sorted(group_of(self.context).processes(0))]

    def load_state(self, folder: Path) -> None:
        """Restore what any engine saved in any layout.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the state is of another model or format.
        """
        state = read_state_json(folder)
        self._load(open_state(folder, state, "weights"), exact=True)
        self.weights_changed()
        if self._trainer is None:
            return
        if "optimizer_steps" not in state:
            raise ValueError(
                f"'{folder}' was saved by a frozen worker and has no optimizer state; "
                f"'{self.context.role}' is trained and needs it"
            )
        optimizer, steps = self._trainer.optimizer, int(state["optimizer_steps"])
        buffers: dict[str, Tensor] = optimizer.new_state() if steps else {}
        source = open_state(folder, state, "optimizer")
        for kind, buffer in buffers.items():
            # Weights that were saved in float32 are their own master copy.
            if kind != "master" or any(name.startswith("master/") for name in source.shapes()):
                self._fill(source, f"{kind}/", buffer)
        optimizer.load_state(buffers, steps)
        self._trainer.calls = state["train_calls"]

    def _load(
        self, source: TensorSource, *, exact: bool, only: str = "", but: str | None = None
    ) -> None:
        """Take over weights, after checking all names and shapes."""
        wanted = {
            param.name: param.shape
            for param in self._rank_layout.params
            if param.name.startswith(only) and not (but and param.name.startswith(but))
        }
        given = source.shapes()
        missing = sorted(wanted.keys() - given.keys())
        unknown = sorted(given.keys() - wanted.keys()) if exact else []
        if missing or unknown:
            raise ValueError(
                f"weights do not fit: missing {missing or 'none'}, unknown {unknown or 'none'}; "
                "they must come from a model of the same architecture"
            )
        for name, shape in wanted.items():
            if tuple(given[name]) != shape:
                raise ValueError(
                    f"weight '{name}': expected shape {list(shape)}, got {list(given[name])}"
                )
        self._fill(source, "", None, wanted.keys())

    def _fill(
        self, source: TensorSource, prefix: str, buffer: Tensor | None, names: Any = None
    ) -> None:
        tensors = self._stored.engine_tensors(buffer)
        with torch.no_grad():
            for piece in self._pieces:
                if names is None or piece.name in names:
                    box = source.read(prefix + piece.name, piece.box)
                    stored_view(tensors, piece).copy_(box)

    def _evaluate(
        self,
        tokens: Tensor,
        mask: Tensor,
        compute: Callable[[Tensor, Tensor], Tensor],
        *,
        per_token: bool,
    ) -> Tensor:
        """Apply `compute` to rows without gradients, in micro-batches; f32, where tokens were.

        `compute` maps tokens and mask of some rows, cut to width W, to [rows, W] if `per_token`,
        else to [rows].
        """
        raise NotImplementedError

    def _train(
        self,
        forward: Forward[O],
        loss: Loss[B, O],
        batch: B,
        epochs: int,
        num_minibatches: int,
        limits: MismatchLimits | None = None,
    ) -> TrainMetrics:
        return train_call(
            self._trainer, self.context, forward, loss, batch, epochs, num_minibatches, limits
        )


def chunks_of(tokens: Tensor, limit: int) -> Iterator[tuple[Tensor, int]]:
    """Rows of similar length, at most `limit` tokens or one row at once, and the longest's length.

    Args:
        tokens: i64[rows, T], right padded with -1.
        limit: Padding not counted.
    """
    lengths = (tokens >= 0).sum(1).cpu()
    order = torch.argsort(lengths, stable=True)
    begin = 0
    while begin < len(order):
        total = lengths[order[begin:]].cumsum(0)
        count = max(int(torch.searchsorted(total, limit, right=True)), 1)
        rows = order[begin : begin + count]
        yield rows, max(int(lengths[rows].max()), 1)
        begin += count


def group_of(context: WorkerContext) -> DeviceGroup:
    """The worker group a context is of."""
    return DeviceGroup(
        context.role,
        context.num_ranks,
        tensor_parallel=context.tensor_parallel,
        pipeline_parallel=context.pipeline_parallel,
    )


def _file(kind: str, process: int) -> str:
    return f"{kind}-{process:05d}.safetensors"
