"""A backend of plain Python processes on this machine: to show what an executor needs of one.

Each process serves one connection of this one, and ends with it. What is stored is a file in a
folder that only this user can read; nobody listens anywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.workers.executors.process_backend import CallFailed, NotInTime, ProcessDied
from penstock.workers.executors.registry import ExecutorKind
from penstock.workers.executors.supervisor import Supervisor
from penstock.workers.weight_sync.channel import Transport

_ROOT = str(Path(__file__).parents[3])
_START_S = 60.0

_PRELOADED = (
    "penstock.workers.executors.rank_process",
    "penstock.workers.engines.torch_engine.specs",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.modeling_auto",
    "reasoning_gym",
    "pytest",
    "tests.workers.executors.frozen",  # the last one
)
"""What most processes import: 3 to 12 s of processor time for each that is not a fork of it."""

_Request = tuple[str, tuple[Any, ...], tuple[str, ...]]
"""Method, arguments, and the files to write its results to."""


@dataclass(frozen=True)
class _Raised:
    """What a file holds instead of a result: what a call raised, or how its process died."""

    text: str
    cause: Exception | None = None

    def error(self) -> CallFailed | ProcessDied:
        return ProcessDied(self.text) if self.cause is None else CallFailed(self.text, self.cause)


class _Store:
    """Files in a folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count()

    def new(self) -> str:
        return str(self.folder / f"{os.getpid()}-{next(self.numbers)}")

    def put(self, value: Any) -> str:
        ref = self.new()
        self.write(ref, value)
        return ref

    def write(self, ref: str, value: Any) -> None:
        """All of it at once, and once only."""
        unfinished = Path(f"{ref}.{threading.get_ident()}")
        unfinished.write_bytes(pickle.dumps(value))
        unfinished.replace(ref)

    def get(self, refs: Sequence[str], timeout_s: float) -> list[Any]:
        end_s = time.monotonic() + timeout_s
        for ref in refs:
            while not Path(ref).exists():
                if time.monotonic() > end_s:
                    raise NotInTime(f"{ref} is not there after {timeout_s:g} s")
                time.sleep(0.001)
        found = [pickle.loads(Path(ref).read_bytes()) for ref in refs]
        for one in found:
            if isinstance(one, _Raised):
                raise one.error()
        return found


class _Home(_Store):
    host = "127.0.0.1"


def _live(make: Callable[..., Any], folder: Path, connection: Connection) -> None:
    """A process: carry out what arrives, until the connection ends, and with it the process."""
    requests = queue.SimpleQueue[_Request]()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    home = _Home(folder)
    resident: Any = None
    while True:
        method, arguments, refs = requests.get()
        try:
            if resident is None:
                resident = make(home)
            found = getattr(resident, method)(*arguments)
            results = found if len(refs) > 1 else (found,)
        except Exception as error:  # noqa: BLE001 - it is passed on
            results = [_Raised(traceback.format_exc(), error)] * len(refs)
        # The first one is waited for, and says that all are there.
        for ref, result in reversed([*zip(refs, results, strict=True)]):
            home.write(ref, result)
        connection.send(refs)


def _read(connection: Connection, requests: queue.SimpleQueue[_Request]) -> None:
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


