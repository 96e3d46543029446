"""What only a CUDA device can show of the torch engine's training: kernels, shapes, bits, waits."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine import attention
from penstock.workers.engines.torch_engine.packing import Pack
from penstock.workers.engines.torch_engine.varlen import has_kernel
from penstock.workers.training.optimizer import OptimizerSpec, optimizer_buffers, update_weights
from ragged_step import Shapes, attend, packs, ragged_rows
from torch import Tensor
from torch_models import VOCAB, make_policy

# Read at the first matrix product of a process, whichever test has it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = pytest.mark.gpu

CUDA = "cuda:0"
THERE = WorkerContext("actor", seed=7, device=CUDA)


@pytest.mark.parametrize(("heads", "keys", "size"), [(14, 2, 64), (12, 12, 128)])
def test_attention_in_16_bits_is_that_of_float32_on_the_cpu(
    heads: int, keys: int, size: int
) -> None:
    """Within a sixty-fourth of the largest number of each result, where rounding is a 256th.

    The kernel rounds weights and their changes to bfloat16 before it multiplies them.
    """
    batch = ragged_rows()
    here, there = (packs(batch, 8192, device)[0] for device in ("cpu", CUDA))
    assert here.sequences.num_prompts
    random = torch.Generator().manual_seed(0)

    def numbers(count: int) -> Tensor:
        made = torch.randn(len(here.tokens), count, size, generator=random)
        return made.to(torch.bfloat16)

    given = [numbers(heads), numbers(keys), numbers(keys)]
    upstream = numbers(heads).flatten(1)
    upstream[-1] = 0  # of the last spare token nothing is ever wanted

    def results(pack: Pack, *tensors: Tensor) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        mixed = attention.attend_packed(leaves[0], leaves[1], leaves[2], pack, size**-0.5)
        return [mixed.detach(), *torch.autograd.grad(mixed, leaves, tensors[3])]

    expected = results(here, *(tensor.float() for tensor in (*given, upstream)))
    tensors = [tensor.to(CUDA) for tensor in (*given, upstream)]
    assert has_kernel(tensors[0])
    found = results(there, *tensors)
    for one, other in zip(found, expected, strict=True):
        bound = float(other[:-1].abs().max()) / 64
        torch.testing.assert_close(one[:-1].float().cpu(), other[:-1], atol=bound, rtol=0)


def test_a_step_of_ragged_rows_has_few_shapes() -> None:
    forward, backward = Shapes("_flash_attention_forward"), Shapes("_flash_attention_backward")
    with forward, backward:
        for pack in packs(ragged_rows(), 4096, CUDA):
            attend(pack, torch.bfloat16)
    assert 1 <= len(forward.found) <= 8
    assert 1 <= len(backward.found) <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """To a few roundings in float32, and one of the weights' own."""
    size = 100_000
    spec = OptimizerSpec(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)

    def stepped(device: str) -> list[Tensor]:
        random = torch.Generator().manual_seed(0)
        data = torch.randn(size, generator=random).to(device, dtype)
        buffers = optimizer_buffers(data)
        for step in (1, 2, 3):
            grad = torch.randn(size, generator=random) * 10.0 ** (step - 2)
            update_weights(data, grad.to(device), buffers, spec, 1e-2, step)
        return [data.float().cpu(), *(buffer.cpu() for buffer in buffers.values())]

    (data, *states), (there, *others) = stepped("cpu"), stepped(CUDA)
    for one, other in zip(states, others, strict=True):
        torch.testing.assert_close(other, one, rtol=2e-6, atol=2e-6)
    one = 2e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(there, data, rtol=0, atol=one)


# --- whole calls


def rows(num_prompts: int = 8) -> PolicyBatch:
    """Eight responses of up to 150 tokens to each prompt of 60."""
    random = torch.Generator().manual_seed(0)
    count = 8 * num_prompts
    length = torch.randint(1, 151, (count,), generator=random)
    tokens = torch.randint(3, VOCAB, (count, 210), generator=random)
    tokens[:, :60] = tokens[:num_prompts, :60].repeat_interleave(8, 0)
    place = torch.arange(210)
    tokens[place >= 60 + length[:, None]] = -1
    mask = (place >= 60) & (tokens >= 0)
    return PolicyBatch(
        tokens=tokens,
        mask=mask,
        behavior_logprob=torch.full(tokens.shape, -4.0) * mask,
        advantage=torch.randn(tokens.shape, generator=random) * mask,
    )


def policy(context: WorkerContext | None, dtype: str, **options: Any) -> PolicyWorker:
    """With heads of 32 numbers, which the kernel takes."""
    optimizer = OptimizerSpec(lr=1e-3)
    return make_policy("qwen3", optimizer=optimizer, context=context, dtype=dtype, **options)


def train(worker: PolicyWorker, batch: PolicyBatch, steps: int = 1) -> None:
    for step in range(steps):
        with call_scope(step, 0):
            worker.train(ClippedPolicyLoss(entropy_coef=0.01), batch)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.2)])
def test_log_probabilities_are_those_of_the_cpu(dtype: str, bound: float) -> None:
    """In nats; logits are of several units, and a bfloat16 of 4 is rounded to 1/64."""
    batch = rows(2)
    here, there = policy(None, dtype), policy(THERE, dtype)
    expected = here.logprob(batch.tokens, batch.mask)
    torch.testing.assert_close(
        there.logprob(batch.tokens, batch.mask), expected, atol=bound, rtol=0
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_is_the_same_to_the_last_bit_where_that_is_asked_for(dtype: str) -> None:
    batch = rows()
    hashes: set[str] = set()
    for _ in range(3):
        worker = policy(THERE, dtype, deterministic=True, micro_batch_tokens=2048)
        train(worker, batch, steps=2)
        hashes.add(worker.weights_sha256())
    assert len(hashes) == 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_evaluation_is_the_same_to_the_last_bit_unasked() -> None:
    batch = rows()
    worker = policy(THERE, "bfloat16")
    first, second = (worker.logprob(batch.tokens, batch.mask) for _ in range(2))
    assert torch.equal(first, second)


def test_a_micro_batch_hardly_waits_for_the_device() -> None:
    """None of ours does; one of torch's own may."""
    batch = rows()

    def waits(micro_batch_tokens: int) -> int:
        worker = policy(THERE, "bfloat16", micro_batch_tokens=micro_batch_tokens)
        train(worker, batch)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                train(worker, batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(one.message) for one in said)

    count = int((batch.tokens >= 0).sum()) // 1024
    assert count >= 6
    assert waits(1024) - waits(1 << 20) <= count
