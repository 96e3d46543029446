"""Programs that a model wrote: what they can do, and what hostile ones come to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.verifiers.sandbox import sandbox
from penstock.workers.verifiers.sandbox.sandbox import Limits, check_sandbox, run_python


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


def test_the_standard_library_works() -> None:
    program = (
        "import asyncio, ctypes, datetime, decimal, heapq, hashlib, itertools, json, random, re\n"
        "import threading, zoneinfo\n"
        "open('own.txt', 'w').write('mine')\n"
        "thread = threading.Thread(target=lambda: print(open('own.txt').read()))\n"
        "thread.start(); thread.join()\n"
    )
    ran = run_python(program)
    assert (ran.exit_code, ran.stdout) == (0, "mine\n"), ran.stderr


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


def test_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"socket.create_connection(('127.0.0.1', {port}), timeout=1)"
        assert attempt(connect, setup="import socket") == "PermissionError"
    for family in ("AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"):
        made = f"socket.socket(socket.{family}, socket.SOCK_DGRAM)"
        assert attempt(made, setup="import socket") == "PermissionError"
    fetched = "urllib.request.urlopen('http://127.0.0.1:9/', timeout=1)"
    assert attempt(fetched, setup="import urllib.request") == "URLError"


def test_no_processes_and_no_programs() -> None:
    assert attempt("os.fork()", setup="import os") == "PermissionError"
    assert attempt("os.execv('/bin/sh', ['sh'])", setup="import os") == "PermissionError"
    assert attempt("subprocess.run(['true'])", setup="import subprocess") == "PermissionError"
    assert attempt("os.posix_spawn('/bin/true', ['true'], {})", setup="import os") != "done"


def test_a_fork_bomb_makes_no_process() -> None:
    before = len(psutil.Process().children(recursive=True))
    program = (
        "import os\nn = 0\nwhile n < 20000:\n    n += 1\n    try:\n        os.fork()\n"
        "    except OSError:\n        pass\nprint(n)\n"
    )
    assert run_python(program).stdout == "20000\n"
    assert len(psutil.Process().children(recursive=True)) == before


def test_a_thread_bomb_meets_the_memory_limit() -> None:
    program = (
        "import threading, time\nn = 0\n"
        "try:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "        n += 1\nexcept BaseException as e:\n    print(n < 2000)\n"
    )
    ran = run_python(program, limits=Limits(time_s=4, memory_mb=256))
    assert ran.stdout == "True\n" or ran.timed_out or ran.exit_code < 0


def test_nothing_outside_can_be_read_written_or_changed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    mode = secret.stat().st_mode
    name = repr(str(secret))
    forbidden = (
        f"open({name}).read()",
        f"open({name}, 'w')",
        f"open({name}, 'a')",
        f"os.truncate({name}, 0)",
        f"os.remove({name})",
        f"os.rename({name}, 'mine')",
        f"os.link({name}, 'mine')",
        f"os.chmod({name}, 0)",
        f"os.chown({name}, 1, 1)",
        f"os.utime({name}, (0, 0))",
        f"os.listdir({str(tmp_path)!r})",
        f"os.mkdir({str(tmp_path / 'new')!r})",
        f"os.symlink({name}, 'mine')",
        "open('/etc/passwd').read()",
        "os.listdir('/')",
        "os.listdir('/proc')",
        "open('../stdin')",
    )
    outcomes = run_python(
        "import os\n"
        "def attempt(statement):\n"
        "    try:\n        exec(statement)\n"
        "    except OSError as e:\n        return type(e).__name__\n"
        "    return 'done'\n",
        calls=[{"function": "attempt", "args": [statement]} for statement in forbidden],
    ).results
    allowed = [s for s, r in zip(forbidden, outcomes, strict=True) if r["value"] == "done"]
    assert allowed == []
    assert secret.read_text() == "secret"
    assert secret.stat().st_mode == mode


def test_secrets_of_the_environment_are_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "very-secret")
    ran = run_python("import os\nprint(dict(os.environ))")
    assert "secret" not in ran.stdout
    parent = f"open('/proc/{os.getpid()}/environ', 'rb').read()"
    assert attempt(parent) == "PermissionError"
    assert attempt("open('/proc/self/environ', 'rb').read()") == "PermissionError"


def test_other_processes_cannot_be_signalled_or_looked_into() -> None:
    own = os.getpid()
    for statement in (f"os.kill({own}, 0)", "os.kill(-1, 9)", "os.kill(0, 9)", "os.setsid()"):
        assert attempt(statement, setup="import os") == "PermissionError", statement
    library = "import ctypes; c = ctypes.CDLL(None, use_errno=True)"
    ptrace = f"assert c.ptrace(16, {own}, 0, 0) == 0"
    assert attempt(ptrace, setup=library) == "AssertionError"


def test_limits_cannot_be_raised_and_confinement_not_undone() -> None:
    raised = "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    assert attempt(raised, setup="import resource") in ("PermissionError", "ValueError")
    assert attempt("print(resource.getrlimit(resource.RLIMIT_AS))", setup="import resource") != ""
    library = "import ctypes; c = ctypes.CDLL(None, use_errno=True)"
    for call in ("unshare(0x10000000)", "mount(b'a', b'/', b'tmpfs', 0, 0)", "syscall(425, 8, 0)"):
        assert attempt(f"assert c.{call} == 0", setup=library) == "AssertionError", call


def test_an_endless_loop_is_ended() -> None:
    start = time.monotonic()
    ran = run_python("while True: pass", limits=Limits(time_s=0.5))
    assert ran.timed_out
    assert ran.exit_code < 0
    assert time.monotonic() - start < 5
    asleep = run_python("import time\ntime.sleep(60)", limits=Limits(time_s=0.5))
    assert asleep.timed_out


def test_a_program_that_ignores_signals_is_ended() -> None:
    program = (
        "import signal, time\n"
        "for s in (1, 2, 3, 15, 24):\n    signal.signal(s, signal.SIG_IGN)\n"
        "while True: pass\n"
    )
    assert run_python(program, limits=Limits(time_s=0.5)).timed_out


def test_memory_is_bounded() -> None:
    huge = Limits(memory_mb=128)
    assert attempt("x = bytearray(1 << 30)", limits=huge) == "MemoryError"
    grows = run_python("x = []\nwhile True: x.append(bytearray(1 << 20))", limits=huge)
    assert grows.exit_code != 0
    assert not grows.timed_out


def test_files_and_output_are_bounded() -> None:
    small = Limits(folder_mb=1, output_bytes=1000)
    assert attempt("open('f', 'wb').write(bytes(2 << 20))", limits=small) in ("OSError", "-25: ")
    flood = run_python("while True: print('x' * 1000)", limits=small)
    assert flood.exit_code != 0
    assert len(flood.stdout) == 1000
    many = "i = 0\nwhile True:\n    i += 1\n    open(str(i), 'w').close()\n"
    start = time.monotonic()
    assert run_python(many, limits=small).exit_code != 0
    assert time.monotonic() - start < 3.9, "its files, not the clock, ended it"
    opened = "files = [open(str(i), 'w') for i in range(100)]"
    assert attempt(opened, limits=Limits(open_files=32)) == "OSError"


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_python("open('f', 'w').write('x')\nwhile True: pass", limits=Limits(time_s=0.3))
    assert list(tmp_path.iterdir()) == []
    assert not [
        p for p in psutil.Process().children(recursive=True) if "sandbox/child.py" in _line(p)
    ]


def _line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def test_a_program_ends_with_whoever_started_it() -> None:
    """The kernel kills it when the thread that waits for it ends, however that comes about."""
    code = (
        "import os, threading\n"
        "from penstock.workers.verifiers.sandbox.sandbox import Limits, run_python\n"
        "run = lambda: run_python('import time\\ntime.sleep(60)', limits=Limits(time_s=60))\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "import time\ntime.sleep(1.5)\n"
        "import psutil\n"
        "print(*(c.pid for c in psutil.Process().children()), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    pids = [int(pid) for pid in ran.stdout.split()]
    assert pids, ran.stderr
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


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


def test_without_confinement_nothing_runs_unless_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The child is replaced by one whose kernel offers nothing."""
    folder = Path(sandbox.__file__).parent
    for name in ("child.py", "kernel.py"):
        text = (folder / name).read_text()
        text = text.replace("version = libc.syscall(444, None, 0, 1)", "version = -1")
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sandbox, "_CHILD", tmp_path / "child.py")
    with pytest.raises(ConfigError) as raised:
        run_python("print(1)")
    assert str(raised.value) == (
        "programs that a model wrote cannot be confined on this machine: the kernel has no "
        "Landlock, which keeps files apart\n    run on a Linux with seccomp and Landlock (5.13 or "
        "newer), or accept that they run with your rights, bounded in time and memory only: "
        "allow_unconfined=true"
    )
    assert run_python("print(1)", allow_unconfined=True).stdout == "1\n"


@pytest.mark.parametrize("options", [{"time_s": 0}, {"memory_mb": 1}, {"open_files": 3}])
def test_limits_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="; expected "):
        Limits(**options)
