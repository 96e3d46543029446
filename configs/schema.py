"""The configuration of a run: frozen models that validate what Hydra composed.

A key is declared once, at its owner. Sections that belong to the launcher are declared here; the
algorithm's own config (`algorithm.cfg`), the schedule, the optimizer, the task's options and others
are the stdlib dataclasses their owners take, and are validated as they stand.

Sizes are in one unit, which the name says: `per_step.prompts`, `max_prompt_tokens`, `num_steps`.
The parts of a cluster are the planner's types; what is given in words ("h100" for a device, "0-7"
for devices) is turned into those types by `launch/placement`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from ..algorithms.reference import ReferenceOptions
from ..dataflow.runtime.executor import Recovery
from ..dataflow.scheduler.schedule import Schedule
from ..planner.formatting import bytes_of
from ..planner.inputs.calls import Lengths
from ..planner.inputs.cluster import DeviceSpec, LinkSpec, NodeGroup
from ..planner.inputs.task_profile import ActingPins
from ..workers.data.chat import LossOn
from ..workers.engines.registry import DEFAULT, check_engine, check_rollout
from ..workers.executors.registry import DEFAULT_EXECUTOR, PARALLEL_EXECUTOR, check_executor
from ..workers.models.lora import LoraSpec
from ..workers.models.spec import ModelSpec
from ..workers.models.tokenizer import TokenizerSpec
from ..workers.training.logprob_mismatch import MismatchLimits
from ..workers.training.optimizer import OptimizerSpec
from ..workers.weight_sync.channel import DEFAULT_TRANSPORT, Transport

SAME = "same"
"""As `rollout.kind`: what trains generates as well."""

AtLeastOne = Annotated[int, Field(ge=1, le=10**12)]
Count = Annotated[int, Field(ge=0, le=10**12)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**62)]
"""Half of what torch takes, so that an offset can be added."""
GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
FileName = Annotated[str, Field(min_length=1)]
HubName = Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
EngineName = Annotated[str, AfterValidator(check_engine)]
RolloutName = Annotated[str, AfterValidator(lambda name: check_rollout(name, SAME))]
ExecutorName = Annotated[str, AfterValidator(check_executor)]


class Section(BaseModel):
    """A part of the configuration: frozen, strict about types, and closed to unknown keys.

    Numbers are finite: where there may be no limit, null says so.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class RoleConfig(Section):
    """The player of a role of the step, where the role's contract alone does not determine it."""

    worker: str | None = None
    """`policy`, `value`, `reward_model`, `process_reward`; a reward: `rule`, `exact`, `math`,
    `instructions`, `code`, `judge`, `served`, `mixture`; or `module:factory` of a worker. By
    default what the role's contract asks for."""
    start: str | None = None
    """Source of its weights: `model`, the name of an earlier stage, a model folder, or a
    model of a hub, `org/name` or `org/name@revision`."""
    start_mean: dict[str, float] = Field(default_factory=dict[str, float])
    """Instead of `start`: several of these and how much of each, for the mean of their weights."""
    init_offset: Seed = 0
    """Added to `model.init_seed` for this role: several that start from random weights start from
    different ones."""
    optimizer: OptimizerSpec | None = None
    """Optimizer of a trained role; the algorithm's by default."""
    frozen: list[str] = Field(default_factory=list[str])
    """Parameters of a trained role that never move, as patterns: `["model.embed_tokens.*"]`."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further fields of the worker's spec, such as `micro_batch_tokens` or `time_limit_s`."""
    engine: EngineName | None = None
    """Engine that trains and evaluates it, an option of `engine=`; the run's by default, whose
    `engine.options` are for no other."""
    rollout: RolloutName | None = None
    """Engine that generates, an option of `rollout=` or `same`; the run's by default."""


class AlgorithmConfig(Section):
    """An algorithm: a step function, its settings, and what is trained before it."""

    step: str
    """The step function as `module:function`; its parameters name the roles and the data."""
    cfg: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Fields of the step's own config, the annotation of its parameter `cfg`."""
    num_steps: AtLeastOne
    """Steps to take."""
    per_step: dict[str, AtLeastOne]
    """For each table the step reads, how many of its items one step takes: `prompts: 32`."""
    num_groups: dict[str, AtLeastOne] = Field(default_factory=dict[str, int])
    """For a table of environments or games, the least number of groups that they fall into."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Optimizer of every trained role that has none of its own."""
    reference: ReferenceOptions = ReferenceOptions()
    """A KL to a reference in the policy's loss, and a reference that follows the policy."""
    seed: Seed | None = None
    """Seed of the stage's data order and random numbers; the run's by default."""
    roles: dict[str, RoleConfig] = Field(default_factory=dict[str, RoleConfig])
    """Role name -> what plays it; roles that are left out follow their contract."""
    before: dict[str, AlgorithmConfig] = Field(default_factory=dict[str, Any])
    """Stages trained before, by name and in order; one that nothing starts from is left out."""


