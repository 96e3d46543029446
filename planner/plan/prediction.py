"""What a plan is expected to do: seconds, bytes, and how sure that is, as data.

Everything here is read back from JSON as it was written, so a plan can be compared with what was
measured later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ..cost.constants import Constants
from ..inputs.workload import Workload

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class NodePrediction(_Data):
    """One call of a step."""

    # from its start to its end on its group, moving weights into its layout included
    duration_s: Seconds
    # what the duration is made of: "compute", "tensor_parallel", ..
    parts_s: Mapping[str, Seconds] = Field(default_factory=dict[str, float])


class GroupMemory(_Data):
    """Memory of the fullest device of one group.

    Calls of a group run one after the other, so the most it ever holds is what is resident and the
    largest of the transient sums.
    """

    # role, or "role.generate" for a copy of its own -> part ("weights") -> always held
    resident_bytes: Mapping[str, Mapping[str, Bytes]]
    # call -> part ("activations", "kv_cache") -> held while the call runs
    transient_bytes: Mapping[str, Mapping[str, Bytes]]
    capacity_bytes: Bytes  # what roles may use of the device

    @property
    def resident_total_bytes(self) -> int:
        return sum(sum(parts.values()) for parts in self.resident_bytes.values())

    @property
    def peak_call(self) -> str | None:
        sums = {call: sum(parts.values()) for call, parts in self.transient_bytes.items()}
        return max(sums, key=lambda call: sums[call]) if any(sums.values()) else None

    @property
    def peak_bytes(self) -> int:
        peak = self.peak_call
        most = sum(self.transient_bytes[peak].values()) if peak else 0
        return self.resident_total_bytes + most


class RunnerUp(_Data):
    """The best plan of another placement."""

    description: str  # who shares how many devices
    step_time_s: Seconds  # what it would take
    why: str  # why it lost, in one sentence


class StreamedStep(_Data):
    """The same plan where a step's rows go on in parts."""

    num_parts: int = Field(ge=1)  # parts
    step_time_s: Annotated[float, Field(gt=0)]  # seconds per step


class OtherSchedule(_Data):
    """The best plan under another schedule."""

    max_lag: int = Field(ge=0)  # how many steps generation may run ahead
    # how far a response grows in one step; 0: to its end
    segment_tokens: int = Field(default=0, ge=0)
    step_time_s: Seconds | None  # what it would take; None if no plan fits


class Prediction(_Data):
    """What the planner expects of a plan."""

    # whether every device holds what it must; a plan that does not is refused, not returned
    feasible: bool = True
    step_time_s: Annotated[float, Field(gt=0)]  # seconds per step, steps following each other
    # no plan under the same pins and models of time and memory can be faster
    lower_bound_s: Seconds
    search_time_s: Seconds = 0.0  # how long the search took
    # whether the search ended before it had proved its plan the best
    stopped_at_deadline: bool = False
    calibration: str = "analytic defaults"  # where the constants of the model of time come from
    constants: Constants | None = None  # these constants; None in plans that do not say
    nodes: Mapping[str, NodePrediction]  # calls by name; nodes that are not here take no time
    # group -> memory of its fullest device
    memory: Mapping[str, GroupMemory] = Field(default_factory=dict[str, GroupMemory])
    runner_up: RunnerUp | None = None  # the best plan with another placement, if one was met
    # the others, the fastest first, where several were compared
    other_schedules: tuple[OtherSchedule, ...] = ()
    streamed: StreamedStep | None = None  # what `Schedule.streaming` makes of it, if that was asked
    # role -> name of its model's shape
    models: Mapping[str, str] = Field(default_factory=dict[str, str])
    workload: Workload | None = None  # rows and tokens of the step it was made for

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.lower_bound_s / self.step_time_s)

    @property
    def segment_tokens(self) -> int:
        return (self.workload.segment_tokens or 0) if self.workload is not None else 0

    @property
    def tokens_per_s(self) -> float | None:
        if self.workload is None:
            return None
        work = self.workload
        return work.num_rows * (work.prompt.mean + work.response.mean) / self.step_time_s

    @property
    def fullest(self) -> GroupMemory | None:
        held = self.memory.values()
        return max(held, key=lambda one: one.peak_bytes / one.capacity_bytes, default=None)

    @property
    def durations_s(self) -> dict[str, float]:
        return {name: node.duration_s for name, node in self.nodes.items()}
