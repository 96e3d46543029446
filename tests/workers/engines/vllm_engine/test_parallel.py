"""Two real processes share a vLLM model by tensor parallelism."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

# What vLLM calls its memory by default: left behind by an engine that was killed, or in use.
TAKEN = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")
PROCESS = Path(__file__).parents[2] / "vllm_rank.py"


@pytest.mark.nightly
def test_two_processes_sample_what_one_samples(tmp_path: Path):
    """The model has one key head, so both processes have it; its output head is tied."""
    TAKEN.touch()
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), str(process), "2", str(tmp_path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
        TAKEN.unlink()
    found = safetensors.torch.load_file(tmp_path / "0.safetensors")
    found |= safetensors.torch.load_file(tmp_path / "1.safetensors")
    for name in ("0", "1", "alone"):
        assert float(found[f"{name}/difference"]) < 1e-5
        assert torch.equal(found[f"{name}/tokens"], found["alone/tokens"])
    assert found["1/layout"].tolist() == [0, 1]
