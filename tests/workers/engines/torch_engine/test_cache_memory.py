"""How many rows a device has memory for, in numbers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from penstock.dataflow.errors import WorkerError
from penstock.workers.engines.torch_engine.device_decode import (
    bytes_per_row,
    rows_in_memory,
    rows_that_fit,
)

GIB = 2**30
H200 = 140 * GIB


def qwen_1_5b() -> Any:
    """The sizes of Qwen2.5-1.5B in bfloat16, without its weights."""
    embedding = torch.empty(151_936, 1536, dtype=torch.bfloat16, device="meta")
    return SimpleNamespace(
        layers=[None] * 28, num_heads=12, num_key_heads=2, head_dim=128, embedding=embedding
    )


def test_what_a_row_of_1k_and_8k_tokens_needs():
    row = bytes_per_row(qwen_1_5b(), 1024 + 8192)
    cache = 9216 * 28 * 2 * 2 * 128 * 2  # positions, layers, key and value, heads, size, bytes
    assert 512 * cache == 126 * GIB
    assert row == cache + 9216 * 12 * 12 + 32 * 151_936
    assert 1.02 < row / cache < 1.03


@pytest.mark.parametrize(
    ("free", "most", "rows"),
    [
        (137 * GIB, 512, 480),  # 123 GiB of 258 MiB each
        (100 * GIB, 512, 336),
        (20 * GIB, 512, 16),  # 6 GiB are 23 rows
        (15 * GIB, 512, 16),  # nothing but the reserve is left, and 16 rows fit into that
        (100 * GIB, 100, 100),
        (100 * GIB, 3, 3),
    ],
)
def test_rows_that_fit_an_h200(free: int, most: int, rows: int):
    row = bytes_per_row(qwen_1_5b(), 1024 + 8192)
    assert rows_that_fit(free, total_bytes=H200, bytes_per_row=row, most=most) == rows


def test_short_rows_all_fit():
    row = bytes_per_row(qwen_1_5b(), 300 + 900)
    assert rows_that_fit(100 * GIB, total_bytes=H200, bytes_per_row=row, most=512) == 512


def test_a_device_without_room_for_16_says_so():
    row = bytes_per_row(qwen_1_5b(), 1024 + 8192)
    with pytest.raises(WorkerError) as error:
        rows_that_fit(3 * GIB, total_bytes=H200, bytes_per_row=row, most=512)
    assert str(error.value) == (
        "generation needs 4.0 GiB for a key-value cache of 16 responses, the fewest that are "
        "sampled at once, and the device has 3.0 GiB free\n"
        "    lower sampling.max_new_tokens or drop long prompts, or have what else is on the "
        "device sleep or move"
    )


def told(answer: Any, device: torch.device) -> Any:
    return answer


def test_what_torch_has_taken_and_does_not_use_is_free(monkeypatch: pytest.MonkeyPatch):
    says: dict[str, Any] = {
        "mem_get_info": (60 * GIB, H200),
        "memory_reserved": 70 * GIB,
        "memory_allocated": 30 * GIB,
    }
    for name, answer in says.items():
        monkeypatch.setattr(torch.cuda, name, partial(told, answer))
    device = torch.device("cuda")
    assert rows_in_memory(qwen_1_5b(), device, 1024 + 8192, 512) == 336  # as of 100 GiB
