"""Checkpoints on disk: complete or absent, verified before use, never the only good one removed.

    step-00000042.writing/   being filled by the caller, while the run goes on
        manifest.json        written last: size and SHA-256 of every file
    step-00000042/           the same folder after one rename

A checkpoint is one whose name has no suffix and whose files match its manifest. Whatever else a
stopped process leaves behind carries a suffix and is removed by the next one. One process at a time
writes to a store. What the files mean is the business of those who write them.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

from ...dataflow.errors import ConfigError
from ...dataflow.files import WrittenFile, disk_refusal, read_json, writing
from .files import file_sha256, sync, write_json

_MANIFEST = "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"step-\d{8,}")
_LEFTOVER = re.compile(r"step-\d{8,}\.(writing|retired)")


class CheckpointWarning(UserWarning):
    """A checkpoint on disk cannot be used; an older one is taken instead."""


class _Entry(TypedDict):
    size_bytes: int
    sha256: str


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self.kept: frozenset[int] = frozenset()
        self._missed: set[int] = set()
        self._good: set[Path] = set()

    def begin(self, step: int) -> Path:
        """Return a folder to fill for the checkpoint of `step`, which counts once it is sealed.

        If it is not, or the process stops, the checkpoints that were there are untouched.
        """
        self.folder.mkdir(exist_ok=True)
        self._clean()
        draft = self._draft(step)
        draft.mkdir()
        return draft

    def seal(self, step: int, written: Mapping[str, WrittenFile]) -> str:
        """Complete a checkpoint, then remove older ones beyond `keep`.

        A usable checkpoint of the same step is replaced only once the new one is complete. Returned
        is why older ones could not be removed; "" if they were.
        """
        draft, final = self._draft(step), self.folder / _name(step)
        try:
            with writing(draft):
                _seal(draft, step, written)
            if final.exists():
                _retire(final)
            draft.rename(final)
            sync(self.folder)
        except BaseException:
            self.abandon(step)
            raise
        self._good.add(final)
        self._missed.discard(step)
        try:
            with writing(self.folder):
                self._prune()
        except OSError as error:
            said = disk_refusal(error)
            if said is None:
                raise
            return said
        return ""

    def abandon(self, step: int) -> None:
        shutil.rmtree(self._draft(step), ignore_errors=True)

    def missed(self, step: int) -> None:
        self._missed.add(step)

    @property
    def num_missed(self) -> int:
        return len(self._missed)

    def warn(self, text: str) -> None:
        warnings.warn(text, CheckpointWarning, stacklevel=2)

    def _draft(self, step: int) -> Path:
        return self.folder / f"{_name(step)}.writing"

    def latest(self) -> Path | None:
        """The newest checkpoint whose every byte is as it was written, or None.

        Leftovers of interrupted writes are removed. A checkpoint that does not verify is passed
        over with a `CheckpointWarning` saying what is wrong with it, and is left for inspection.
        """
        self._clean()
        for folder in reversed(checkpoints_in(self.folder).values()):
            fault = fault_of(folder)
            if fault is None:
                self._good.add(folder)
                return folder
            self._good.discard(folder)
            self.warn(
                f"checkpoint {folder} cannot be used: {fault}; looking for an older one. "
                "Delete the folder to silence this."
            )
        return None

    def _clean(self) -> None:
        if not self.folder.exists():
            return
        entries = [*self.folder.iterdir()] if self.folder.is_dir() else []
        for path in (self.folder, *(path for path in entries if _NAME.fullmatch(path.name))):
            if not path.is_dir():
                raise ConfigError(f"'{path}' is a file where a folder belongs\n    remove it")
        for path in entries:
            if not _LEFTOVER.fullmatch(path.name):
                continue
            final = path.with_suffix("")
            if path.suffix == ".retired" and not final.exists() and fault_of(path) is None:
                # Stopped between setting it aside and naming its replacement, or removing it.
                path.rename(final)
            else:
                shutil.rmtree(path)
        sync(self.folder)

    def _prune(self) -> None:
        num_good = 0
        for folder in reversed(checkpoints_in(self.folder).values()):
            if num_good >= self.keep and _step(folder) in self.kept:
                continue
            if num_good >= self.keep:
                self._good.discard(folder)
                shutil.rmtree(_retire(folder))
            elif folder in self._good or fault_of(folder) is None:
                self._good.add(folder)
                num_good += 1
        for path in self.folder.glob("step-*.retired"):
            shutil.rmtree(path)
        sync(self.folder)


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Step -> the folder with its checkpoint's name, oldest first, verified or not.

    Nothing is changed: this is for those who read the checkpoints of a run that is going on.
    """
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)]
    steps = {_step(path): path for path in found if path.is_dir()}
    return dict(sorted(steps.items()))


