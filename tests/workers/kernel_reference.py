"""What kernels of a CUDA device compute, in plain torch, and the functions that go to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from penstock.workers.engines.torch_engine import fused
from penstock.workers.training import weight_gradients
from penstock.workers.training.compiled import Compiled
from torch import Tensor


class _Aten:
    silu_backward = torch.ops.aten.silu_backward

    @staticmethod
    def _fused_rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        wide = x.float()
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (wide * scale * weight).to(x.dtype), scale

    @staticmethod
    def _fused_rms_norm_backward(
        upstream: Tensor, x: Tensor, shape: Any, scale: Tensor, weight: Tensor, mask: list[bool]
    ) -> tuple[Tensor, Tensor]:
        assert upstream.is_contiguous()
        normed, wide = x.float() * scale, upstream.float() * weight
        to_x = (wide - normed * (wide * normed).mean(-1, keepdim=True)) * scale
        to_weight = (upstream.float() * normed).flatten(0, -2).sum(0)
        return to_x.to(x.dtype), to_weight.to(weight.dtype)


def _function(self: Compiled, *inputs: Any) -> Any:
    with torch.no_grad():
        return self.function(*inputs)


def use_functions(
    patch: pytest.MonkeyPatch, call: Callable[..., Any] = _function, *, adds: bool = True
) -> None:
    """Have a CPU compute what a CUDA device does, compiled functions as they are or by `call`."""
    patch.setattr(fused, "_ATEN", _Aten)
    patch.setattr(fused, "has_kernels", lambda x: True)  # pyright: ignore[reportUnknownLambdaType]
    patch.setattr(Compiled, "__call__", call)
    patch.setattr(weight_gradients, "ADDED_ON", frozenset({"cpu"} if adds else ()))
