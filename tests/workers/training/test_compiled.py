"""Functions that are compiled on a device: which is called, for how many rows, and what if not."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from penstock.workers.training import compiled
from penstock.workers.training.compiled import Compiled, number
from torch import Tensor


@pytest.fixture(autouse=True)
def _compiles() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Whatever vLLM, which has torch compile nothing, may have left in this process."""
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    with dynamo.patch(disable=False):
        yield


def twice_and(x: Tensor, y: Tensor) -> Tensor:
    return x * 2 + y


def on_device(patch: pytest.MonkeyPatch, compile_: Callable[..., Any]) -> Compiled:
    """A function that takes tensors for those of a device, where torch compiles by `compile_`."""
    patch.setattr(compiled, "_can_compile", lambda: True)
    patch.setattr(torch, "compile", compile_)
    return Compiled(twice_and, (0,))


def test_on_a_cpu_the_function_for_it_is_called_and_no_gradient_passes() -> None:
    function = Compiled(twice_and, (0,), plain=torch.add)
    out = function(torch.ones(2, requires_grad=True), torch.ones(2))
    assert out.tolist() == [2.0, 2.0]
    assert not out.requires_grad


def test_it_is_compiled_once_for_all_numbers_of_rows_and_again_for_another_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled_for: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_for.append(len(inputs))
        return graph.forward

    whole = torch.compile
    options: list[Any] = []

    def compile_(function: Any, **kwargs: Any) -> Any:
        options.append(kwargs.pop("options"))
        return whole(function, backend=backend, **kwargs)

    function = on_device(monkeypatch, compile_)
    for rows, width in ((3, 4), (7, 4), (12, 4), (5, 6), (9, 6)):
        x = torch.randn(rows, width, requires_grad=True)
        out = function.compiled(x, torch.ones(width))
        torch.testing.assert_close(out, x.detach() * 2 + 1)
        assert not out.requires_grad
    assert len(compiled_for) == 2
    chosen = {"compile_threads": 1, "deterministic": True, "emulate_precision_casts": True}
    assert options == [chosen, chosen]


def test_neither_a_single_row_first_nor_another_mode_makes_torch_give_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled_for: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_for.append(len(inputs))
        return graph.forward

    whole = torch.compile

    def compile_(function: Any, **kwargs: Any) -> Any:
        del kwargs["options"]
        return whole(function, backend=backend, **kwargs)

    function = on_device(monkeypatch, compile_)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for rows in range(1, 13):
            for asked in (False, True):
                torch.use_deterministic_algorithms(asked)
                x = torch.randn(rows, 4)
                torch.testing.assert_close(function.compiled(x, torch.ones(4)), x * 2 + 1)
        for rows in range(2, 13):  # every second column
            x = torch.randn(rows, 8)[:, ::2]
            torch.testing.assert_close(function.compiled(x, torch.ones(4)), x * 2 + 1)
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(compiled_for) == 5


def test_it_is_compiled_for_more_widths_than_torch_compiles_one_function_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = torch.compile

    def compile_(function: Any, **kwargs: Any) -> Any:
        del kwargs["options"]
        return whole(function, backend="eager", **kwargs)

    function = on_device(monkeypatch, compile_)
    for width in range(2, 22):
        out = function.compiled(torch.ones(3, width), torch.ones(width))
        assert out.shape == (3, width)


def test_where_compiling_fails_the_function_is_called_as_it_is_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile_(function: Any, **kwargs: Any) -> Any:
        def fails(*inputs: Tensor) -> Tensor:
            raise RuntimeError("no compiler")

        return fails

    function = on_device(monkeypatch, compile_)
    inputs = [torch.empty(2, device="meta") for _ in range(2)]
    with pytest.warns(RuntimeWarning, match="twice_and could not be compiled: no compiler"):
        assert function(*inputs).shape == (2,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert function(*inputs).shape == (2,)


def test_running_out_of_memory_is_no_failure_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(function: Any, **kwargs: Any) -> Any:
        def fails(*inputs: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("full")

        return fails

    function = on_device(monkeypatch, compile_)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        function(torch.empty(2, device="meta"), torch.empty(2, device="meta"))


def test_a_number_is_made_once_for_a_device() -> None:
    one = number(0.5, torch.device("cpu"))
    assert one is number(0.5, torch.device("cpu"))
    assert (one.dtype, one.shape, float(one)) == (torch.float32, (), 0.5)
