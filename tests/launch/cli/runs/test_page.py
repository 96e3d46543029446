"""Every command of docs/runs.md works on runs as the page has them, but for `reproduce`."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from penstock.launch.run_dir.provenance import CodeVersion
from penstock.launch.run_dir.run_folder import RunFolder, create_run
from penstock.launch.run_dir.step_logs import METRICS, MetricsLog

from ...conftest import Penstock

PAGE = Path(__file__).parents[4] / "docs" / "runs.md"
STARTS = [
    datetime(2026, 11, 23, 14, 35, 15, tzinfo=UTC),
    datetime(2026, 11, 23, 15, 10, 2, tzinfo=UTC),
    datetime(2026, 11, 24, 9, 0, 0, tzinfo=UTC),
    datetime(2026, 11, 1, 9, 0, 0, tzinfo=UTC),
]


@pytest.fixture
def runs(tmp_path: Path) -> list[RunFolder]:
    folders: list[RunFolder] = []
    for seed, start in enumerate(STARTS):
        folder = create_run(
            tmp_path / "runs",
            name="grpo",
            seed=seed % 3,
            config=f"algorithm:\n  optimizer:\n    lr: {1 + seed % 2}\n",
            data="0123456789abcdef",
            code=CodeVersion("0.1.0"),
            now=start + timedelta(0),
        )
        for home, metric in ((folder, "reward.score/reward/mean"), (folder.stage("sft"), "")):
            home.path.mkdir(parents=True, exist_ok=True)
            with MetricsLog(home.path / METRICS) as log:
                for step in range(3):
                    counts = {"actor.generate/new_tokens": 5.0, "run/step_time_s": 1.0}
                    log.write(step, {metric or "actor.train/cross_entropy": step / 3, **counts})
        folder.write_summary({"accuracy_after_rl": 0.5, "num_steps": 3, "weights_sha256": "a" * 64})
        folders.append(folder)
    return folders


@pytest.mark.usefixtures("fonts")
def test_the_commands_of_the_page(penstock: Penstock, runs: list[RunFolder]) -> None:
    Path("table.csv").write_text("step,loss\n0,1\n")
    found = [
        shlex.split(line)[1:]
        for line in PAGE.read_text().splitlines()
        if line.startswith("    penstock runs ")
    ]
    actions = [words[1] for words in found]
    assert actions == [
        *("list", "list", "show", "diff", "compare", "compare", "plot", "plot"),
        *("reproduce", "export", "import", "import"),
    ]
    for words in found:
        if words[1] == "reproduce":
            continue
        if words[1:] == ["import", "it.run"]:
            words = [*words, "runs=elsewhere"]  # it is here already
        said = penstock(*words)
        assert (said.code, said.err) == (0, ""), words
