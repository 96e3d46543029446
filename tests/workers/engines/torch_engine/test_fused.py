"""What a CUDA device computes between matrix products, by the same functions on a CPU."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from fake_device import CountedOps
from inductor_kernels import kernels_of
from kernel_reference import use_functions
from penstock.workers.engines.torch_engine import fused, varlen
from penstock.workers.engines.torch_engine.adapters import Adapters, LowRank
from penstock.workers.engines.torch_engine.backbone import LeanBackbone, fused_names
from penstock.workers.engines.torch_engine.packing import Pack, pack_rows
from penstock.workers.training import token_logprob as head
from penstock.workers.training import weight_gradients
from penstock.workers.training.compiled import Compiled
from penstock.workers.training.flat_parameters import FlatParameters
from penstock.workers.training.token_logprob import token_logprob
from torch import Tensor

# pyright: reportPrivateUsage=false
WORDS = 211
VIEWS = {
    *("as_strided", "detach", "expand", "select", "slice", "split", "split_with_sizes", "t"),
    *("transpose", "unbind", "unsqueeze", "view", "_unsafe_view", "empty", "new_empty", "alias"),
    *("empty_like", "lift_fresh"),
}


def _model(family: str, dtype: torch.dtype, num_layers: int = 3) -> Any:
    torch.manual_seed(0)
    config: Any = getattr(transformers, f"{family}Config")(
        hidden_size=64, intermediate_size=112, num_hidden_layers=num_layers, num_attention_heads=4,
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
            found = Adapters((LowRank(down, torch.full((64, 2), 0.02, device=device), 1.0),))
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
    monkeypatch.setattr(weight_gradients, "ADDED_ON", frozenset[str]())
    plain = _outcome(family, torch.bfloat16, device="cuda", **kind)
    assert _distance(compiled[0], plain[0]) < 1e-3
    assert _distance(compiled[1], exact[1]) <= _distance(plain[1], exact[1]) * 1.2
    assert _distance(compiled[1], plain[1]) < 0.015


# --- kernels

_KERNELS = {
    "_sum_norm_compiled": 1, "_before_sum_norm_compiled": 2, "_rotated_compiled": 1,
    "_heads_rotated_back_compiled": 3, "_product_compiled": 1, "_before_product_compiled": 2,
}  # fmt: skip
_MOST_OF_A_LAYER = 45


def _launches(num_layers: int) -> int:
    """Kernels of a micro-batch that is trained on, but for those of the head."""
    ops = CountedOps()

    def call(self: Compiled, *inputs: Any) -> Any:
        before = ops.counts.copy()
        with torch.no_grad():
            made = self.function(*inputs)
        ops.counts = before + Counter({"compiled": _KERNELS[self.function.__name__]})
        return made

    model = _model("Qwen2", torch.bfloat16, num_layers).to("meta")
    with pytest.MonkeyPatch.context() as patch:
        use_functions(patch, call)
        patch.setattr(weight_gradients, "ADDED_ON", frozenset({"meta"}))
        patch.setattr(weight_gradients, "add_product", lambda total, left, right: total.add_(1))  # pyright: ignore[reportUnknownLambdaType]
        patch.setattr(varlen, "most_head_size", lambda device: 256)  # pyright: ignore[reportUnknownLambdaType]
        patch.setattr(varlen, "flash_forward", _flash_forward)
        patch.setattr(varlen, "flash_backward", _flash_backward)
        flat = FlatParameters(model, fused_names(model.model, "model."))
        backbone = LeanBackbone(model.model, flat, "model.")
        flat.enable_gradients()
        tokens = torch.zeros(3, 1500, dtype=torch.int64)
        pack = pack_rows(tokens, tokens == 0)
        pack = replace(pack, tokens=pack.tokens.to("meta"), read=pack.read.to("meta"))
        with ops:
            backbone.states(pack).sum().backward()
    return sum(n for name, n in ops.counts.items() if name not in VIEWS)


def _flash_forward(query: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return query + 1, *(query.new_empty(0) for _ in range(3))


def _flash_backward(upstream: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return query + 1, key + 1, value + 1  # three kernels, as many as it has


def test_a_layer_of_training_is_few_kernels() -> None:
    assert 2 * 30 < _launches(4) - _launches(2) <= 2 * _MOST_OF_A_LAYER


_ROWS, _B16, _F32 = 4096, torch.bfloat16, torch.float32
_STATES, _NORM, _TABLE = ((_ROWS, 1536), _B16), ((1536,), _B16), ((_ROWS, 1, 64), _B16)
_QUERY, _KEY = ((_ROWS, 12, 128), _B16), ((_ROWS, 2, 128), _B16)
_GATE_UP, _UPSTREAM = ((_ROWS, 2 * 8960), _B16), ((_ROWS, 8960), _B16)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its compiler
@pytest.mark.parametrize(
    ("function", "inputs", "kilobytes"),
    [
        (partial(fused._sum_norm_compiled, eps=1e-6), [_STATES, _STATES, _NORM], 12.3),
        (
            partial(fused._before_sum_norm_compiled, eps=1e-6, needs_norm=True, needs_normed=True),
            [_STATES, _STATES, ((_ROWS, 1), _F32), _NORM, _STATES],
            15.5,
        ),
        (fused._product_compiled, [_GATE_UP], 53.8),
        (partial(fused._before_product_compiled, needs_product=True), [_UPSTREAM, _GATE_UP], 143.4),
        (fused._rotated_compiled, [((_ROWS, 14, 128), _B16), _TABLE, _TABLE], 7.4),
        (fused._heads_rotated_back_compiled, [_QUERY, _KEY, _KEY, _TABLE, _TABLE], 8.5),
    ],
    ids=["sum and norm", "its gradient", "product", "its gradients", "rotation", "its gradient "],
)  # fmt: skip
def test_bytes_that_functions_move_for_a_token_of_a_layer_of_a_1_5b(
    function: Any, inputs: list[Any], kilobytes: float
) -> None:
    """Those of what they are given and give, and not twice those."""
    name = getattr(function, "func", function).__name__
    kernels, num_bytes = kernels_of(function, *inputs)
    assert kernels == _KERNELS[name]
    assert num_bytes / _ROWS / 1000 == pytest.approx(kilobytes, rel=0.03)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its compiler
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_logit_is_read_once_forward_and_replaced_once(with_entropy: bool) -> None:
    logits: Any = [((512, 151_936), _B16), ((), _F32)]
    rows: Any = [((512,), _F32)] * (5 if with_entropy else 3)

    def change(logits: Tensor, by: Tensor, a: Tensor, b: Tensor, c: Tensor) -> None:
        head._change_compiled(logits, by, a, b, c)

    sums = partial(head._sums_compiled, weighted=with_entropy)
    for function, inputs, most in (
        (sums, logits, 2.1),
        (head._change_compiled if with_entropy else change, [*logits, *rows], 4.1),
    ):
        kernels, num_bytes = kernels_of(function, *inputs)
        assert kernels == 1
        assert num_bytes <= most * 512 * 151_936


# --- compiled on a CPU


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_what_the_compiler_makes_rounds_as_well(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a C++ compiler: the kernels are others than a GPU's, of the same graph."""
    plain = _outcome(family, torch.bfloat16)

    def call(self: Compiled, *inputs: Any) -> Any:
        with torch.no_grad():
            return self.compiled(*inputs)

    use_functions(monkeypatch, call)
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    with dynamo.patch(disable=False):  # as vLLM leaves it in a process
        compiled = _outcome(family, torch.bfloat16)
    torch.testing.assert_close(compiled[0], plain[0], rtol=0, atol=2e-6)
    assert _distance(compiled[1], plain[1]) < 0.01