class ModelConfig(Section):
    """The language model that policies, critics and reward models start from."""

    folder: str | None = None
    """A local folder in Hugging Face's layout: `model=PATH`."""
    hub: str | None = None
    """Instead of a folder: a model of a hub, `model=org/name`."""
    revision: str | None = None
    """A branch, a tag or a commit of `hub`; a run records the commit."""
    package: str | None = None
    """Instead of a folder: a model that comes in a Python package, such as `smollm2-135m`."""
    architecture: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Without a folder: fields of a Hugging Face config with `model_type`. The vocabulary is the
    tokenizer's."""
    init_seed: Seed = 0
    """Seeds the random weights of an `architecture`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of weights and activations. `auto`: bfloat16 for a trained model where the device
    computes that faster, else float32."""
    tokenizer: TokenizerSpec | Literal["task", "folder"] = "folder"
    """`task`: one token per character that the task's prompts and answers use. `folder`: the
    tokenizer in the model's folder. Or a tokenizer's own settings."""
    lora: LoraSpec = LoraSpec()
    """Adapters that trained roles learn instead of the weights: `model.lora.rank=16`."""

    @property
    def precision(self) -> Literal["float32", "bfloat16"]:
        """`dtype` as the run resolved it; float32 before that."""
        return "float32" if self.dtype == "auto" else self.dtype

    @field_validator("architecture")
    @classmethod
    def _has_type(cls, value: dict[str, Any]) -> dict[str, Any]:
        if value and "model_type" not in value:
            raise ValueError("needs a 'model_type', such as qwen2")
        return value


class TaskConfig(Section, extra="allow"):
    """The problems: prompts, answers to imitate, and a verifier.

    Keys beyond these are options of the task's kind; see `ReasoningTaskSpec` and `FileTaskSpec`.
    """

    kind: str
    """`reasoning_gym` for generated problems, `instructions` for requests with an instruction that
    can be checked, `file` for a JSONL or Parquet file, `hf` for a data set of Hugging Face's,
    `mixture` for several of these; `calculator`, `maze`, `twenty_questions`, `search`,
    `table_questions`, `gymnasium_text`, `verifiers`, `openenv`, `tools` and `program` to converse
    with; `gymnasium`, `board_game` and `library_game` to act in; or `module:Class` of a task of
    your own."""
    max_prompt_tokens: AtLeastOne | None = None
    """Longer prompts are reported and left out."""
    max_response_tokens: AtLeastOne = 16
    """Longest response, end-of-sequence included: sampled, imitated or compared."""
    max_turns: AtLeastOne = 8
    """Most turns of the policy in a conversation, of a task that has some."""
    max_total_tokens: Count = 0
    """Longest conversation with its prompt, in tokens; 0 for tasks without conversations.
    `max_response_tokens` is the longest turn."""
    chat: bool = False
    """Whether a prompt that is a text is rendered by the tokenizer's chat template, as one message
    of a user. Prompts that are conversations always are."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further variables of the chat template: `{enable_thinking: false}`."""
    loss_on: LossOn = "response"
    """Tokens that supervised fine-tuning imitates. `response`: those of the assistant in the
    response, in `messages_field` in all its turns. `completion`: all after the prompt. `assistant`:
    those of the assistant, in the prompt as well. `all`: every token."""
    pack_tokens: AtLeastOne | None = None
    """Supervised fine-tuning takes packs, in place of single demonstrations: as many together as
    have so many tokens, none of which sees another."""
    order: Literal["shuffled", "curriculum", "priority"] = "shuffled"
    """Choice of prompts. `shuffled`: every one once in an epoch. `curriculum`: the easiest
    first. `priority`: each with a weight of 1 - pass rate. The last two need `pass_rate_field`."""
    curriculum_steps: AtLeastOne = 100
    """Steps until a curriculum takes from all prompts."""
    pass_rates: tuple[Share, Share] = (0.0, 1.0)
    """Lowest and highest pass rate of prompts that are trained on."""
    decontaminate_words: AtLeastOne | None = None
    """Training problems that share so many words in a row with a held-out prompt are left out; null
    compares nothing. 8 to 13 are usual."""
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest share of rows that may be left out before the run refuses to start."""

    @property
    def options(self) -> dict[str, Any]:
        """The keys that belong to the task's kind."""
        return dict(self.model_extra or {})


