"""The part that all workers with a trained model share, whichever engine computes it.

Weights in and out, checkpoints, giving up the device, evaluation in micro-batches, the train call.
A data-parallel rank may be several processes that share a model: every method is called on all of
them at the same time with the same arguments, and what counts is what the one returns that answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...algorithms.roles.language_tables import TrainMetrics
from ...dataflow.errors import ConfigError
from ...dataflow.files import WrittenFile, write_hashed
from ...dataflow.graph.role import Loss, Metric, Worker, WriteState
from ...dataflow.runtime.call_context import call_key, call_piece
from ...dataflow.runtime.worker_protocol import WorkerContext
from ...planner.resharding.sharding import Sharding
from .checkpoint_files import (
    WholeTensorSource,
    box_key,
    fill_weights,
    gather_weights,
    open_state,
    pieces_on,
    read_state_json,
    share_of,
    state_file,
    stored_view,
)
from .data_parallel import worker_group
from .flat_parameters import tensors_sha256
from .host_memory import HostCopy, dropped, give_back_freed, on_host, pin_ahead, sent
from .logprob_mismatch import MismatchLimits
from .microbatch import bounded, repeated_tokens
from .network import MicroBatches, Network
from .optimizer import OptimizerSpec
from .state_files import StateFiles
from .trainer import Forward, Trainer
from .weight_checks import check_outputs, refuse_faults, unusable

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741 - O for output, as in Loss[B, O]


class ModelWorker(Worker):
    """A network, and a trainer unless it is frozen."""

    takes_pieces = True

    def __init__(
        self,
        context: WorkerContext,
        network: Network,
        optimizer: OptimizerSpec | None,
        micro_batch_tokens: int,
        *,
        offload: bool = False,
    ) -> None:
        self.context = context
        self.offload = offload and not context.places  # a view is dropped between its calls
        self.device = network.device  # Where the weights lie
        self.metrics: dict[str, Metric] = {}
        self._network = network
        self._micro_batch_tokens = micro_batch_tokens
        # Weights that sleep, and what else does
        self._weights_copy: HostCopy | None = None
        self._states_copy: HostCopy | None = None
        self._has_slept = False
        self._state_files = StateFiles()
        self._restarts = optimizer is not None and optimizer.restart_every_call
        self._trainer: Trainer[Any] | None = None
        if optimizer is not None:
            self._trainer = Trainer[Any](network, optimizer, micro_batch_tokens)

    # --- weights in and out

    def weights_layout(self) -> Sharding:
        """Layout of the group's weights; device numbers are those of `WorkerContext.process`."""
        return self._network.layout

    def local_tensors(self) -> dict[str, Tensor]:
        """This process's weights by the names `weights_layout` gives them: views, not copies.

        Call `weights_changed` after writing to them.
        """
        return self._network.tensors()

    def frozen_weights(self) -> tuple[Sharding, dict[str, Tensor]] | None:
        return self._network.frozen_weights()

    def weights_changed(self) -> None:
        self._network.weights_changed()
        if self._trainer is not None:
            self._trainer.discard_pieces()
            self._trainer.optimizer.refresh()

    def export_weights(self) -> dict[str, Tensor]:
        """Copies of all weights by Hugging Face name, on the CPU; tied weights appear once.

        The process that answers gets them; the others of its rank send theirs and get nothing.
        """
        lead = worker_group(self.context).processes(self.context.rank)[0]
        return gather_weights(self._network, lead)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._state_files.keep()
        fill_weights(self._network, WholeTensorSource(weights))
        self.weights_changed()

    def weights_sha256(self) -> str:
        """Hash of names, dtypes, shapes and bytes of what `export_weights` gives."""
        return tensors_sha256(self.export_weights())

    # --- checkpoints

    def save_state(self, folder: Path) -> None:
        write = self.take_state()
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, lambda: False)

    def take_state(self) -> WriteState:
        """Take weights and optimizer state, to be written while calls go on.

        A model that one process alone has is written in format 1 of `checkpoint_files`, any other
        in format 2: of what several processes hold each writes a share.
        """
        if self._trainer is not None:
            self._trainer.refuse_pieces("its state was to be saved")
        optimizer = None if self._trainer is None else self._trainer.optimizer
        moments = {} if optimizer is None else optimizer.state()  # every rank must ask
        several = self.context.num_processes > 1 or self._network.is_divided
        state: dict[str, Any] = {"format": 2 if several else 1}
        kinds: dict[str, Mapping[str, Tensor | None]] = {"weights": {"": None}}
        if optimizer is not None:
            kinds["optimizer"] = {f"{kind}/": buffer for kind, buffer in moments.items()}
        files: dict[str, dict[str, Tensor]] = {}
        for kind, buffers in kinds.items():
            file = state_file(kind, self.context.process if several else None)
            files[file] = self._stored(buffers, boxed=several)
            if several:
                state[kind] = [state_file(kind, one) for one in range(self.context.num_processes)]
        if self._trainer is not None:
            state["optimizer_steps"] = self._trainer.optimizer.steps
            state["train_calls"] = self._trainer.calls
        state["micro_batch_tokens"] = self._micro_batch_tokens  # for people: a bit depends on it
        described = (json.dumps(state, indent=2) + "\n").encode()
        write_files = self._state_files.take(files)

        def write(folder: Path, is_unwanted: Callable[[], bool]) -> Mapping[str, WrittenFile]:
            written = dict(write_files(folder, is_unwanted))
            if self.context.process == 0:
                written["state.json"] = write_hashed(folder / "state.json", [described])
            return written

        return write

    def _stored(self, buffers: Mapping[str, Tensor | None], *, boxed: bool) -> dict[str, Tensor]:
        """This process's part of the weights (None) and of buffers laid out as they are."""
        found: dict[str, Tensor] = {}
        pieces = [
            piece
            for piece in pieces_on(self._network.rank_layout, self.context.process)
            if piece.first
        ]
        for prefix, buffer in buffers.items():
            tensors = self._network.tensors(buffer)
            for piece in share_of(pieces, self.context.rank, self.context.num_ranks):
                key = box_key(piece.name, piece.box) if boxed else piece.name
                found[prefix + key] = stored_view(tensors, piece)
        return found

    def load_state(self, folder: Path) -> None:
        """Restore what any engine saved in any layout; bit for bit what this one saved."""
        state = read_state_json(folder)
        self._state_files.keep()
        fill_weights(self._network, open_state(folder, state, "weights"))
        owner = f"'{self.context.role}'"
        refuse_faults(folder, owner, {"not finite": unusable(self._network.tensors())})
        self.weights_changed()
        if self._trainer is None:
            return
        if "optimizer_steps" not in state:
            raise ValueError(
                f"'{folder}' was saved by a frozen worker and has no optimizer state; "
                f"'{self.context.role}' is trained and needs it"
            )
        optimizer, steps = self._trainer.optimizer, int(state["optimizer_steps"])
        buffers = optimizer.new_state() if steps else {}
        source = open_state(folder, state, "optimizer")
        # Weights that were saved in float32 are their own master copy.
        has_master = any(name.startswith("master/") for name in source.shapes())
        saved = {f"{k}/": part for k, part in buffers.items() if k != "master" or has_master}
        fill_weights(self._network, source, buffers=saved, exact=False)
        optimizer.load_state(buffers, steps)
        self._trainer.calls = state["train_calls"]

    # --- sharing the device

    def device_tensors(self) -> list[Tensor]:
        """Weights, gradients and optimizer states as far as they exist, on whatever device."""
        states = [] if self._trainer is None else self._trainer.optimizer.buffers
        return [*self._network.held_tensors(), *states]

    def sleep(self) -> None:
        """Move them to host memory; nothing to do if they are there.

        A gradient that no piece of a batch waits in is zeroed before it is added to, so it is not
        copied.

        On a CPU there is no other memory to move to, and nothing is done, unless it is told to wait
        there: then what a GPU would do is done.
        """
        optimizer = None if self._trainer is None else self._trainer.optimizer
        to_come = 0 if optimizer is None or optimizer.buffers else optimizer.num_bytes
        self.sleep_but_weights()
        if self._weights_copy is None:
            self._weights_copy = self._moved(self.device_tensors())  # what is left of them
        if to_come and self.device.type == "cuda" and not self._has_slept:
            pin_ahead(to_come)  # while others generate for the first step, which makes it
        self._has_slept = True

    def sleep_but_weights(self) -> None:
        if self._states_copy is None:
            states = [] if self._trainer is None else self._trainer.optimizer.buffers
            self._states_copy = self._moved([*self._network.gradients(), *states])

    def _moved(self, tensors: list[Tensor]) -> HostCopy:
        self._state_files.keep()
        device = self.device.type if self.offload else "cuda"
        waits = self._trainer is not None and self._trainer.has_pieces
        void = [] if waits else self._network.gradients()
        return HostCopy(tensors, device, void=void)

    def sleep_empty(self) -> bool:
        """Give up the weights of a view (`DeviceGroup.within`) until they come again."""
        if not self.context.places:
            return False
        if self._weights_copy is None:
            self._network.weights_changed()  # so that nothing gathered of them is kept
            _, frozen = self.frozen_weights() or (None, {})
            self._weights_copy = dropped([*self._network.tensors().values(), *frozen.values()])
        return True

    def wake_weights(self) -> None:
        kept, self._weights_copy = self._weights_copy, None
        if kept is not None:
            kept.restore()

    def wake(self) -> None:
        self.wake_weights()
        kept, self._states_copy = self._states_copy, None
        if kept is not None:
            kept.restore()

    # --- calls

    def follow(self, leader: object, *, share: float = 1.0, every: int = 1) -> TrainMetrics:
        """Move the weights to `w + share * (leader - w)` in place; nothing is sent anywhere."""
        role = self.context.role
        if not 0 < share <= 1:
            raise ConfigError(f"role '{role}' follows with share={share}; expected in (0, 1]")
        if every < 1:
            raise ConfigError(f"role '{role}' follows with every={every}; expected at least 1")
        if call_key(role, "follow").step % every:
            return TrainMetrics({"followed": Metric.mean(0.0, 1.0)})
        if not isinstance(leader, ModelWorker) or leader.weights_layout() != self.weights_layout():
            raise ConfigError(
                f"role '{role}' is to follow a model that is not the same in the same layout here\n"
                "    give both roles one model, and put them on one group with one engine"
            )
        tensors, others = self.local_tensors(), leader.local_tensors()
        if share < 1 and any(tensor.dtype != torch.float32 for tensor in tensors.values()):
            raise ConfigError(
                f"role '{role}' follows with share={share}, and its weights have 16 bits, which "
                "cannot hold a change smaller than 1/256 of a weight\n"
                "    set model.dtype=float32, or copy now and then: share=1.0, every=N"
            )
        self._state_files.keep()
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(others[name] if share == 1 else tensor.lerp(others[name], share))
        self.weights_changed()
        return TrainMetrics({"followed": Metric.mean(1.0, 1.0)})

    def _train(
        self,
        forward: Forward[O],
        loss: Loss[B, O],
        batch: B,
        epochs: int,
        num_minibatches: int,
        limits: MismatchLimits = MismatchLimits(),
    ) -> TrainMetrics:
        """Train in the call being served, on all of a batch or on a piece; see `Trainer.train`."""
        if self._trainer is None:
            raise RuntimeError(
                f"'{self.context.role}' is frozen and cannot train; give its spec an optimizer= "
                "(OptimizerSpec)"
            )
        if call_piece() == "none":
            self._trainer.discard_pieces()
            return self._trainer.skip()
        changes = ("whole", "last", *(["first"] if self._restarts else []))
        if call_piece() in changes:  # the other pieces change neither weights nor moments
            self._state_files.keep()
        metrics = self._trainer.train(
            forward,
            loss,
            batch,
            epochs=epochs,
            num_minibatches=num_minibatches,
            key=call_key(self.context.role, "train"),
            limits=limits,
            piece=call_piece(),
        )
        if call_piece() not in ("first", "part"):  # the next one takes it again
            give_back_freed(self.device)
        return metrics

    def _evaluate(
        self,
        tokens: Tensor,
        mask: Tensor,
        compute: Callable[[Tensor, Tensor], Tensor],
        *,
        per_token: bool,
        width: int | None = None,
        what: str = "scores",
    ) -> Tensor:
        """Apply `compute` to rows without gradients, in micro-batches; f32, where tokens were.

        `compute` maps tokens and mask of some rows, cut to width W, to [rows, W] if `per_token`,
        else to [rows]; with a `width` to so many numbers in place of each. All processes that
        compute outputs of the rank get all results.
        """
        check_columns(tokens, mask)
        network, device = self._network, self.device
        shape = (*tokens.shape[: 1 + per_token], *([] if width is None else [width]))
        result = torch.zeros(shape, dtype=torch.float32, device=device)
        lengths = (tokens >= 0).sum(1).cpu()
        limit = network.micro_batch_limit(self._micro_batch_tokens, int(lengths.sum()))

        def load(rows: Tensor) -> _Rows:
            width = max(int(lengths[rows].max()), 1)
            part, allowed = tokens[rows, :width], mask[rows, :width]
            return _Rows(*(sent(column, device) for column in (rows, part, allowed)))

        def step(rows: _Rows) -> Tensor:
            found = compute(rows.tokens, rows.mask)
            if per_token:
                result[rows.index, : rows.tokens.shape[1]] = found
            else:
                result[rows.index] = found
            return result.new_zeros(())

        order = torch.arange(len(lengths))
        if network.sort_by_length:
            order = torch.argsort(lengths, stable=True)
        again = [0] * len(order)
        if network.shares_prompts:
            again = repeated_tokens(on_host(tokens)[order], on_host(mask)[order])
        ends, sizes = range(1, len(order) + 1), lengths[order].tolist()
        parts = [order[begin:end] for begin, end in bounded(ends, sizes, again, limit)]
        with torch.no_grad():
            network.run(MicroBatches(parts, load, step), backward=False)
        found = network.together(result)
        check_outputs(self.context.role, what, found, network.tensors())
        return found.to(tokens.device)


@dataclass(frozen=True)
class _Rows:
    """Some rows of a call on the device: which ones, their tokens and masks cut to width W."""

    index: Tensor
    tokens: Tensor
    mask: Tensor


def check_columns(tokens: Tensor, mask: Tensor) -> None:
    """Require i64[rows, T] tokens and a bool mask of that shape that leaves column 0 alone."""
    if (
        tokens.ndim != 2
        or tokens.dtype != torch.int64
        or mask.dtype != torch.bool
        or mask.shape != tokens.shape
    ):
        raise ValueError(
            f"expected tokens i64[rows, T] and mask bool of the same shape, got "
            f"{tokens.dtype}{list(tokens.shape)} and {mask.dtype}{list(mask.shape)}"
        )
    if mask.shape[1] and bool(on_host(mask)[:, 0].any()):
        raise ValueError(
            "mask is True at a row's first token, which nothing precedes and so no model can "
            "predict; every row must begin with at least one prompt token"
        )
