"""Small tensors of written-out numbers, and comparisons to six digits."""

from __future__ import annotations

import torch
from torch import Tensor

Rows = list[list[float]]


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask_of(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows).bool()


def assert_close(actual: Tensor, expected: object) -> None:
    torch.testing.assert_close(actual.double(), f64(expected), atol=1e-6, rtol=0)
