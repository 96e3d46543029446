"""The moments of `disk_full.py`: when they come, what happens then, and what the run must say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KEEP", "MOMENTS", "MOUNTS", "Moment", "chosen"]

KEEP = 2
"""Checkpoints that a run keeps."""

PAGE_BYTES = 4096
"""What a tmpfs gives out at once."""

_FILLER = "filler"


class _Mounts:
    """Mounts file systems in the namespace of this process."""

    def run(self, *words: object) -> None:
        """Run a command of mounting.

        Raises:
            RuntimeError: If it fails.
        """
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr}")

    @contextmanager
    def disk(self, folder: Path, size_bytes: int, num_inodes: int) -> Generator[None]:
        """A disk of its own at a folder, while the body runs."""
        folder.mkdir(exist_ok=True)
        size = f"size={size_bytes},nr_inodes={num_inodes}"
        self.run("mount", "-t", "tmpfs", "-o", size, "none", folder)
        try:
            yield
        finally:
            self.run("umount", "--recursive", "--lazy", folder)

    def read_only(self, folder: Path) -> None:
        """Let nobody write below a folder who has not opened a file there yet."""
        self.run("mount", "--bind", folder, folder)
        self.run("mount", "-o", "remount,bind,ro", folder)

    def tiny(self, folder: Path, spare_bytes: int) -> None:
        """Lay a disk over a folder that has room for names, and for so many bytes."""
        size_bytes = spare_bytes + PAGE_BYTES
        self.run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", folder)
        (folder / _FILLER).write_bytes(bytes(PAGE_BYTES))


MOUNTS = _Mounts()


def _fill_bytes(folder: Path, spare_bytes: int) -> None:
    """Use up all bytes of the folder's disk but so many."""
    descriptor = os.open(folder / _FILLER, os.O_CREAT | os.O_WRONLY, 0o600)
    for _ in range(1000):  # another thread may be writing, and take what was to be used up
        info = os.statvfs(folder)
        size_bytes = os.fstat(descriptor).st_size + info.f_bavail * info.f_frsize - spare_bytes
        with suppress(OSError):
            os.posix_fallocate(descriptor, 0, size_bytes)
            break
    os.close(descriptor)


def _fill_names(folder: Path) -> None:
    """Use up all inodes of the folder's disk, so that no file or folder can be made."""
    (folder / f"{_FILLER}s").mkdir()
    with suppress(OSError):
        for number in range(1 << 16):
            (folder / f"{_FILLER}s" / str(number)).touch()


