"""From a checkpoint to what others can use: model folders in Hugging Face's layout, and a hash."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...dataflow.files import opened, writing
from ...dataflow.graph.role import Role, Worker
from ...dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec, is_spec
from ...workers.models.tokenizer import Tokenizer
from ...workers.training.flat_parameters import tensors_sha256


@dataclasses.dataclass(frozen=True)
class Exported:
    """The exported roles of a stage.

    Attributes:
        folders: Role name -> its model folder; workers that cannot write one are left out.
        weights_sha256: Role name -> hash over names, types, shapes and bytes of its weights.
    """

    folders: Mapping[str, Path]
    weights_sha256: Mapping[str, str]


def export_roles(
    roles: Mapping[str, WorkerSpec | Role],
    checkpoint: Path,
    tokenizer: Tokenizer | None,
    folder: Path,
    seed: int,
) -> Exported:
    """Write a model folder for every trained role, from the checkpoint that holds its state.

    The weights are read in this process whatever executor trained them, and written to a folder
    that is complete or absent.
    """
    folders: dict[str, Path] = {}
    hashes: dict[str, str] = {}
    for role, spec in roles.items():
        worker = restored(role, spec, checkpoint / role, seed)
        hashes[role] = tensors_sha256(worker.export_weights())
        draft = folder / f"{role}.writing"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        with writing(draft):
            if worker.save_pretrained(draft) is False:
                draft.rmdir()
                continue
            if tokenizer is not None:
                tokenizer.save(draft)
        shutil.rmtree(folder / role, ignore_errors=True)
        folders[role] = draft.rename(folder / role)
    return Exported(folders, hashes)


def restored(role: str, spec: WorkerSpec | Role, state: Path, seed: int) -> Worker:
    """A worker of this process as it was when its state was saved, which trains no further."""
    built: Any = spec
    if is_spec(spec):
        built = RestoredSpec(spec, state).build(WorkerContext(role, seed))
    return built


@dataclasses.dataclass(frozen=True)
class RestoredSpec:
    """Recipe for the worker of another recipe with a saved state; a `WorkerSpec`."""

    spec: WorkerSpec
    state: Path

    def build(self, context: WorkerContext) -> Any:
        """Build it without an optimizer and load the state."""
        spec: WorkerSpec = self.spec
        if dataclasses.is_dataclass(spec) and hasattr(spec, "optimizer"):
            frozen: Any = dataclasses.replace(spec, optimizer=None)  # type: ignore[type-var]
            spec = frozen
        built: Any = spec.build(context)
        built.load_state(self.state)
        return built


def files_sha256(folder: Path) -> dict[str, str]:
    """Path within the folder -> hash, of every file below it."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with opened(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = digest
    return found


def combined_sha256(hashes: Mapping[str, str]) -> str:
    """One hash for all trained roles: the only one's own, or that of `role:hash` lines."""
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    lines = "".join(f"{role}:{hashes[role]}\n" for role in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()
