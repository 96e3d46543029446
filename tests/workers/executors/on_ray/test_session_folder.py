"""What a process that was killed has left is cleared away; what lives is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.executors.on_ray.executor import SessionFolder


@pytest.fixture
def top(monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="ps") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        yield Path(short) / f"penstock-ray-{os.getuid()}"


HOLDS = """\
import subprocess, sys
from penstock.workers.executors.on_ray.executor import SessionFolder
folder = SessionFolder()
code = "import time; time.sleep(600)"
session = f"{folder.path}/session/"
child = subprocess.Popen(["/ray/raylet", "-c", code, session], executable=sys.executable)
other = subprocess.Popen([sys.executable, "-c", code, session])
print(folder.path, child.pid, other.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_what_a_killed_process_left_is_cleared(top: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(top.parent)},
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    path, pid, other = holder.stdout.readline().split()
    beside = SessionFolder()  # the other one lives: nothing is cleared
    assert Path(path).is_dir()
    os.kill(int(pid), 0)
    beside.remove()
    holder.kill()
    holder.wait(10)
    again = SessionFolder()
    assert not Path(path).exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    os.kill(int(other), 9)  # it only names the folder, so it is left alone
    again.remove()
    assert list(top.iterdir()) == []
    for pipe in (holder.stdin, holder.stdout):
        pipe.close()


def test_a_link_in_its_place_is_refused(top: Path, tmp_path: Path) -> None:
    top.symlink_to(tmp_path)
    with pytest.raises(ConfigError) as raised:
        SessionFolder()
    assert str(raised.value) == (
        f"'{top}' belongs to another user, and Ray's files are to lie there\n"
        "    remove it, or set TMPDIR to a folder of your own"
    )
