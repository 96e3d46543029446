"""From a composed configuration to a `Run`: validated, steps recorded, engines and task found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from ...configs.schema import ExecutorConfig, ModelConfig, RunConfig
from ...configs.validate import check_finite, validated
from ...dataflow.errors import ConfigError, PlanError
from ...planner.cost.calibration import Calibration
from ...planner.plan.plan import Plan
from ...workers.models.architecture import checked_config
from .data import task_spec_of
from .engines import engines_of, refuse_engines
from .env_specs import MODEL_TYPE, refuse_other_value_loss
from .record import check_followers, load_step, recorded, step_cfg
from .run import Run, executor_kind

AUTO = "auto"
"""As `placement`: let the planner choose."""


def run_config(composed: Mapping[str, Any]) -> RunConfig:
    """The validated configuration of a run; the algorithms' own configs are not looked at yet.

    Raises:
        ConfigError: For whatever in it is unknown, missing or of the wrong type.
    """
    config = validated(RunConfig, composed)
    check_finite(composed, "")  # of options that are a worker's or a tracker's as well
    return config


def resolve(config: RunConfig, device: str | None = None) -> Run:
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
    _check_mirror(config)
    stages = recorded(config.algorithm, config.seed)
    check_architecture(config.model.architecture)
    for stage in stages[:-1]:
        refuse_engines(stage)
    for stage in stages:
        refuse_other_value_loss(stage.graph, config.model.architecture)
        check_followers(stage, config.model.dtype)
    engines = engines_of(config.engine, config.rollout, config.algorithm)
    config = config.model_copy(update={"executor": on_a_device(config, device)})
    return Run(config, stages, engines, task_spec_of(config.task))


def _check_mirror(config: RunConfig) -> None:
    kind = executor_kind(config.executor.kind)
    if config.checkpoint.mirror == "neighbor" and not kind.has_processes:
        raise ConfigError(
            f"'checkpoint.mirror' is 'neighbor', but executor={kind.name} computes everything in "
            "one process, which has no neighbor to keep a copy\n    set executor=ray, or "
            "checkpoint.mirror=none and a smaller checkpoint_every"
        )


_HERE = "__main__:"
"""Before the name of what a script or a notebook defines itself."""


def _check_known_elsewhere(config: RunConfig) -> None:
    """Refuse what the running program defines itself where other processes would need it."""
    kind = executor_kind(config.executor.kind)
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

    kind = executor_kind(section.kind)
    machines = kind.machines() if kind.is_installed else ()
    gpus = [machine for machine in machines if machine.total.get("GPU", 0) >= 1]
    return "cuda" if gpus or (not machines and torch.cuda.is_available()) else "cpu"


def resolved(composed: Mapping[str, Any]) -> Run:
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


def dumped(run: Run) -> dict[str, Any]:
    """Write a run's configuration as plain data with every default, for `run_config`."""
    # Where a model of a hub or a package lies is this machine's; its name and commit say which.
    if run.model.hub is not None or run.model.package is not None:
        run = run.having(model=run.model.model_copy(update={"folder": None}))
    data = run.config.model_dump(mode="json")
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
