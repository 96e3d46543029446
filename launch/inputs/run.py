"""From a composed configuration to a `Run`, the one object that goes on to its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from ...configs.references import entry_or_own
from ...configs.schema import ExecutorConfig, ModelConfig, RunConfig
from ...configs.validate import check_finite, validated
from ...dataflow.errors import ConfigError, PlanError
from ...dataflow.graph.graph import Node
from ...dataflow.runtime.engine import Source
from ...planner.cost.calibration import Calibration
from ...planner.inputs.cluster import ClusterSpec
from ...planner.plan.plan import Plan
from ...workers.data.task import DataReport, TaskSpec
from ...workers.executors.registry import EXECUTORS, ExecutorKind
from ...workers.models.architecture import checked_config
from .data import Data, task_spec_of
from .engines import MODEL_TYPE, Engines, engines_of
from .record import Stage, load_step, recorded, step_cfg
from .suites import HeldOut, HeldOutRows, Suite

AUTO = "auto"  # as `placement`: let the planner choose
_HERE = "__main__:"  # before the name of what a script or a notebook defines itself
_LATER: Any = None  # a field that `prepare` fills in


@dataclass(frozen=True)
class Run:
    """A run, as far as it is known: `resolve` makes it, and `prepare` completes it."""

    # the configuration, with a local folder, a precision and a vocabulary in its section `model`,
    # with a device and threads in `executor`
    config: RunConfig
    stages: tuple[Stage, ...]  # what is trained, in order; the main one last
    engines: Engines  # what trains and generates
    spec: TaskSpec  # the recipe of the task
    # where it runs, if that was described or joined; otherwise this machine
    cluster: ClusterSpec | None = None
    # role's start as written -> the same with the commit of a hub's model that it is
    snapshots: Mapping[str, str] = field(default_factory=dict[str, str])
    plan: Plan | None = None  # where the main stage's nodes run; None until that is decided
    # what was chosen for it, or why nothing was, in one line; "" if nothing was to choose
    note: str = ""
    data: Data = _LATER
    # for each stage, a source for every table it reads
    sources: Mapping[str, Mapping[str, Source]] = _LATER
    suites: tuple[Suite, ...] = ()  # the problems to measure accuracy on
    held_out_rows: HeldOutRows | None = None  # rows that the main stage's loss is measured on
    reports: tuple[DataReport, ...] = ()  # what was left out of the data, for each way it is read
    # tokens of the longest prompt with its response that any stage or its evaluation samples; None
    # if unknown
    longest_sequence: int | None = None

    @property
    def main(self) -> Stage:
        return self.stages[-1]

    @property
    def placed(self) -> Plan:
        assert self.plan is not None, "nothing has been placed yet"
        return self.plan

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def executor(self) -> ExecutorConfig:
        return self.config.executor

    @property
    def held_out(self) -> HeldOut | None:
        """The problems of the suite that has no name; None if there is none."""
        return next((suite.prompts for suite in self.suites if not suite.name), None)

    def having(self, **sections: Any) -> Run:
        return replace(self, config=self.config.model_copy(update=sections))


def executor_kind(name: str, at: str = "executor.kind") -> ExecutorKind:
    return entry_or_own(name, EXECUTORS, at, "executor", ExecutorKind)


def run_config(composed: Mapping[str, Any]) -> RunConfig:
    """The validated configuration of a run; the algorithms' own configs are not looked at yet."""
    config = validated(RunConfig, composed)
    check_finite(composed, "")  # of options that are a worker's or a tracker's as well
    return config


def resolve(config: RunConfig, device: str | None = None) -> Run:
    """Resolve a run's configuration, for a device that the machines have; None to look."""
    if config.calibration is not None:
        check_calibration(Path(config.calibration))
    _check_executor(config)
    stages = recorded(config.algorithm, config.seed)
    architecture = config.model.architecture
    # The networks of actors in environments are another section's, and looked at there.
    if architecture and architecture.get("model_type") != MODEL_TYPE:
        checked_config(architecture)
    for stage in stages[:-1]:
        for role, given in stage.config.roles.items():
            for key in ("engine", "rollout"):
                if getattr(given, key) is not None:
                    raise ConfigError(
                        f"'{stage.at}.roles.{role}.{key}' is set, but the roles of an earlier "
                        "stage run on the engines that the main one's have\n    set "
                        f"algorithm.roles.{role}.{key} instead"
                    )
    for node in (node for stage in stages for node in stage.graph.nodes):
        _check_two_hot(node, architecture)
        if node.leader is not None:
            _check_follower(node, config.model.dtype)
    engines = engines_of(config.engine, config.rollout, config.algorithm)
    config = config.model_copy(update={"executor": on_a_device(config, device)})
    return Run(config, stages, engines, task_spec_of(config.task))


