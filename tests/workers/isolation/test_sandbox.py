"""Programs that a model wrote: what they can do, and what hostile ones come to."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from killer import killing, lives
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.workers.isolation import kinds, sandbox
from penstock.workers.isolation.confine import Unconfined
from penstock.workers.isolation.kinds import (
    ARCHITECTURES,
    BUBBLEWRAP,
    KINDS,
    LANDLOCK,
    LIMITS,
    NAMESPACES,
    SandboxKind,
    program_for,
)
from penstock.workers.isolation.sandbox import (
    Limits,
    check_nothing_left,
    check_sandbox,
    run_in,
    run_python,
    why_not,
)

ROOT = Path(__file__).parents[3]
CONFINING = [*(k for k in (BUBBLEWRAP, NAMESPACES) if why_not(k) is None), LANDLOCK]
"""What this machine has; the last line always, or its tests fail."""


@pytest.fixture(params=CONFINING, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> SandboxKind:
    return request.param


@pytest.fixture
def attempts() -> Iterator[Any]:
    """The table of hostile programs, which the benchmark runs one by one."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("sandbox_attempts")
    sys.path.remove(str(ROOT / "benchmarks"))


def test_a_program_reads_and_writes_its_streams() -> None:
    check_sandbox()
    ran = run_python("import sys\nprint(input()[::-1])\nsys.exit(3)", stdin="abc\n")
    assert (ran.exit_code, ran.stdout, ran.stderr, ran.timed_out) == (3, "cba\n", "", False)
    failed = run_python("1/0")
    assert failed.exit_code == 1
    assert failed.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_functions_are_called_and_assertions_run() -> None:
    program = (
        "class Solution:\n    def add(self, a, b=1):\n        return a + b\n"
        "def pairs():\n    return {2, 1}, (3, [None])\n"
        "def fails():\n    raise KeyError('x')\n"
    )
    calls = [
        {"function": "add", "args": [2, 3]},
        {"function": "add", "args": [2], "kwargs": {"b": 4}},
        {"function": "pairs"},
        {"function": "fails"},
        {"function": "other"},
    ]
    ran = run_python(program, calls=calls, asserts=["assert Solution().add(1) == 2", "assert 0"])
    assert ran.results == [
        {"value": 5},
        {"value": 6},
        {"value": [[1, 2], [3, [None]]]},
        {"error": "KeyError: 'x'"},
        {"error": "there is no function other"},
        {"value": True},
        {"error": "AssertionError: "},
    ]


STANDARD = """
import asyncio, concurrent.futures, csv, ctypes, datetime, decimal, heapq, hashlib, itertools, json
import logging, mmap, pickle, random, re, resource, select, signal, statistics, struct, threading
import time, unittest, uuid, zlib, zoneinfo

async def slept():
    await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(3)))
    return await asyncio.to_thread(lambda: 7)

assert asyncio.run(slept()) == 7
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    assert [*pool.map(abs, [-1, -2])] == [1, 2]
assert decimal.Decimal(1) / 3
assert ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 5)() == 5
mapped = mmap.mmap(-1, 4096)
mapped[:2] = b'ok'
assert zoneinfo.ZoneInfo('Europe/Paris')
assert uuid.uuid4() and random.SystemRandom().random() < 1
assert resource.getrlimit(resource.RLIMIT_AS)[0] > 0
signal.signal(signal.SIGALRM, lambda *_: print('alarm'))
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(0.05)
try:
    __import__('subprocess').run(['true'])
except OSError as error:
    print(type(error).__name__)
"""

WRITING = """
import os, pathlib, shutil, sqlite3, tempfile
open('own.txt', 'w').write('mine')
with tempfile.TemporaryDirectory() as place:
    pathlib.Path(place, 'a').write_text('x')
    shutil.copyfile(pathlib.Path(place, 'a'), 'b')
with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryFile() as other:
    file.write(b'x'), other.write(b'x')
base = sqlite3.connect('base.db')
base.execute('create table t(x)')
base.execute('insert into t values (3)')
base.commit()
print(open('own.txt').read(), sorted(os.listdir()), base.execute('select x from t').fetchone())
"""


