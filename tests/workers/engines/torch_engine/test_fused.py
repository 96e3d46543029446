"""What a CUDA device computes between matrix products, by the same functions on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from kernel_reference import use_functions
from penstock.workers.engines.torch_engine.adapters import LowRank
from penstock.workers.engines.torch_engine.backbone import LeanBackbone, fused_names
from penstock.workers.engines.torch_engine.packing import Pack, pack_rows
from penstock.workers.training.compiled import Compiled
from penstock.workers.training.flat_parameters import FlatParameters
from penstock.workers.training.token_logprob import token_logprob
from penstock.workers.training.weight_gradients import AddedGradients
from torch import Tensor

WORDS = 211


def _model(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config: Any = getattr(transformers, f"{family}Config")(
        hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=WORDS, tie_word_embeddings=family != "Llama",
    )  # fmt: skip
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms as well
            weight.add_(torch.randn_like(weight) * 0.02)
            weight.copy_(weight.bfloat16())
    return model.to(dtype)


def _pack(device: str) -> tuple[Pack, Tensor]:
    """Two prompts of three answers each, one of them shorter, and what follows each read token."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(WORDS, (6, 40), generator=random)
    tokens[:3, :12], tokens[3:, :20] = tokens[0, :12], tokens[3, :20]
    tokens[1, 12] = tokens[0, 12]  # one word asked for twice after the same state
    tokens[2, 30:] = -1
    reads = torch.zeros(6, 40, dtype=torch.bool)
    reads[:3, 11:39], reads[3:, 19:39], reads[2, 29:] = True, True, False
    row, column = reads.nonzero(as_tuple=True)
    shared = torch.tensor([12] * 3 + [20] * 3)
    return pack_rows(tokens.to(device), reads, shared), tokens[row, column + 1].to(device)


def _outcome(
    family: str,
    dtype: torch.dtype,
    *,
    again: bool = False,
    adapted: bool = False,
    device: str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of all weights."""
    model = _model(family, dtype).to(device)
    flat = FlatParameters(model, fused_names(model.model, "model."))
    backbone = LeanBackbone(model.model, flat, "model.")
    backbone.checkpointing = again
    if adapted:
        for layer in backbone.layers:
            down = torch.full((2, 112), 0.01, device=device)
            found = (LowRank(down, torch.full((64, 2), 0.02, device=device), 1.0),)
            object.__setattr__(layer.down, "adapters", found)
    grad = flat.enable_gradients()
    pack, target = _pack(device)
    head = model.get_output_embeddings().weight
    logprob, entropy = token_logprob(
        backbone.states(pack), head, None, target, pack.entry, 0.7, needs_entropy=True
    )
    assert entropy is not None
    factor = torch.randn(len(target), generator=torch.Generator().manual_seed(5)).to(device)
    ((logprob * factor).sum() + 0.01 * entropy.sum()).backward()
    return logprob.detach().cpu(), grad.cpu()


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("adds", [False, True], ids=["by autograd", "added"])
def test_a_device_rounds_where_torch_does_and_its_gradients_are_no_farther_from_the_truth(
    family: str, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = _outcome(family, torch.float32)
    plain = _outcome(family, torch.bfloat16)
    use_functions(monkeypatch, adds=adds)
    fused = _outcome(family, torch.bfloat16)
    assert torch.equal(fused[0], plain[0])
    assert _distance(fused[1], exact[1]) <= _distance(plain[1], exact[1]) * 1.1  # seeds: +- 6 %
    assert _distance(fused[1], plain[1]) < 0.01


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("adapted", [False, True], ids=["alone", "adapted"])
def test_in_float32_a_device_computes_what_a_cpu_does(
    family: str, again: bool, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _outcome(family, torch.float32, again=again, adapted=adapted)
    use_functions(monkeypatch)
    fused = _outcome(family, torch.float32, again=again, adapted=adapted)
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-5, atol=1e-5)
    assert _distance(fused[1], plain[1]) < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("adapted", [False, True], ids=["alone", "adapted"])
def test_on_a_gpu_what_is_compiled_is_what_is_not(
    family: str, again: bool, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning would say that something could not be compiled."""
    kind: Any = {"again": again, "adapted": adapted}
    exact = _outcome(family, torch.float32, **kind)
    compiled = _outcome(family, torch.bfloat16, device="cuda", **kind)
    monkeypatch.setattr(Compiled, "plainly", True)
    monkeypatch.setattr(AddedGradients, "devices", frozenset[str]())
    plain = _outcome(family, torch.bfloat16, device="cuda", **kind)
    assert _distance(compiled[0], plain[0]) < 1e-3
    assert _distance(compiled[1], exact[1]) <= _distance(plain[1], exact[1]) * 1.2
    assert _distance(compiled[1], plain[1]) < 0.015