class ExecutorConfig(Section):
    """Placement of nodes."""

    kind: ExecutorName = DEFAULT_EXECUTOR
    """An executor: an option of `executor=`, or `module:EXECUTOR` for one of your own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`cpu` or `cuda`. `auto`: `cuda` if there is one; perceptrons stay on the CPU."""
    groups: dict[GroupName, AtLeastOne] = Field(default_factory=dict[str, int])
    """Worker group -> data-parallel ranks; the first one runs whatever `nodes` does not name. What
    is given here is used instead of `placement`."""
    nodes: dict[str, str] = Field(default_factory=dict[str, str])
    """Role name or node name -> worker group; `ROLE.generate` is whatever samples with a role."""
    tensor_parallel: dict[str, AtLeastOne] = Field(default_factory=dict[str, int])
    """Worker group -> processes that share every matrix of a data-parallel rank; 1 by default."""
    pipeline_parallel: dict[str, AtLeastOne] = Field(default_factory=dict[str, int])
    """Worker group -> stages of layers in each data-parallel rank; 1 by default."""
    devices: dict[str, list[Count]] = Field(default_factory=dict[str, list[int]])
    """Worker group -> which devices its processes have; groups that name the same take turns on
    them. By default devices of its own."""
    served: dict[str, dict[str, str]] = Field(default_factory=dict[str, "dict[str, str]"])
    """Worker group -> role -> the group that serves it there, instead of a copy: `{acting: {actor:
    policy}}`."""
    num_threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Torch's and numpy's threads per process; by default the cores are shared out among the
    ranks."""
    memory_limit: str | None = None
    """The most memory that all processes of a run may need together, such as `6GiB`: one that is
    predicted to need more is refused before it starts. For language models on CPUs."""
    transport: Transport = DEFAULT_TRANSPORT
    """Path of new weights from group to group: through the executor's object store, or in
    the memory of a GPU that both are on (`cuda_ipc`)."""

    @field_validator("transport", mode="before")
    @classmethod
    def _is_still_there(cls, value: object) -> object:
        if value == "point_to_point":
            raise ValueError(
                "the channel 'point_to_point' is gone: the object store was faster in every case "
                "measured\n    leave executor.transport out, or set it to object_store"
            )
        return value

    @field_validator("nodes", mode="before")
    @classmethod
    def _in_dots(cls, value: Any) -> Any:
        """Accept the mapping that a command line makes of `executor.nodes.actor.generate=x`."""
        if not isinstance(value, Mapping):
            return value
        found: dict[str, Any] = {}
        for name, group in cast("Mapping[str, Any]", value).items():
            inner = cls._in_dots(group)
            nested = cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else {"": inner}
            found |= {f"{name}.{last}".rstrip("."): one for last, one in nested.items()}
        return found

    @field_validator("memory_limit")
    @classmethod
    def _is_a_size(cls, value: str | None) -> str | None:
        if value is not None and not bytes_of(value):
            raise ValueError("must be more than nothing")
        return value


class EngineConfig(Section):
    """Engine that trains and evaluates the models."""

    kind: EngineName = DEFAULT.name
    """An engine that trains: an option of `engine=`, or `module:ENGINE` for one of your own."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Fields of every model worker's spec, such as `micro_batch_tokens`; a role's own win."""


class RolloutConfig(Section):
    """Engine that samples from policies."""

    kind: RolloutName = SAME
    """`same`: the engine that trains. Others, options of `rollout=` or `module:ENGINE`, generate
    in processes of their own, which take turns with those that train where they are placed on the
    same devices; `torch` without a lag generates there in the processes that train."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Fields of the rollout worker's spec, such as `max_decode_rows`."""


class CheckpointConfig(Section):
    """Checkpoints that are kept beside those on the disk."""

    mirror: Literal["none", "neighbor"] = "none"
    """`neighbor`: the state after every step is kept in the machine's memory besides, outside the
    process that it belongs to, so that a death costs one step at most."""