def test_the_standard_library_works(kind: SandboxKind) -> None:
    ran = run_in(kind, STANDARD)
    assert (ran.exit_code, ran.stdout) == (0, "alarm\nPermissionError\n"), ran.stderr


def test_files_are_written_in_memory_or_not_at_all(kind: SandboxKind) -> None:
    ran = run_in(kind, WRITING)
    if kind.has_folder:
        assert ran.stdout == "mine ['b', 'base.db', 'own.txt'] (3,)\n", ran.stderr
    else:
        assert "PermissionError: [Errno 13] Permission denied: 'own.txt'" in ran.stderr


def test_quick_attempts_get_nowhere(
    kind: SandboxKind, attempts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "very-secret")
    processes = psutil.Process().children(recursive=True)
    hidden = [attempts.HIDDEN] if kind.has_folder else []
    assert escaped(kind, [*attempts.QUICK.values(), *hidden], attempts, tmp_path) == []
    assert psutil.Process().children(recursive=True) == processes


@pytest.mark.parametrize(
    ("confined", "version"), [(LANDLOCK, 1), *((k, -1) for k in CONFINING if k.has_folder)]
)
def test_each_layer_holds_by_itself(
    confined: SandboxKind,
    version: int,
    attempts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the first Landlock, which knows no signals, and with none beside namespaces."""
    monkeypatch.setattr(kinds, "_CODE", _with_landlock(version, tmp_path / "code"))
    hidden = [attempts.HIDDEN] if confined.has_folder else []
    tables = [*attempts.QUICK.values(), *hidden]
    (tmp_path / "outside").mkdir()
    assert escaped(confined, tables, attempts, tmp_path / "outside") == []


def escaped(kind: SandboxKind, tables: list[Any], attempts: Any, place: Path) -> list[str]:
    """The attempts that get out, of all of these one after another in a single process."""
    (secret := place / "secret").write_text("EXPECTED" + "-VALUE")
    mode = secret.stat().st_mode
    codes = {name: code for table in tables for name, code in table.items()}
    alone = codes.pop("open descriptors")  # others before it leave theirs open
    with socket.create_server(("127.0.0.1", 0)) as server:
        about = {"secret": str(secret), "port": server.getsockname()[1], "parent": os.getpid()}
        ran = run_in(
            kind,
            "def attempt(program):\n    names = {}\n"
            "    exec(program, names)\n    return 'ESCAPED' in names\n",
            calls=[
                {"function": "attempt", "args": [attempts.program_of(one, **about)]}
                for one in codes.values()
            ],
            limits=Limits(time_s=30),
        )
        assert "OUT" not in run_in(kind, attempts.program_of(alone, **about)).stdout
    assert (secret.read_text(), secret.stat().st_mode) == ("EXPECTED" + "-VALUE", mode)
    assert [path.name for path in place.iterdir()] == ["secret"]
    outcomes = zip(codes, ran.results, strict=True)
    return [name for name, outcome in outcomes if outcome != {"value": False}]


def _with_landlock(version: int, folder: Path) -> Path:
    """A copy of the confining code in which the kernel tells this version of Landlock."""
    folder.mkdir()
    text = Path(sandbox.__file__).with_name("confine.py").read_text()
    asked = "version = libc.syscall(444, None, 0, 1)"
    assert asked in text
    (folder / "confine.py").write_text(text.replace(asked, f"version = {version}"))
    return folder


def test_the_tables_of_attempts_can_succeed(attempts: Any, tmp_path: Path) -> None:
    """Without confinement an attempt is out: the tables are not held by their own mistakes."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    about = {"secret": str(secret), "port": 1, "parent": os.getpid()}
    for group, name in (
        ("files", "read a file"),
        ("files", "write a file"),
        ("processes", "shell"),
        ("processes", "fork"),
        ("signals", "signal to the parent"),
        ("signals", "owner of a pipe"),
        ("network", "socket AF_INET SOCK_STREAM"),
        ("undoing", "prctl, outlive the parent"),
        ("kernel", "file in memory"),
        ("looking in", "its own environment"),
    ):
        ran = run_in(LIMITS, attempts.program_of(attempts.QUICK[group][name], **about))
        assert "OUT" in ran.stdout, (name, ran)


FLOODS = (
    "deaf to its parent's death",
    "threads that sleep",
    "output",
    "results",
    "nested results",
    "one long result",
    "fill, map, unlink, again",
    "empty files",
    "1200 nested folders",
    "folders",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", FLOODS)
def test_floods_are_bounded_and_leave_nothing(
    name: str, kind: SandboxKind, attempts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flood = attempts.FLOODS[name]
    if flood.needs_folder and not kind.has_folder:
        name, flood = "folders", attempts.FLOODS["folders"]  # which fails at the first
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    processes = psutil.Process().children(recursive=True)
    program = attempts.program_of(flood.program, secret="none", port=1, parent=os.getpid())
    start = time.monotonic()
    limits = Limits(time_s=20 if flood.timed_out is False else 0.6)
    ran = run_in(kind, program, calls=[{"function": "none"}], limits=limits)
    assert time.monotonic() - start < 60  # bounded, on a machine that is busy with other things too
    assert "OUT" not in ran.stdout.split("\n", 1)[0]
    if flood.timed_out is not None:
        assert ran.timed_out == flood.timed_out, ran
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert psutil.Process().children(recursive=True) == processes


def attempt(statement: str, *, setup: str = "", limits: Limits | None = None) -> str:
    """How an attempt failed: the type of what it raised, or "done"."""
    lines = "".join(f"    {line}\n" for line in statement.splitlines())
    program = (
        f"{setup}\ntry:\n{lines}    print('done')\n"
        "except BaseException as e:\n    print(type(e).__name__)\n"
    )
    ran = run_python(program, limits=limits)
    assert not ran.timed_out
    return ran.stdout.strip() or f"{ran.exit_code}: {ran.stderr}"


DEAF = """
import signal
for s in (1, 2, 3, 15, 24):
    signal.signal(s, signal.SIG_IGN)
while True: pass
"""


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)", DEAF])
def test_a_program_without_end_is_ended(program: str) -> None:
    start = time.monotonic()
    ran = run_python(program, limits=Limits(time_s=0.5))
    assert ran.timed_out
    assert ran.exit_code < 0
    assert time.monotonic() - start < 5


def test_memory_is_bounded() -> None:
    huge = Limits(memory_mb=128)
    assert attempt("x = bytearray(1 << 30)", limits=huge) == "MemoryError"
    grows = run_python("x = []\nwhile True: x.append(bytearray(1 << 20))", limits=huge)
    assert grows.exit_code != 0
    assert not grows.timed_out


def test_files_and_output_are_bounded() -> None:
    small = Limits(folder_mb=1, output_bytes=1000)
    big = "open('f', 'wb').write(bytes(2 << 20))"
    assert attempt(big, limits=small) in ("OSError", "PermissionError")
    flood = run_python("while True: print('x' * 1000)", limits=small)
    assert flood.exit_code != 0
    assert len(flood.stdout) == 1000
    opened = "files = [open(__import__('os').__file__) for i in range(100)]"
    assert attempt(opened, limits=Limits(open_files=32)) == "OSError"


def test_a_program_ends_with_whoever_started_it(kind: SandboxKind) -> None:
    """As when a verifier that is out of time is killed; the program does what it can to live on."""
    code = (
        "import os, threading, time\n"
        "from penstock.workers.isolation import kinds\n"
        "from penstock.workers.isolation.sandbox import Limits, run_in\n"
        f"kind = kinds.{kind.name.upper()}\n"
        "program = 'import ctypes, time; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); time.sleep(60)'\n"
        "run = lambda: run_in(kind, program, limits=Limits(time_s=60))\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "import psutil\n"
        "found = []\n"
        f"while len(found) < {1 + kind.has_folder}:\n"
        "    time.sleep(0.2)\n"
        "    found = psutil.Process().children(recursive=True)\n"
        "time.sleep(0.2)\n"
        "print(*(c.pid for c in found), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    pids = [int(pid) for pid in ran.stdout.split()]
    assert len(pids) == 1 + kind.has_folder, ran.stderr
    deadline = time.monotonic() + 5
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(lives, pids))


def test_results_are_not_taken_from_the_program_s_own_writing() -> None:
    program = (
        "import os\n"
        "for fd in range(3, 10):\n"
        '    try:\n        os.write(fd, b\'{"value": true, "token": "guess"}\\n\')\n'
        "    except OSError:\n        pass\n"
    )
    ran = run_python(program + "os._exit(0)", asserts=["assert False"])
    assert ran.results == []


def test_several_run_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(run_python, [f"print({i})" for i in range(4)])
        assert [ran.stdout for ran in found] == ["0\n", "1\n", "2\n", "3\n"]


def test_without_a_strong_sandbox_nothing_runs_unless_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trials are replaced by those of a machine that offers nothing."""
    reasons = {
        "bubblewrap": "there is no program bwrap on the PATH",
        "namespaces": "unshare: Operation not permitted",
        "landlock": "the kernel has no Landlock, which keeps files apart",
        "limits": None,
    }

    def why(kind: SandboxKind) -> str | None:
        return reasons[kind.name]

    monkeypatch.setattr(sandbox, "why_not", why)
    _forget_trials()
    try:
        with pytest.raises(ConfigError) as raised:
            run_python("print(1)")
        assert str(raised.value) == (
            "programs that a model wrote need a sandbox of kind 'landlock' or stronger, which this "
            "machine does not offer\n"
            "    bubblewrap: there is no program bwrap on the PATH\n"
            "    namespaces: unshare: Operation not permitted\n"
            "    landlock: the kernel has no Landlock, which keeps files apart\n"
            "    install bubblewrap, allow user namespaces, or run on a Linux with seccomp and "
            "Landlock (5.13 or newer); or accept less: verifier_options.minimum=limits runs "
            "programs with your rights, bounded in time and memory only"
        )
        assert run_python("print(1)", minimum="limits").stdout == "1\n"
        reasons["landlock"] = None
        _forget_trials()
        assert check_sandbox() is LANDLOCK
        with pytest.raises(ConfigError, match="a sandbox of kind 'namespaces' or stronger"):
            check_sandbox("namespaces")
    finally:
        _forget_trials()


def _forget_trials() -> None:
    sandbox.best_kind.cache_clear()
    sandbox._why_not_stronger.cache_clear()  # pyright: ignore[reportPrivateUsage]
    sandbox.announce_sandbox.cache_clear()


def test_the_strongest_kind_that_works_is_used_and_announced_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _forget_trials()
    best = next(kind for kind in KINDS if kind in CONFINING)
    assert check_sandbox(best.name) is best
    for _ in range(2):
        sandbox.announce_sandbox()
    assert capsys.readouterr().err == f"penstock: sandbox: {best.name}\n"


def test_an_unknown_minimum_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        run_python("print(1)", minimum="landlok")
    assert str(raised.value) == (
        "minimum=landlok is no kind of sandbox; did you mean 'landlock'?\n"
        "    use bubblewrap, namespaces, landlock, limits"
    )


def test_a_kernel_without_landlock_is_noticed_by_the_last_line_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "_CODE", _with_landlock(-1, tmp_path / "code"))
    with pytest.raises(Unconfined, match="the kernel has no Landlock, which keeps files apart"):
        run_in(LANDLOCK, "print(1)")
    for kind in CONFINING[:-1]:
        assert run_in(kind, "print(1)").stdout == "1\n"


def test_a_sandbox_that_cannot_be_made_any_more_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not a score of 0: the program never ran."""
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bwrap: no space for namespaces >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not(BUBBLEWRAP) == "exit code 1 bwrap: no space for namespaces"
    monkeypatch.setattr(sandbox, "best_kind", lambda: BUBBLEWRAP)
    with pytest.raises(WorkerError) as raised:
        run_python("print(1)")
    assert str(raised.value) == (
        "a sandbox of kind 'bubblewrap', which a trial showed to work, cannot be made any more: "
        "exit code 1 bwrap: no space for namespaces\n"
        "    see whether memory, processes or user namespaces have run out"
    )


def test_a_process_that_is_left_is_an_error_that_names_it() -> None:
    code = "import os, time\nif p := os.fork():\n    print(p, flush=True)\ntime.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        child = int(leader.stdout.readline())
        leader.kill()
    with pytest.raises(WorkerError) as raised:
        check_nothing_left(leader.pid, 0.05)
    assert str(raised.value) == (
        f"processes of a model's program are left 0.05 s after it was killed: {child}\n"
        "    end them with kill -9, and run on a kernel that allows user namespaces"
    )
    os.kill(child, signal.SIGKILL)
    check_nothing_left(leader.pid, 10)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_filter_allows_each_call_once_and_ends_by_denying(machine: str) -> None:
    program = program_for(machine)
    steps = [struct.unpack("HBBI", program[i : i + 8]) for i in range(0, len(program), 8)]
    assert steps[-1] == (6, 0, 0, 0x50001)  # return: an error, "operation not permitted"
    ends = [i + 1 + max(step[1:3]) for i, step in enumerate(steps) if step[0] != 6]
    assert max(ends) < len(steps)
    # A number is looked for wherever the step before did not load an argument.
    allowing = [a[3] for a, b in pairwise(steps) if a[:3] == (0x15, 0, 1) and b[3] == 0x7FFF0000]
    assert len(allowing) == len(set(allowing)) > 80


@pytest.mark.parametrize(
    "options", [{"time_s": 0}, {"memory_mb": 1}, {"open_files": 3}, {"threads": 0}]
)
def test_limits_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="; expected "):
        Limits(**options)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    found: list[subprocess.Popen[bytes]] = []
    begin = sandbox.start

    def start(*args: Any) -> subprocess.Popen[bytes]:
        found.append(begin(*args))
        return found[-1]

    monkeypatch.setattr(sandbox, "start", start)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at once", "while it runs"])
@pytest.mark.parametrize("whom", ["front", "program"])
def test_a_program_that_is_killed_from_outside_runs_again(
    kind: SandboxKind, when: str, whom: str, started: list[subprocess.Popen[bytes]]
) -> None:
    def busy_s() -> float:
        family = psutil.Process(started[0].pid)
        times = [one.cpu_times() for one in (family, *family.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    def find() -> list[int]:
        front = psutil.Process(started[0].pid)
        inside = [one.pid for one in front.children(recursive=True)]
        return inside[-1:] if whom == "program" and inside else [front.pid]

    code = "n = 0\nwhile n < 20_000_000: n += 1\nprint(n)"
    with killing(find, lambda: bool(started) and (when == "at once" or busy_s() > 0.3)):
        ran = run_in(kind, code, limits=Limits(time_s=60.0))
    assert (ran.exit_code, ran.stdout, ran.timed_out) == (0, "20000000\n", False)
    assert len(started) == 2


@pytest.mark.slow
def test_one_that_takes_all_its_cpu_time_is_not_run_again(
    kind: SandboxKind, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = sandbox.bounds

    def less(limits: Limits) -> dict[str, int]:
        return {**bounds(limits), "cpu_s": 1}

    monkeypatch.setattr(sandbox, "bounds", less)
    ran = run_in(kind, "while True: pass", limits=Limits(time_s=60.0))
    assert ran.timed_out
    assert len(started) == 1
