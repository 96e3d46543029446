"""Axes, specs, and what an annotation says about a column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Optional

import pytest
import torch
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.axes import (
    Axis,
    Behavior,
    DType,
    GroupId,
    Spec,
    boolean,
    f32,
    has_mark,
    i64,
    is_optional,
    spec_of,
)
from penstock.dataflow.graph.tracer import build, op
from torch import Tensor

PROMPT = Axis("prompt")
SAMPLE = Axis("sample", within=PROMPT)
TOKEN = Axis("token", ragged=True)
FEATURE = Axis("feature")

PerToken = Annotated[Tensor, f32(SAMPLE, TOKEN)]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (f32(), "f32[]"),
        (f32(SAMPLE), "f32[sample]"),
        (i64(SAMPLE, TOKEN), "i64[sample, token~]"),
        (boolean(SAMPLE, TOKEN, FEATURE), "bool[sample, token~, feature]"),
        (f32(PROMPT, FEATURE), "f32[prompt, feature]"),
    ],
)
def test_a_spec_prints_dtype_and_axes(spec: Spec, text: str) -> None:
    assert str(spec) == text


def test_a_spec_knows_its_row_axis_and_its_ragged_axis() -> None:
    assert (f32().row_axis, f32().ragged_axis) == (None, None)
    assert (f32(SAMPLE).row_axis, f32(SAMPLE).ragged_axis) == (SAMPLE, None)
    assert f32(SAMPLE, TOKEN).ragged_axis == TOKEN
    assert f32(SAMPLE, FEATURE).ragged_axis is None


@pytest.mark.parametrize(
    ("axes", "position"), [((TOKEN,), 0), ((SAMPLE, FEATURE, TOKEN), 2)], ids=["first", "third"]
)
def test_a_ragged_axis_must_be_the_second(axes: tuple[Axis, ...], position: int) -> None:
    shown = ", ".join(str(axis) for axis in axes)
    with pytest.raises(ValueError, match="ragged") as caught:
        f32(*axes)
    assert str(caught.value) == (
        f"ragged axis 'token' is axis {position} of f32[{shown}]; a ragged axis must be the second "
        "one: its lengths are per row of the first"
    )


def test_specs_are_equal_if_dtype_and_axes_are() -> None:
    assert f32(SAMPLE, TOKEN) == f32(Axis("sample", within=PROMPT), Axis("token", ragged=True))
    assert f32(SAMPLE) != i64(SAMPLE)
    assert f32(SAMPLE) != f32(Axis("sample"))


@pytest.mark.parametrize(
    ("dtype", "torch_dtype", "padding"),
    [
        (DType.F32, torch.float32, 0.0),
        (DType.I64, torch.int64, -1),
        (DType.BOOL, torch.bool, False),
    ],
)
def test_each_dtype_has_a_torch_dtype_and_a_padding_it_can_hold(
    dtype: DType, torch_dtype: torch.dtype, padding: object
) -> None:
    assert dtype.torch == torch_dtype
    assert dtype.padding == padding
    assert torch.full((1,), dtype.padding, dtype=torch_dtype).item() == padding


def test_an_annotation_gives_its_spec_and_its_marks() -> None:
    marked = Annotated[Tensor, i64(SAMPLE), GroupId()]
    assert spec_of(PerToken) == f32(SAMPLE, TOKEN)
    assert spec_of(marked) == i64(SAMPLE)
    assert has_mark(marked, GroupId)
    assert not has_mark(marked, Behavior)
    assert not has_mark(PerToken, GroupId)


@pytest.mark.parametrize("annotation", [Tensor, int, None, Annotated[Tensor, "f32"], list[int]])
def test_what_is_not_a_column_has_no_spec(annotation: object) -> None:
    assert spec_of(annotation) is None


def test_an_optional_column_is_a_column() -> None:
    assert is_optional(Optional[PerToken])  # noqa: UP045 - `|` on Annotated is not typed
    assert spec_of(Optional[PerToken]) == f32(SAMPLE, TOKEN)  # noqa: UP045
    assert not is_optional(PerToken)
    assert is_optional(int | None)
    assert not is_optional(int | str)
    assert spec_of(int | None) is None


# --- free axes: ops over them serve columns over any axes, the same ones throughout a call

ROW, STEP = Axis("row", free=True), Axis("step", free=True)
FISH, DAY = Axis("fish"), Axis("day")
BIRD, HOUR = Axis("bird"), Axis("hour", ragged=True)

Any2 = Annotated[Tensor, f32(ROW, STEP)]
AnyMask = Annotated[Tensor, boolean(ROW, STEP)]


@dataclass(frozen=True)
class Fish:
    weight: Annotated[Tensor, f32(FISH, DAY)]
    awake: Annotated[Tensor, boolean(FISH, DAY)]
    age: Annotated[Tensor, f32(FISH)]


@dataclass(frozen=True)
class Birds:
    song: Annotated[Tensor, f32(BIRD, HOUR)]
    awake: Annotated[Tensor, boolean(BIRD, HOUR)]


@dataclass(frozen=True)
class Both:
    kept: Any2
    dropped: Any2


@op(scope="row")
def kept(mask: AnyMask, *, column: Any2) -> Both:
    return Both(column * mask, column * ~mask)


@op(scope="row")
def made_up(age: Annotated[Tensor, f32(FISH)]) -> Any2:
    return age[:, None]


def test_outputs_are_over_the_axes_that_were_given() -> None:
    def step(fish: Fish, birds: Birds) -> object:
        return kept(fish.awake, column=fish.weight), kept(birds.awake, column=birds.song)

    graph = build(step)
    assert [str(o.spec) for o in graph["kept"].outputs] == ["f32[fish, day]"] * 2
    assert [str(o.spec) for o in graph["kept#2"].outputs] == ["f32[bird, hour~]"] * 2


def test_an_axis_is_the_same_throughout_a_call() -> None:
    def step(fish: Fish, birds: Birds) -> object:
        return kept(fish.awake, column=birds.song)

    with pytest.raises(FlowError) as raised:
        build(step)
    assert "input 'column': expected f32[fish, day], got f32[bird, hour~]" in str(raised.value)


def test_the_number_of_axes_and_the_dtype_are_not_free() -> None:
    def step(fish: Fish) -> object:
        return kept(fish.weight, column=fish.weight)

    with pytest.raises(FlowError, match=r"input 'mask': expected bool\[row, step\], got f32\[fish"):
        build(step)

    def other(fish: Fish) -> object:
        return kept(fish.awake, column=fish.age)

    with pytest.raises(FlowError, match=r"input 'column': expected f32\[fish, day\], got f32\["):
        build(other)


def test_an_output_cannot_be_over_an_axis_that_nobody_gave() -> None:
    def step(fish: Fish) -> object:
        return made_up(fish.age)

    with pytest.raises(FlowError) as raised:
        build(step)
    assert raised.value.what == (
        "'made_up.out' is f32[row, step], whose axis 'row' is free, and no input says what it "
        "stands for"
    )


def test_binding() -> None:
    spec: Spec = f32(ROW, STEP)
    assert spec.binding_to(f32(FISH, DAY), {}) == {ROW: FISH, STEP: DAY}
    assert spec.binding_to(f32(FISH, DAY), {ROW: BIRD}) is None
    assert spec.bound({STEP: DAY}) == f32(ROW, DAY)
