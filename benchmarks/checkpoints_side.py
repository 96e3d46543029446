"""One process of `checkpoints.py`: `penstock run`, whose steps are treated in turns.

Run as: python checkpoints_side.py NUMBER MEASURED WORD...

What becomes of the checkpoint after a step follows from the step and the NUMBER of the process, see
`kind_of`. The JSON file MEASURED gets, by step, for how long the run stood still for it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from penstock.dataflow.runtime.checkpoint import Saving, Take
from penstock.launch.main import main

KINDS = ("none", "goes-on", "waits")
"""No checkpoint; one that is written while the run goes on; one that is waited for."""

LIMIT_S = 600.0


def kind_of(step: int, number: int) -> str:
    """What is done after a step in a process: in three processes each step meets each kind once."""
    return KINDS[(step + number) % len(KINDS)]


def measure(number: int) -> dict[int, float]:
    """Have every checkpoint from now on treated and noted: its step, and how long the run stood."""
    held_s: dict[int, float] = {}
    begin = Saving.begin

    def measured(self: Saving, step: int, take: Take, *, due: bool = True) -> bool:
        since_s, kind = time.monotonic(), kind_of(step, number)
        taken = begin(self, step, take, due=due and kind != "none")
        if kind == "waits":
            self.settle(LIMIT_S)
        held_s[step] = time.monotonic() - since_s
        return taken

    Saving.begin = measured
    return held_s


if __name__ == "__main__":
    found = measure(int(sys.argv[1]))
    code = main(["run", *sys.argv[3:]])
    if code:
        sys.exit(code)
    Path(sys.argv[2]).write_text(json.dumps(found))
