"""Running Python that a model wrote: in a sandbox, without network and within limits.

A program runs from beginning to end, an interpreter lives on between pieces of code. The strongest
kind of sandbox that a trial shows to work here is used; where that is weaker than what was asked
for, nothing runs.

What a program reads and writes are files in memory that nothing else can open, so that nothing is
left when their descriptors are closed. A process that is out of time, or has too many threads, is
killed with its namespaces. When it has ended, its process group is counted: anything left is an
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import IO, Annotated, Any

from annotated_types import Ge

from ...dataflow.errors import ConfigError, WorkerError, nearest
from ...dataflow.options import Int, PositiveFloat, PositiveInt, option_class
from .child import was_killed
from .confine import CONFINED, Unconfined
from .kinds import KINDS, LANDLOCK, LIMITS, SandboxKind
from .pool import END_S, STOP_S, CallResult, Lines, NotSaid, ready

_PIECES = Path(__file__).with_name("pieces.py")
_POLL_S = 0.01
_TICKS_S = 0.25  # the kernel counts by the tick, and late on a busy machine
_START_S = 30.0  # seconds until a process is confined; they do not count as the program's
_LOOK_S = 0.05  # between two looks at how many threads an interpreter has
_RESULT_BYTES = 1 << 20
"""Bytes that are read of a program's results: in no time, whatever they are made of."""


