"""One program in a process of its own: started, watched, ended, and gone without a trace.

What it reads and writes are files in memory that nothing else can open, so that nothing is left
when their descriptors are closed. A program that is out of time, or has too many threads, is killed
with its namespaces. When it has ended, its process group is counted: anything left is an error.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import secrets
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from annotated_types import Ge

from ....dataflow.errors import WorkerError
from ....dataflow.options import Int, PositiveFloat, PositiveInt, option_class
from ..child import was_killed
from .child import CONFINED
from .kernel import Unconfined
from .kinds import SandboxKind

_POLL_S = 0.01
_TICKS_S = 0.1
START_S = 30.0
"""Seconds until a process is confined; they do not count as the program's."""
_END_S = 0.5
"""Between a process's closing all it had and its end."""
STOP_S = 5.0
"""Seconds killed processes may take to vanish."""
_RESULT_BYTES = 1 << 20
"""What is read of a program's results: in no time, whatever they are made of."""


@option_class
class Limits:
    """What one run may use."""

    time_s: PositiveFloat = 4.0
    """Seconds by the clock from its first line on, and of CPU time, rounded up."""
    memory_mb: Annotated[Int, Ge(64)] = 512
    """Address space, Python itself included."""
    folder_mb: PositiveInt = 16
    """All files in its folder, 4096 bytes at least each; also each of its output streams."""
    open_files: Annotated[Int, Ge(16)] = 64
    """Files open at once."""
    threads: PositiveInt = 64
    """Threads at once; more end the run."""
    output_bytes: PositiveInt = 65_536
    """What is kept of each of its output streams."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of a run."""

    exit_code: int
    """0 if the program ended by itself; minus the signal that ended it. A code above 128 cannot be
    told from a signal, as in shells."""
    stdout: str
    stderr: str
    results: Sequence[Mapping[str, Any]] = ()
    """Of each call, then of each assertion, as far as it got: `{"value"}` or `{"error"}`."""
    timed_out: bool = False


def run_in(
    kind: SandboxKind,
    program: str,
    *,
    stdin: str = "",
    calls: Sequence[Mapping[str, Any]] = (),
    asserts: Sequence[str] = (),
    limits: Limits | None = None,
    code: Path | None = None,
) -> Ran:
    """`sandbox.run_python`, in a sandbox of this kind.

    Args:
        kind: One of `kinds.KINDS`.
        program: See `sandbox.run_python`.
        stdin: The same.
        calls: The same.
        asserts: The same.
        limits: The same.
        code: The folder of another `child.py`.

    Raises:
        Unconfined: If there is no such sandbox here; then the program did not run.
        WorkerError: If a process is left.
    """
    if reason := kind.missing():
        raise Unconfined(reason)
    limits = limits or Limits()
    token = secrets.token_hex(16)
    work = {"program": program, "calls": list(calls), "asserts": list(asserts), "token": token}
    try:
        return _run(kind, work, stdin, limits, code, is_last=False)
    except _Killed:  # what a program does is a function of what it reads: so does another
        return _run(kind, work, stdin, limits, code, is_last=True)


class _Killed(Exception):
    """A process was killed, and not by us."""


def _run(
    kind: SandboxKind,
    work: Mapping[str, Any],
    stdin: str,
    limits: Limits,
    code: Path | None,
    *,
    is_last: bool,
) -> Ran:
    """Run some work once."""
    num_calls, num_asserts = len(work["calls"]), len(work["asserts"])
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(unnamed_file(name)) for name in _STREAMS}
        # One end of each is the child's: it learns that this process is gone, and tells that it is
        # confined, where the program can write no more.
        lifeline, verdict = stack.enter_context(Pipe()), stack.enter_context(Pipe())
        descriptors = {
            "results": files["results"].fileno(),
            "lifeline": lifeline.reading,
            "verdict": verdict.writing,
        }
        setup = {**kind.setup(), **descriptors, "limits": bounds(limits)}
        fill(files["given"], json.dumps({"setup": setup, "work": work}))
        fill(files["stdin"], stdin)
        streams = (files["stdin"].fileno(), files["stdout"].fileno(), files["stderr"].fileno())
        command = kind.command(code, files["given"].fileno())
        passed = [files["given"].fileno(), *descriptors.values()]
        process = start(command, kind.environment, streams, passed)
        told, timed_out, by_itself = _finish(process, verdict, limits)
        if by_itself and was_killed(process.returncode) and not is_last:
            raise _Killed
        stderr = _text(files["stderr"], limits.output_bytes)
        exit_code = process.returncode if process.returncode <= 128 else 128 - process.returncode
        if told != CONFINED:
            reason = told.decode() or f"exit code {exit_code} {stderr[-200:].strip()}"
            raise Unconfined(reason)
        token, results = work["token"], _results(files["results"], num_calls + num_asserts)
        checked = [r for i, r in enumerate(results) if i < num_calls or r.get("token") == token]
        return Ran(
            exit_code=exit_code,
            stdout=_text(files["stdout"], limits.output_bytes),
            stderr=stderr,
            results=[{k: r[k] for k in ("value", "error") if k in r} for r in checked],
            timed_out=timed_out or exit_code == -signal.SIGXCPU,
        )


_STREAMS = ("given", "stdin", "stdout", "stderr", "results")


def unnamed_file(name: str) -> IO[bytes]:
    """A file without a name, in memory where the system has such."""
    try:
        return os.fdopen(os.memfd_create(f"penstock_{name}"), "w+b")
    except (AttributeError, OSError):  # only Linux has it, and may be told to refuse
        return tempfile.TemporaryFile()


