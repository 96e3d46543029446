"""Folders of runs for tests of the page, written as `penstock run` writes them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.launch.run_dir.provenance import CodeVersion
from penstock.launch.run_dir.run_folder import RunFolder, create_run
from penstock.launch.run_dir.step_logs import MetricsLog

BEGUN_S = 1_795_000_000.0
PLAN: Mapping[str, Any] = {
    "groups": [{"name": "all"}],
    "prediction": {
        "step_time_s": 0.5,
        "nodes": {"actor.generate": {"duration_s": 0.25}, "actor.train": {"duration_s": 0.125}},
        "memory": {
            "all": {
                "resident_bytes": {"actor": {"weights": 100, "moments": 200}},
                "transient_bytes": {
                    "actor.train": {"activations": 50},
                    "actor.generate": {"kv": 7},
                },
                "capacity_bytes": 1000,
            }
        },
    },
}


def new_run(
    runs: Path, name: str = "grpo", *, plan: Mapping[str, Any] = PLAN, seed: int = 3
) -> RunFolder:
    """A run that has not taken a step yet."""
    return create_run(
        runs,
        name=name,
        seed=seed,
        config="algorithm: {step: 'x:y'}\n",
        data="0123",
        plan=json.dumps(plan),
        graph="<svg xmlns='http://www.w3.org/2000/svg'/>",
        code=CodeVersion("0.1.0", "abc", False),
    )


def value_at(step: int) -> float:
    """What `reward/mean` is at a step, in all files of these tests."""
    return (step * 7919 % 1000) / 1000


def add_steps(home: Path, steps: Iterable[int], first_step: int | None = None) -> None:
    """Append steps as a run does that goes on, or was resumed at a step."""
    numbers = list(steps)
    with MetricsLog(
        home / "metrics.jsonl", first_step=numbers[0] if first_step is None else 0
    ) as log:
        for step in numbers:
            values = {"reward/mean": value_at(step), "train/loss": -float(step), "run/lag_max": 1.0}
            log.write(step, values, BEGUN_S + step / 2)


def write_many_steps(home: Path, num_steps: int, padding: int = 600) -> None:
    """A metrics.jsonl of as many steps, with lines as long as real ones are."""
    more = ", ".join(f'"actor.train/number_{i}": 0.{i:06d}' for i in range(padding // 36))
    with (home / "metrics.jsonl").open("w") as file:
        for step in range(num_steps):
            file.write(
                f'{{"step": {step}, "wall_time_s": {BEGUN_S + step / 2}, '
                f'"reward/mean": {value_at(step)}, "train/loss": {-float(step)}, {more}}}\n'
            )


def row(prompt: str, response: str, reward: float, **more: Any) -> dict[str, Any]:
    """One sample as `SampleLog` keeps it."""
    known = {"prompt": prompt, "response": response, "reward": reward, "rule.score": reward}
    return {"length": len(response), **known, **more}


def add_samples(home: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
    """The samples of a step."""
    (home / "samples").mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "version": step, **one}) + "\n" for one in rows]
    packed = gzip.compress("".join(lines).encode())
    (home / "samples" / f"step-{step:06d}.jsonl.gz").write_bytes(packed)