def _step(folder: Path) -> int:
    return int(folder.name[5:])


def fault_of(folder: Path) -> str | None:
    try:
        found = set(_files(folder)) - {_MANIFEST}
        entries = _read_manifest(folder)
        for name, entry in sorted(entries.items()):
            if name not in found:
                return f"file '{name}' is missing"
            size = (folder / name).stat().st_size
            if size != entry["size_bytes"]:
                return f"file '{name}' has {size} bytes, expected {entry['size_bytes']}"
            if file_sha256(folder / name) != entry["sha256"]:
                return f"file '{name}' has another SHA-256 than when it was written"
        extra = sorted(found - set(entries))
        return f"file '{extra[0]}' is not in {_MANIFEST}" if extra else None
    except (OSError, ValueError, RecursionError) as error:
        return str(error)


def _read_manifest(folder: Path) -> dict[str, _Entry]:
    try:
        content: Any = read_json(folder / _MANIFEST)
        version, step, entries = content["format"], content["step"], content["files"]
        well_formed = all(
            isinstance(entry["size_bytes"], int) and isinstance(entry["sha256"], str)
            for entry in entries.values()
        )
    except FileNotFoundError:
        raise ValueError(f"{_MANIFEST} is missing, so the write never finished") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{_MANIFEST} is damaged ({type(error).__name__}: {error})") from error
    if not well_formed:
        raise ValueError(f"{_MANIFEST} is damaged (an entry has no size or no SHA-256)")
    if version != _FORMAT:
        raise ValueError(f"{_MANIFEST} has format {version!r}, this version reads {_FORMAT}")
    if folder.name.partition(".")[0] != _name(step):
        raise ValueError(f"{_MANIFEST} is that of step {step!r}")
    return cast(dict[str, _Entry], entries)


def _name(step: object) -> str:
    return f"step-{step:08d}" if isinstance(step, int) else ""


def _seal(folder: Path, step: int, written: Mapping[str, WrittenFile]) -> None:
    files: dict[str, _Entry] = {}
    for name in sorted({*_files(folder), *written}):
        path, known = folder / name, written.get(name)
        size_bytes = path.stat().st_size
        if known is None:
            sync(path)
            files[name] = {"size_bytes": size_bytes, "sha256": file_sha256(path)}
            continue
        if known.size_bytes != size_bytes:
            raise ValueError(f"'{path}' has {size_bytes} bytes, {known.size_bytes} were written")
        files[name] = {"size_bytes": size_bytes, "sha256": known.sha256}
    if _MANIFEST in files:
        raise ValueError(f"a checkpoint's own file may not be called {_MANIFEST}")
    for path in folder.rglob("*"):
        if path.is_dir():
            sync(path)
    write_json(folder / _MANIFEST, {"format": _FORMAT, "step": step, "files": files})


def _files(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"'{path.relative_to(folder)}' is neither a plain file nor a folder")
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def _retire(folder: Path) -> Path:
    retired = folder.with_name(f"{folder.name}.retired")
    folder.rename(retired)
    return retired
