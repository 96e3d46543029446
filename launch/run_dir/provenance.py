"""Origins of a run besides its configuration and its data, and what its processes use.

Origins are written into `run.json` when the run begins, and compared when it is resumed or
repeated: the version of every package, the machine, the code, the user's own modules, such as a
reward or a step, and the folders of models that roles start from. A module is hashed in full. Of a
large weight file, pieces are read: models of 100 GB are compared in seconds, and other weights
differ in some piece even if a few tensors were left as they were.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import Any

import psutil

from ... import __version__
from ...dataflow.errors import ConfigError, is_library
from ...dataflow.files import opened, read_bytes

_MOST_NAMED = 4  # packages that one line names


@dataclass(frozen=True)
class Origins:
    """The user's own files, the models, the packages and the machine that a run began with."""

    # A Python file, relative to the working directory if it is below that -> its SHA-256.
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    models: Mapping[str, str] = field(default_factory=dict[str, str])  # folder -> its files' hash
    versions: Mapping[str, str] = field(default_factory=dict[str, str])  # `python` among them
    hardware: Mapping[str, Any] = field(default_factory=dict[str, Any])


def origins_now(folders: Iterable[str], processor: str) -> Origins:
    """Return the origins of a run of these models' folders that began now."""
    import torch  # here: reading a record needs none of it

    hardware = {
        "processor": processor,
        # Processors of one name may have others, and torch rounds by them.
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        # Counted without asking a device for anything, which would take memory of it.
        "num_cuda_devices": torch.cuda.device_count(),
        "system": platform.platform(),
    }
    models = {folder: _model_hash(Path(folder)) for folder in folders}
    return Origins(_loaded_files(), models, _versions(), hardware)


def changed_versions(before: Origins, now: Origins) -> str:
    """`torch 2.12.0 -> 2.13.0, ray 2.50.0 -> none and 7 more`; "" if none has changed."""
    then, since = before.versions, now.versions
    if not then or not since:  # a run of an older version did not record them
        return ""
    names = [name for name in sorted({*then, *since}) if then.get(name) != since.get(name)]
    said = [f"{name} {then.get(name) or 'none'} -> {since.get(name) or 'none'}" for name in names]
    more = f" and {len(said) - _MOST_NAMED} more" if len(said) > _MOST_NAMED else ""
    return f"{', '.join(said[:_MOST_NAMED])}{more}"


def required(*, optional: bool = True) -> list[str]:
    """Return the packages that this one requires; none where it is not installed."""
    try:
        listed = requires("penstock-rl") or []
    except PackageNotFoundError:
        return []
    left_out = 'extra == "dev"' if optional else "extra =="
    return [*dict.fromkeys(re.split(r"[^\w.-]", one)[0] for one in listed if left_out not in one)]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for one in distributions():
        name: str | None = one.metadata["Name"]
        if name:  # a folder that an interrupted installation left has none
            found.setdefault(name.lower().replace("_", "-"), one.version)
    return dict(sorted(found.items()))


_MAX_MODULE_BYTES = 10_000_000  # a larger file is no module written by hand
# Of a model's file 2 MiB are hashed, evenly spaced, the first and the last bytes among them.
_NUM_PIECES, _PIECE_BYTES = 16, 128 * 1024


def changed_files(before: Origins, now: Origins) -> list[str]:
    """Return the recorded files that are not as they were; new ones make no difference.

    A file that has not been imported this time, for instance the script that started the run, is
    compared where it lies, unless another file of its name has been imported in its place.
    """
    new = {path: found for path, found in now.files.items() if path not in before.files}
    changed: list[str] = []
    for path, recorded in before.files.items():
        same_name = {found for one, found in new.items() if Path(one).name == Path(path).name}
        found = {now.files[path]} if path in now.files else same_name
        if recorded not in (found or {_file_hash(Path(path))}):
            changed.append(path)
    return changed


def check_models(run: str, before: Origins, now: Origins) -> None:
    for folder, found in now.models.items():
        recorded = before.models.get(folder, found)
        if recorded != found:
            raise ConfigError(
                f"run '{run}' was started from another model in '{folder}': the hash of its files "
                f"was {recorded} and is {found} now\n"
                "    bring the folder back as it was when the run began, or start a new run"
            )


def _loaded_files() -> dict[str, str]:
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


def _file_hash(path: Path) -> str | None:
    if path.suffix != ".py" or not path.is_file() or path.stat().st_size > _MAX_MODULE_BYTES:
        return None
    return hashlib.sha256(read_bytes(path)).hexdigest()


def _model_hash(folder: Path) -> str:
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


_ROOT = Path(__file__).resolve().parents[2]
_GIT_DEADLINE_S = 20.0


@dataclass(frozen=True)
class CodeVersion:
    """The version of Penstock's code."""

    package: str
    commit: str | None = None  # of the source tree; None outside one
    dirty: bool = False  # that tree differed from its commit

    def __str__(self) -> str:
        if self.commit is None:
            return self.package
        return f"{self.package} ({self.commit[:12]}{', changed' if self.dirty else ''})"


def code_version(root: Path = _ROOT) -> CodeVersion:
    top = _git(root, "rev-parse", "--show-toplevel")
    # A package installed below another repository does not take that repository's commit.
    if top is None or Path(top).resolve() != root.resolve():
        return CodeVersion(__version__)
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    status = _git(root, "status", "--porcelain")
    return CodeVersion(__version__, commit, status is None or status != "")


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


_LOG = logging.getLogger("penstock.launch")


class ProcessUsage:
    """Watches this process and all below it, while entered.

    The sum of resident memory counts pages that processes share once for each of them.
    """

    def __init__(self, every_s: float = 0.5) -> None:
        self.peak_bytes = 0
        self._every_s = every_s
        self._root = psutil.Process()
        self._cpu_s: dict[psutil.Process, float] = {}
        self._cpu_s_before = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="process-usage", daemon=True)

    def sample(self) -> int:
        total = 0
        for process in (self._root, *self._root.children(recursive=True)):
            try:
                total += process.memory_info().rss
                times = process.cpu_times()
                self._cpu_s[process] = times.user + times.system
            except psutil.NoSuchProcess:  # it ended between being listed and being asked
                continue
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu_s.values()) - self._cpu_s_before

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.sample()

    def __enter__(self) -> ProcessUsage:
        self.sample()
        self._cpu_s_before = sum(self._cpu_s.values())  # also of children that were there before
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        from ...dataflow.runtime.worker_protocol import CLOSE_S  # here: it needs torch

        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _LOG.warning(
                "taking a sample of memory has not ended in %g s; its peak is left out", CLOSE_S
            )
            return
        self.sample()