class SuiteConfig(Section):
    """Problems to evaluate on besides the task's own."""

    task: TaskConfig
    """Source of its problems, as in the section `task`: its held-out problems, or all problems of a
    task that holds out none. `+task@evaluation.suites.NAME.task=chain_sum` takes an option of
    `task=`."""
    num_prompts: AtLeastOne | None = None
    """The first so many of them; by default at most as many as `evaluation.num_prompts`."""
    sampling: dict[str, Any] = Field(default_factory=dict[str, Any])
    """As `evaluation.sampling`, whose fields stay where they are not given here."""


class EvaluationConfig(Section):
    """Evaluation before, during and after training: accuracy, loss, or episodes' return."""

    every: AtLeastOne | None = None
    """Steps between evaluations during training; null for none but those before and after."""
    num_prompts: Count = 512
    """Most held-out problems of the task, or of each suite that it names; 0 evaluates none."""
    sampling: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Fields of `Sampling` to answer with; by default one greedy response per prompt
    (`temperature: 0`) of at most `task.max_response_tokens`. With `num_samples: 8` accuracy is the
    mean over 8 samples, and pass@2, pass@4 and pass@8 are measured beside it."""
    suites: dict[GroupName, SuiteConfig] = Field(default_factory=dict[str, SuiteConfig])
    """Further problems by name, each with a task of its own: `evaluation/NAME/accuracy`."""
    keep_best: Annotated[str, Field(min_length=1)] | None = None
    """A metric as logged below `evaluation/`: `accuracy`, `NAME/pass@4`, `actor/return`, `loss`.
    The checkpoint of the step where it was highest, or the loss lowest, is kept beside the newest
    ones."""
    stop_after: AtLeastOne | None = None
    """End the run once `keep_best` has not improved in so many evaluations."""
    num_examples: Count = 4
    """Problems whose responses are shown and kept."""
    num_episodes: Count = 20
    """Held-out episodes in environments, rounded up to as many in each; 0 plays none."""
    max_episode_steps: AtLeastOne = 10_000
    """A held-out episode that is longer counts with what was earned by then."""

    @model_validator(mode="after")
    def _is_reached(self) -> EvaluationConfig:
        if self.stop_after is not None and self.keep_best is None:
            raise ValueError("stop_after is set, but keep_best does not say which metric improves")
        if self.keep_best is not None and self.every is None:
            raise ValueError("keep_best is set, but every is null, so no step is evaluated")
        return self


class SamplesConfig(Section):
    """Responses of each step that are kept, for `penstock samples`."""

    max_rows: Annotated[int, Field(ge=0, le=100_000)] = 64
    """Responses of a step, whole prompts first; 0 keeps none."""
    keep_steps: AtLeastOne | None = None
    """Steps that are kept, the newest ones; null for all."""
    show_every: Count | None = None
    """Print one of the responses every so many steps; 0 prints none. null: on a terminal those of
    steps 1, 10, 100... and the last."""
    track_every: AtLeastOne | None = None
    """Give the responses of every so many steps to the trackers, as tables; null gives none."""
    max_mib: AtLeastOne = 256
    """Room that a stage's samples may take, compressed: once they take more, every second step is
    dropped, then every second of the rest."""


class PushConfig(Section):
    """The policy of each checkpoint as a model folder for others, while the run goes on."""

    folder: FileName | None = None
    """The folder to write, replaced each time; `pushed` in the run's folder if only `hub` is
    set."""
    hub: HubName | None = None
    """A repository `ORG/NAME` of the hub that HF_ENDPOINT names, to upload the folder to; the token
    is taken from HF_TOKEN."""
    private: bool = True
    """Whether a repository that is made for it is private."""


class TrackerConfig(Section):
    """Trackers of metrics besides metrics.jsonl, which is always written."""

    kind: str | None = "tensorboard"
    """`tensorboard`: event files in the run's folder. `wandb`: files there for `wandb sync`, unless
    its mode says otherwise. `mlflow`: `mlflow.db` in the folder of runs. `trackio`: Trackio's own
    folder. `prometheus`: an address on this machine. Or `module:factory` of a tracker of your own;
    null for nowhere."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of what makes the tracker."""
    also: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """More trackers beside it: kind -> its options, `tracker.also.prometheus.port=9400`."""

    @model_validator(mode="after")
    def _reads_options(self) -> TrackerConfig:
        if self.kind is None and self.options:
            raise ValueError(
                "options are set, but kind is null; choose a tracker, or leave them out"
            )
        if self.kind in self.also:
            raise ValueError(f"'{self.kind}' is kind and stands in also; leave one of them out")
        return self

    @property
    def all(self) -> dict[str, dict[str, Any]]:
        """Kind -> options, of every tracker."""
        return {**({self.kind: self.options} if self.kind else {}), **self.also}


