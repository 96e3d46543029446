"""What both sides of `vs_trl.py` share; imports the standard library only, for two environments."""

from __future__ import annotations

import json
import random
import re
import statistics
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NUM_PROMPTS = 64
NUM_SAMPLES = 4
PROMPT_TOKENS = 20
WARM_UP = 2
LEARNING_RATE = 1e-6  # every update is taken in full, but the response lengths do not drift
SPECIAL_TOKENS = 4  # ids before the characters
GROUP = 12  # characters of one phase; see `phase_chain` in vs_trl.py
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
MAX_NEW_TOKENS = {"varied": 128, "uniform": 6}
UPDATES = {"varied": 8, "uniform": 40}


def prompts(num_updates: int) -> list[str]:
    """Prompts of all updates: 19 random lower-case letters and a start character."""
    letters = random.Random(0)
    start = sorted(ALPHABET)[:GROUP][-1]
    return [
        "".join(letters.choices(string.ascii_lowercase, k=PROMPT_TOKENS - 1)) + start
        for _ in range(num_updates * NUM_PROMPTS)
    ]


def score(text: str) -> float:
    """The reward: the share of characters with an even code."""
    return sum(ord(character) % 2 == 0 for character in text) / max(len(text), 1)


def peak_rss_mib() -> float:
    """Most memory this process held, in MiB.

    Read from the kernel's own record of this program: the figure of `getrusage` would include what
    the parent held when it started us.
    """
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM line; this benchmark needs Linux")
    return int(found[1]) / 1024


def write_side(file: Path, ends_s: Sequence[float], lengths: Sequence[int], **more: Any) -> None:
    """Write what one process measured.

    Args:
        file: Where to.
        ends_s: When the warm-up ended, then when each timed update did.
        lengths: Response lengths of the timed updates, the end-of-sequence token included.
        more: Anything else worth keeping.
    """
    steps = [after - before for before, after in zip(ends_s, ends_s[1:], strict=False)]
    rows = NUM_PROMPTS * NUM_SAMPLES
    if len(lengths) != rows * len(steps):
        raise RuntimeError(f"{len(lengths)} responses in {len(steps)} updates of {rows} rows")
    ordered = sorted(lengths)
    measured = {
        "samples_per_s": rows * len(steps) / (ends_s[-1] - ends_s[0]),
        "step_s": statistics.median(steps),
        "updates": len(steps),
        "peak_rss_mib": peak_rss_mib(),
        "length_mean": statistics.fmean(lengths),
        "length_min_quartiles_max": [ordered[(len(ordered) - 1) * i // 4] for i in range(5)],
    }
    file.write_text(json.dumps(measured | more))
