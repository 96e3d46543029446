"""What a data sheet does not say: the few constants that turn peaks into times.

A device's peaks and a link's bandwidth are what their makers promise. How much of that a program
gets, and what each launch and each message costs, depends on the software as much as on the
device; these numbers are all that the model of time knows of it. `penstock profile` measures
them on a machine; the defaults here are used where nobody has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...dataflow.errors import PlanError
from ..inputs.calls import CallKind
from ..inputs.cluster import ClusterSpec

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Constants(BaseModel):
    """How a program uses devices and links; the same for every model, mesh and layout."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

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
    backward: Annotated[float, Field(ge=1, le=10, allow_inf_nan=False)] = 2.0
    """A backward pass through a layer, in forward passes. Its products are two; what is no product
    may be more."""
    corrections: Mapping[CallKind, Positive] = Field(default_factory=dict[CallKind, float])
    """Kind of call -> what its predicted seconds are multiplied by, as a run has measured them."""
    source: str
    """Where the numbers come from, for the plan to say: "analytic defaults", "fitted to ...", or
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


# an RLHF system of 2024 in PyTorch without CUDA graphs; made by `benchmarks/planner_fit.py`. The
# efficiency is low because it stands for all that grows with the tokens, and because the peak is
# that of an H100's dense half-precision products.
PUBLISHED_H100 = Constants(
    matmul_efficiency=0.133,
    memory_efficiency=0.8,
    network_efficiency=0.7,
    launch_s=5.33e-4,
    hop_s=2.08e-5,
    stage_s=5.6e-4,
    call_s=0.0,
    source="fitted to 16 published PPO iterations on H100 nodes without CUDA graphs",
)