class Pipe:
    """A pipe; an end closes with whoever holds it, however that ends."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self._open = {self.reading, self.writing}

    def close(self, end: int) -> None:
        """Close one end, if it is open."""
        if end in self._open:
            self._open.remove(end)
            os.close(end)

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self.reading, self.writing):
            self.close(end)


def fill(file: IO[bytes], text: str) -> None:
    """Write it, to be read from the beginning."""
    file.write(text.encode("utf-8", errors="replace"))
    file.seek(0)


def _text(file: IO[bytes], num_bytes: int) -> str:
    """The beginning of what was written."""
    return os.pread(file.fileno(), num_bytes, 0).decode("utf-8", errors="replace")


def _results(file: IO[bytes], num_lines: int) -> list[Mapping[str, Any]]:
    """Of the first lines those that can be read; a program may have written there too."""
    found: list[Mapping[str, Any]] = []
    for line in os.pread(file.fileno(), _RESULT_BYTES, 0).split(b"\n", num_lines)[:num_lines]:
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            found.append(read)
    return found


def bounds(limits: Limits) -> dict[str, int]:
    """Those that the process sets itself."""
    return {
        "cpu_s": math.ceil(limits.time_s),
        "memory_bytes": limits.memory_mb << 20,
        "file_bytes": limits.folder_mb << 20,
        "open_files": limits.open_files,
    }


def has_used_up(cpu_s: float, limits: Limits) -> bool:
    """Whether the kernel has ended a process for its CPU time; it counts by the tick."""
    return cpu_s >= bounds(limits)["cpu_s"] - _TICKS_S


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: tuple[int, int, int],
    passed: Sequence[int],
) -> subprocess.Popen[bytes]:
    """In a session and process group of its own, which no program can leave: calls for it fail.

    Args:
        command: Of a kind of sandbox.
        environment: All of it.
        streams: Descriptors of standard input, output and error.
        passed: Further ones that it needs.
    """
    process = subprocess.Popen(
        command,
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        pass_fds=passed,
        env=environment,
        cwd="/",
        start_new_session=True,
    )
    with contextlib.suppress(OSError):  # if memory runs out, this is the one to go, not the trainer
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
    return process


def _finish(
    process: subprocess.Popen[bytes], verdict: Pipe, limits: Limits
) -> tuple[bytes, bool, bool]:
    """What it told of its confinement, and whether it used up its time, and ended by itself."""
    timed_out = by_itself = False
    try:
        verdict.close(verdict.writing)  # so that its end shows if the process ends without a word
        told = f"it was not ready after {START_S:g} s".encode()
        if _readable(verdict.reading, START_S):
            told = os.read(verdict.reading, 1000)
        deadline = time.monotonic() + limits.time_s
        while told == CONFINED and not ended(process, min(_POLL_S, limits.time_s)):
            timed_out = time.monotonic() >= deadline
            if timed_out or any(num_threads(p) > limits.threads for p in members(process.pid)):
                break
        by_itself = ended(process, 0 if told == CONFINED else _END_S)
    finally:
        cpu_s = kill(process)
        check_nothing_left(process.pid, STOP_S)
    if by_itself and was_killed(process.returncode) and has_used_up(cpu_s, limits):
        timed_out, by_itself = True, False  # by the kernel
    return told, timed_out, by_itself


def ended(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Whether it ends within these seconds."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # Linux has it since 5.3
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        return process.poll() is not None
    try:
        return _readable(descriptor, wait_s)
    finally:
        os.close(descriptor)


def _readable(descriptor: int, wait_s: float) -> bool:
    """Whether there is something to read, or its other end is closed, within these seconds."""
    poll = select.poll()  # which takes any number; select() only those below 1024
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(math.ceil(1000 * wait_s)))


def members(process_id: int) -> Iterable[int]:
    """A process and the one it stands in front of, which is the first of its namespaces."""
    with contextlib.suppress(OSError):  # it has ended, or the system tells no children
        children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
        return [*map(int, children.split()), process_id]
    return [process_id]


def num_threads(process_id: int) -> int:
    """How many it has now."""
    try:
        return os.stat(f"/proc/{process_id}/task").st_nlink - 2
    except OSError:  # it has ended, or the system does not tell
        return 0


def kill(process: subprocess.Popen[bytes]) -> float:
    """Kill the process's whole group, and wait for the process itself.

    It is waited for last: until then nobody else can have its number, nor its group's.

    Returns:
        Seconds of CPU time that it took.
    """
    if not ended(process, 0):
        first = [member for member in members(process.pid) if member != process.pid]
        for member in first:  # it takes all its namespace along
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        # The one in front waits for it; else it would be left to whoever waits for orphans.
        ended(process, STOP_S if first else 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    before_s = _cpu_of_children_s()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(
            f"process {process.pid}, which ran a model's program, is still there {STOP_S:g} s "
            "after it was killed"
        ) from error
    return _cpu_of_children_s() - before_s


def _cpu_of_children_s() -> float:
    """Of all children that have been waited for, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def check_nothing_left(group: int, wait_s: float) -> None:
    """Count the living processes of a group whose leader has ended; there must be none.

    Raises:
        WorkerError: If some are there after these seconds.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        if not (left := [*_living(group)]):  # nobody has waited for them yet, but they have ended
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    raise WorkerError(
        f"processes of a model's program are left {wait_s:g} s after it was killed: "
        f"{', '.join(map(str, left))}\n"
        "    end them with kill -9, and run on a kernel that allows user namespaces"
    )


def _living(group: int) -> Iterable[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended
            # After the name, which may hold anything: the state, the parent, the group.
            state, _, own_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(own_group) == group and state not in "ZX":
                yield int(entry.name)
