"""Functions that torch compiles into few kernels on a CUDA device, and calls as they are elsewhere.

What lies between matrix products reads and writes memory far more often than it computes. Inductor
makes one or two Triton kernels of such a function, which read each number once.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_MOST_TOLD = 500  # letters of a compiler's message


class Compiled:
    """A function that torch compiles once for each width and dtype, for any number of rows.

    Two processes compile the same kernels, and no gradient passes. Where compiling fails, or torch
    has no Triton, the function is called as it is, which a warning says once.

    Args:
        function: Of tensors, the first of them on the device, and of numbers, which are compiled
            into it: one that changes is given as `number` makes it.
        rows: Which of its arguments have the rows, of any number, as their first dimension.
        plain: Is called in its place where nothing is compiled.
    """

    plainly = False
    """Whether nothing is compiled, for a comparison."""

    def __init__(
        self,
        function: Callable[..., Any],
        rows: Sequence[int],
        plain: Callable[..., Any] | None = None,
    ) -> None:
        self.function, self._rows, self._plain = function, rows, plain or function
        self._compiled: dict[object, Callable[..., Any]] = {}  # for each layout of inputs
        self._fails = False

    def __call__(self, *inputs: Any) -> Any:
        with torch.no_grad():  # in every call: torch compiles again for another mode
            is_plain = self._fails or Compiled.plainly or inputs[0].device.type == "cpu"
            if is_plain or not _can_compile():
                return self._plain(*inputs)
            try:
                return self.compiled(*inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                said = f"{self.function.__name__} could not be compiled: {str(error)[:_MOST_TOLD]}"
                _warn_slow(
                    said, "tell it to Penstock's authors, with the versions of torch and triton"
                )
                self._fails = True
                return self._plain(*inputs)

    def compiled(self, *inputs: Any) -> Any:
        """Call what is compiled, on any device, for as many rows as come."""
        inputs = tuple(
            one.detach() if isinstance(one, Tensor) and one.requires_grad else one for one in inputs
        )
        # What torch would compile again for, and give up after eight times.
        asked = torch.are_deterministic_algorithms_enabled()
        layout = (asked, *map(_layout_of, inputs))
        if (known := self._compiled.get(layout)) is not None:
            return known(*inputs)
        dynamo: Any = importlib.import_module("torch._dynamo")
        for place in self._rows:
            if place < len(inputs):
                dynamo.maybe_mark_dynamic(inputs[place], 0)
        # A copy for each: torch compiles one function for few layouts, and then gives up.
        f: Any = self.function
        own = FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__)
        made = torch.compile(own, fullgraph=True, dynamic=False, options=_options())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's advice
            found = made(*inputs)
        self._compiled[layout] = made
        return found


@cache
def number(value: float, device: torch.device) -> Tensor:
    """A number as a float32 scalar on a device, made without waiting for it."""
    return torch.full((), value, dtype=torch.float32, device=device)


@cache
def _can_compile() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        importlib.import_module("triton")
    except ImportError:
        _warn_slow("this torch has no Triton", "install triton of the version that torch asks for")
        return False
    return True


@cache
def _options() -> dict[str, Any]:
    """Inductor's: what the function rounds is rounded, and two processes choose the same kernels.

    None starts processes that compile.
    """
    inductor: Any = importlib.import_module("torch._inductor.config")
    chosen = {"compile_threads": 1, "deterministic": True, "emulate_precision_casts": True}
    return {name: value for name, value in chosen.items() if hasattr(inductor, name)}


def _layout_of(one: Any) -> object:
    if not isinstance(one, Tensor):
        return one
    return one.dtype, one.shape[1:], one.stride(), one.shape[:1] == (1,)


def _warn_slow(what: str, help_: str) -> None:
    warnings.warn(
        f"the device moves more memory than it has to: {what}\n"
        f"    the same is computed without; {help_}",
        RuntimeWarning,
        stacklevel=4,
    )
