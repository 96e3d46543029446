"""A measured machine: its devices and links as a cluster, and what our engine gets out of them.

`penstock profile` writes this file, the planner reads it. The cluster holds peaks, measured with
large products and long copies while all ranks work; the constants say which share of them real
calls reach, and are those with which the model of time comes closest to the calls that were timed.
The calls are kept beside them, so that anybody can see how close that is.

A device's peaks and a link's bandwidth are what their makers promise. How much of that a program
gets, and what each launch and each message costs, depends on the software as much as on the
device; these numbers are all that the model of time knows of it. `penstock profile` measures
them on a machine; the defaults here are used where they were not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from ...dataflow.errors import PlanError
from ...dataflow.files import read_bytes
from ..inputs.calls import CallKind
from ..inputs.cluster import ClusterSpec
from ..inputs.model_shape import ModelShape, PlanData

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Constants(PlanData):
    """A program's use of devices and links; the same for every model, mesh and layout."""

    matmul_efficiency: Share
    """Share of the device's peak that large matrix products reach in training and forward passes,
    everything else that grows with the number of tokens (norms, softmax, losses) included."""
    attention_efficiency: Share | None = None
    """The same of attention's scores and of the sums that they weigh, softmax included; None if it
    is that of the other products, as with fused kernels."""
    memory_efficiency: Share
    """Share of the memory bandwidth that optimizer steps and copies reach."""
    read_efficiency: Share | None = None
    """The same of the weights, keys and values that products read; None if it is that of the
    rest."""
    network_efficiency: Share
    """Share of a link's bandwidth that a long message reaches."""
    launch_s: Seconds
    """Starting the kernels of one layer's forward pass one by one. A layer takes at least this,
    however few rows it has; without CUDA graphs decoding waits for it, not for memory."""
    hop_s: Seconds
    """Software's share of the latency of one hop of a ring, on top of the link's own. An
    all-reduce over n ranks has 2 (n - 1) hops."""
    stage_s: Seconds
    """Handing a micro-batch to the next pipeline stage, on top of the link's own latency: send,
    receive, and the schedule's own work."""
    call_s: Seconds
    """Any call at all: dispatch, gathering its rows, handing on its results."""
    update_s: Seconds = 0.0
    """An optimizer step beyond what it computes: picking its rows, the loss, norms, metrics."""
    micro_batch_s: Seconds = 0.0
    """The host's work for a micro-batch besides its layers' launches: packing, the loss. Of this
    and the launches together a GPU waits for what takes longer than its own work."""
    generate_s: Seconds = 0.0
    """A generation beyond what it computes: preparing its rows, handing on what was sampled."""
    replay_s: Seconds | None = None
    """A layer's kernels in a decode step that is replayed as one graph, beyond what they read and
    compute: each waits for the one before. None if they are launched one by one."""
    sample_s: Seconds = 0.0
    """The kernels of such a step that are in no layer: embedding, head, sampling."""
    backward: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)] = 2.0
    """A backward pass through a layer, in forward passes. Its products are two; what is no product
    may be more."""
    corrections: Mapping[CallKind, Positive] = Field(default_factory=dict[CallKind, float])
    """Kind of call -> what its predicted seconds are multiplied by, as a run has measured them."""
    source: str
    """Source of the numbers, for the plan to say: "analytic defaults", "fitted to ...", or
    the calibration file."""

    def replaced(self, **changes: Any) -> Constants:
        try:
            return Constants(**{**self.model_dump(), **changes})
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                fields = ", ".join(Constants.model_fields)
                raise PlanError(f"'{key}' is no constant; there are {fields}") from None
            raise PlanError(f"constant {key}: {first['msg']} (got {first['input']!r})") from None


# A tuned stack: fused kernels, decoding mostly with CUDA graphs, NCCL
GPU_DEFAULTS = Constants(
    matmul_efficiency=0.45,
    memory_efficiency=0.8,
    network_efficiency=0.7,
    launch_s=1.0e-4,
    hop_s=5.0e-6,
    stage_s=5.0e-5,
    call_s=0.05,
    source="analytic defaults for GPUs",
)

# pyTorch on one core a rank, messages through the kernel's sockets
CPU_DEFAULTS = Constants(
    matmul_efficiency=0.5,
    attention_efficiency=0.2,
    memory_efficiency=0.6,
    network_efficiency=0.5,
    launch_s=5.0e-4,
    hop_s=1.0e-4,
    stage_s=2.0e-4,
    call_s=5.0e-3,
    update_s=5.0e-3,
    source="analytic defaults for CPUs",
)


