"""A run is reproduced from its archive in another folder, to the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ...conftest import Penstock
from ..test_run import TINY, only_run

pytestmark = pytest.mark.slow


def test_from_its_archive_in_another_folder(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("algorithm=sft", *TINY, "algorithm.per_step.demos=8")
    assert penstock("run", *words).code == 0
    first = only_run()
    assert penstock("runs", "export", first.name, "it.run").code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert penstock("runs", "import", "../it.run").code == 0

    said = penstock("runs", "reproduce", first.name, "into=again")
    again = only_run(Path("again"))
    assert said.code == 0, said.err
    assert said.out.splitlines()[-1] == f"{again}: the same weights"
    summaries = [
        json.loads((run / "summary.json").read_text()) for run in (tmp_path / first, again)
    ]
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert 0 < summaries[0]["cpu_utilization"] < 1.5

    changed = json.loads((Path("runs") / first.name / "summary.json").read_text())
    changed["weights_sha256"] = "0" * 64
    (Path("runs") / first.name / "summary.json").write_text(json.dumps(changed))
    about = json.loads((Path("runs") / first.name / "run.json").read_text())
    about["versions"]["torch"] = "2.0.0"
    about["hardware"]["processor"] = "another"
    (Path("runs") / first.name / "run.json").write_text(json.dumps(about))
    said = penstock("runs", "reproduce", first.name, "into=third")
    assert said.code == 1
    assert "differs: packages, torch 2.0.0 -> " in said.out
    assert "differs: machine, processor: another then and " in said.out
    assert said.out.splitlines()[-1].startswith(f"  weights_sha256: {'0' * 64} then and ")
