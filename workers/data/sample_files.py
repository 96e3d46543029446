"""Names of the files of samples: `step-000010.jsonl.gz`, one of each step.

Apart from what writes them, so that who only reads them need not import torch.
"""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d+)\.jsonl\.gz")


def step_files(folder: Path) -> dict[int, Path]:
    """Step -> its file, in order; none if there is no folder."""
    if not folder.is_dir():
        return {}
    found = {int(m[1]): path for path in folder.iterdir() if (m := _NAME.fullmatch(path.name))}
    return dict(sorted(found.items()))
