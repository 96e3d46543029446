"""The leak check itself: it must catch each kind of leak, and only leaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LEAKY = """
import os, subprocess, sys, threading

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

def test_tidy(tmp_path):
    subprocess.run([sys.executable, "-c", ""], check=True)
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    (tmp_path / "closed.txt").write_text("closed")

def test_end():
    for item in kept:
        if isinstance(item, subprocess.Popen):
            item.kill()
            item.wait()
"""


def test_each_kind_of_leak_is_caught_and_named(tmp_path: Path) -> None:
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    assert "GRACE_S = 5.0" in conftest
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_S = 5.0", "GRACE_S = 0.3"))
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "6 passed, 4 errors" in ran.stdout, ran.stdout
    for leak in ("test_process", "test_thread", "test_file", "test_socket"):
        assert f"ERROR test_leaky.py::{leak}" in ran.stdout
    for named in ("import time; time.sleep(60)", ": left\n", "left.txt", "pipe:["):
        assert named in ran.stdout
