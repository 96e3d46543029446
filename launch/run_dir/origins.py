"""What a run began with besides its configuration and its data, in files that anyone may replace.

Two kinds are recorded when a run begins and compared when it is resumed: the modules of the user's
own, such as a reward, a step or a worker, and the folders of models that roles start from. A
module is hashed in full. Of a large weight file, pieces are read: models of 100 GB are compared in
seconds, and other weights differ in some piece even if a few tensors were left as they were.
Configuration, data and Penstock's own code are compared elsewhere.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError, is_library
from ...dataflow.regular_files import opened, read_bytes

_MAX_MODULE_BYTES = 10_000_000
"""A larger file is no module that somebody wrote."""

_NUM_PIECES = 16
_PIECE_BYTES = 128 * 1024
"""Of a file of a model: 2 MiB in all, evenly spaced, the first and the last bytes among them."""


@dataclass(frozen=True)
class Origins:
    """What a run began with.

    Attributes:
        files: Python file of the user's -> SHA-256 of it; its path is relative to the working
            directory if the file is below that.
        models: Folder of a model, as configured -> hash over its files.
    """

    files: Mapping[str, str] = field(default_factory=dict[str, str])
    models: Mapping[str, str] = field(default_factory=dict[str, str])


def origins_of(folders: Iterable[str]) -> Origins:
    """What this process has begun with, once a run has been prepared in it.

    Args:
        folders: Folders of models.

    Raises:
        OSError: If a file cannot be read.
    """
    return Origins(_loaded_files(), {folder: _model_hash(Path(folder)) for folder in folders})


def changed_files(before: Origins, now: Origins) -> list[str]:
    """The recorded files that are not as they were; those that came later make no difference.

    A file that has not been imported this time, for instance the script that started the run, is
    compared where it lies, unless another file of its name has been imported in its place.
    """
    new = {path: found for path, found in now.files.items() if path not in before.files}
    changed: list[str] = []
    for path, recorded in before.files.items():
        found = {now.files[path]} if path in now.files else _of_name(Path(path).name, new)
        if recorded not in (found or {_file_hash(Path(path))}):
            changed.append(path)
    return changed


def check_models(run: str, before: Origins, now: Origins) -> None:
    """Refuse to go on from other models than the run began with.

    Args:
        run: The name of the run.
        before: What it began with; empty for a run of a version that did not record it.
        now: What is there.

    Raises:
        ConfigError: If the files of a folder differ.
    """
    for folder, found in now.models.items():
        recorded = before.models.get(folder, found)
        if recorded != found:
            raise ConfigError(
                f"run '{run}' was started from another model in '{folder}': the hash of its files "
                f"was {recorded} and is {found} now\n"
                "    bring the folder back as it was when the run began, or start a new run"
            )


def _loaded_files() -> dict[str, str]:
    """The imported files of the user's, and their hashes."""
    files: dict[str, str] = {}
    for module in list(sys.modules.values()):
        # Not getattr: a module that loads its members when they are asked for may load them all.
        fields: dict[str, Any] = getattr(module, "__dict__", {})
        file = fields.get("__file__")
        if not isinstance(file, str) or is_library(file):
            continue
        path, here = Path(file).resolve(), Path.cwd()
        found = _file_hash(path)
        if found is not None:
            files[str(path.relative_to(here) if path.is_relative_to(here) else path)] = found
    return files


def _of_name(name: str, files: Mapping[str, str]) -> set[str]:
    return {found for path, found in files.items() if Path(path).name == name}


def _file_hash(path: Path) -> str | None:
    """Of a Python file; None if there is none, or one that is too large to be a module."""
    if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _MAX_MODULE_BYTES:
        return None
    return hashlib.sha256(read_bytes(path)).hexdigest()


def _model_hash(folder: Path) -> str:
    """Of the names, sizes and pieces of a model's files: configuration, tokenizer and weights."""
    digest = hashlib.sha256()
    for path in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))):
        size_bytes = path.stat().st_size
        digest.update(f"{path.name}\n{size_bytes}\n".encode())
        last = max(0, size_bytes - _PIECE_BYTES)
        with opened(path) as file:
            for offset in sorted({last * n // (_NUM_PIECES - 1) for n in range(_NUM_PIECES)}):
                file.seek(offset)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:16]
