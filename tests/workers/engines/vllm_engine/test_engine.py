"""What the engine asks of vLLM on a GPU, of which there is none here: vLLM is a fake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.vllm_engine.engine import EngineOptions, VllmEngine
from penstock.workers.engines.vllm_engine.generator import VllmPolicySpec
from torch_models import EOS
from vllm_models import CONTEXT, model_spec

OPTIONS = EngineOptions(
    dtype="bfloat16",
    max_model_len=64,
    max_rows=None,
    kv_cache_bytes=None,
    memory_fraction=None,
    quantization=None,
    enforce_eager=False,
    device="cuda:0",
    tensor_parallel=1,
    process=0,
)


class Asked:
    """An `LLMEngine` that notes how it is to sleep."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def collective_rpc(self, method: str, **options: Any) -> None:
        del method, options

    def has_unfinished_requests(self) -> bool:
        return False

    def sleep(self, level: int) -> None:
        self.said.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.said.append("wake")


def test_weights_are_copied_to_the_host_only_if_they_are_to_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, free = Asked(), iter([(10, 100), (70, 100), (10, 100), (90, 100)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: next(free))
    engine = VllmEngine.__new__(VllmEngine)  # as if it had started, on a device that is not here
    vars(engine).update(_engine=asked, _options=OPTIONS, _asleep=False, _freed_bytes=[])
    assert engine.drops_weights
    assert engine.sleep() == 60
    assert engine.sleep(keep_weights=False) == 0  # it sleeps already
    engine.wake()
    assert engine.sleep(keep_weights=False) == 80
    engine.wake()
    assert asked.said == ["sleep 1", "wake", "sleep 2", "wake"]


def test_fp8_is_refused_on_the_cpu() -> None:
    spec = VllmPolicySpec(model=model_spec("llama"), end_ids=(EOS,), quantization="fp8_per_block")
    with pytest.raises(ConfigError) as caught:
        spec.build(CONTEXT)
    assert str(caught.value) == (
        "'actor' is to generate with quantization=fp8_per_block, which vLLM computes on GPUs only, "
        "and it is placed on the CPU\n    set executor.device=cuda, or leave "
        "rollout.options.quantization out"
    )


def test_a_way_to_quantize_that_there_is_not_is_named() -> None:
    wrong: Any = "fp8"
    with pytest.raises(ValueError, match="quantization is") as caught:
        VllmPolicySpec(model=model_spec("llama"), end_ids=(EOS,), quantization=wrong)
    assert str(caught.value) == (
        "quantization is 'fp8'; expected one of 'fp8_per_tensor', 'fp8_per_channel' or "
        "'fp8_per_block'"
    )


@pytest.mark.gpu
def test_on_a_gpu_vllm_computes_in_fp8_with_weights_that_come_anew() -> None:
    """What it is given stays bfloat16; it quantizes whatever is loaded."""
    pytest.importorskip("vllm")
    context = WorkerContext("actor", seed=7, device="cuda")
    spec = VllmPolicySpec(
        model=replace(model_spec("llama"), dtype="bfloat16"), end_ids=(EOS,), max_decode_rows=8,
        memory_fraction=0.2, quantization="fp8_per_tensor",
    )  # fmt: skip
    policy = spec.build(context)
    try:
        module = spec.model.causal_lm("cpu")
        weights = {name: tensor.detach() for name, tensor in module.named_parameters()}
        policy.load_weights({name: tensor * 1.5 for name, tensor in weights.items()})
        policy.sleep_empty()
        policy.wake()
        policy.load_weights(weights)
    finally:
        policy.close()
