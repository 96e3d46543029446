"""A device that computes on the host, and writes down what a real one would have made it wait for.

Its tensors say that they lie on "recorded:0" and hold real numbers. An operation that mixes them
with tensors of the host fails, as on a GPU; what would stop until the device has caught up is
counted. Autograd and modules work as on any device.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

NAME = "recorded"
_SIZES_DEPEND_ON_NUMBERS = {"nonzero", "masked_select", "_unique2", "unique_dim", "equal"}


_LIBRARY = torch.library.Library("aten", "IMPL")


class _Module(backend_registration._DummyBackendModule):  # pyright: ignore[reportPrivateUsage]
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


@cache
def _register() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())  # pyright: ignore[reportPrivateUsage]

    # `torch.tensor(..., device=)` copies below the mode.
    def empty(size: Any, stride: Any, *, dtype: Any = None, **unused: Any) -> Tensor:
        return There(torch.empty_strided(size, stride, dtype=dtype))

    def copy(there: Any, source: Tensor, non_blocking: bool = False) -> Tensor:
        there.held.copy_(source)
        return there

    _LIBRARY.impl("empty_strided", empty, "PrivateUse1")
    _LIBRARY.impl("copy_", copy, "PrivateUse1")


class There(Tensor):
    """A tensor of the device; `held` lies on the host."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[There], held: Tensor, requires_grad: bool = False) -> There:
        made: There = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(f"{NAME}:0"),
            requires_grad=requires_grad,
        )
        made.held = held
        return made

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of RecordedDevice()")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, There)
        self.held = value.held
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


def _there(leaf: Any) -> Any:
    return There(leaf) if isinstance(leaf, Tensor) else leaf


class RecordedDevice(TorchDispatchMode):
    """Where tensors of the device may be used."""

    def __init__(self) -> None:
        super().__init__()
        _register()
        self.waits: Counter[str] = Counter()  # operation -> how often the host waited
        self.sent = self.launches = 0  # copies that did not wait; operations, views among them

    @property
    def device(self) -> torch.device:
        return torch.device(f"{NAME}:0")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, _ = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        there = any(isinstance(tensor, There) for tensor in tensors)
        goes = kwargs.get("device")
        asked = goes is not None and torch.device(goes).type == NAME
        if not (there or asked):
            return func(*args, **kwargs)
        name: str = func.overloadpacket.__name__
        leaves_device = goes is not None and torch.device(goes).type == "cpu"
        self._note(name, leaves, tensors, kwargs, asked=asked, leaves_device=leaves_device)
        made = func(*self._inside(args), **self._inside(kwargs))
        if leaves_device or (name == "copy_" and not isinstance(args[0], There)):
            return made
        wrapped = tree_map(_there, made)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)

    def _note(
        self,
        name: str,
        leaves: list[Any],
        tensors: list[Tensor],
        kwargs: dict[str, Any],
        *,
        asked: bool,
        leaves_device: bool,
    ) -> None:
        self.launches += 1
        here = [t for t in tensors if not isinstance(t, There) and t.ndim > 0]
        copies = name in ("_to_copy", "copy_")
        if here and not copies:
            shapes = [list(t.shape) for t in here]
            raise RuntimeError(f"aten.{name}: tensors of the host {shapes} on {NAME}:0")
        if name == "_local_scalar_dense" or name in _SIZES_DEPEND_ON_NUMBERS:
            self.waits[name] += 1
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            t.dtype == torch.bool for t in tensors[1:]
        ):
            self.waits[f"{name} by a mask"] += 1
        if copies and (leaves_device or (here and not isinstance(tensors[0], There))):
            crosses = leaves_device or asked
            waits = not (kwargs.get("non_blocking") or any(x is True for x in leaves))
            if crosses and (waits or leaves_device):
                self.waits["to the host" if leaves_device else "from the host"] += 1
            elif crosses:
                self.sent += 1
        elif copies and here:  # copy_ of the host's numbers
            self.waits["from the host"] += 1

    @staticmethod
    def _inside(tree: Any) -> Any:
        leaves, spec = tree_flatten(tree)

        def one(leaf: Any) -> Any:
            if isinstance(leaf, There):
                return leaf.held
            if isinstance(leaf, torch.device) and leaf.type == NAME:
                return torch.device("cpu")
            return leaf

        return tree_unflatten([one(leaf) for leaf in leaves], spec)
