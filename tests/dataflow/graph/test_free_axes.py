"""Ops over free axes serve columns over any axes, the same ones throughout a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.axes import Axis, Spec, boolean, f32
from penstock.dataflow.graph.tracer import build, op
from torch import Tensor

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
