"""The torch engine on a device that is not the CPU, as far as no such device is needed for it.

Numbers and waits are looked at on a `RecordedDevice`; shapes alone are counted on "meta".
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_device import CountedOps, LargestTensor
from penstock.workers.engines.torch_engine import attention, varlen
from penstock.workers.engines.torch_engine.packing import pack_rows
from penstock.workers.training.host_memory import sent
from ragged_step import Shapes, attend, packs, ragged_rows

LIMIT_S = 250


@pytest.mark.slow
def test_numbers_and_waits_on_a_recorded_device() -> None:
    """In a process of its own: torch keeps a device that has been registered."""
    cases = Path(__file__).with_name("recorded_device_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, cases], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize("micro_batch_tokens", [4096, 16384])
def test_a_step_of_ragged_rows_has_few_shapes(
    micro_batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "most_head_size", lambda device: 256)  # pyright: ignore[reportUnknownLambdaType]
    made = packs(ragged_rows(), micro_batch_tokens)
    assert len(made) >= 20
    forward, backward = Shapes("_flash_attention_forward"), Shapes("_flash_attention_backward")
    with forward, backward:
        for pack in made:
            attend(pack, torch.bfloat16)
    assert 1 <= len(forward.found) <= 8
    assert 1 <= len(backward.found) <= 8


def test_many_short_rows_are_few_operations_in_float32() -> None:
    """A launch costs a GPU more than 512 rows of eight tokens do."""
    tokens = torch.randint(3, 50, (512, 8), generator=torch.Generator().manual_seed(0))
    tokens[:, :5] = tokens[:32, :5].repeat_interleave(16, 0)
    tokens[::3, 7], tokens[1::3, 6:] = -1, -1
    pack = pack_rows(sent(tokens, torch.device("meta")), tokens >= 0, torch.full((512,), 5))
    with CountedOps() as seen:
        attend(pack, torch.float32)
    assert seen.counts["_softmax"] <= 16


def test_no_scores_of_a_long_row_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16,384 tokens in evaluation: nothing has as many elements as a head has pairs."""
    monkeypatch.setattr(varlen, "most_head_size", lambda device: 256)  # pyright: ignore[reportUnknownLambdaType]
    tokens = torch.full((1, 16_384), 5)
    pack = pack_rows(sent(tokens, torch.device("meta")), tokens > 0)
    shape = (len(pack.tokens), 4, 64)
    query = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with LargestTensor() as seen, torch.no_grad():
        attention.attend_packed(query, query[:, :2], query[:, 2:], pack, 0.125)
    assert query.numel() <= seen.numel < 16_384**2 // 32