class RunConfig(Section):
    """A whole run."""

    algorithm: AlgorithmConfig
    """The algorithm; see `algorithm=`."""
    model: ModelConfig
    """The model to train; see `model=`."""
    task: TaskConfig
    """The task to train on; see `task=`."""
    executor: ExecutorConfig = ExecutorConfig()
    """Where; see `executor=`."""
    engine: EngineConfig = EngineConfig()
    """Engine that trains and evaluates; see `engine=`."""
    rollout: RolloutConfig = RolloutConfig()
    """Engine that generates; see `rollout=`."""
    mismatch: MismatchLimits = MismatchLimits()
    """Limits beyond which two engines disagree."""
    placement: FileName = "auto"
    """`auto`: with several ranks the planner chooses where nodes run. Or the file of a plan, which
    `penstock plan output=FILE` wrote."""
    calibration: FileName | None = None
    """Result of `penstock profile` on this machine, for `placement: auto`; by default
    `calibration.json` in the folder of runs, if it is there."""
    task_profile: FileName | None = None
    """Result of `penstock profile task=... algorithm=...` for this task, for `placement: auto` of
    what has no language model: acting in environments, or verifiers; by default
    `task_profile.json` in the folder of runs. Or the folder of a run that was planned with one, for
    what it measured."""
    schedule: Schedule = Schedule()
    """Distance by which generation may run ahead of training; see `schedule=`."""
    tracker: TrackerConfig = TrackerConfig()
    """Trackers of metrics; see `tracker=`."""
    callbacks: list[str] = Field(default_factory=list[str])
    """Classes of your own that watch the steps and may end the run, `module:Class`, each derived
    from `penstock.StageObserver`."""
    push: PushConfig = PushConfig()
    """Models for others, written or uploaded while the run goes on."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Measurement of accuracy."""
    samples: SamplesConfig = SamplesConfig()
    """Responses that are kept."""
    seed: Seed = 0
    """All randomness of the run derives from it."""
    checkpoint_every: AtLeastOne = 50
    """Steps between checkpoints; one is always written at the end of a stage."""
    keep_checkpoints: AtLeastOne = 2
    """Checkpoints kept per stage, the newest ones."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints that are kept beside them."""
    recovery: Recovery = Recovery()
    """Reaction to processes that die."""
    name: GroupName | None = None
    """Name of the run, which its folder has between date and seed; the algorithm's by default."""
    runs: FileName = "runs"
    """The folder in which run folders are made."""
    progress: Literal["auto", "plain", "quiet", "json"] = "auto"
    """Display of a run's progress. `auto`: a live line on a terminal, else as `plain`: lines now
    and then. `quiet`: warnings, errors and the last line. `json`: an object per line on standard
    output."""


StepKept = Annotated[int, Field(ge=0)] | Literal["best"] | None


class EvalConfig(Section):
    """Keys of `penstock eval` besides those of a run."""

    run: FileName | None = None
    """A run's folder, whose policy is evaluated; null for the section `model`."""
    step: StepKept = None
    """Step of the run: steps that were complete at a checkpoint, or `best`; by default the
    newest."""
    output: FileName | None = None
    """A JSON file for what was found, problem by problem."""


class ExportConfig(Section):
    """Keys of `penstock export`."""

    run: FileName
    """A run's folder; the run may be going on."""
    step: StepKept = None
    """Steps that were complete at one of its checkpoints, or `best`; by default the newest."""
    role: str | None = None
    """Name of a trained role; the policy by default."""
    adapter: bool = False
    """Write the adapter alone, as peft reads it, instead of the model that it is merged into."""
    output: FileName | None = None
    """The folder to write, new or empty; by default `RUN-step-N` in the working directory."""
    push: HubName | None = None
    """A repository `ORG/NAME` of the hub that HF_ENDPOINT names, to upload the folder to; the token
    is taken from HF_TOKEN."""
    private: bool = True
    """Whether a repository that is made for it is private."""