@dataclass(frozen=True)
class Moment:
    """What happens to a run, and when.

    Attributes:
        name: For the table.
        event: A pattern of "EVENT PATH", of Python's audit events; "" for before the start.
        action: "bytes" and "names" fill the disk, "tiny" puts a full one at `target`, "read only"
            and "delete" are of `target`.
        target: A path below the trial's folder, with RUN for the run's folder.
        spare_pages: Of memory, that the disk has left when it is full.
        codes: Exit codes that are right.
        reason: A pattern of what the message must say.
        nth: Which of the events that match, from 1.
        warns: Whether a run that goes on must warn.
        leaves_nothing: Whether nothing may be left if the run is refused.
        words: More words of the command.
        resume_words: And of the one that resumes it.
    """

    name: str
    event: str
    action: str = "bytes"
    target: str = ""
    spare_pages: int = 0
    codes: tuple[int, ...] = (1,)
    reason: str = r"'[^\n']*runs[^\n']*': No space left on device"
    nth: int = 1
    warns: bool = False
    leaves_nothing: bool = True
    words: tuple[str, ...] = ("tracker=none",)
    resume_words: tuple[str, ...] = ()

    @property
    def at_start(self) -> bool:
        """Whether it comes before the run does."""
        return not self.event

    def arm(self, folder: Path, log: Path) -> None:
        """Have it happen in this process."""
        seen, own = 0, os.getpid()
        pattern = re.compile(self.event)

        def hook(event: str, args: tuple[Any, ...]) -> None:
            nonlocal seen
            if event not in _EVENTS or seen >= self.nth or os.getpid() != own:
                return
            if event == "open" and not _writes(args[2]):
                return
            path = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | Path) else ""
            if pattern.search(f"{event} {path}"):
                seen += 1
                if seen == self.nth:
                    self.disturb(folder, log)

        sys.addaudithook(hook)

    def disturb(self, folder: Path, log: Path) -> None:
        """Do it now, and note which checkpoints are complete."""
        target = self._target(folder)
        if self.action == "delete":
            shutil.rmtree(target)
        complete = _complete_checkpoints(folder)
        if self.action == "read only":
            target.mkdir(parents=True, exist_ok=True)
            MOUNTS.read_only(target)
        elif self.action == "tiny":
            MOUNTS.tiny(target, self.spare_pages * PAGE_BYTES)
        elif self.action == "names":
            _fill_names(folder)
        elif self.action == "bytes":
            _fill_bytes(folder, self.spare_pages * PAGE_BYTES)
        log.write_text(json.dumps({"checkpoints": complete}))

    def undo(self, folder: Path) -> None:
        """Give back the space."""
        target = self._target(folder)
        if target != folder and f" {target} " in Path("/proc/self/mountinfo").read_text():
            MOUNTS.run("umount", target)
        (folder / _FILLER).unlink(missing_ok=True)
        shutil.rmtree(folder / f"{_FILLER}s", ignore_errors=True)

    def _target(self, folder: Path) -> Path:
        runs = sorted(folder.glob("runs/*-seed0"))
        return folder / self.target.replace("RUN", str(runs[0]) if runs else "runs")


_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree")


def _writes(flags: object) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def _complete_checkpoints(folder: Path) -> list[str]:
    from penstock.launch.run_dir.checkpoint import fault_of

    named = folder.glob("runs/**/checkpoints/step-" + "[0-9]" * 8)
    return [str(path.relative_to(folder)) for path in named if fault_of(path) is None]


_MAIN = r"seed0/"
_STEP = r"os.mkdir .*seed0/checkpoints/step-0000000{}\.writing$"
_READ_ONLY = r"'[^\n']*runs[^\n']*': Read-only file system"
_GONE = r"'[^\n']*runs[^\n']*': No such file or directory"
_NO_MODEL = r"model folder '[^\n]*' has no config.json"
_TENSORBOARD = ("tracker=tensorboard",)
_RAY = ("tracker=none", "executor=ray")

