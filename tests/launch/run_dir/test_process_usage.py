"""Memory and processor time follow this process and its children."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from penstock.launch.run_dir import process_usage as memory_module
from penstock.launch.run_dir.process_usage import ProcessUsage


def test_a_peak_in_this_process_is_kept_after_it_is_gone() -> None:
    """In a process of its own: the children that other tests have left end when they like."""
    code = (
        "import torch\n"
        "from penstock.launch.run_dir.process_usage import ProcessUsage\n"
        "with ProcessUsage(every_s=0.01) as memory:\n"
        "    before = memory.sample()\n"
        "    block = torch.ones(16 * 2**20)\n"  # 64 MiB
        "    memory.sample()\n"
        "    del block\n"
        "print(memory.peak_bytes - before)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(ran.stdout) > 48 * 2**20


def test_children_are_counted() -> None:
    with ProcessUsage(every_s=0.01) as memory:
        before = memory.sample()
        code = "x = bytearray(64 << 20); x[::4096] = b'1' * len(x[::4096]); input()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while memory.peak_bytes - before < 48 * 2**20 and time.monotonic() < deadline:
            time.sleep(0.01)
        child.communicate(b"\n", timeout=30)
    assert memory.peak_bytes - before > 48 * 2**20


def test_a_sample_that_hangs_holds_up_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    going_on, hangs = threading.Event(), threading.Event()

    class Hangs(ProcessUsage):
        def sample(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                hangs.set()
                going_on.wait(30)
            return 0

    monkeypatch.setattr(memory_module, "CLOSE_S", 0.05)
    with Hangs(every_s=0.01):
        assert hangs.wait(30)
    going_on.set()
    assert "taking a sample of memory has not ended in 0.05 s" in caplog.text


def test_the_time_of_children_that_have_ended_is_kept() -> None:
    with ProcessUsage(every_s=0.01) as usage:
        own_s = usage.cpu_s
        code = "import time\nwhile time.process_time() < 0.6: pass\ninput()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        deadline = time.monotonic() + 60
        while usage.cpu_s - own_s < 0.6 and time.monotonic() < deadline:
            time.sleep(0.01)
        child.communicate(b"\n", timeout=30)
    assert usage.cpu_s - own_s >= 0.6