def resolved(composed: Mapping[str, Any]) -> Run:
    return resolve(run_config(composed))


def _check_two_hot(node: Node, architecture: Mapping[str, Any]) -> None:
    weighs = architecture.get("value_bins") is not None
    for loss in node.constants.values():
        two_hot = getattr(loss, "two_hot", None)
        if two_hot is None or two_hot == weighs:
            continue
        if weighs:
            raise ConfigError(
                f"the critic that '{node.name}' trains weighs values (model.architecture."
                "value_bins), and its loss is a squared error\n    leave value_bins out, or set"
                " two_hot of the loss: algorithm.cfg.loss.two_hot=true (env_ppo, a2c), "
                "algorithm.cfg.learning.loss.two_hot=true (self_play, population)"
            )
        raise ConfigError(
            f"the loss of '{node.name}' is two_hot, and its critic says one value\n    set "
            "model.architecture.value_bins=255, or leave two_hot out"
        )


def _check_follower(node: Node, dtype: str) -> None:
    share, every = node.constants.get("share", 1.0), node.constants.get("every", 1)
    at = f"{node.where}\nnode '{node.name}'"
    if not 0 < share <= 1:
        raise ConfigError(f"{at} follows with share={share}; expected above 0, at most 1")
    if not (isinstance(every, int) and every >= 1):
        raise ConfigError(f"{at} follows with every={every}; expected a whole number of steps")
    if share < 1 and dtype == "bfloat16":
        raise ConfigError(
            f"{at} averages weights (share={share}), but 'model.dtype' is '{dtype}', and 16 "
            "bits hold no change smaller than 1/256 of a weight\n"
            "    set model.dtype=float32, or let it copy now and then: share=1.0, every=N"
        )


def _check_executor(config: RunConfig) -> None:
    kind = executor_kind(config.executor.kind)
    own = _named_here(config.model_dump(mode="json", exclude={"callbacks"}))
    if kind.has_processes and own:
        key, name = next(iter(own.items()))
        raise ConfigError(
            f"'{key}': '{name}' is known to this process alone, and executor={kind.name} has "
            "others compute steps\n    write it into a module, such as own.py, and name "
            f"own:{name.removeprefix(_HERE)}; or set executor=in_process"
        )
    if config.checkpoint.mirror == "neighbor" and not kind.has_processes:
        raise ConfigError(
            f"'checkpoint.mirror' is 'neighbor', but executor={kind.name} computes everything in "
            "one process, which has no neighbor to keep a copy\n    set executor=ray, or "
            "checkpoint.mirror=none and a smaller checkpoint_every"
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
    """Require the file of a profile, or a run's folder, which is read where it is used."""
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
    """
    section, device = config.executor, there
    if section.device != AUTO:
        return section
    if config.placement != AUTO and not section.groups:
        device = Plan.read(Path(config.placement)).groups[0].device.partition(":")[0]
    elif config.model.architecture.get("model_type") == MODEL_TYPE:
        device = "cpu"
    elif not device:
        import torch

        kind = executor_kind(section.kind)
        machines = kind.machines() if kind.is_installed else ()
        gpus = [machine for machine in machines if machine.total.get("GPU", 0) >= 1]
        device = "cuda" if gpus or (not machines and torch.cuda.is_available()) else "cpu"
    return section.model_copy(update={"device": device})


def check_model(model: ModelConfig) -> None:
    """Require weights to start from, which only a run needs."""
    folder = None if model.folder is None else Path(model.folder)
    if folder is not None and not (folder / "config.json").is_file():
        missing = "has no config.json" if folder.exists() else "does not exist"
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"'model.folder': '{model.folder}' holds an adapter and no model\n    give it as "
                "model.lora.folder, and the model that it was trained on as model=PATH"
            )
        raise ConfigError(
            f"'model.folder': '{model.folder}' {missing}\n    give a local folder that "
            "save_pretrained wrote, or a model of a hub: model=org/name"
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


def dumped(run: Run) -> dict[str, Any]:
    """Write a run's configuration as plain data with every default, for `run_config`."""
    # Where a model of a hub or a package lies is this machine's; its name and commit say which.
    if run.model.hub is not None or run.model.package is not None:
        run = run.having(model=run.model.model_copy(update={"folder": None}))
    data = run.config.model_dump(mode="json")
    main = data["algorithm"]
    _spell_out(main, "algorithm", run.snapshots)
    for name, before in main["before"].items():
        _spell_out(before, f"algorithm.before.{name}", run.snapshots)
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
