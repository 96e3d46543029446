"""Memory and time of reading a set that is larger than memory as a stream.

A set of conversations is written as Parquet, in several files. In a process of its own a source of
demonstrations then takes its first 1,000 rows: how much the process has grown is measured from
before the task is built. Another process asks for a step in the middle of the set, as a resumed run
does, and both must read the same rows. The libraries `datasets` and `pyarrow` are loaded before.

    python benchmarks/streamed_rows.py --rows 2000000 --json FILE
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROWS_OF_A_FILE = 250_000
ROWS_OF_A_STEP = 50
NUM_STEPS = 20


def write(folder: Path, num_rows: int) -> int:
    """Write the set; returns its bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(5000)]
    texts = [" ".join(rng.choices(words, k=40)) for _ in range(997)]
    for start in range(0, num_rows, ROWS_OF_A_FILE):
        count = min(ROWS_OF_A_FILE, num_rows - start)
        said = [f"{start + i // 2}: {texts[(start + i) % 997]}" for i in range(2 * count)]
        turns = pa.StructArray.from_arrays(
            [pa.array(["user", "assistant"] * count), pa.array(said)], names=["role", "content"]
        )
        offsets = pa.array(range(0, 2 * count + 1, 2), pa.int32())
        table = pa.table({"messages": pa.ListArray.from_arrays(offsets, turns)})
        pq.write_table(table, folder / f"{start:09}.parquet")
    return sum(path.stat().st_size for path in folder.iterdir())


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def read(folder: Path, steps: list[int]) -> dict[str, Any]:
    """Take these steps of the stream, in this process."""
    from penstock.workers.data.chat import TURNS
    from penstock.workers.data.row_sources import HfTaskSpec
    from penstock.workers.data.sources import DemonstrationSource
    from penstock.workers.models.tokenizer import TokenizerSpec

    tokenizer = TokenizerSpec(kind="byte", chat_template=TURNS).build()
    alone = resident_mb()
    for library in ("datasets", "pyarrow.parquet"):  # which are counted apart
        import_module(library)
    before = resident_mb()
    began = time.perf_counter()
    files = (str(folder / "*.parquet"),)
    task = HfTaskSpec(dataset="parquet", data_files=files, streaming=True, num_held_out=50).build()
    source = DemonstrationSource(
        task,
        tokenizer,
        batch_size=ROWS_OF_A_STEP,
        seed=0,
        max_prompt_tokens=1024,
        max_response_tokens=1024,
    )
    built = time.perf_counter()
    digests = {
        str(step): hashlib.sha256(source.batch(step).tokens.numpy().tobytes()).hexdigest()
        for step in steps
    }
    return {
        "build_s": built - began,
        "steps_s": time.perf_counter() - built,
        "libraries_mb": before - alone,
        "grown_mb": resident_mb() - before,
        "rows": digests,
    }


def in_process(folder: Path, steps: list[int]) -> dict[str, Any]:
    words = [sys.executable, __file__, "--read", str(folder), "--steps", json.dumps(steps)]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--steps", type=json.loads)
    options = parser.parse_args()
    if options.read:
        print(json.dumps(read(options.read, options.steps)))
        return
    with TemporaryDirectory() as name:
        size = write(Path(name), options.rows)
        first = [*range(NUM_STEPS)]
        through = in_process(Path(name), first)
        middle = options.rows // 2 // ROWS_OF_A_STEP
        resumed = in_process(Path(name), [NUM_STEPS - 1, middle, middle + 1])
        again = in_process(Path(name), [middle + 1])
    same = resumed["rows"][str(NUM_STEPS - 1)] == through["rows"][str(NUM_STEPS - 1)]
    same = same and again["rows"][str(middle + 1)] == resumed["rows"][str(middle + 1)]
    found = {
        "rows": options.rows,
        "parquet_mb": size / 1e6,
        "rows_taken": NUM_STEPS * ROWS_OF_A_STEP,
        "libraries_mb": through["libraries_mb"],
        "grown_mb": through["grown_mb"],
        "grown_mb_in_the_middle": again["grown_mb"],
        "build_s": through["build_s"],
        "first_steps_s": through["steps_s"],
        "step_in_the_middle_s": again["steps_s"],
        "resumed_reads_the_same_rows": same,
    }
    for key, value in found.items():
        print(f"{key:<28} {value:.1f}" if isinstance(value, float) else f"{key:<28} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
