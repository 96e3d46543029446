"""Groups of processes that are forks of one, which has imported what they need.

To import torch, transformers and an engine takes a process up to twelve seconds of processor time,
more than most groups compute. A script of ranks ends with `fork_groups(main)`; a test runs it with
`run_groups`, and what a process wrote is the file "log-GROUP-PROCESS" of the folder.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from penstock.workers.isolation import child as child_process

_LIMIT_S = 500.0
_SHOWN = 3000
_PRELOADED = (
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mistral", "qwen2")),
    "transformers.models.qwen3.modeling_qwen3",
)
"""What libraries import only once it is used."""

Main = Callable[[int, int, Path, list[str]], None]
"""A process's number, how many there are, the folder, and the group's other words."""


def run_groups(folder: Path, script: Path, *groups: tuple[int, Sequence[str]]) -> None:
    """Run groups of so many processes, one group after another; each is given some words."""
    words = [word for size, others in groups for word in (str(size), *others)]
    command = [sys.executable, str(script), str(folder), *words]
    limit_s = len(groups) * _LIMIT_S + 60
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr


def night(*values: Any) -> Any:
    """A case of `make test-all`: on few cores each layout of four processes takes many seconds."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def is_night(request: pytest.FixtureRequest) -> bool:
    """Whether tests of this file that are marked `nightly` run too, and need what they look at."""
    items = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("nightly") for item in items)


def fork_groups(main: Main) -> None:
    """Be `python SCRIPT FOLDER SIZE WORD... [SIZE WORD...]`, with one thread in each process."""
    torch.set_num_threads(1)
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection in each child would copy all that was imported
    folder, *words = sys.argv[1:]
    begins = [place for place, word in enumerate(words) if word.isdecimal()]
    for number, (begin, end) in enumerate(
        zip(begins, [*begins[1:], len(words)], strict=True), start=1
    ):
        size, others = int(words[begin]), words[begin + 1 : end]
        logs = [Path(folder) / f"log-{number}-{process}" for process in range(size)]
        children = [
            _fork(partial(main, process, size, Path(folder), others), log)
            for process, log in enumerate(logs)
        ]
        if not _all_end_well(children):
            sys.exit("\n".join(f"{log.name}:\n{log.read_text()[-_SHOWN:]}" for log in logs))


def join(process: int, size: int, store: Path, limit_s: int = 120) -> None:
    """Make these processes torch.distributed's."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=process,
        world_size=size,
        timeout=timedelta(seconds=limit_s),
    )


def _fork(act: Callable[[], None], log: Path) -> int:
    """A child that acts, writes to the log alone, and ends without what its parent would do."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    child_process.prctl(child_process.DEATH_SIGNAL, signal.SIGKILL)  # a test that ends early
    code = 1
    try:
        act()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _all_end_well(children: Sequence[int]) -> bool:
    """Wait for all of them, or until one fails or time is over; the others are killed then."""
    end_s = time.monotonic() + _LIMIT_S
    left = list(children)
    try:
        while left:
            for child in list(left):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    left.remove(child)
                    if status:
                        return False
            if time.monotonic() > end_s:
                return False
            time.sleep(0.05)
        return True
    finally:
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
