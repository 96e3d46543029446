"""The torch engine on a device that is not the CPU: right numbers, and no waits.

Run by `test_fake_device.py` in a process of its own. The device is `RecordedDevice`, which holds
real numbers and refuses tensors of the host among its own; attention in 16 bits goes through
`varlen_reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss, ClippedValueLoss
from penstock.algorithms.roles import PolicyBatch, ValueBatch
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchValueSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec
from recorded_device import NAME, RecordedDevice
from torch_models import FAMILIES, make_batch, make_policy
from varlen_reference import use_reference

OPTIMIZER = OptimizerSpec(lr=1e-3, weight_decay=0.1)
THERE = WorkerContext("actor", seed=7, device=f"{NAME}:0")
LOSS = ClippedPolicyLoss(entropy_coef=0.01)


def policies(dtype: str, **options: Any) -> tuple[PolicyWorker, Callable[[], PolicyWorker]]:
    """One on the CPU, and how to make the same on the device."""

    def make(context: WorkerContext | None = None) -> PolicyWorker:
        return make_policy("qwen2", optimizer=OPTIMIZER, context=context, dtype=dtype, **options)

    return make(), lambda: make(THERE)


def trained(policy: PolicyWorker, batch: PolicyBatch) -> dict[str, float]:
    with call_scope(0, 0):
        metrics = policy.train(LOSS, batch).metrics
    return {name: metric.value for name, metric in metrics.items()}


def test_training_and_evaluation_give_the_numbers_of_the_cpu() -> None:
    """In several micro-batches, none of which waits for the device."""
    here, make = policies("float32", micro_batch_tokens=80, activation_checkpointing=True)
    batch = make_batch(here, 3, new=12)
    with RecordedDevice() as device:
        there = make()
        device.waits.clear()
        found = there.logprob(batch.tokens, batch.mask)
        assert device.waits.total() == 2, device.waits  # are they finite, and the result itself
        torch.testing.assert_close(found, here.logprob(batch.tokens, batch.mask), atol=1e-5, rtol=0)
        device.waits.clear()
        expected, metrics = trained(here, batch), trained(there, batch)
        # The mismatch, the norm, the sums, and whether weights are finite: once each in a call.
        assert device.waits.total() == 7, device.waits
        assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for name, weight in there.export_weights().items():
            # Adam's first step is lr * sign(g): only where g is rounding may it differ.
            torch.testing.assert_close(
                weight, here.export_weights()[name], atol=2e-4, rtol=0, msg=name
            )


def test_16_bits_go_through_the_kernel_for_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    here, make = policies("bfloat16", micro_batch_tokens=80)
    batch = make_batch(here, 3, new=12)
    expected = here.logprob(batch.tokens, batch.mask)
    use_reference(monkeypatch)
    with RecordedDevice():
        there = make()
        found = there.logprob(batch.tokens, batch.mask)
        # The CPU rounds attention's weights to bfloat16 before it multiplies them, the kernel does
        # not: a few hundredths of a nat at logits of several units.
        torch.testing.assert_close(found, expected, atol=0.1, rtol=0)
        metrics = trained(there, batch)
    assert metrics == pytest.approx(trained(here, batch), rel=0.05, abs=0.05)


def test_a_mixture_of_devices_is_refused() -> None:
    with RecordedDevice() as device:
        x = torch.ones(3, device=device.device)
        with pytest.raises(RuntimeError, match=r"aten.add: tensors of the host \[\[3\]\]"):
            x.add(torch.ones(3))


def test_other_roles_do_not_wait_either() -> None:
    batch = make_batch(make_policy("qwen2"), 3, new=12)
    rows = ValueBatch(
        tokens=batch.tokens,
        mask=batch.mask,
        value_target=batch.advantage,
        old_value=torch.zeros_like(batch.advantage),
    )
    spec = TorchValueSpec(
        model=ModelSpec(architecture=FAMILIES["qwen2"]), optimizer=OPTIMIZER, micro_batch_tokens=80
    )
    with RecordedDevice() as device:
        there = spec.build(THERE)
        device.waits.clear()
        with call_scope(0, 0):
            there.train(ClippedValueLoss(), rows)
        assert device.waits.total() <= 7