MOMENTS = (
    # Before anything is trained: refused, and nothing is left.
    Moment("folder of runs", r"os.mkdir runs$", "names", codes=(2,)),
    Moment("run folder", r"os.mkdir runs/.*seed0$", "names", codes=(2,)),
    Moment("config.yaml", r"open .*/\.config\.yaml", codes=(2,)),
    Moment("plan.json", r"open .*/\.plan\.json", codes=(2,)),
    Moment("run.json", r"open .*/\.run\.json", codes=(2,)),
    Moment("run.json's name", r"os.rename .*/\.plan\.json", "names", codes=(2,)),
    Moment("lock", r"open .*/\.lock", codes=(2,)),
    Moment("folder of the first stage", r"os.mkdir .*stages/sft$", "names", codes=(2,)),
    Moment("first trace.json", r"open .*sft/\.trace\.json", codes=(2,)),
    Moment("first line of metrics", r"open .*sft/trace\.json", codes=(2,)),
    Moment("disk of TensorBoard, from the start", r"open .*sft/tensorboard/", "tiny",
           "RUN/stages/sft/tensorboard", codes=(0,), warns=True, words=_TENSORBOARD),
    # While the stage before the main one is trained and written.
    Moment("checkpoint of the first stage", r"os.mkdir .*sft/checkpoints/.*writing$"),
    Moment("models of the first stage", r"os.mkdir .*sft/models/actor.writing$", nth=2),
    Moment("tokenizer of the first stage", r"open .*sft/models/.*/tokenizer_config"),
    Moment("summary of the first stage", r"open .*sft/\.summary\.json"),
    # While the main stage is trained.
    Moment("metrics of the main stage", r"open .*seed0/\.metrics\.jsonl", "names"),
    Moment("examples.json", r"open .*/examples\.json"),
    Moment("evaluation before training", r"open .*/\.step-00000000\.json"),
    Moment("first step", r"os.rename .*/\.step-00000000\.json"),
    Moment("TensorBoard's folder", r"os.mkdir .*seed0/tensorboard$", "names", words=_TENSORBOARD),
    Moment("TensorBoard's events", r"open .*seed0/tensorboard/", words=_TENSORBOARD),
    Moment("disk of TensorBoard, in the middle", r"open .*seed0/tensorboard/", "tiny",
           "RUN/tensorboard", 1, codes=(0,), warns=True, words=_TENSORBOARD),
    Moment("folder of checkpoints", r"os.mkdir .*seed0/checkpoints$", "names"),
    Moment("weights of the first checkpoint", _STEP.format(2)),
    Moment("optimizer of a checkpoint", _STEP.format(4), spare_pages=3),
    Moment("state of a checkpoint", r"open .*00004\.writing/actor/state\.json"),
    Moment("run.json of a checkpoint", r"open .*00004\.writing/run\.json"),
    Moment("manifest of a checkpoint", r"open .*00004\.writing/\.manifest"),
    Moment("name of a checkpoint", r"os.rename .*00004\.writing$", "names"),
    Moment("steps after a checkpoint", r"os.rename .*00004\.writing$"),
    Moment("weights of the last checkpoint", _STEP.format(6)),
    Moment("removal of old checkpoints", r"os.rename .*00000002$", codes=(0,)),
    Moment("models", r"os.mkdir .*seed0/models/actor.writing$", nth=2),
    Moment("curve.svg", r"open .*/\.curve\.svg"),
    Moment("summary.json", r"open .*seed0/\.summary\.json"),
    # Read-only folders.
    Moment("read only from the start", "", "read only", "runs", codes=(2,), reason=_READ_ONLY),
    Moment("checkpoints read only", _STEP.format(4), "read only", "RUN/checkpoints",
           reason=_READ_ONLY),
    Moment("old checkpoints read only", r"os.rename .*00000002$", "read only", "RUN/checkpoints",
           codes=(0,), warns=True),
    Moment("run read only between checkpoints", r"os.rename .*00004\.writing$", "read only", "RUN",
           reason=_READ_ONLY),
    Moment("run read only in the export", r"os.mkdir .*seed0/models/actor.writing$", "read only",
           "RUN", reason=_READ_ONLY, nth=2),
    # Deleted under the run.
    Moment("run folder deleted", r"os.mkdir .*seed0/checkpoints$", "delete", "RUN",
           reason=_GONE, nth=2),
    Moment("checkpoint deleted as it is written", r"open .*00004\.writing/run\.json", "delete",
           "RUN/checkpoints", codes=(0,), warns=True),
    Moment("checkpoints deleted between two", r"os.mkdir .*seed0/checkpoints$", "delete",
           "RUN/checkpoints", codes=(0,), nth=2),
    Moment("stages deleted", _STEP.format(2), "delete", "RUN/stages", reason=_NO_MODEL),
    Moment("first stage deleted as it ends", r"os.rename .*sft/\.summary\.json", "delete",
           "RUN/stages/sft", reason=_GONE),
    # Workers in processes of their own.
    Moment("weights of a checkpoint, on Ray", _STEP.format(4), words=_RAY),
    Moment("steps after a checkpoint, on Ray", r"os.rename .*00004\.writing$", words=_RAY),
)  # fmt: skip


def chosen(part: str, *, with_ray: bool) -> list[Moment]:
    """The moments whose name contains a text."""
    return [
        moment for moment in MOMENTS if part in moment.name and (with_ray or moment.words != _RAY)
    ]
