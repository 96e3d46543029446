"""Count what guards against hostile input, so that no change loses any of it.

    python benchmarks/counts.py --json FILE

Counts the cases that pytest collects in `tests/hostile`, the messages that tests pin there and
their checksums, the escapes that `sandbox_escapes.py` attempts in each kind of sandbox, and the
kinds of input that `fuzz.py` makes. Nothing is run but pytest's collection.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from bench import parser, report, table
from fuzz_keys import GROUPS
from fuzz_surfaces import KINDS as SURFACES
from penstock.workers.isolation.kinds import KINDS
from sandbox_escapes import attempts

ROOT = Path(__file__).parents[1]
HOSTILE = ROOT / "tests" / "hostile"


def collected() -> dict[str, int]:
    """Count the cases of each file of `tests/hostile`, the nightly ones included."""
    words = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--collect-only", str(HOSTILE)]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    cases = [line.partition("::")[0] for line in said.splitlines() if "::" in line]
    return dict(sorted(Counter(Path(case).name for case in cases).items()))


def messages() -> dict[str, dict[str, str | int]]:
    """Count the pinned messages of each file, with the file's SHA-256."""
    return {
        file.name: {
            "messages": len(json.loads(file.read_text())),
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted((HOSTILE / "messages").glob("*.json"))
    }


def main() -> None:
    """Count, print and write."""
    given = parser(__doc__ or "").parse_args()
    hostile, pinned = collected(), messages()
    escapes = {kind.name: sum(1 for _ in attempts(kind)) for kind in KINDS[:-1]}
    groups = {name: len(options) for name, options in GROUPS.items()}
    rows = [
        ("cases in tests/hostile", sum(hostile.values())),
        ("messages pinned there", sum(int(file["messages"]) for file in pinned.values())),
        *((f"escapes attempted in {name}", count) for name, count in escapes.items()),
        *((f"options of {name} that are fuzzed", count) for name, count in groups.items()),
        ("kinds of input that are fuzzed", len(SURFACES)),
    ]
    print(table(["what", "count"], rows))
    fuzzed = {"options": groups, "surfaces": sorted(SURFACES)}
    found = {"hostile": hostile, "messages": pinned, "escapes": escapes, "fuzzed": fuzzed}
    report(found, given.json)


if __name__ == "__main__":
    main()
