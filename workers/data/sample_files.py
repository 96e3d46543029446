"""Names of the files of samples: `step-000010.jsonl.gz`, one of each step.

Beside them, `parts-000010-PID.jsonl` has the parts of scores until the step's samples are written.
Apart from what writes samples, so that who only reads them need not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_NAME = re.compile(r"step-(\d+)\.jsonl\.gz")


def step_files(folder: Path) -> dict[int, Path]:
    """Step -> its file, in order; none if there is no folder."""
    if not folder.is_dir():
        return {}
    found = {int(m[1]): path for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))


def tokens_key(tokens: Iterable[int]) -> str:
    """Return what identifies a row by its tokens, of the prompt and the response; -1 is padding."""
    text = json.dumps([token for token in tokens if token >= 0])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_parts(
    folder: str,
    step: int,
    role: str,
    rows: Iterable[Iterable[int]],
    parts: Iterable[Mapping[str, float | None]],
) -> None:
    """Keep the named parts of the scores of some rows until the step's samples are written."""
    named = [{f"{role}/{name}": value for name, value in own.items()} for own in parts]
    lines = [json.dumps(one) for one in zip(map(tokens_key, rows), named, strict=True)]
    Path(folder).mkdir(exist_ok=True)
    with (Path(folder) / f"parts-{step:06d}-{os.getpid()}.jsonl").open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def take_parts(folder: Path, step: int) -> dict[str, dict[str, Any]]:
    """Return the parts of a step's scores by their rows' keys, and remove them and older ones."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("parts-*.jsonl")):
        of_step = int(path.name.split("-")[1])
        for key, own in map(json.loads, path.read_text().splitlines() if of_step == step else ()):
            found.setdefault(key, {}).update(own)
        if of_step <= step:
            path.unlink(missing_ok=True)
    return found
