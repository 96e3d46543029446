"""Peak memory follows this process and its children."""

from __future__ import annotations

import subprocess
import sys
import time

import torch
from penstock.launch.memory import PeakMemory


def test_a_peak_in_this_process_is_kept_after_it_is_gone() -> None:
    with PeakMemory(every_s=0.01) as memory:
        before = memory.sample()
        block = torch.ones(16 * 2**20)  # 64 MiB
        memory.sample()
        del block
    assert memory.peak_bytes - before > 48 * 2**20


def test_children_are_counted() -> None:
    with PeakMemory(every_s=0.01) as memory:
        before = memory.sample()
        code = "x = bytearray(64 << 20); x[::4096] = b'1' * len(x[::4096]); input()"
        child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while memory.peak_bytes - before < 48 * 2**20 and time.monotonic() < deadline:
            time.sleep(0.01)
        child.communicate(b"\n", timeout=30)
    assert memory.peak_bytes - before > 48 * 2**20
