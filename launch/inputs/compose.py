"""From a composed configuration to what follows from it alone: `Resolved`.

It is validated and resolved once, here: steps are recorded, engines and the task are known by their
objects. What comes after (`placement`, `stages`) takes the parts that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from ...configs.references import entry_or_own
from ...configs.schema import (
    EvaluationConfig,
    ExecutorConfig,
    MismatchConfig,
    ModelConfig,
    RunConfig,
    SamplesConfig,
    TaskConfig,
)
from ...configs.validate import check_finite, validated
from ...dataflow.errors import ConfigError, PlanError
from ...dataflow.runtime.recovery.limits import Recovery
from ...dataflow.scheduler.schedule import Schedule
from ...planner.cost.calibration import Calibration
from ...planner.inputs.cluster import ClusterSpec
from ...planner.plan.plan import Plan
from ...workers.data.task import TaskSpec
from ...workers.executors.executor_kind import ExecutorKind
from ...workers.executors.registry import EXECUTORS
from ...workers.models.architecture import checked_config
from .data import task_spec_of
from .engines import Engines, engines_of, refuse_engines
from .env_specs import MODEL_TYPE, refuse_other_value_loss
from .record import Recorded, check_followers, load_step, recorded, step_cfg

AUTO = "auto"
"""As `placement`: let the planner choose."""


@dataclass(frozen=True)
class PlacementInputs:
    """Where nodes run, as configured.

    Attributes:
        executor: The section.
        placement: `AUTO`, or the file of a plan.
        calibration: The file of what was measured of this machine, if one is named.
        runs: The folder of runs, where one is looked for that is not named.
        cluster: What it is to run on, if that is described or was joined; otherwise this machine.
    """

    executor: ExecutorConfig
    placement: str
    calibration: str | None
    runs: Path
    cluster: ClusterSpec | None = None


@dataclass(frozen=True)
class Resolved:
    """A run as far as its configuration says, before any data or model is touched.

    Attributes:
        stages: Its algorithms with their graphs, the main one last.
        engines: What trains and generates.
        placement: What is said of where.
        model: What is trained.
        task: The section of the task.
        spec: The task it describes.
        schedule: How far generation may run ahead.
        mismatch: When to complain that two engines disagree.
        evaluation: How accuracy is measured.
        samples: What is kept of the responses.
        seed: Of all randomness.
        checkpoint_every: Steps between checkpoints.
        keep_checkpoints: How many are kept.
        recovery: How often it may go back when processes die.
        mirrored: Whether its state is kept in memory after every step.
        snapshots: Role's start as written -> the same with the commit of a hub's model that it is.
        longest_sequence: Tokens of the longest prompt with its response that any stage or its
            evaluation samples; None if unknown, as it is before the data is read.
    """

    stages: tuple[Recorded, ...]
    engines: Engines
    placement: PlacementInputs
    model: ModelConfig
    task: TaskConfig
    spec: TaskSpec
    schedule: Schedule
    mismatch: MismatchConfig
    evaluation: EvaluationConfig
    samples: SamplesConfig
    seed: int
    checkpoint_every: int
    keep_checkpoints: int
    recovery: Recovery = Recovery()
    mirrored: bool = False
    snapshots: Mapping[str, str] = field(default_factory=dict[str, str])
    longest_sequence: int | None = None

    @property
    def main(self) -> Recorded:
        """The algorithm that the run is for."""
        return self.stages[-1]


def run_config(composed: Mapping[str, Any]) -> RunConfig:
    """The validated configuration of a run; the algorithms' own configs are not looked at yet.

    Raises:
        ConfigError: For whatever in it is unknown, missing or of the wrong type.
    """
    config = validated(RunConfig, composed)
    check_finite(composed, "")  # of options that are a worker's or a tracker's as well
    return config


def resolve(config: RunConfig, device: str | None = None) -> Resolved:
    """Resolve a run's configuration.

    Args:
        config: The configuration.
        device: What the machines have on which it is to run; None to look.

    Raises:
        ConfigError: If a key, a role, a file or a size is wrong.
        FlowError: If a step is no valid graph.
        PlanError: If the calibration cannot be read.
    """
    if config.calibration is not None:
        check_calibration(Path(config.calibration))
    _check_known_elsewhere(config)
    recovery = _recovery_of(config)
    stages = recorded(config.algorithm, config.seed)
    check_architecture(config.model.architecture)
    for stage in stages[:-1]:
        refuse_engines(stage)
    for stage in stages:
        refuse_other_value_loss(stage.graph, config.model.architecture)
        check_followers(stage, config.model.dtype)
    return Resolved(
        stages=stages,
        engines=engines_of(config.engine, config.rollout, config.algorithm),
        placement=PlacementInputs(
            on_a_device(config, device), config.placement, config.calibration, Path(config.runs)
        ),
        model=config.model,
        task=config.task,
        spec=task_spec_of(config.task),
        schedule=config.schedule,
        mismatch=config.mismatch,
        evaluation=config.evaluation,
        samples=config.samples,
        seed=config.seed,
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep_checkpoints,
        recovery=recovery,
        mirrored=config.checkpoint.mirror == "neighbor",
    )


def _recovery_of(config: RunConfig) -> Recovery:
    """Return what to do when processes die."""
    kind = entry_or_own(config.executor.kind, EXECUTORS, "executor.kind", "executor", ExecutorKind)
    if config.checkpoint.mirror == "neighbor" and not kind.has_processes:
        raise ConfigError(
            f"'checkpoint.mirror' is 'neighbor', but executor={kind.name} computes everything in "
            "one process, which has no neighbor to keep a copy\n    set executor=ray, or "
            "checkpoint.mirror=none and a smaller checkpoint_every"
        )
    said = config.recovery
    longest_s = max(Recovery.longest_pause_s, said.pause_s)
    return Recovery(said.max_restarts, said.max_repeats, said.pause_s, longest_s)


_HERE = "__main__:"
"""Before the name of what a script or a notebook defines itself."""


def _check_known_elsewhere(config: RunConfig) -> None:
    """Refuse what the running program defines itself where other processes would need it."""
    kind = entry_or_own(config.executor.kind, EXECUTORS, "executor.kind", "executor", ExecutorKind)
    own = _named_here(config.model_dump(mode="json"))
    if kind.has_processes and own:
        key, name = next(iter(own.items()))
        raise ConfigError(
            f"'{key}': '{name}' is known to this process alone, and executor={kind.name} has "
            "others compute steps\n    write it into a module, such as own.py, and name "
            f"own:{name.removeprefix(_HERE)}; or set executor=in_process"
        )


def _named_here(value: Any, at: str = "") -> dict[str, str]:
    """Key -> a name of the running program's own."""
    if isinstance(value, Mapping):
        inner = cast("Mapping[str, Any]", value).items()
    elif isinstance(value, list):
        inner = ((str(number), one) for number, one in enumerate(cast("list[Any]", value)))
    else:
        return {at: value} if isinstance(value, str) and value.startswith(_HERE) else {}
    found: dict[str, str] = {}
    for name, one in inner:
        found |= _named_here(one, f"{at}.{name}" if at else name)
    return found


