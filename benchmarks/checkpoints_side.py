"""One process of `checkpoints.py`: `penstock run`, noting how long checkpoints held it up.

Run as: python checkpoints_side.py waits|goes-on MEASURED WORD...

The JSON file MEASURED gets seconds by step. A process that waits goes on once a checkpoint is
complete, by the same code otherwise.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from penstock.dataflow.runtime.saving.of_run import Saving, Take
from penstock.launch.main import main

LIMIT_S = 600.0


def measure(waits: bool) -> dict[int, float]:
    """Have every checkpoint from now on noted: its step, and for how long the run stood still."""
    held_s: dict[int, float] = {}
    begin = Saving.begin

    def measured(self: Saving, step: int, take: Take, *, due: bool = True) -> bool:
        since_s = time.monotonic()
        taken = begin(self, step, take, due=due)
        if waits:
            self.settle(LIMIT_S)
        held_s[step] = time.monotonic() - since_s
        return taken

    Saving.begin = measured
    return held_s


if __name__ == "__main__":
    found = measure(sys.argv[1] == "waits")
    code = main(["run", *sys.argv[3:]])
    if code:
        sys.exit(code)
    Path(sys.argv[2]).write_text(json.dumps(found))
