"""Folders of runs as `penstock run` leaves them, without a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.provenance import CodeVersion, Origins
from penstock.launch.run_dir.run_folder import RunFolder, create_run
from penstock.launch.run_dir.step_logs import MetricsLog

NOW = datetime(2026, 11, 21, 3, 14, 54, tzinfo=UTC)
HERE = {"python": "3.12.1", "torch": "2.13.0"}, {"processor": "one", "num_cores": 2}

Make = Callable[..., RunFolder]


def made(
    runs: Path,
    seed: int,
    lr: str,
    summary: dict[str, Any] | None,
    losses: Sequence[float] = (),
    environment: tuple[dict[str, str], dict[str, Any]] = HERE,
) -> RunFolder:
    """A run with a loss at each step, each of which took half a second and 16 samples."""
    folder = create_run(
        runs,
        name="grpo",
        seed=seed,
        config=f"optimizer:\n  lr: {lr}\nresume: null\n",
        data="0123456789abcdef",
        origins=Origins({"reward.py": f"{seed}" * 64}, {}, *environment),
        code=CodeVersion("0.1.0"),
        now=NOW + timedelta(hours=seed),
    )
    if summary is not None:
        folder.write_summary(summary)
    with MetricsLog(folder.metrics) as log:
        for step, loss in enumerate(losses):
            step_values = {"run/step_time_s": 0.5, "run/samples_per_s": 32.0, "a.train/tokens": 7.0}
            log.write(step, {"a.train/loss": loss, **step_values}, 1e9 + step)
    return folder


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`made` in the folder of runs of the working directory."""
    return lambda *args, **kwargs: made(tmp_path / "runs", *args, **kwargs)


@pytest.fixture
def runs(tmp_path: Path) -> list[RunFolder]:
    """A finished run, one that was stopped and is better, one that goes on, and a damaged one."""
    home = tmp_path / "runs"
    folders = [
        made(home, 0, "1.0e-05", {"num_steps": 200, "accuracy_after_rl": 0.5, "stopped": None}),
        made(home, 1, "1.0e-04", {"num_steps": 9, "accuracy_after_rl": 0.75, "stopped": "asked"}),
        made(home, 2, "1.0e-05", None),
        made(home, 3, "1.0e-05", {}),
    ]
    folders[3].summary.write_text("{")
    return folders
