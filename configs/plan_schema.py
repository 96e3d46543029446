"""What `penstock plan` is configured with beyond a run, and what `penstock profile` is.

The cluster's own parts are the planner's types, validated as they stand. What is given in words
("h100" for a device, "0-7" for devices) is turned into those types by `launch/placement`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from ..planner.inputs.cluster import DeviceSpec, LinkSpec, NodeGroup
from ..planner.inputs.workload import Lengths
from ..workers.executors.registry import PARALLEL_EXECUTOR, check_executor
from .schema import AtLeastOne, Count, FileName, Section

Width = Annotated[int, Field(ge=16, le=1 << 16, multiple_of=16)]
"""Of a model whose heads are 16 wide or more."""


class ClusterConfig(Section):
    """What the plan is for: equal nodes, or groups of them."""

    name: FileName
    """What the plan calls it."""
    num_nodes: AtLeastOne = 1
    """Nodes; all equal."""
    devices_per_node: AtLeastOne = 8
    """Devices in each."""
    device: DeviceSpec | None = None
    """What they are; or the name of a cluster whose device it is: `device: h100`."""
    within: LinkSpec | None = None
    """Between devices of one node; that cluster's, if `device` is a name."""
    between: LinkSpec | None = None
    """Between devices of different nodes."""
    node_groups: list[NodeGroup] = Field(default_factory=list[NodeGroup])
    """For a mixed cluster, instead of the keys of its nodes: a list of groups with those keys."""


class WorkloadConfig(Section):
    """How much one step computes. What is null follows from the algorithm and the task."""

    num_prompts: AtLeastOne | None = None
    """Prompts per step; by default `algorithm.per_step`."""
    samples_per_prompt: AtLeastOne | None = None
    """Responses per prompt; by default what the step samples."""
    prompt: Lengths | int | None = None
    """Tokens of a prompt, or `{tokens: [..], weights: [..]}`; by default as the task's prompts."""
    response: Lengths | int | None = None
    """Tokens of a response, or a histogram; by default the most that the step samples."""
    updates_per_train: AtLeastOne | None = None
    """Optimizer steps of a train call; by default the step's `epochs * num_minibatches`."""
    passes_per_train: AtLeastOne | None = None
    """Times a train call goes over its rows; by default the step's `epochs`."""

    @field_validator("prompt", "response")
    @classmethod
    def _at_least_one(cls, value: Lengths | int | None) -> Lengths | int | None:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"expected at least 1 token, got {value}")
        return value


class PinsConfig(Section):
    """Fixed parts of the plan. A call group is a role, or "ROLE.generate" of a trained role."""

    together: list[list[str]] = Field(default_factory=list[list[str]])
    """Lists of call groups that share a group."""
    apart: list[list[str]] = Field(default_factory=list[list[str]])
    """Lists of call groups of which no two share a group."""
    num_devices: dict[str, AtLeastOne] = Field(default_factory=dict[str, int])
    """Call group -> devices of its group."""
    devices: dict[str, list[int] | str] = Field(default_factory=dict[str, "list[int] | str"])
    """Call group -> ids of its group's devices, as a list or as text: "0-7, 12"."""
    layouts: dict[str, dict[str, Any]] = Field(default_factory=dict[str, "dict[str, Any]"])
    """Node name -> sizes of its layout that are fixed: `actor.train: {tp: 8, pp: 1}`."""


class PlanOptions(Section):
    """The search."""

    models: dict[str, str | None] = Field(default_factory=dict[str, "str | None"])
    """Role -> its model, where it is not the run's: an option of `model=`, a folder with a
    config.json, or null for a role without a model."""
    tp_across_nodes: bool = False
    """Whether tensor parallelism may reach over the network."""
    max_cp: AtLeastOne = 1
    """Most ranks that may share a sequence (context parallelism)."""
    deadline_s: Annotated[float, Field(gt=0)] | None = 60.0
    """Seconds after which the best plan so far is taken, with the gap that is left; null to wait
    for the proof."""
    lags: Annotated[list[Count], Field(min_length=1)] = [0, 1]
    """Values of `schedule.max_lag` that `schedule=auto` compares."""
    segments: Annotated[list[Count], Field(min_length=1)] = [0]
    """Values of `schedule.segment_tokens` that `schedule=auto` compares with each of these; 0 for
    responses that end in the step that begins them."""
    calibration: str | None = None
    """A file that `penstock profile` wrote, for its constants and `cluster=measured`; or the folder
    of a run, for what it measured of its own plan. Analytic defaults without one."""
    pins: PinsConfig = PinsConfig()
    """Parts that are fixed."""
    compare: list[FileName] = Field(default_factory=list[str])
    """YAML files with the keys of `plan.pins`: what the best plan under each takes, uses and
    costs, beside the plan that is asked for. Or folders of runs, for what they took."""
    target_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds in which a step is to be made: plan for the fewest nodes of the cluster that do, and
    say what each number of nodes gives. Up to 16 nodes every number is tried, above that halves."""
    sensitivity: bool = False
    """Whether to say what a step takes with twice as much of each thing the hardware has."""


class PlanSchedule(Section):
    """How far generation may run ahead of training."""

    max_lag: Count | Literal["auto"] = 0
    """Steps, or `auto` to find out whether lag helps."""


class PlanConfig(Section):
    """What a plan needs beside the run it is for."""

    cluster: ClusterConfig
    """Where; see `cluster=`."""
    workload: WorkloadConfig = WorkloadConfig()
    """How much one step computes."""
    plan: PlanOptions = PlanOptions()
    """The search."""


class ProfileConfig(Section):
    """What is measured, and where the result goes."""

    output: FileName = "runs/calibration.json"
    """The file to write; a run looks for `calibration.json` in the folder of its runs."""
    device: Literal["cpu", "cuda"] = "cpu"
    """`cpu`: each device of the plan is a share of the cores. `cuda`: each is a CUDA device."""
    num_ranks: Annotated[int, Field(ge=1, le=64)] | None = None
    """Devices, on a cluster those of each machine; by default one per CUDA device, or one per core
    up to eight."""
    num_threads: AtLeastOne | None = None
    """Torch threads of each rank; by default the cores are shared out."""
    dispatch: str = PARALLEL_EXECUTOR
    """The executor with which the cost of a call is measured. If it has joined a cluster
    (`RAY_ADDRESS`), all machines of that are measured instead of this one."""
    widths: Annotated[list[Width], Field(min_length=1)] | None = None
    """Hidden sizes of the models that are timed; by default 64 to 512, or 512 to 4096 on CUDA."""
    dtypes: Annotated[list[Literal["float32", "bfloat16"]], Field(min_length=1)] | None = None
    """Of their weights; by default bfloat16 on CUDA, and on a CPU float32 and, where the processor
    computes it fast, bfloat16."""
    rows: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    """Rows of a timed training call; the others follow from it."""
    seconds: Annotated[float, Field(gt=0)] = 0.5
    """How long each thing is repeated, about; longer is steadier."""
    deadline_s: Annotated[float, Field(gt=0)] = 900.0
    """When to give up."""

    @field_validator("dispatch")
    @classmethod
    def _is_there(cls, value: str) -> str:
        return check_executor(value)
