"""The torch engine on a device that is not the CPU: right numbers, few waits, few shapes.

The device is `RecordedDevice`, which holds real numbers and refuses tensors of the host among its
own; attention in 16 bits goes through `varlen_reference` there. Shapes alone are counted on "meta".
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
from penstock.workers.engines.torch_engine import attention, varlen
from penstock.workers.engines.torch_engine.packing import Pack, pack_rows
from penstock.workers.engines.torch_engine.varlen import has_kernel
from penstock.workers.training.microbatch import micro_batches, take_rows
from penstock.workers.training.optimizer import OptimizerSpec
from penstock.workers.training.transfers import sent
from recorded_device import NAME, RecordedDevice
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_models import make_batch, make_policy
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


@pytest.mark.parametrize("again", [False, True])
def test_training_and_evaluation_give_the_numbers_of_the_cpu(again: bool) -> None:
    """In several micro-batches, none of which waits for the device."""
    here, make = policies("float32", micro_batch_tokens=80, activation_checkpointing=again)
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
    from penstock.workers.engines.torch_engine.specs import TorchValueSpec
    from penstock.workers.models.spec import ModelSpec
    from torch_models import FAMILIES

    batch = make_batch(make_policy("qwen2"), 3, new=12)
    rows = ValueBatch(
        tokens=batch.tokens,
        mask=batch.mask,
        value_target=batch.advantage,
        old_value=torch.zeros_like(batch.advantage),
    )
    spec = TorchValueSpec(
        model=ModelSpec(architecture=FAMILIES["qwen2"]),
        optimizer=OPTIMIZER,
        micro_batch_tokens=80,
    )
    with RecordedDevice() as device:
        there = spec.build(THERE)
        device.waits.clear()
        with call_scope(0, 0):
            there.train(ClippedValueLoss(), rows)
        assert device.waits.total() <= 7


# --- shapes of a step


def ragged_rows() -> PolicyBatch:
    """512 rows: 64 prompts of 300 tokens, 8 responses each of up to 900."""
    random = torch.Generator().manual_seed(0)
    length = torch.randint(1, 901, (512,), generator=random)
    tokens = torch.randint(3, 50, (512, 1200), generator=random)
    tokens[:, :300] = tokens[:64, :300].repeat_interleave(8, 0)
    place = torch.arange(1200)
    tokens[place >= 300 + length[:, None]] = -1
    zeros = torch.zeros(tokens.shape)
    return PolicyBatch(
        tokens=tokens,
        mask=(place >= 300) & (tokens >= 0),
        behavior_logprob=zeros,
        advantage=zeros,
    )


def packs(batch: PolicyBatch, micro_batch_tokens: int) -> list[Pack]:
    """All micro-batches of the step, on "meta"."""
    made: list[Pack] = []
    every = torch.arange(len(batch.tokens))
    for part in micro_batches(batch, every, "row", micro_batch_tokens, sort_by_length=False):
        rows = take_rows(batch, part)
        reads = torch.zeros_like(rows.mask)
        reads[:, :-1] = rows.mask[:, 1:]
        shared = torch.full((len(part),), 300)
        made.append(pack_rows(sent(rows.tokens, torch.device("meta")), reads, shared))
    return made


class Shapes(TorchDispatchMode):
    """The different shapes of what some operations are given, and the longest sequences."""

    def __init__(self, *operations: str) -> None:
        super().__init__()
        self.operations = operations
        self.found: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = func.overloadpacket.__name__
        if name in self.operations:
            self.found.add(tuple(tuple(x.shape) if isinstance(x, Tensor) else x for x in args))
        return func(*args, **(kwargs or {}))


def attend(pack: Pack, dtype: torch.dtype) -> None:
    """Forward and backward, with 4 query heads on 2 key heads."""

    def leaf(heads: int) -> Tensor:
        shape = (len(pack.tokens), heads, 64)
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    query, key, value = leaf(4), leaf(2), leaf(2)
    assert has_kernel(query) == (dtype == torch.bfloat16)
    attention.attend_packed(query, key, value, pack, 0.125).sum().backward()


@pytest.mark.parametrize("micro_batch_tokens", [4096, 16384])
def test_a_step_of_ragged_rows_has_few_shapes(
    micro_batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "most_head_size", lambda device: 256)  # pyright: ignore[reportUnknownLambdaType]
    made = packs(ragged_rows(), micro_batch_tokens)
    assert len(made) >= 20
    forward, backward = Shapes("_flash_attention_forward"), Shapes("_flash_attention_backward")
    with forward, backward:
        for pack in made:
            attend(pack, torch.bfloat16)
    assert 1 <= len(forward.found) <= 8
    assert 1 <= len(backward.found) <= 8


def test_so_it_has_in_float32() -> None:
    made = packs(ragged_rows(), 4096)[:24]
    with Shapes("_softmax") as scores:
        for pack in made:
            attend(pack, torch.float32)
    assert 1 <= len(scores.found) <= 8


def test_no_scores_of_a_long_row_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16,384 tokens in evaluation: nothing has as many elements as a head has pairs."""
    monkeypatch.setattr(varlen, "most_head_size", lambda device: 256)  # pyright: ignore[reportUnknownLambdaType]
    tokens = torch.full((1, 16_384), 5)
    pack = pack_rows(sent(tokens, torch.device("meta")), tokens > 0)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for one in made if isinstance(made, tuple | list) else (made,):
                largest = max(largest, one.numel() if isinstance(one, Tensor) else 0)
            return made

    shape = (len(pack.tokens), 4, 64)
    query = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with Sizes(), torch.no_grad():
        attention.attend_packed(query, query[:, :2], query[:, 2:], pack, 0.125)
    assert query.numel() <= largest < 16_384**2 // 32
