"""The lean forward pass against Hugging Face's own, in outputs and gradients."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.dataflow.runtime.call_context import call_scope
from penstock.workers.engines.torch_engine import network
from penstock.workers.engines.torch_engine.network import LeanNetwork, PlainNetwork
from penstock.workers.engines.torch_engine.packing import pack_rows
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor
from torch_models import FAMILIES, VOCAB, make_batch, make_policy, module_of

ROWS, WIDTH, PROMPT = 24, 40, 9


def rows(*, same_prompt: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, where logits are wanted (with holes), and prompt lengths."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, WIDTH), generator=generator)
    length = torch.randint(PROMPT + 1, WIDTH + 1, (ROWS,), generator=generator)
    length[3] = PROMPT  # a row of which only the prompt is needed
    tokens[torch.arange(WIDTH) >= length[:, None]] = -1
    if same_prompt:
        tokens[: ROWS // 2, :PROMPT] = tokens[0, :PROMPT]
        tokens[ROWS // 2 :, :PROMPT] = tokens[-1, :PROMPT]
    place = torch.arange(WIDTH)
    reads = (place >= PROMPT - 1) & (place < length[:, None])
    reads &= torch.rand(reads.shape, generator=generator) < 0.8
    reads[:, PROMPT - 1] = True
    reads[5] = False  # a row of which nothing is needed
    return tokens, reads, torch.full((ROWS,), PROMPT)


def hugging_face(module: Any, tokens: Tensor, reads: Tensor) -> Tensor:
    logits = module(input_ids=tokens.clamp(min=0), attention_mask=(tokens >= 0).long()).logits
    return logits[reads]


@pytest.mark.parametrize("same_prompt", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_hugging_face(name: str, same_prompt: bool):
    policy = make_policy(name)
    assert isinstance(policy.network, LeanNetwork)
    tokens, reads, shared = rows(same_prompt=same_prompt)
    expected = hugging_face(module_of(policy), tokens, reads)
    for grad in (False, True):  # they take different attention paths
        with torch.set_grad_enabled(grad):
            found = policy.network.outputs(tokens, reads, shared)
            logits = policy.network.head(found.values)
        torch.testing.assert_close(found.spread(logits), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("same_prompt", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_hugging_face(name: str, same_prompt: bool):
    policy = make_policy(name)
    tokens, reads, shared = rows(same_prompt=same_prompt)
    weight = torch.randn(int(reads.sum()), VOCAB, generator=torch.Generator().manual_seed(2))

    assert isinstance(policy.network, LeanNetwork)
    flat = policy.network.flat
    flat.enable_gradients()
    found = policy.network.outputs(tokens, reads, shared)
    (found.spread(policy.network.head(found.values)) * weight).sum().backward()
    got = {name: part.clone() for name, part in policy.network.tensors(flat.grad).items()}

    flat.enable_gradients()
    (hugging_face(module_of(policy), tokens, reads) * weight).sum().backward()
    for name_, gradient in policy.network.tensors(flat.grad).items():
        scale = max(float(gradient.abs().max()), 1e-3)
        torch.testing.assert_close(got[name_], gradient, atol=2e-5 * scale, rtol=0)


def test_a_shared_prompt_is_packed_once():
    tokens, reads, shared = rows(same_prompt=True)
    alone = pack_rows(tokens, reads)
    together = pack_rows(tokens, reads, shared)
    saved = (ROWS - 2 - 1) * PROMPT  # two prompts remain, and one row was not needed at all
    assert abs(len(alone.tokens) - len(together.tokens) - saved) <= 64


def test_other_architectures_take_the_hugging_face_forward():
    policy = make_policy("gpt2")
    assert isinstance(policy.network, PlainNetwork)
    tokens, reads, shared = rows(same_prompt=False)
    found = policy.network.outputs(tokens, reads, shared)
    expected = hugging_face(module_of(policy), tokens, reads)
    logits = module_of(policy).lm_head(found.values)
    torch.testing.assert_close(found.spread(logits), expected, atol=1e-5, rtol=0)


def test_logits_that_a_model_caps_are_its_own():
    policy = make_policy("gemma2")
    tokens, reads, shared = rows(same_prompt=False)
    expected = hugging_face(module_of(policy), tokens, reads)
    found = policy.network.outputs(tokens, reads, shared)
    target = expected.argmax(-1)
    logprob, _ = policy.network.token_logprob(found, target, 1.0, needs_entropy=False)
    best = expected.log_softmax(-1).amax(-1)
    torch.testing.assert_close(logprob, best, atol=1e-5, rtol=0)


def test_a_sliding_window_is_not_taken_for_full_attention():
    from penstock.workers.engines.torch_engine.backbone import is_lean
    from penstock.workers.models.spec import ModelSpec
    from torch_models import BASE

    sliding = {**BASE, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}
    assert not is_lean(ModelSpec(architecture={**sliding, "sliding_window": 8}).backbone("cpu"))


def test_the_same_bits_are_asked_for_during_a_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    network.prepare_same_bits()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    made = make_policy(deterministic=True).network
    assert isinstance(made, LeanNetwork)
    assert made.same_bits
    for asked in (False, True):
        with network._same_bits(asked):  # pyright: ignore[reportPrivateUsage]
            assert torch.are_deterministic_algorithms_enabled() == asked
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_computing_activations_again_changes_no_bit(name: str) -> None:
    batch, found = make_batch(make_policy(name)), list[dict[str, Tensor]]()
    for again in (False, True):
        policy = make_policy(name, optimizer=OptimizerSpec(), activation_checkpointing=again)
        with call_scope(0, 0):
            policy.train(ClippedPolicyLoss(), batch)
        found.append(policy.export_weights())
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items())