@option_class
class Limits:
    """Limits of one run."""

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
    """Bytes that are kept of each of its output streams."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    exit_code: int
    """0 if the program ended by itself; minus the signal that ended it. A code above 128 cannot be
    told from a signal, as in shells."""
    stdout: str
    stderr: str
    results: Sequence[Mapping[str, Any]] = ()
    """Results of each call, then of each assertion, as far as it got: a `value` or an `error`."""
    timed_out: bool = False


class Sandboxed:
    """A process in a sandbox, from its start until nothing is left of it.

    It runs some work (see `confine`), with descriptors of standard input, output and error and of
    results; where it is seeded, hashes of texts are always the same.

    Attributes:
        verdict: Descriptor that can be read when it is confined, or cannot be.
        used_up: Once it has ended: whether the kernel has ended it, for the CPU time that it took.
        was_killed: The same: whether a signal from outside has.

    Raises:
        Unconfined: If there is no such sandbox here.
        OSError: If the system starts no more processes.
    """

    def __init__(
        self,
        kind: SandboxKind,
        work: Mapping[str, Any],
        limits: Limits,
        streams: Sequence[int],
        *,
        seeded: bool = False,
    ) -> None:
        if reason := kind.missing():
            raise Unconfined(reason)
        self._limits, self._ended = limits, False
        self.was_killed = self.used_up = False
        with contextlib.ExitStack() as held:
            # One end of each is the process's: it learns that this one is gone, and tells that it
            # is confined, where what runs in it can write no more.
            lifeline, verdict = _pipe(held), _pipe(held)
            descriptors = {
                "results": streams[3],
                "lifeline": lifeline[0].fileno(),
                "verdict": verdict[1].fileno(),
            }
            setup = {**kind.setup(), **descriptors, "limits": bounds(limits)}
            with _unnamed_file("given", json.dumps({"setup": setup, "work": work})) as given:
                self._process = start(
                    kind.command(given.fileno(), python_environment=seeded),
                    {**kind.environment, **({"PYTHONHASHSEED": "0"} if seeded else {})},
                    streams[:3],
                    [given.fileno(), *descriptors.values()],
                )
            verdict[1].close()  # so that its end shows if the process ends without a word
            self.verdict = verdict[0].fileno()
            self._held = held.pop_all()

    @property
    def crowded(self) -> bool:
        num_threads = 0
        for member in self._members():
            with contextlib.suppress(OSError):  # it has ended, or the system does not tell
                # A link for each thread's folder, and the two that every folder has: cheaper than a
                # listing.
                num_threads = max(num_threads, os.stat(f"/proc/{member}/task").st_nlink - 2)
        return num_threads > self._limits.threads

    def ends(self, wait_s: float) -> bool:
        try:
            descriptor = os.pidfd_open(self._process.pid)
        except (AttributeError, OSError):  # Linux has it since 5.3
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
            return self._process.poll() is not None
        try:
            # Unlike a wait, this leaves the number of a process that has ended to it.
            return _readable(descriptor, wait_s)
        finally:
            os.close(descriptor)

    def send(self, number: signal.Signals) -> None:
        if self._ended:  # its number may be another's
            return
        for member in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, number)

    def kill(self, wait_s: float = 0.0) -> int:
        """Kill it with all that is in it, after so many seconds to end; may be called again.

        Returns:
            The exit code, or minus the signal that ended it.

        Raises:
            WorkerError: If it cannot be killed.
        """
        if not self._ended:
            self.send(signal.SIGCONT)
            self._ended = True
            by_itself = self.ends(wait_s)
            try:
                cpu_s = self._kill()
                by_signal = by_itself and was_killed(self._process.returncode)
                self.used_up = by_signal and cpu_s >= bounds(self._limits)["cpu_s"] - _TICKS_S
                self.was_killed = by_signal and not self.used_up
                check_nothing_left(self._process.pid, STOP_S)
            finally:
                self._held.close()
        code = self._process.returncode
        return code if code <= 128 else 128 - code

    def _kill(self) -> float:
        """Kill its whole group, wait for it, and return the seconds of CPU time that it took.

        It is waited for last: until then no other process can have its number, nor its group's.
        """
        process = self._process
        if not self.ends(0):
            first = [member for member in self._members() if member != process.pid]
            for member in first:  # it takes all its namespace along
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            # The one in front waits for it; else it would be left to init.
            self.ends(STOP_S if first else 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # The wait itself adds a child's time to that of all children.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired as error:
            raise WorkerError(
                f"process {process.pid}, which ran a model's program, is still there {STOP_S:g} s "
                "after it was killed"
            ) from error
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def _members(self) -> Iterable[int]:
        """The process and the one it stands in front of, which is the first of its namespaces."""
        own = self._process.pid
        with contextlib.suppress(OSError):  # it has ended, or the system tells no children
            children = Path(f"/proc/{own}/task/{own}/children").read_text()
            return [*map(int, children.split()), own]
        return [own]


def run_python(
    program: str,
    *,
    stdin: str = "",
    calls: Sequence[Mapping[str, Any]] = (),
    asserts: Sequence[str] = (),
    limits: Limits | None = None,
    minimum: str = LANDLOCK.name,
) -> Ran:
    """Run a program, and after it calls of its functions and assertions.

    Args:
        program: Python source; it runs as `__main__` with the standard library.
        stdin: What it reads.
        calls: `{"function", "args", "kwargs"}` each; a function is looked for at the top of the
            program, then in a class `Solution`. What it returns must not be trusted to be true, but
            the program never sees what is expected. With `"typed": True` arguments and the value
            are as `confine.typed` makes them.
        asserts: Statements, run one by one among the program's names. A program can make them hold
            that do not: it shares a process with them. Calls and output leave it no such way.
        limits: The default ones if not given.
        minimum: The weakest kind of sandbox to run it in, a name of `kinds.KINDS`.

    Raises:
        ConfigError: If the machine has no sandbox as strong.
        WorkerError: If the sandbox, which worked before, cannot be made now, or a process is left.
    """
    kind = check_sandbox(minimum)
    try:
        return run_in(kind, program, stdin=stdin, calls=calls, asserts=asserts, limits=limits)
    except Unconfined as error:
        raise WorkerError(
            f"a sandbox of kind '{kind.name}', which a trial showed to work, cannot be made any "
            f"more: {error}\n    see whether memory, processes or user namespaces have run out"
        ) from error


def check_sandbox(minimum: str = LANDLOCK.name) -> SandboxKind:
    """The kind of sandbox that programs run in here.

    Raises:
        ConfigError: If `minimum` is no kind, or there is none as strong on this machine.
    """
    names = [kind.name for kind in KINDS]
    if minimum not in names:
        raise ConfigError(
            f"minimum={minimum} is no kind of sandbox{nearest(minimum, names)}\n"
            f"    use {', '.join(names)}"
        )
    kind = best_kind()
    if names.index(kind.name) > names.index(minimum):
        reasons = "".join(f"    {name}: {why}\n" for name, why in _why_not_stronger().items())
        raise ConfigError(
            f"programs that a model wrote need a sandbox of kind '{minimum}' or stronger, which "
            f"this machine does not offer\n{reasons}    install bubblewrap, allow user namespaces, "
            "or run on a Linux with seccomp and Landlock (5.13 or newer); or accept less: "
            f"verifier_options.minimum={LIMITS.name} runs programs with your rights, bounded in "
            "time and memory only"
        )
    return kind


@lru_cache(maxsize=1)
def best_kind() -> SandboxKind:
    """The strongest kind that works here, found by trials once per process."""
    return next(kind for kind in KINDS if kind.name not in _why_not_stronger())


@lru_cache(maxsize=1)
def announce_sandbox() -> None:
    """Say once per process which kind of sandbox programs run in."""
    print(f"penstock: sandbox: {best_kind().name}", file=sys.stderr, flush=True)


@lru_cache(maxsize=1)
def _why_not_stronger() -> Mapping[str, str]:
    """The kinds stronger than the best that works, and why each of them does not."""
    failed: dict[str, str] = {}
    for kind in KINDS:
        reason = why_not(kind)
        if reason is None:
            break
        failed[kind.name] = reason
    return failed


_PROBE = """
import os, socket
def blocked(attempt, *args):
    try:
        attempt(*args)
    except OSError:
        return True
    return False
