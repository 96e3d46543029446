"""What the Megatron workers share: building, weights in and out, checkpoints, the train call.

A data-parallel rank is tensor_parallel x pipeline_parallel processes. Every method is called on all
of them at the same time with the same arguments; outputs are those of the process that answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..algorithms.roles import TrainMetrics
from ..dataflow.context import call_key
from ..dataflow.placement import DeviceGroup
from ..dataflow.role import Loss, Metric
from ..dataflow.worker import WorkerContext
from ..planner.box import volume
from ..planner.layout import Layout
from ..planner.sharding import Sharding
from .agreement import AgreementLimits
from .data_parallel import rank_group
from .host_copy import SleepsInHostMemory
from .megatron_gather import gather_weights
from .megatron_groups import join_groups, model_group
from .megatron_layout import HeadName, megatron_sharding, pieces_on, stored_view
from .megatron_options import MegatronOptions
from .model import ModelSpec
from .model_source import model_source
from .state_files import TensorSource, WholeTensors, box_key, open_state, read_state_json
from .torch_worker import check_columns
from .trainer import Forward
from .weights import tensors_sha256, write_tensors

__all__ = ["MegatronWorker"]

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741 - O for output, as in Loss[B, O]

_FORMAT = 2


class MegatronWorker(SleepsInHostMemory):
    """This process's part of a model, and a trainer unless it is frozen. Implements `Trainable`.

    Args:
        context: Where the worker lives.
        model: Architecture and weights.
        head: A scalar head and what it is called; None for the language model's own.
        options: How it computes.

    Attributes:
        metrics: Numbers about the last calls; see `drain_metrics`.

    Raises:
        ConfigError: If the engine cannot compute the model.
        PlanError: If the model cannot be divided as the group is.
    """

    def __init__(
        self,
        context: WorkerContext,
        model: ModelSpec,
        options: MegatronOptions,
        head: tuple[HeadName, nn.Linear] | None = None,
    ) -> None:
        join_groups(context)
        from .megatron_model import build_trunk, supported_shape
        from .megatron_network import MegatronNetwork

        self.context = context
        self.model = model
        self.metrics: dict[str, Metric] = {}
        self._micro_batch_tokens = options.micro_batch_tokens
        config = model.config
        shape = supported_shape(config, model.dtype)
        name: HeadName = "lm_head" if head is None else head[0]
        one = Layout(tp=context.tensor_parallel, pp=context.pipeline_parallel)
        layout = one.model_copy(update={"dp": context.num_ranks})
        everyone = range(context.num_processes)
        self._layout = megatron_sharding(shape, layout, everyone, head=name)
        ours = sorted(_group_of(context).processes(context.rank))
        self._rank_layout = megatron_sharding(shape, one, ours, head=name)
        self._pieces = list(pieces_on(self._rank_layout, context.process))
        trunk = build_trunk(
            config, shape, context, name, sequence_parallel=options.sequence_parallel
        )
        tied = shape.tied_embeddings and head is None
        self.network = MegatronNetwork(trunk, context, tied=tied)
        self.device = self.network.flat.data.device
        self._load(model_source(model), exact=False, but=name if head else None)
        if head is not None:
            added = {f"{name}.{part}": value for part, value in head[1].named_parameters()}
            self._load(WholeTensors(added), exact=False, only=name)
        self._trainer = None if options.optimizer is None else self._make_trainer(options)

    def _make_trainer(self, options: MegatronOptions) -> Any:
        from .megatron_optimizer import SharedAdamW
        from .megatron_trainer import MegatronTrainer

        assert options.optimizer is not None
        optimizer = SharedAdamW(
            self.network.flat.data,
            options.optimizer,
            rank_group(self.context, self.device),
            counted=self.network.spans({piece.tensor for piece in self._pieces if piece.first}),
            model_group=model_group(),
            shared=options.share_optimizer,
        )
        return MegatronTrainer[Any](
            self.context, self.network, optimizer, options.optimizer, options.micro_batch_tokens
        )

    def weights_layout(self) -> Sharding:
        """Who in the group stores what; device numbers are those of `WorkerContext.process`."""
        return self._layout

    def local_tensors(self) -> dict[str, Tensor]:
        """This process's weights by the names `weights_layout` gives them: views, not copies.

        Whoever writes to them calls `weights_changed` afterwards.
        """
        return self.network.engine_tensors()

    def device_tensors(self) -> list[Tensor]:
        """See `SleepsInHostMemory`."""
        states = [] if self._trainer is None else self._trainer.optimizer.buffers
        return [*self.network.buffers(), *states]

    def weights_changed(self) -> None:
        """Tell the optimizer that weights were written from outside."""
        if self._trainer is not None:
            self._trainer.optimizer.refresh()

    def export_weights(self) -> dict[str, Tensor]:
        """Copies of all weights by Hugging Face name, on the CPU of the process that answers.

        The other processes of the rank send theirs and get nothing.
        """
        return self._gathered(_group_of(self.context).processes(self.context.rank)[0])

    def weights_to_write(self) -> dict[str, Tensor]:
        """The same on process 0, the one where transformers writes files; nothing elsewhere."""
        return self._gathered(0) if self.context.rank == 0 else {}

    def _gathered(self, lead: int) -> dict[str, Tensor]:
        tensors = self.network.engine_tensors()
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
        tensors = self.network.engine_tensors(buffer)
        return {
            box_key(piece.name, piece.box): stored_view(tensors, piece)
            for piece in self._pieces
            if piece.first
        }

    def _files(self, kind: str) -> list[str]:
        return [_file(kind, process) for process in sorted(_group_of(self.context).processes(0))]

    def load_state(self, folder: Path) -> None:
        """Restore what any engine saved in any layout.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the state is of another model or format.
        """
        state = read_state_json(folder)
        self._load(open_state(folder, state, "weights"), exact=True)
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
        tensors = self.network.engine_tensors(buffer)
        with torch.no_grad():
            for piece in self._pieces:
                if names is None or piece.name in names:
                    box = source.read(prefix + piece.name, piece.box)
                    stored_view(tensors, piece).copy_(box)

    def _train(
        self,
        forward: Forward[O],
        loss: Loss[B, O],
        batch: B,
        epochs: int,
        num_minibatches: int,
        limits: AgreementLimits | None = None,
    ) -> TrainMetrics:
        if self._trainer is None:
            raise RuntimeError(
                f"'{self.context.role}' is frozen and cannot train; give its spec an optimizer= "
                "(OptimizerSpec)"
            )
        return self._trainer.train(
            forward,
            loss,
            batch,
            epochs=epochs,
            num_minibatches=num_minibatches,
            key=call_key(self.context.role, "train"),
            limits=limits,
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
        else to [rows]. It is called on the last stage; the others return zeros.
        """
        check_columns(tokens, mask)
        shape = tokens.shape if per_token else tokens.shape[:1]
        result = torch.zeros(shape, dtype=torch.float32, device=tokens.device)

        def step(part: tuple[Tensor, int]) -> Tensor:
            rows, width = part
            some = tokens[rows, :width].to(self.device)
            if not self.network.is_last:
                return self.network.states(some)
            found = compute(some, mask[rows, :width].to(self.device)).to(tokens.device)
            if per_token:
                result[rows, :width] = found
            else:
                result[rows] = found
            return torch.zeros((), device=self.device)

        with torch.no_grad():
            self.network.run(step, list(self._chunks(tokens)), backward=False)
        return result

    def _chunks(self, tokens: Tensor) -> Iterator[tuple[Tensor, int]]:
        """Rows of similar length, and the longest."""
        lengths = (tokens >= 0).sum(1).cpu()
        order = torch.argsort(lengths, stable=True)
        begin = 0
        while begin < len(order):
            total = lengths[order[begin:]].cumsum(0)
            count = max(int(torch.searchsorted(total, self._micro_batch_tokens, right=True)), 1)
            rows = order[begin : begin + count]
            yield rows, max(int(lengths[rows].max()), 1)
            begin += count

    @property
    def num_elements(self) -> int:
        """Weights that this process stores."""
        return sum(volume(piece.box) for piece in self._pieces)


def _group_of(context: WorkerContext) -> DeviceGroup:
    return DeviceGroup(
        context.role,
        context.num_ranks,
        tensor_parallel=context.tensor_parallel,
        pipeline_parallel=context.pipeline_parallel,
    )


def _file(kind: str, process: int) -> str:
    return f"{kind}-{process:05d}.safetensors"