def check_calibration(path: Path) -> None:
    """Require the file of a profile, or a run's folder, which is read where it is used.

    Raises:
        PlanError: If it is neither.
    """
    if not path.is_dir():
        Calibration.read(path)
    elif not (path / "plan.json").is_file():
        raise PlanError(
            f"calibration {path}: it is no run's folder\n    give runs/ID, or the file of a profile"
        )


def on_a_device(config: RunConfig, there: str | None = None) -> ExecutorConfig:
    """The section with a device: that of a plan's file, the best one there, the CPU of perceptrons.

    The best one is looked for on the cluster that the executor has joined, or else on this machine,
    unless it is said what is `there`.

    Raises:
        PlanError: If the file of a plan cannot be read.
    """
    section = config.executor
    if section.device != AUTO:
        return section
    if config.placement != AUTO and not section.groups:
        device = Plan.read(Path(config.placement)).groups[0].device.partition(":")[0]
    elif config.model.architecture.get("model_type") == MODEL_TYPE:
        device = "cpu"
    else:
        device = there or _best_device(section)
    return section.model_copy(update={"device": device})


def _best_device(section: ExecutorConfig) -> str:
    import torch

    kind = entry_or_own(section.kind, EXECUTORS, "executor.kind", "executor", ExecutorKind)
    machines = kind.machines() if kind.is_installed else ()
    gpus = [machine for machine in machines if machine.total.get("GPU", 0) >= 1]
    return "cuda" if gpus or (not machines and torch.cuda.is_available()) else "cpu"


