"""Pools of processes with the odd verifier."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest
from penstock.workers.verifiers.pool import VerifierPool, VerifierSpec

from .odd_reward import REWARD, MakePool


@pytest.fixture
def make_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[MakePool]:
    """Makes pools, of one process unless it is told otherwise; in the end nothing of them runs."""
    (tmp_path / "odd_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[VerifierPool] = []

    def make(factory: str = "make", **options: Any) -> VerifierPool:
        spec = VerifierSpec(factory=f"odd_reward:{factory}", arguments={})
        settings: dict[str, Any] = {"num_processes": 1, **options}
        made.append(VerifierPool(spec, **settings))
        return made[-1]

    yield make
    below = [p for pool in made for pid in pool.process_ids for p in _below(pid)]
    for pool in made:
        pool.close()
    # One whose supervisor was killed is a zombie until the system's first process looks.
    assert not [process for process in below if not _ended(process)]


def _below(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
