"""A run's model: its name becomes a local folder, its precision `auto` a dtype.

Afterwards a run's model is a local folder or an architecture, in one precision. A run's config.yaml
records the snapshot and the precision, so that it goes on with the same elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

from ...configs.schema import ModelConfig, RoleConfig
from ...configs.validate import nearest_key
from ...dataflow.errors import ConfigError
from ...workers.models.hub import PACKAGED, hub_folder, is_hub_id, packaged_folder
from ...workers.models.model_folder import folder_config
from ..inputs.compose import AUTO
from ..inputs.record import Stage, averages
from ..inputs.run import Run
from ..run_dir.stop import say
from .machine import has_fast_bfloat16


def with_models(run: Run) -> Run:
    """The run with a precision and a model that are here.

    Of a model of a hub all but the weights is downloaded: what is wrong with the rest of a run
    should not be said after a hundred gigabytes. One of a package is converted.
    """
    device = run.executor.device
    in_float32 = any(map(averages, run.stages))
    model = local_model(run.model)
    cluster = run.cluster if device.startswith("cuda") else None

    def is_fast() -> bool:
        if cluster is not None:
            return cluster.computes_faster("bfloat16")
        return has_fast_bfloat16(device)

    model = with_dtype(model, lambda: not in_float32 and is_fast())
    model = model.model_copy(update={"lora": model.lora.resolved()})
    return _with_starts(run.having(model=model))


def _with_starts(run: Run) -> Run:
    """With folders in place of the models of hubs and packages that roles start from."""
    snapshots: dict[str, str] = {}
    names = {stage.name for stage in run.stages}
    stages: list[Stage] = []
    for stage in run.stages:
        roles: dict[str, RoleConfig] = {}
        for role, given in stage.config.roles.items():
            at = f"{stage.at}.roles.{role}.start"
            starts = [start for start in (given.start, *given.start_mean) if start is not None]
            found = {start: _local_start(start, at, names, snapshots) for start in starts}
            mean = {found[start]: share for start, share in given.start_mean.items()}
            start = None if given.start is None else found[given.start]
            roles[role] = given.model_copy(update={"start": start, "start_mean": mean})
        stages.append(replace(stage, config=stage.config.model_copy(update={"roles": roles})))
    return replace(run, stages=tuple(stages), snapshots=snapshots)


def _local_start(start: str, at: str, names: AbstractSet[str], snapshots: dict[str, str]) -> str:
    name, _, revision = start.partition("@")
    if start in names or Path(start).exists():
        return start
    if start in PACKAGED:
        return str(packaged_folder(start, say))
    if not is_hub_id(name):
        return start
    folder = hub_folder(name, revision or None, weights=False, key=at)
    snapshots[start] = f"{name}@{folder.name}"
    return str(folder)


def fetch_weights(run: Run) -> None:
    """Download the weights that were left out."""
    wanted = [("algorithm.roles", snapshot) for snapshot in run.snapshots.values()]
    if run.model.hub is not None:
        wanted.append(("model.hub", f"{run.model.hub}@{run.model.revision}"))
    for key, snapshot in wanted:
        name, _, commit = snapshot.partition("@")
        folder_config(hub_folder(name, commit, weights=False, key=key))
        hub_folder(name, commit, weights=True, key=key)


def local_model(model: ModelConfig) -> ModelConfig:
    """The section with the folder of its model, if that is in a hub or a package."""
    named = [key for key in ("hub", "package", "folder", "architecture") if getattr(model, key)]
    if len(named) > 1 and named[0] in ("hub", "package"):
        raise ConfigError(
            f"'model' has '{named[0]}' and '{named[1]}', and is one thing only\n    choose "
            "model=org/name, model=PATH or an option of model=, which set nothing else"
        )
    if model.revision is not None and model.hub is None:
        raise ConfigError(
            "'model.revision' is set, but only models of a hub have revisions\n    leave it out, "
            "or choose model=org/name"
        )
    if model.hub is not None:
        folder = hub_folder(model.hub, model.revision, weights=False)
        return model.model_copy(update={"folder": str(folder), "revision": folder.name})
    if model.package is not None:
        if model.package not in PACKAGED:
            raise ConfigError(
                f"'model.package': there is no model '{model.package}'"
                f"{nearest_key(model.package, PACKAGED)}\n    models in packages are: "
                f"{', '.join(PACKAGED)}"
            )
        return model.model_copy(update={"folder": str(packaged_folder(model.package, say))})
    return model


def with_dtype(model: ModelConfig, is_fast: Callable[[], bool]) -> ModelConfig:
    """The section with a precision: 16 bits for trained weights where they are computed faster.

    Random weights stay in float32: small models that begin from nothing learn better so.
    """
    if model.dtype != AUTO:
        return model
    dtype = "bfloat16" if model.folder is not None and is_fast() else "float32"
    return model.model_copy(update={"dtype": dtype})