def resolved(composed: Mapping[str, Any]) -> Resolved:
    """Both at once; raises as they do."""
    return resolve(run_config(composed))


def check_architecture(architecture: Mapping[str, Any]) -> None:
    """Refuse keys that a Hugging Face model does not have, and values it cannot be made with.

    The networks of actors in environments are another section's, and looked at there.

    Raises:
        ConfigError: Naming the key.
    """
    if architecture and architecture.get("model_type") != MODEL_TYPE:
        checked_config(architecture)


def check_model(model: ModelConfig) -> None:
    """Require weights to start from, which only a run needs.

    Raises:
        ConfigError: If the section describes no model, two, or one without a tokenizer.
    """
    folder = model.folder
    if folder is not None and not (Path(folder) / "config.json").is_file():
        missing = "does not exist" if not Path(folder).exists() else "has no config.json"
        if (Path(folder) / "adapter_config.json").is_file():
            raise ConfigError(
                f"'model.folder': '{folder}' holds an adapter and no model\n    give it as "
                "model.lora.folder, and the model that it was trained on as model=PATH"
            )
        raise ConfigError(
            f"'model.folder': '{folder}' {missing}\n    give a local folder that save_pretrained "
            "wrote, or a model of a hub: model=org/name"
        )
    if folder is None and not model.architecture:
        raise ConfigError(
            "'model' has neither a folder nor an architecture\n"
            "    choose one: model=tiny, model=smollm2-135m, model=org/name or model=PATH"
        )
    if folder is not None and model.architecture:
        raise ConfigError(
            "'model' has both a folder and an architecture\n"
            "    to start from a folder, choose model=PATH; in an experiment's file, have "
            "'override /model: folder' in its defaults and set model.folder"
        )
    if folder is None and model.tokenizer == "folder":
        raise ConfigError(
            "'model.tokenizer' is 'folder', but 'model.folder' is not set\n"
            "    set model.tokenizer=task, or give a model folder"
        )


def dumped(config: RunConfig, run: Resolved) -> dict[str, Any]:
    """A run's configuration as plain data, every default spelled out; `run_config` reads it back.

    Args:
        config: As composed.
        run: What came of it: threads and the size of the vocabulary may have been added.
    """
    # Where a model of a hub or a package lies is this machine's; its name and commit say which.
    here = {} if run.model.hub is None and run.model.package is None else {"folder": None}
    model = run.model.model_copy(update=here)
    found = {"executor": run.placement.executor, "model": model}
    data = config.model_copy(update=found).model_dump(mode="json")
    _spell_out(data["algorithm"], "algorithm", run.snapshots)
    options = TypeAdapter(type(run.spec)).dump_python(run.spec, mode="json")
    data["task"] = {**options, **data["task"]}
    return data


def _spell_out(algorithm: dict[str, Any], at: str, snapshots: Mapping[str, str]) -> None:
    step = load_step(algorithm["step"], f"{at}.step")
    for cfg in step_cfg(step, algorithm["cfg"], f"{at}.cfg").values():
        algorithm["cfg"] = TypeAdapter(type(cfg)).dump_python(cfg, mode="json")
    for role in algorithm["roles"].values():
        role["start"] = snapshots.get(role["start"], role["start"])
        mean = role["start_mean"]
        role["start_mean"] = {snapshots.get(start, start): mean[start] for start in mean}
    for name, before in algorithm["before"].items():
        _spell_out(before, f"{at}.before.{name}", snapshots)
