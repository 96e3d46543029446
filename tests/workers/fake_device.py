"""A batch on a pretended CUDA device: shapes, dtypes and devices are real, numbers there are none.

Whatever asks such a tensor for a number, copies it to the host or mixes devices raises.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from penstock.algorithms.roles import Sampling
from penstock.workers.engines.torch_engine.backbone import Linears
from penstock.workers.engines.torch_engine.device_decode import DeviceBatch
from penstock.workers.rollout.response_sampler import TokenSampler
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATORS: dict[Any, Any] = {
    Tensor.__invert__: torch.bitwise_not,
    Tensor.copy_: torch.ops.aten.copy_,
}


class Spelled(TorchFunctionMode):
    """Does `tensor[...]` and some more by operators: Python's own ask for the device's driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATORS:
            return _OPERATORS[func](*args)
        if func is Tensor.__getitem__:
            part, indices = _part(*args)
            return torch.ops.aten.index(part, indices) if indices else part
        if func is Tensor.__setitem__:
            part, indices = _part(*args[:2])
            value = args[2]
            if not isinstance(value, Tensor):
                value = torch.full((), value, dtype=part.dtype, device=part.device)
            if indices:
                return torch.ops.aten.index_put_(part, indices, value)
            return torch.ops.aten.copy_(part, value)
        return func(*args, **(kwargs or {}))


def _part(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view that an index names, and the tensors that are left of the index."""
    dim = 0
    indices: list[Tensor | None] = []
    for one in index if isinstance(index, tuple) else (index,):
        if one is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(one, slice):
            assert one.step is None
            tensor = torch.ops.aten.slice(tensor, dim, one.start, one.stop)
        elif isinstance(one, int):
            tensor, dim = tensor.select(dim, one), dim - 1
        else:
            assert isinstance(one, Tensor)
            assert one.dtype != torch.bool, "to read by a mask the host waits for its sum"
            indices += [None] * (dim - len(indices)) + [one]
        dim += 1
    return tensor, indices


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that is made, of one type if that is given."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.numel = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor) and self.dtype in (None, one.dtype):
                self.numel = max(self.numel, one.numel())
                self.num_bytes = max(self.num_bytes, one.numel() * one.element_size())
        return made


class CountedOps(TorchDispatchMode):
    """Counts operations, and refuses copies from the pretended device to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        out = func(*args, **(kwargs or {}))
        moved = isinstance(out, Tensor) and out.device.type == "cpu"
        given = [one for one in args if isinstance(one, Tensor)]
        assert not (moved and any(one.device.type == "cuda" for one in given)), func
        return out


@contextmanager
def fake_batch(
    network: Any, sampling: Sampling, *, num_rows: int, positions: int
) -> Generator[Any]:
    """A `DeviceBatch` with a cache; inside, new tensors are pretended as well."""

    def moved(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

    own, backbone = copy.copy(network), copy.copy(network.backbone)
    tables = backbone.rope(positions + 1)
    vocab_size = network.module.config.vocab_size
    with FakeTensorMode(), Spelled(), torch.no_grad():
        for name in ("embedding", "final_norm"):
            setattr(backbone, name, moved(getattr(backbone, name)))
        backbone.layers = [_moved(layer, moved) for layer in backbone.layers]
        backbone._rope = tuple(moved(table) for table in tables)
        own.backbone, own.device = backbone, torch.device("cuda")
        linear = network._linear
        bias = None if linear.bias is None else moved(linear.bias)
        own._linear = SimpleNamespace(weight=moved(linear.weight), bias=bias)
        length = torch.zeros(num_rows, dtype=torch.int64)
        tokens = TokenSampler(
            torch.empty(num_rows, 64, dtype=torch.float64, device="cuda"),
            sampling,
            ends=torch.empty(2, dtype=torch.int64, device="cuda"),
            vocab_size=vocab_size,
            length=length,
            limit=length,
            seen=torch.empty(num_rows, vocab_size, dtype=torch.bool, device="cuda"),
        )
        sampler: Any = SimpleNamespace(tokens=tokens, record_later=list)
        batch: Any = DeviceBatch(own, sampler, num_rows, positions)
        batch._reserve(positions)
        yield batch


def _moved(layer: Any, moved: Any) -> Any:
    own = {field.name: getattr(layer, field.name) for field in fields(layer)}
    linears = {n: _moved(t, moved) for n, t in own.items() if isinstance(t, Linears)}
    tensors = {n: moved(t) for n, t in own.items() if isinstance(t, Tensor)}
    return replace(layer, **linears, **tensors)