class _Process:
    """This process's end of another."""

    def __init__(self, backend: SpawnedBackend, make: Callable[..., Any]) -> None:
        self.backend = backend
        self.connection, theirs = backend.context.Pipe()
        self.child = backend.context.Process(
            target=_live, args=(make, backend.folder, theirs), daemon=True
        )
        with _importable():
            self.child.start()
        theirs.close()
        self.pid, self.exit_code = self.child.pid, self.child.exitcode
        self.owed: list[str] = []
        self.is_dead = False
        self.thread = threading.Thread(target=self._listen, name="spawned", daemon=True)
        self.thread.start()

    def call(self, request: _Request) -> None:
        with self.backend.changed:
            if not self.is_dead:
                self.owed += request[-1]
                with contextlib.suppress(OSError):  # The thread that listens is about to see it.
                    self.connection.send(request)
                return
        self._bury(request[-1])

    def _listen(self) -> None:
        try:
            while True:
                done = self.connection.recv()
                with self.backend.changed:
                    self.owed = [ref for ref in self.owed if ref not in done]
                    self.backend.changed.notify_all()
        except (EOFError, OSError):
            self.child.join(_START_S)
            self.exit_code = self.child.exitcode
            with self.backend.changed:
                self.is_dead = True
            self._bury(self.owed)

    def _bury(self, refs: Sequence[str]) -> None:
        number = self.exit_code
        how = "ended" if number is None or number >= 0 else f"got {signal.Signals(-number).name}"
        for ref in refs:
            if not Path(ref).exists():
                self.backend.write(ref, _Raised(f"process {self.pid} {how}"))
        with self.backend.changed:
            self.backend.changed.notify_all()

    def kill(self) -> None:
        """At once; the thread that listens buries it."""
        if self in self.backend.processes:
            self.backend.processes.remove(self)
            self.child.kill()
            self.thread.join(_START_S)
            self.connection.close()
            self.child.close()


def start_helpers() -> ForkServerContext:
    """What Python keeps once it is used; for before a test is checked for what it leaves."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _ROOT)  # `frozen` takes it away again
        forkserver.ensure_running()
    resource_tracker.ensure_running()
    return context


class _Devices:
    def is_there(self, group: str) -> bool:
        del group
        return True

    def release(self, group: str) -> None:
        """This backend has no devices to share out."""


class SpawnedBackend(_Store):
    """See `ProcessBackend`; `close` ends all processes and deletes what is stored."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="spawned-")
        super().__init__(Path(self._folder.name))
        self.context = start_helpers()
        self.changed = threading.Condition()
        self.is_up = True
        self.processes: list[_Process] = []

    def reserve(
        self,
        groups: Sequence[DeviceGroup],
        timeout_s: float,
        training: AbstractSet[str] = frozenset(),
        held: Sequence[_Devices] = (),
    ) -> _Devices:
        return _Devices()

    def spawn(
        self,
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        group: DeviceGroup,
        process: int,
        devices: _Devices,
    ) -> _Process:
        started = _Process(self, partial(_made, make, arguments))
        self.processes.append(started)
        return started

    def call(
        self, process: _Process, method: str, arguments: tuple[Any, ...], num_results: int = 1
    ) -> list[str]:
        refs = tuple(self.new() for _ in range(num_results))
        process.call((method, arguments, refs))
        return list(refs)

    def watch(self, refs: Sequence[str], timeout_s: float) -> list[str]:
        def known() -> list[str]:
            return [ref for ref in refs if Path(ref).exists()]

        with self.changed:
            return self.changed.wait_for(known, timeout_s) or []

    def kill(self, process: _Process) -> None:
        process.kill()

    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [one.child.pid or 0 for one in self.processes if not one.is_dead]

    def close(self) -> None:
        self.is_up = False
        for process in list(self.processes):
            process.kill()
        self._folder.cleanup()


def _made(make: Callable[..., Any], arguments: tuple[Any, ...], home: _Home) -> Any:
    return make(home, *arguments)


@contextlib.contextmanager
def _importable() -> Generator[None]:
    """A child process looks for modules where this one does; tests lie at the root."""
    sys.path.insert(0, _ROOT)
    try:
        yield
    finally:
        sys.path.remove(_ROOT)


class SpawnedExecutor(Supervisor):
    """The executor over plain processes."""

    def __init__(
        self,
        backend: SpawnedBackend,
        num_threads: int | None = None,
        *,
        transport: Transport = "object_store",
    ) -> None:
        super().__init__("plain processes", lambda: backend, num_threads, transport=transport)


_OPEN: list[SpawnedBackend] = []


def _create(num_threads: int | None, transport: Transport) -> SpawnedExecutor:
    _OPEN.append(SpawnedBackend())
    return SpawnedExecutor(_OPEN[-1], num_threads, transport=transport)


def _end() -> None:
    while _OPEN:
        _OPEN.pop().close()


EXECUTOR = ExecutorKind(name="spawned", create=_create, end=_end)
