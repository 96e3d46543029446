"""What the engine asks of vLLM on a GPU, of which there is none here: vLLM is a fake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.vllm_engine.engine import EngineOptions, VllmEngine
from penstock.workers.engines.vllm_engine.generator import VllmPolicySpec, memory_share
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


GIB = 1 << 30


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, None),  # it has the GPU for itself, and vLLM's own share
        ({"memory_fraction": 0.5}, 0.5),
        ({"sleeping_beside": 1}, 0.92),  # weights go through the host, and a context stays
        ({"sleeping_beside": 1, "memory_fraction": 0.5}, 0.5),
        # 80 GiB less one of a context and two versions of 14
        ({"sleeping_beside": 1, "sent_from": 1}, 0.637),
        ({"sleeping_beside": 2, "sent_from": 2}, 0.8),
    ],
)
def test_vllm_leaves_what_stays_on_the_device_while_others_sleep(
    options: dict[str, Any], share: float | None
) -> None:
    spec = VllmPolicySpec(model=model_spec("llama"), end_ids=(EOS,), **options)
    sizes = {"needed": 15 * GIB, "sent": 14 * GIB, "device": 80 * GIB}
    found = memory_share(spec, "actor", **sizes)
    assert found == share
    if found is not None and options.get("sleeping_beside"):
        kept = options["sleeping_beside"] * GIB
        kept += 2 * 14 * GIB // options["sent_from"] if "sent_from" in options else 0
        assert found * 80 * GIB + kept <= 80 * GIB


REFUSED_SHARES: dict[tuple[tuple[str, Any], ...], str] = {
    (("sent_from", 1), ("memory_fraction", 0.9)): (
        "keep 29.0 GiB of each GPU of 80.0 GiB while they sleep\n    vLLM may have 51.0 GiB, and "
        "is to have 72.0 GiB\n    set rollout.options.memory_fraction=0.637, or leave "
        "executor.transport=cuda_ipc out, or divide the model (executor.tensor_parallel), or put "
        "it on GPUs of its own"
    ),
    (("memory_fraction", 1.0),): (
        "keep 1.00 GiB of each GPU of 80.0 GiB while they sleep\n    vLLM may have 79.0 GiB, and "
        "is to have 80.0 GiB\n    set rollout.options.memory_fraction=0.987, or divide the model "
        "(executor.tensor_parallel), or put it on GPUs of its own"
    ),
}


@pytest.mark.parametrize("options", REFUSED_SHARES)
def test_a_share_beside_which_the_others_have_no_room_is_refused(
    options: tuple[tuple[str, Any], ...],
) -> None:
    spec = VllmPolicySpec(
        model=model_spec("llama"), end_ids=(EOS,), sleeping_beside=1, **dict(options)
    )
    with pytest.raises(ConfigError) as caught:
        memory_share(spec, "actor", needed=15 * GIB, sent=14 * GIB, device=80 * GIB)
    assert str(caught.value) == (
        "'actor' generates with vLLM in turns with 1 other group(s), which "
        + REFUSED_SHARES[options]
    )


def test_a_model_that_has_no_room_beside_its_trainer_is_refused() -> None:
    spec = VllmPolicySpec(model=model_spec("llama"), end_ids=(EOS,), sleeping_beside=1, sent_from=1)
    with pytest.raises(ConfigError, match="vLLM may have 19.0 GiB, and is to have 31.0 GiB") as no:
        memory_share(spec, "actor", needed=31 * GIB, sent=30 * GIB, device=80 * GIB)
    assert str(no.value).endswith(
        "\n    leave executor.transport=cuda_ipc out, or divide the model "
        "(executor.tensor_parallel), or put it on GPUs of its own"
    )


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
