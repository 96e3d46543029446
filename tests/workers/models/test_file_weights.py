"""The experts of a mixture, in a module and in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.workers.models.file_weights import FusedExperts, as_in_files
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.checkpoint_files import WholeTensorSource
from safetensors.torch import load_file
from torch import Tensor
from torch_models import MIXTURES, architecture


def module_tensors(family: str) -> dict[str, Tensor]:
    module = ModelSpec(architecture=architecture(family)).causal_lm("cpu")
    return {name: weight.detach() for name, weight in module.named_parameters()}


@pytest.mark.parametrize("family", MIXTURES)
def test_files_are_named_as_transformers_names_them(tmp_path: Path, family: str):
    module = ModelSpec(architecture=architecture(family)).causal_lm("cpu")
    module.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    ours = dict(as_in_files(dict(module.named_parameters()), family))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("family", MIXTURES)
def test_files_are_read_as_the_modules_parameters(family: str):
    tensors = module_tensors(family)
    source = FusedExperts(WholeTensorSource(dict(as_in_files(tensors, family))))
    assert source.shapes() == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        box = tuple((0, size) for size in tensor.shape)
        assert torch.equal(source.read(name, box), tensor), name


FUSED = torch.arange(3 * 8 * 5).view(3, 8, 5).float()
NAME = "model.layers.0.mlp.experts.gate_up_proj"


@given(*(st.tuples(*[st.integers(0, size)] * 2).map(sorted) for size in FUSED.shape))
@settings(max_examples=50)
def test_any_box_can_be_read(experts: list[int], rows: list[int], columns: list[int]):
    if experts[0] == experts[1] or rows[0] == rows[1]:
        return
    source = FusedExperts(WholeTensorSource(dict(as_in_files({NAME: FUSED}, "qwen3_moe"))))
    spans = (experts, rows, columns)
    found = source.read(NAME, tuple((start, stop) for start, stop in spans))
    assert torch.equal(found, FUSED[tuple(slice(*span) for span in spans)])


def test_an_expert_without_a_matrix_is_refused():
    files = dict(as_in_files({NAME: FUSED}, "qwen3_moe"))
    del files["model.layers.0.mlp.experts.1.up_proj.weight"]
    with pytest.raises(ConfigError) as error:
        FusedExperts(WholeTensorSource(files))
    assert str(error.value) == (
        f"the model's files lack a matrix of expert 1 of '{NAME}'\n"
        "    save the whole model again with save_pretrained"
    )