def model_spec(config: ModelConfig, **architecture: Any) -> ModelSpec:
    """The `ModelSpec` of a model section; `architecture` adds fields that are not set there."""
    if config.folder is not None:
        return ModelSpec(folder=config.folder, dtype=config.precision)
    return ModelSpec(
        architecture={**architecture, **config.architecture},
        init_seed=config.init_seed,
        dtype=config.precision,
    )


Width = Annotated[int, Field(ge=16, le=1 << 16, multiple_of=16)]
"""Width of a model, whose heads are 16 wide or more."""


class ClusterConfig(Section):
    """The cluster that a plan is for: equal nodes, or groups of them."""

    name: FileName
    """Name of the cluster in the plan."""
    num_nodes: AtLeastOne = 1
    """Nodes; all equal."""
    devices_per_node: AtLeastOne = 8
    """Devices in each."""
    cores_per_node: AtLeastOne | None = None
    """Processor cores of each, where environments and verifiers compute; by default one for each
    device of a CPU, and not known of others."""
    host_bytes: Annotated[int, Field(ge=1, le=1 << 60)] | None = None
    """Host memory of each, for processes; not known if null."""
    device: DeviceSpec | None = None
    """The devices; or the name of a cluster whose device it is: `device: h100`."""
    within: LinkSpec | None = None
    """Between devices of one node; that cluster's, if `device` is a name."""
    between: LinkSpec | None = None
    """Between devices of different nodes."""
    node_groups: list[NodeGroup] = Field(default_factory=list[NodeGroup])
    """For a mixed cluster, instead of the keys of its nodes: a list of groups with those keys."""


class WorkloadConfig(Section):
    """Amount of work of one step. What is null follows from the algorithm and the task."""

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
    """Fixed parts of the plan.

    A call group is a role, or a call of a trained role that does not train it: "critic.value".
    """

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
    num_processes: dict[str, AtLeastOne] = Field(default_factory=dict[str, int])
    """Role that verifies -> processes of each of its ranks."""
    acting: ActingPins = ActingPins()
    """Where acting in environments or games happens, of a step without a language model."""


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


class PlanConfig(Section):
    """Keys of a plan besides those of the run it is for."""

    cluster: ClusterConfig
    """Where; see `cluster=`."""
    workload: WorkloadConfig = WorkloadConfig()
    """Amount of work of one step."""
    plan: PlanOptions = PlanOptions()
    """The search."""


class ProfileConfig(Section):
    """The measurement, and where the result goes."""

    output: FileName = "runs/calibration.json"
    """The file to write; a run looks for `calibration.json` in the folder of its runs."""
    device: Literal["cpu", "cuda"] = "cpu"
    """`cpu`: each device of the plan is a share of the cores. `cuda`: each is a CUDA device."""
    num_ranks: Annotated[int, Field(ge=1, le=64)] | None = None
    """Devices, on a cluster those of each machine; by default one per CUDA device, or one per core
    up to eight."""
    num_threads: AtLeastOne | None = None
    """Torch threads of each rank; by default the cores are shared out."""
    dispatch: ExecutorName = PARALLEL_EXECUTOR
    """The executor with which the cost of a call is measured. If it has joined a cluster
    (`RAY_ADDRESS`), all machines of that are measured instead of this one."""
    widths: Annotated[list[Width], Field(min_length=1)] | None = None
    """Hidden sizes of the models that are timed; by default 64 to 512, or 512 to 4096 on CUDA."""
    dtypes: Annotated[list[Literal["float32", "bfloat16"]], Field(min_length=1)] | None = None
    """Weight types; by default bfloat16 on CUDA, and on a CPU float32 and, where the processor
    computes it fast, bfloat16."""
    rows: Annotated[int, Field(ge=1, le=1 << 16)] = 16
    """Rows of a timed training call; the others follow from it."""
    seconds: Annotated[float, Field(gt=0)] = 0.5
    """Seconds for which each thing is repeated, about; longer is steadier."""
    deadline_s: Annotated[float, Field(gt=0)] = 900.0
    """Seconds after which to give up."""


class TaskProfileConfig(Section):
    """Keys of `penstock profile` besides those of the run whose task is measured."""

    output: FileName = "runs/task_profile.json"
    """The file to write; a run looks for `task_profile.json` in the folder of its runs."""
    seconds: Annotated[float, Field(gt=0, le=60)] = 2.0
    """Seconds for which each thing is repeated, about; longer is steadier."""