def default_constants(cluster: ClusterSpec) -> Constants:
    """The analytic defaults for a cluster: those of CPUs if any of its devices is one."""
    cpu = any(group.device.is_cpu for group in cluster.node_groups)
    return CPU_DEFAULTS if cpu else GPU_DEFAULTS


class MeasuredCall(PlanData):
    """A call that was timed, and what the model of time says of it."""

    name: str
    """The call, with its numbers of rows and of tokens in each."""
    width: Annotated[int, Field(ge=1)]
    """Hidden size of the model."""
    dtype: str
    """Type of its weights."""
    measured_s: Positive
    """Median over repeats, of the slowest rank."""
    predicted_s: Positive
    """Predicted with the constants of this calibration."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0


class DtypeConstants(PlanData):
    """Rates that the engine reaches on a device with models in one dtype."""

    constants: Constants
    """With the efficiency of products at the middle width."""
    matmul_efficiency: Mapping[Annotated[int, Field(ge=1)], Share] = Field(min_length=1)
    """Hidden size -> share of the peak that a model of that width reaches. Small products reach
    less, and what is no product at all weighs more beside them."""

    def at(self, width: int) -> Constants:
        """The constants for a model of any width.

        Between two measured widths the efficiency is interpolated over the logarithm of the width;
        beyond them it is that of the nearest.
        """
        known = sorted(self.matmul_efficiency.items())
        found = known[0][1] if width <= known[0][0] else known[-1][1]
        for (low, at_low), (high, at_high) in pairwise(known):
            if low < width <= high:
                way = math.log(width / low) / math.log(high / low)
                found = at_low + way * (at_high - at_low)
        return self.constants.replaced(matmul_efficiency=found)


class Calibration(PlanData):
    """One machine, as the planner sees it."""

    cluster: ClusterSpec
    """The devices: each is what one rank has."""
    constants: Constants
    """Constants of the model of time, for a step of which no model is known."""
    dtypes: Mapping[str, DtypeConstants] = Field(default_factory=dict[str, DtypeConstants])
    """By the dtype of the models that were timed; where there are none, `constants` hold for every
    model."""
    num_threads: Annotated[int, Field(ge=1)]
    """Torch threads of one rank while it was measured."""
    executor: str
    """Executor that `call_s` was measured with."""
    machine: str
    """Machine that it ran on, for people."""
    date: str
    """Date of the measurement, as YYYY-MM-DD."""
    notes: tuple[str, ...] = ()
    """Things that could not be measured, and what stands in for them."""
    calls: tuple[MeasuredCall, ...] = ()
    """Calls that the constants were fitted to."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.cluster.node_groups[0].device.is_cpu else "cuda"

    @property
    def error(self) -> float:
        return sum(abs(call.error) for call in self.calls) / max(len(self.calls), 1)

    def notes_for(self, models: Iterable[ModelShape | None]) -> tuple[str, ...]:
        # A share of the peak is that of one dtype: what is no product takes as long in the others.
        largest = _largest(models)
        if largest is None or not self.dtypes or largest.dtype in self.dtypes:
            return ()
        return (
            f"the calibration is of models in {' and '.join(self.dtypes)}, and "
            f"'{largest.name}' is in {largest.dtype}; measure such models too: `penstock profile "
            f"dtypes=[{','.join((*self.dtypes, largest.dtype))}]`",
        )

    def constants_for(self, models: Iterable[ModelShape | None]) -> Constants:
        largest = _largest(models)
        if largest is None or not self.dtypes:
            return self.constants
        found = self.dtypes.get(largest.dtype) or next(iter(self.dtypes.values()))
        return found.at(largest.hidden_size)

    @staticmethod
    def read(file: Path) -> Calibration:
        """Read what `penstock profile` wrote.

        Raises:
            PlanError: If the file is missing, cannot be read, or holds something else.
        """
        writes = f"; `penstock profile output={file}` writes"
        return read_model(Calibration, file, "calibration", f"{writes} one", f"{writes} a new one")


M = TypeVar("M", bound=BaseModel)


def read_model(kind: type[M], file: Path, what: str, missing: str = "", wrong: str = "") -> M:
    """Read a JSON file of a plan's data; `missing` and `wrong` say what makes it if it is so."""
    try:
        return kind.model_validate_json(read_bytes(file).decode())
    except FileNotFoundError:
        raise PlanError(f"{what} file {file} does not exist{missing}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{what} file {file} cannot be read: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        said = f"{first['msg']} (got {first['input']!r:.80})"
        raise PlanError(f"{what} file {file}: {key}: {said}{wrong}") from None


def _largest(models: Iterable[ModelShape | None]) -> ModelShape | None:
    shapes = [shape for shape in models if shape is not None]
    return max(shapes, key=ModelShape.num_params, default=None)
