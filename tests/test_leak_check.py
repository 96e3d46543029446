"""What holds for every test: leaks are caught where they are made, and nothing is inherited."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

LEAKY = """
import gc, os, subprocess, sys, threading

kept = []

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))

def test_thread():
    stop = threading.Event()
    kept.append(stop)
    threading.Thread(target=stop.wait, name="left", daemon=True).start()

def test_file(tmp_path):
    kept.append(open(tmp_path / "left.txt", "w"))

def test_socket():
    kept.append(os.pipe())

def test_failure():
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(61)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    raise AssertionError("on purpose")

def test_zombie():
    process = subprocess.Popen([sys.executable, "-c", ""])
    kept.append(process)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

def test_after_the_failure():
    kept[:] = [item for item in kept if not isinstance(item, subprocess.Popen)]
    sys.last_exc = sys.last_value = sys.last_traceback = None
    gc.collect()  # a process that was not waited for says so here
    try:
        raise AssertionError(f"child {os.waitpid(-1, os.WNOHANG)}")
    except ChildProcessError:
        pass

def test_tidy(tmp_path):
    subprocess.run([sys.executable, "-c", ""], check=True)
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    (tmp_path / "closed.txt").write_text("closed")

"""


@pytest.mark.slow
def test_each_kind_of_leak_is_caught_and_named(tmp_path: Path) -> None:
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    assert "GRACE_S = 5.0" in conftest
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_S = 5.0", "GRACE_S = 0.3"))
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 7 passed, 6 errors" in ran.stdout, ran.stdout
    for leak in ("process", "thread", "file", "socket", "failure", "zombie"):
        assert f"ERROR test_leaky.py::test_{leak}" in ran.stdout
    for named in ("time.sleep(60)", "time.sleep(61)", ": left\n", "left.txt", "pipe:[", "zombie)"):
        assert named in ran.stdout


INHERITS = """
import json, os, signal, subprocess, sys

CODE = '''
import json, os, signal, sys
umask = os.umask(0)
print(json.dumps({
    "ignored": [n.name for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN],
    "umask": umask, "stdin": sys.stdin.read(), "environment": dict(os.environ),
}))
'''

def test_child():
    assert os.fstat(0)
    with open("said.json", "w") as out:
        subprocess.run([sys.executable, "-c", CODE], stdout=out, check=True)
"""

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)
HOSTILE = {
    "COLUMNS": "20",
    "FORCE_COLOR": "1",
    "LC_ALL": "C",
    "MASTER_ADDR": "192.0.2.1",
    "OMP_NUM_THREADS": "7",
    "PYTHONIOENCODING": "latin-1",
    "RANK": "3",
    "RAY_ADDRESS": "192.0.2.1:6379",
    "WORLD_SIZE": "4",
}


def _hostile() -> None:
    """As a script without job control starts what is to run on in the background, and worse."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    os.close(0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_nothing_is_inherited(tmp_path: Path, workers: tuple[str, ...]) -> None:
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_inherits.py").write_text(INHERITS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if name != "TERM"} | HOSTILE
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, "."],
        cwd=tmp_path,
        env=environment,
        preexec_fn=_hostile,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert not {number.name for number in IGNORED} & set(said["ignored"])
    assert (said["umask"], said["stdin"]) == (0o022, "")
    kept = {name: said["environment"].get(name) for name in HOSTILE}
    known = {"COLUMNS": "80", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    assert kept == {**dict.fromkeys(HOSTILE), **known}
    assert said["environment"]["TERM"] == "dumb"
