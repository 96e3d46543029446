"""How the workers of roles are built, whichever executor has it done."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from penstock.algorithms.roles import Reward
from penstock.dataflow.runtime.executor import build_role
from penstock.dataflow.runtime.worker_protocol import WorkerContext


@pytest.fixture
def cudnn() -> Generator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_device_of_a_process_has_its_number() -> None:
    assert WorkerContext("actor", device="cuda").device == "cuda:0"
    assert WorkerContext("actor", device="cuda:3").device == "cuda:3"
    assert WorkerContext("actor").device == "cpu"


@pytest.mark.usefixtures("cudnn")
def test_workers_on_gpus_do_without_cudnn_s_attention() -> None:
    build_role("reward", Reward(), WorkerContext("reward"))
    assert torch.backends.cuda.cudnn_sdp_enabled()
    build_role("reward", Reward(), WorkerContext("reward", device="cuda"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
