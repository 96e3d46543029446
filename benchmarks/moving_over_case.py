"""What both sides of `moving_over.py` share; imports the standard library only."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

ROWS, NUM_PROMPTS, NUM_SAMPLES, MAX_NEW_TOKENS = 8, 4, 4, 12
LORA_RANK, LORA_ALPHA = 4, 8
WEIGHTS = (1.0, 0.5)
"""Weights of the two rewards."""


def texts(seed: int, shortest: int = 4, longest: int = 12) -> list[str]:
    """Random words of lower-case letters, one for each row."""
    letters = random.Random(seed)
    sizes = [letters.randint(shortest, longest) for _ in range(ROWS)]
    return ["".join(letters.choices(string.ascii_lowercase, k=size)) for size in sizes]


def write_rows(folder: Path) -> None:
    """Write the rows of every program as JSONL, in the forms that TRL documents."""
    prompts, chosen, rejected = texts(1), texts(2), texts(3)
    pairs = list(zip(prompts, chosen, rejected, strict=True))
    rows: dict[str, list[dict[str, Any]]] = {
        "sft": [{"prompt": p, "completion": c} for p, c, _ in pairs],
        "pairs": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in pairs],
        "kto": [
            {"prompt": p, "completion": text, "label": liked}
            for p, c, r in pairs
            for text, liked in ((c, True), (r, False))
        ],
    }
    columns = [{"prompt": p, "letter": c[0], "length": len(r)} for p, c, r in pairs]
    rows["grpo"], rows["held_out"] = columns[:NUM_PROMPTS], columns[NUM_PROMPTS:]
    asked = "Which of the entries a to h says most about it?"
    rows["asked"] = [{"prompt": [{"role": "user", "content": f"{p}: {asked}"}]} for p in prompts]
    for name, these in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in these)
        (folder / f"{name}.jsonl").write_text(lines)


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows that `write_rows` wrote."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def early(completions: list[str], letter: list[str], **_: Any) -> list[float]:
    """Share of characters that come no later in the alphabet than the row's letter."""
    return [
        sum(one <= own for one in text) / max(len(text), 1)
        for text, own in zip(completions, letter, strict=True)
    ]


def near(completions: list[str], length: list[int], **_: Any) -> list[float]:
    """How near the text's length is to the row's, 0 at best."""
    return [-abs(len(text) - own) / 10 for text, own in zip(completions, length, strict=True)]


def asked(response: str) -> float:
    """Short answers are good."""
    return 1 / (1 + len(response))


def look_up(entry: str) -> str:
    """Look an entry up in the catalog.

    Args:
        entry: The letter of the entry, from a to h.
    """
    return f"Entry {entry} of the catalog holds {ord(entry)}."
