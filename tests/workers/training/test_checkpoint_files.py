"""Boxes of parameters in files: written in one cut, read in another."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from penstock.planner.resharding.sharding import Box
from penstock.workers.training.checkpoint_files import (
    FileTensors,
    WholeTensorSource,
    box_key,
    open_state,
    read_state_json,
    read_whole,
)
from penstock.workers.training.flat_parameters import write_tensors
from torch import Tensor

SIZES = (5, 7)


def spans(cuts: set[int], size: int) -> list[tuple[int, int]]:
    ends = sorted({0, *cuts, size})
    return list(itertools.pairwise(ends))


def part(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


@given(
    st.tuples(*(st.sets(st.integers(1, size - 1)) for size in SIZES)),
    st.tuples(*(st.tuples(st.integers(0, s - 1), st.integers(1, s)) for s in SIZES)),
    st.integers(1, 3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_box_is_read_from_any_cut(
    tmp_path: Path, cuts: tuple[set[int], set[int]], wanted: Box, num_files: int
):
    tensor = torch.randn(SIZES)
    boxes = list(itertools.product(*(spans(c, s) for c, s in zip(cuts, SIZES, strict=True))))
    files = [tmp_path / f"{index}.safetensors" for index in range(num_files)]
    for index, file in enumerate(files):
        write_tensors(file, {box_key("w", b): part(tensor, b) for b in boxes[index::num_files]})
    read = FileTensors(files, boxed=True)
    assert read.shapes() == {"w": SIZES}
    box = tuple((min(a, b - 1), b) for a, b in wanted)
    assert torch.equal(read.read("w", box), part(tensor, box))
    assert torch.equal(read_whole(read)["w"], tensor)


def test_both_formats_are_read(tmp_path: Path):
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3.0)}
    write_tensors(tmp_path / "weights.safetensors", weights)
    (tmp_path / "state.json").write_text('{"format": 1}')
    for state in (read_state_json(tmp_path), {"format": 2, "weights": ["0.safetensors"]}):
        boxed = {box_key("a", ((0, 2), (0, 3))): weights["a"], box_key("b", ()): weights["b"]}
        write_tensors(tmp_path / "0.safetensors", boxed)
        read = read_whole(open_state(tmp_path, state, "weights"))
        assert {name: value.tolist() for name, value in read.items()} == {
            "a": [[0, 1, 2], [3, 4, 5]],
            "b": 3.0,
        }
    assert read_whole(WholeTensorSource(weights)).keys() == weights.keys()


def test_a_missing_part_is_noticed(tmp_path: Path):
    box = ((0, 1), (0, 3))
    write_tensors(tmp_path / "0.safetensors", {box_key("w", ((1, 2), (0, 3))): torch.zeros(1, 3)})
    with pytest.raises(
        ValueError, match=r"has 3 of 6 numbers of 'w' \[2, 3\]; a process's file is"
    ):
        FileTensors([tmp_path / "0.safetensors"], boxed=True)
    with pytest.raises(FileNotFoundError, match=r"1.safetensors' does not exist"):
        FileTensors([tmp_path / "1.safetensors"], boxed=True)
    write_tensors(tmp_path / "2.safetensors", {"w": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match=r"has a tensor 'w'; expected a name such as"):
        FileTensors([tmp_path / "2.safetensors"], boxed=True)
    assert box_key("w", box) == "w[0:1,0:3]"


def test_an_unknown_format_is_refused(tmp_path: Path):
    (tmp_path / "state.json").write_text(json.dumps({"format": 9}))
    with pytest.raises(ValueError, match="has format 9; this version reads formats 1, 2"):
        read_state_json(tmp_path)
