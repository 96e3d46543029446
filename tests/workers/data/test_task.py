"""What importing tasks brings with it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_importing_is_free() -> None:
    code = (
        "import sys, penstock.workers.data.task, penstock.workers.data.reasoning_task, "
        "penstock.workers.verifiers.verifiers, penstock.workers.data.row_sources\n"
        "print([m for m in ('torch', 'reasoning_gym', 'datasets', 'math_verify', 'transformers') "
        "if m in sys.modules])\n"
        "import penstock.workers.data.sources, penstock.workers.rewards.rule_reward\n"
        "print([m for m in ('reasoning_gym', 'datasets', 'math_verify', 'transformers') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n[]\n", done.stderr