def network(): return blocked(socket.socket)
def files(): return blocked(open, '/etc/passwd')
def processes(): return blocked(lambda: os.fork() or os._exit(0))
def signals(): return blocked(os.kill, os.getppid(), 0)
"""


def why_not(kind: SandboxKind) -> str | None:
    """Try out that this kind confines programs here; None if it does, or else the reason."""
    if kind is LIMITS:
        return None
    names = ("network", "files", "processes", "signals")
    asked = [{"function": name} for name in names]
    try:
        ran = run_in(kind, _PROBE, calls=asked, limits=Limits(time_s=30))
    except Unconfined as error:
        return str(error)
    held = [name for name, r in zip(names, ran.results, strict=False) if r.get("value") is True]
    if len(held) < len(names):
        missing = ", ".join(name for name in names if name not in held)
        return f"a trial did not keep it from {missing} {ran.stderr[-200:]}".strip()
    return None


def run_in(
    kind: SandboxKind,
    program: str,
    *,
    stdin: str = "",
    calls: Sequence[Mapping[str, Any]] = (),
    asserts: Sequence[str] = (),
    limits: Limits | None = None,
) -> Ran:
    """`run_python`, in a sandbox of this kind.

    Raises:
        Unconfined: If there is no such sandbox here; then the program did not run.
        WorkerError: If a process is left.
    """
    limits = limits or Limits()
    work = {"program": program, "calls": list(calls), "asserts": list(asserts)}
    told, ran, killed = _run(kind, work, stdin, limits)
    if killed:  # not by us; what a program does is a function of what it reads: so does another
        told, ran, _ = _run(kind, work, stdin, limits)
    if told != CONFINED:
        raise Unconfined(told.decode() or f"exit code {ran.exit_code} {ran.stderr[-200:].strip()}")
    return ran


def _run(
    kind: SandboxKind, work: Mapping[str, Any], stdin: str, limits: Limits
) -> tuple[bytes, Ran, bool]:
    """Run some work: what was told of its confinement, what became of it, whether it was killed."""
    token, num_calls = secrets.token_hex(16), len(work["calls"])
    with contextlib.ExitStack() as stack:
        texts = {"stdin": stdin, "stdout": "", "stderr": "", "results": ""}
        files = [stack.enter_context(_unnamed_file(*each)) for each in texts.items()]
        streams = [file.fileno() for file in files]
        process = Sandboxed(kind, {**work, "token": token}, limits, streams)
        told, timed_out = f"it was not ready after {_START_S:g} s".encode(), False
        try:
            if _readable(process.verdict, _START_S):
                told = os.read(process.verdict, 1000)
            deadline = time.monotonic() + limits.time_s
            while told == CONFINED and not process.ends(min(_POLL_S, limits.time_s)):
                timed_out = time.monotonic() >= deadline
                if timed_out or process.crowded:
                    break
        finally:
            exit_code = process.kill(0 if told == CONFINED else END_S)
        results = _results(files[3], num_calls + len(work["asserts"]))
        checked = [r for i, r in enumerate(results) if i < num_calls or r.get("token") == token]
        ran = Ran(
            exit_code=exit_code,
            stdout=_text(files[1], limits.output_bytes),
            stderr=_text(files[2], limits.output_bytes),
            results=[{k: r[k] for k in ("value", "error") if k in r} for r in checked],
            timed_out=timed_out or process.used_up or exit_code == -signal.SIGXCPU,
        )
        return told, ran, process.was_killed


class Interpreter:
    """A sandboxed Python that lives on between the pieces of code it is given.

    It is confined as whole programs are, before the first piece runs; what runs in it is
    `pieces.py`, which shares its process with the pieces, so it may answer anything. Between two
    pieces it is stopped, with whatever threads a piece has left. Limits are of all its pieces
    together, `time_s` of their CPU time; `seed` is for its module `random`.

    Raises:
        Unconfined: If there is no such sandbox here.
        OSError: If the system starts no more processes.
    """

    def __init__(self, kind: SandboxKind, seed: int, limits: Limits, most_chars: int) -> None:
        program = f"{_PIECES.read_text(encoding='utf-8')}\nserve({seed})\n"
        work = {"program": program, "calls": [], "asserts": [], "token": ""}
        with contextlib.ExitStack() as held:
            calls, answers = _pipe(held), _pipe(held)
            with open(os.devnull, "wb") as nowhere:
                streams = (calls[0].fileno(), answers[1].fileno(), nowhere.fileno())
                self.process = Sandboxed(
                    kind, work, limits, (*streams, nowhere.fileno()), seeded=True
                )
            calls[0].close()
            answers[1].close()
            self._held = held.pop_all()
        self._most_chars = most_chars
        # As JSON a character takes 12 bytes at most.
        self._lines = Lines(calls[1].fileno(), answers[0].fileno(), 12 * most_chars + 1000)

    async def confined(self) -> None:
        """Wait until the first piece may run; otherwise nothing is left of it.

        Raises:
            Unconfined: If it could not be confined; then nothing ran.
            NotSaid: If it did not tell in time.
        """
        try:
            await ready(self.process.verdict, asyncio.get_running_loop().time() + _START_S)
            told = os.read(self.process.verdict, 1000)
        except BaseException:
            self.kill()
            raise
        if told != CONFINED:
            self.kill(END_S)
            raise Unconfined(told.decode(errors="replace") or "its process ended")

    async def run(self, code: str, limit_s: float) -> CallResult:
        """Run a piece: what it printed, its last value, and what it raised, if anything.

        Raises:
            NotSaid: If it did not answer in time, or with too many threads, and must be killed.
        """
        if not self._lines.quiet:
            raise NotSaid("it ended or spoke between two calls", ended=True)
        self.process.send(signal.SIGCONT)
        message = {"code": code, "most_chars": self._most_chars}
        asked = asyncio.ensure_future(self._lines.ask(message, limit_s))
        try:
            while not (await asyncio.wait({asked}, timeout=_LOOK_S))[0]:
                if self.process.crowded:
                    raise NotSaid("it started too many threads")
            answer = asked.result()
        finally:
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError, NotSaid):
                await asked
        if answer.error is None and not isinstance(answer.value, str):
            raise NotSaid("what it said is no answer")
        self.process.send(signal.SIGSTOP)
        return answer

    def kill(self, wait_s: float = 0.0) -> int:
        """`Sandboxed.kill`, and close the pipes to it."""
        try:
            return self.process.kill(wait_s)
        finally:
            self._held.close()


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int],
    passed: Sequence[int],
) -> subprocess.Popen[bytes]:
    """In a session and process group of its own, which no program can leave: calls for it fail."""
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


def bounds(limits: Limits) -> dict[str, int]:
    """Those that the process sets itself."""
    return {
        "cpu_s": math.ceil(limits.time_s),
        "memory_bytes": limits.memory_mb << 20,
        "file_bytes": limits.folder_mb << 20,
        "open_files": limits.open_files,
    }


def _pipe(stack: contextlib.ExitStack) -> tuple[FileIO, FileIO]:
    """Make a pipe whose ends, to read and to write, are closed with the stack or before."""
    reading, writing = os.pipe()
    ends = FileIO(reading, "rb"), FileIO(writing, "wb")
    return stack.enter_context(ends[0]), stack.enter_context(ends[1])


def _unnamed_file(name: str, text: str = "") -> IO[bytes]:
    """A file without a name that holds a text, in memory where the system has such."""
    try:
        file = os.fdopen(os.memfd_create(f"penstock_{name}"), "w+b")
    except (AttributeError, OSError):  # only Linux has it, and may be told to refuse
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the caller
    file.write(text.encode("utf-8", errors="replace"))
    file.seek(0)
    return file


def _text(file: IO[bytes], num_bytes: int) -> str:
    return os.pread(file.fileno(), num_bytes, 0).decode("utf-8", errors="replace")


def _results(file: IO[bytes], num_lines: int) -> list[Mapping[str, Any]]:
    """Read those of the first lines that can be read; a program may have written there too."""
    found: list[Mapping[str, Any]] = []
    for line in os.pread(file.fileno(), _RESULT_BYTES, 0).split(b"\n", num_lines)[:num_lines]:
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            found.append(read)
    return found


def _readable(descriptor: int, wait_s: float) -> bool:
    """Whether there is something to read, or its other end is closed, within these seconds."""
    poll = select.poll()  # which takes any number; select() only those below 1024
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(math.ceil(1000 * wait_s)))


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
        if not (left := [*_living(group)]):  # they have ended; zombies are left
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
