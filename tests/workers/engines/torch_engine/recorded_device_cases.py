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
from penstock.workers.engines.fsdp_engine.mesh import ContextGroup, attend_to_end
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchValueSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.host_memory import masked, sent
from penstock.workers.training.optimizer import OptimizerSpec
from recorded_device import NAME, RecordedDevice
from torch import Tensor
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


def test_rows_that_processes_share_are_cut_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the last tokens of rows attend to all before them in the kernel, without a mask."""
    nothing: Any = None
    group = ContextGroup(0, 2, nothing)
    tokens = torch.randint(3, 50, (3, 22), generator=torch.Generator().manual_seed(0))
    reads = tokens % 3 > 0
    expected, states = group.cut(tokens, reads), torch.randn(3, 12, 4)
    query, key, value = (torch.randn(3, heads, 8, 16) for heads in (4, 2, 2))
    parts = [query[:, :, :5], key, value]
    use_reference(monkeypatch)
    with RecordedDevice() as device:
        there = device.device
        found = group.cut(sent(tokens, there), sent(reads, there))
        picked = masked(states.to(there, non_blocking=True), found.reads)
        assert not device.waits
        for name in ("tokens", "reads", "position", "number"):
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name
        assert torch.equal(picked.cpu(), states[expected.reads])
        mixed, grads = with_gradients(parts)
        half = [part.bfloat16().to(there) for part in parts]
        device.waits.clear()
        again, others = with_gradients(half)
        assert {name for name in device.waits if "mask" in name} == set()
        for one, other in zip([again, *others], [mixed, *grads], strict=True):
            torch.testing.assert_close(one.cpu().float(), other, atol=0.1, rtol=0.05)


def with_gradients(parts: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [part.detach().requires_grad_() for part in parts]
    mixed = attend_to_end(leaves[0], leaves[1], leaves[2], 0.25)
    return mixed.detach(), torch.autograd.grad(mixed.float().square().sum(), leaves)
