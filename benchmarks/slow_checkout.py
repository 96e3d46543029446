"""A source tree that takes longer for each step: what `regress checkout=` is to find."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["slow_checkout"]

_SLOWED = """\
import sys
import time
from penstock.dataflow.runtime.run import Run

steps = Run.steps


def slower(self):
    began_s = time.monotonic()
    for result in steps(self):
        time.sleep({slower} * (time.monotonic() - began_s))
        yield result
        began_s = time.monotonic()


Run.steps = slower
from penstock.launch.main import main

sys.executable = {python!r}  # as that of an environment is: children are as slow
sys.exit(main(sys.argv[3:]))
"""


def slow_checkout(home: Path, slower: float) -> Path:
    """A folder whose interpreter runs this tree's code, with steps longer by a share.

    Args:
        home: Where it is made.
        slower: The share, 0.25 for a quarter; 0 for none.
    """
    (home / ".venv" / "bin").mkdir(parents=True)
    code, python = home / "slowed.py", home / ".venv" / "bin" / "python"
    code.write_text(_SLOWED.format(slower=slower, python=str(python)))
    # Called as `python -m penstock.launch.main WORDS`.
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{code}" "$@"\n')
    python.chmod(0o755)
    return home
