"""What the torch workers share: building, weights in and out, checkpoints, the train call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....algorithms.roles.language import TrainMetrics
from ....dataflow.graph.role import Loss, Metric
from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.resharding.sharding import Sharding, whole
from ...training.checkpoint_files import open_state, read_state_json, read_whole
from ...training.data_parallel import rank_group
from ...training.flat_parameters import tensors_sha256, write_tensors
from ...training.host_offload import SleepsInHostMemory
from ...training.logprob_mismatch import MismatchLimits
from ...training.optimizer import OptimizerSpec
from ...training.train_calls import check_columns, train_call
from ...training.trainer import Forward, Trainer
from .network import Network, PlainNetwork

__all__ = ["TorchWorker", "first_masked", "no_outputs"]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741 - O for output, as in Loss[B, O]

_FORMAT = 1


class TorchWorker(SleepsInHostMemory):
    """A network, and a trainer unless it is frozen. Implements `Trainable`.

    Args:
        context: Where the worker lives; on several ranks rank 0's weights are broadcast.
        network: The model.
        optimizer: None for a frozen model, which refuses `train` and keeps no optimizer state.
        micro_batch_tokens: Tokens computed at once, in evaluation and training.

    Attributes:
        metrics: Numbers about the last calls; see `drain_metrics`.
    """

    def __init__(
        self,
        context: WorkerContext,
        network: Network,
        optimizer: OptimizerSpec | None,
        micro_batch_tokens: int,
    ) -> None:
        self.context = context
        self.network = network
        self.device = network.flat.data.device
        self.metrics: dict[str, Metric] = {}
        self._micro_batch_tokens = micro_batch_tokens
        self._sort_by_length = isinstance(network, PlainNetwork)
        rank_group(context, self.device).broadcast_(network.flat.data)
        self._trainer: Trainer[Any] | None = None
        if optimizer is not None:
            self._trainer = Trainer[Any](
                context,
                network.flat,
                optimizer,
                micro_batch_tokens=micro_batch_tokens,
                sort_by_length=self._sort_by_length,
            )

    def weights_layout(self) -> Sharding:
        """Every process of the group has all weights; devices are numbered as its processes."""
        flat = self.network.flat
        return whole(
            {name: tuple(flat.parameter(name).shape) for name in flat.names},
            range(self.context.num_processes),
            dtype=str(flat.data.dtype).removeprefix("torch."),
        )

    def local_tensors(self) -> dict[str, Tensor]:
        """All weights by Hugging Face name: views, not copies."""
        flat = self.network.flat
        return {name: flat.view(flat.data, name) for name in flat.names}

    def device_tensors(self) -> list[Tensor]:
        """See `SleepsInHostMemory`."""
        flat = self.network.flat
        grad = [] if flat.grad is None else [flat.grad]
        states = [] if self._trainer is None else self._trainer.optimizer.buffers
        return [flat.data, *grad, *states]

    def weights_changed(self) -> None:
        """Tell the optimizer that weights were written from outside."""
        if self._trainer is not None:
            self._trainer.optimizer.refresh()

    def export_weights(self) -> dict[str, Tensor]:
        """Copies of all weights by Hugging Face name, on the CPU; tied weights appear once."""
        return self.network.flat.named()

    def load_weights(self, weights: Any) -> None:
        """Replace all weights in place.

        Raises:
            ValueError: If names or shapes differ; nothing has been changed then.
        """
        self.network.flat.load(weights)
        self.weights_changed()

    def weights_sha256(self) -> str:
        """Hash of names, dtypes, shapes and bytes of all weights."""
        return tensors_sha256(self.export_weights())

    def save_state(self, folder: Path) -> None:
        """Write weights.safetensors, optimizer.safetensors and state.json; only process 0 does."""
        if self.context.process != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / "weights.safetensors", self.export_weights())
        state: dict[str, int] = {"format": _FORMAT}
        if self._trainer is not None:
            write_tensors(folder / "optimizer.safetensors", self._trainer.optimizer.state())
            state["optimizer_steps"] = self._trainer.optimizer.steps
            state["train_calls"] = self._trainer.calls
        (folder / "state.json").write_text(json.dumps(state, indent=2) + "\n")

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, bit for bit, or what another engine saved.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the state is of another model or format.
        """
        state = read_state_json(folder)
        self.load_weights(read_whole(open_state(folder, state, "weights")))
        if self._trainer is not None:
            if "optimizer_steps" not in state:
                raise ValueError(
                    f"'{folder}' was saved by a frozen worker and has no optimizer state; "
                    f"'{self.context.role}' is trained and needs it"
                )
            moments = read_whole(open_state(folder, state, "optimizer"))
            self._trainer.optimizer.load_state(moments, state["optimizer_steps"])
            self._trainer.calls = state["train_calls"]

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
        check_columns(tokens, mask)
        shape = tokens.shape if per_token else tokens.shape[:1]
        result = torch.zeros(shape, dtype=torch.float32, device=tokens.device)
        with torch.no_grad():
            for rows, width in self._chunks(tokens):
                part = compute(
                    tokens[rows, :width].to(self.device), mask[rows, :width].to(self.device)
                ).to(tokens.device)
                if per_token:
                    result[rows, :width] = part
                else:
                    result[rows] = part
        return result

    def _chunks(self, tokens: Tensor) -> Iterator[tuple[Tensor, int]]:
        lengths = (tokens >= 0).sum(1).cpu()
        order = torch.arange(len(tokens))
        if self._sort_by_length:
            order = torch.argsort(lengths, stable=True)
        ends = lengths[order].cumsum(0)
        begin = 0
        while begin < len(order):
            limit = self._micro_batch_tokens + (int(ends[begin - 1]) if begin else 0)
            end = max(int(torch.searchsorted(ends, limit, right=True)), begin + 1)
            rows = order[begin:end]
            yield rows, int(lengths[rows].max())
            begin = end


def first_masked(mask: Tensor) -> Tensor:
    """Index of each row's first masked token (the prompt's length), i64[rows]; 0 if none."""
    return mask.long().argmax(1) if mask.shape[1] else torch.zeros(len(mask), dtype=torch.int64)


def no_outputs(network: Network) -> Tensor:
    """A zero that depends on the weights, for rows of which nothing is read.

    A loss over such rows then has a gradient, which is zero.
    """
    flat = network.flat
    return flat.parameter(flat.names[0]).reshape(-1)[0].float() * 0
