"""AdamW and its schedule against torch's optimizer and against numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_device import CountedOps
from penstock.workers.engines.fsdp_engine.network import FsdpAdamW
from penstock.workers.training import optimizer as adamw
from penstock.workers.training.data_parallel import RankGroup
from penstock.workers.training.flat_parameters import FlatParameters
from penstock.workers.training.optimizer import (
    AdamW,
    JoinedAdamW,
    OptimizerSpec,
    SharedAdamW,
    optimizer_buffers,
    square_sum,
    update_each,
    update_weights,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import get_scheduler


def test_steps_equal_torch_adamw():
    torch.manual_seed(0)
    module, twin = nn.Linear(7, 5), nn.Linear(7, 5)
    twin.load_state_dict(module.state_dict())
    flat = FlatParameters(module)
    spec = OptimizerSpec(betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
    ours = AdamW(flat.data, spec)
    theirs = torch.optim.AdamW(twin.parameters(), betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for lr in (0.1, 0.01, 0.05, 0.0):
        x = torch.randn(3, 7)
        grad = flat.enable_gradients()
        module(x).square().sum().backward()
        norm = ours.step(grad, lr)
        theirs.zero_grad()
        twin(x).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
        torch.testing.assert_close(module.weight, twin.weight, atol=1e-6, rtol=0)
        torch.testing.assert_close(module.bias, twin.bias, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_that_restarts_goes_on_as_a_new_one_would(dtype: torch.dtype):
    old, new = FlatParameters(nn.Linear(4, 4).to(dtype)), FlatParameters(nn.Linear(4, 4).to(dtype))
    optimizer = AdamW(old.data, OptimizerSpec())
    for size in (3.0, -1.0):
        optimizer.step(torch.full_like(old.data, size, dtype=torch.float32), 0.1)
    optimizer.restart()
    new.data.copy_(old.data)
    fresh = AdamW(new.data, OptimizerSpec())
    for taken in (optimizer, fresh):
        for size in (0.5, 2.0):
            taken.step(torch.full_like(old.data, size, dtype=torch.float32), 0.01)
    assert taken.steps == optimizer.steps == 2
    torch.testing.assert_close(
        old.data, new.data, atol=1e-3 if dtype != torch.float32 else 0, rtol=0
    )


def test_clipping_can_be_off_and_a_short_gradient_is_left_alone():
    flat = FlatParameters(nn.Linear(2, 1))
    for limit, expected in ((0.0, 30.0), (100.0, 30.0), (3.0, 3.0)):
        grad = torch.zeros_like(flat.data)
        grad[0] = 30.0
        assert AdamW(flat.data, OptimizerSpec(max_grad_norm=limit)).step(grad, 0.1) == 30.0
        assert float(grad[0]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (OptimizerSpec(lr=2.0), [2.0, 2.0, 2.0]),
        (OptimizerSpec(lr=2.0, warmup_calls=4), [0.5, 1.0, 1.5, 2.0, 2.0]),
        (
            OptimizerSpec(lr=1.0, schedule="linear", warmup_calls=2, total_calls=6),
            [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0],
        ),
        (
            OptimizerSpec(lr=1.0, schedule="cosine", total_calls=4, min_lr_ratio=0.2),
            [1.0, 0.8828427, 0.6, 0.3171573, 0.2, 0.2],
        ),
    ],
)
def test_learning_rate(spec: OptimizerSpec, expected: list[float]):
    got = [spec.lr_at(call) for call in range(len(expected))]
    assert got == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup_ratio": 0.3}, [0.5, 1, 1, 1]),  # 1.2 calls, rounded up
        ({"warmup_ratio": 0.25, "schedule": "constant_with_warmup"}, [1, 1, 1, 1]),
        ({"warmup_ratio": 0.5, "schedule": "linear"}, [0.5, 1, 1, 0.5]),
        ({"warmup_ratio": 0.5, "schedule": "linear", "total_calls": 8}, [0.25, 0.5, 0.75, 1]),
        ({"warmup_calls": 2, "schedule": "cosine_with_min_lr"}, [0.5, 1, 1, 0.5]),
    ],
)
def test_warm_up_as_a_share_and_names_of_transformers(
    options: dict[str, Any], expected: list[float]
) -> None:
    """The schedule falls over the four train calls of a stage."""
    spec = OptimizerSpec(lr=1.0, **options).over(4)
    assert [spec.lr_at(call) for call in range(4)] == pytest.approx(expected)
    assert spec.over(9) == spec


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("cosine_with_min_lr", {"min_lr_ratio": 0.2}, {"min_lr_rate": 0.2}),
        ("cosine_with_restarts", {"num_cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"power": 2.0, "min_lr_ratio": 0.1}, {"power": 2.0, "lr_end": 0.05}),
        ("inverse_sqrt", {}, {}),
        ("warmup_stable_decay", {"decay_calls": 4}, {"num_decay_steps": 4}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedules_are_those_of_transformers_after_the_warm_up(
    name: str, options: dict[str, Any], theirs: dict[str, Any], warmup: int
) -> None:
    options = {**options, "schedule": name, "warmup_calls": warmup}
    spec = OptimizerSpec(lr=0.5, **options).over(12)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler: Any = get_scheduler(name, optimizer, warmup, 12, theirs)
    for call in range(13):
        if call >= warmup:
            assert spec.lr_at(call) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_a_warm_up_has_one_length() -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        OptimizerSpec(warmup_ratio=0.1, warmup_calls=3)


def _first_step(optimizer: AdamW, grad: torch.Tensor) -> float:
    """The norm of a first step, which makes the buffers that were foretold."""
    foretold = optimizer.num_bytes
    norm = optimizer.step(grad, 0.0)
    assert foretold == sum(buffer.nbytes for buffer in optimizer.buffers) > 0
    return norm


def _norm_by(engine: str, grad: torch.Tensor) -> float:
    """Return the norm that an engine's optimizer reports, with weights cut as it cuts them."""
    spec = OptimizerSpec(max_grad_norm=0)
    data, alone = torch.zeros(len(grad)), RankGroup(0, 1, torch.device("cpu"))
    if engine == "torch":
        return _first_step(AdamW(data, spec), grad)
    spans = [(0, 70_000), (70_016, len(grad))]  # a gap, as between aligned parameters
    in_memory: Any = dist
    dist.init_process_group("gloo", store=in_memory.HashStore(), rank=0, world_size=1)
    try:
        if engine == "fsdp":
            optimizer = FsdpAdamW(
                lambda buffer: {"w": data if buffer is None else buffer}, spec, alone, spans
            )
            return _first_step(optimizer, grad)
        half = len(grad) // 2
        parts = [
            SharedAdamW(data[a:b], spec, alone, counted=own, model_groups=[None], shared=True)
            for a, b, own in (
                (0, half, [*spans[:1], (70_016, half)]),
                (half, len(grad), [(0, len(grad) - half)]),
            )
        ]
        return _first_step(JoinedAdamW(data, spec, parts, [half, len(grad) - half]), grad)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "fsdp", "megatron"])
@pytest.mark.parametrize("size", [70_016 + 2, 10**6 + 7, 10**7])
def test_a_norm_is_exact_however_long_the_gradient(engine: str, size: int):
    """Norms agree to 1e-6 in every engine: one float32 sum of 10M squares loses 4e-4 on a CPU."""
    grad = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-3
    grad[70_000:70_016] = 0
    exact = float(grad.double().square().sum().sqrt())
    assert _norm_by(engine, grad) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(("rank", "own"), [(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6])])
def test_ranks_that_share_its_state_have_runs_of_one_length(rank: int, own: list[int]):
    """Each is as long as the first, so that they are sent alike; the last holds what is left."""
    ranks = RankGroup(rank, 3, torch.device("cpu"))
    optimizer = SharedAdamW(
        torch.zeros(7), OptimizerSpec(), ranks, counted=[(0, 7)], model_groups=[None], shared=True
    )
    optimizer.load_state({"exp_avg": torch.arange(7.0)}, steps=1)
    assert optimizer._buffers["exp_avg"].tolist() == own  # pyright: ignore[reportPrivateUsage]


def test_square_sums_of_nothing_and_of_spans():
    x = torch.arange(200_000.0)
    assert float(square_sum(x[:0])) == float(square_sum(x, [])) == 0
    assert float(square_sum(x, [(3, 5), (7, 7), (65_536, 65_537)])) == 9 + 16 + 65_536.0**2


def test_a_falling_schedule_needs_its_length():
    with pytest.raises(ValueError, match=r"schedule 'cosine' needs total_calls above"):
        OptimizerSpec(schedule="cosine", warmup_calls=3, total_calls=3)
    with pytest.raises(ValueError, match=r"schedule 'cosine' needs total_calls above"):
        OptimizerSpec(schedule="cosine", warmup_calls=3).over(3)
    with pytest.raises(ValueError, match=r"schedule 'linear' needs total_calls"):
        OptimizerSpec(schedule="linear").lr_at(1)


def test_a_schedule_falls_over_the_calls_that_there_are():
    spec = OptimizerSpec(lr=1.0, schedule="linear").over(4)
    assert [spec.lr_at(call) for call in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert OptimizerSpec(schedule="linear", total_calls=9).over(4).total_calls == 9
    assert OptimizerSpec().over(4) == OptimizerSpec()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1e-4),
        ("betas", (0.9, 1.0)),
        ("betas", (-0.1, 0.9)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("max_grad_norm", -1.0),
        ("warmup_calls", -1),
        ("total_calls", -1),
        ("min_lr_ratio", 1.5),
    ],
)
def test_options_out_of_range(name: str, value: Any):
    with pytest.raises(ValueError, match=f"^{name} is {re.escape(str(value))}; expected "):
        OptimizerSpec(**{name: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_takes_no_step_holds_nothing(dtype: torch.dtype):
    flat = FlatParameters(nn.Linear(4, 4).to(dtype))
    optimizer = AdamW(flat.data, OptimizerSpec())
    optimizer.refresh()
    assert optimizer.state() == {}
    optimizer.load_state({}, 0)
    optimizer.step(torch.ones_like(flat.data, dtype=torch.float32), 0.1)
    kinds = {"first", "second"} if dtype == torch.float32 else {"first", "second", "master"}
    assert optimizer.state().keys() == kinds
    assert all(state.shape == flat.data.shape for state in optimizer.state().values())


def _stepped(
    rule: Any, dtype: torch.dtype, spec: OptimizerSpec, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Three steps of 1,000 weights by a rule, in two parts each."""
    monkeypatch.setattr(adamw, "_plain_step", rule)
    monkeypatch.setattr(adamw, "_AT_ONCE", 600)
    random = torch.Generator().manual_seed(0)
    data = torch.randn(1000, generator=random).to(dtype)
    buffers = optimizer_buffers(data)
    for step in (1, 2, 3):
        grad = torch.randn(1000, generator=random) * 10.0 ** (step - 2)
        update_weights(data, grad, buffers, spec, 1e-2, step)
    return data, buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_fused_kernel_of_gpus_takes_the_same_step(
    dtype: torch.dtype, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a few roundings in float32: they are of sizes up to 4, and move by up to 0.03."""
    spec = OptimizerSpec(betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    rules = (adamw._plain_step, adamw._fused_step)  # pyright: ignore[reportPrivateUsage]
    (ours, state), (fused, other) = (_stepped(r, dtype, spec, monkeypatch) for r in rules)
    for kind, buffer in state.items():
        torch.testing.assert_close(buffer, other[kind], rtol=2e-6, atol=1e-6)
    # Of 16 bits: a rounding of the float32 master may end on either side of a half.
    one = 1e-6 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(ours, fused, rtol=0, atol=one)
    assert not torch.equal(ours, torch.randn(1000, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clipped", [False, True])
def test_many_tensors_are_stepped_at_once_on_a_device(dtype: torch.dtype, clipped: bool) -> None:
    """As each alone, in as many operations as one of them takes."""
    random, spec = torch.Generator().manual_seed(0), OptimizerSpec(weight_decay=0.1)
    clip = (torch.tensor(3.0), torch.tensor(0.0)) if clipped else None
    kept: list[list[tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]] = [[], []]
    for shape in ((3, 5), (7,), (1, 4)):
        data, grad = (torch.randn(shape, generator=random) for _ in range(2))
        for parts in kept:
            own = data.to(dtype).clone()
            parts.append((own, grad.clone(), optimizer_buffers(own)))
    with CountedOps() as seen:
        update_each(kept[0], spec, 1e-2, 1, clip)
    assert seen.counts["_fused_adamw_"] == clipped
    assert seen.counts["_foreach_copy_"] == (clipped and dtype == torch.bfloat16)
    for (data, _, buffers), (other, grad, others) in zip(*kept, strict=True):
        update_weights(other, grad, others, spec, 1e-2, 1, clip)
        assert torch.equal(data, other)
        assert all(torch.equal(buffer, others[kind]) for kind, buffer in buffers.items())


def test_a_fused_step_makes_nothing_the_size_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """18 bytes a weight of 16 bits are all there is: weight, gradient, moments and master."""
    size = 10_000
    made = 0

    class Made(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal made
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and not func.is_view:
                is_new = all(
                    found.untyped_storage()._cdata != x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
                    for x in args
                    if isinstance(x, torch.Tensor)
                )
                made += found.nbytes if is_new else 0
            return found

    monkeypatch.setattr(adamw, "_plain_step", adamw._fused_step)  # pyright: ignore[reportPrivateUsage]
    data = torch.zeros(size, dtype=torch.bfloat16)
    optimizer, grad = AdamW(data, OptimizerSpec()), torch.ones(size)
    optimizer.step(grad, 0.1)
    with Made():
        optimizer.step(grad, 0.1)
    assert made <= 80
    held = [data, grad, *optimizer.buffers]
    assert sum(tensor.nbytes for tensor in held) == 18 * size


@pytest.mark.parametrize("length", [0.1, 30.0])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_device_clips_with_the_step_and_takes_none_that_is_not_finite(
    length: float, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, spec = torch.randn(1000), OptimizerSpec(max_grad_norm=limit)
    gradients = [torch.nn.functional.normalize(torch.randn(1000), dim=0) * length for _ in "123"]

    def stepped() -> tuple[AdamW, torch.Tensor, list[float]]:
        data = start.clone()
        optimizer = AdamW(data, spec)
        return optimizer, data, [optimizer.step(grad.clone(), 1e-2) for grad in gradients]

    _, plain, norms = stepped()
    monkeypatch.setattr(AdamW, "clips_at_once", frozenset({"cpu"}))
    optimizer, data, others = stepped()
    torch.testing.assert_close(data, plain, rtol=0, atol=2e-6)
    assert others == norms
    before = [one.clone() for one in (data, *optimizer.buffers)]
    bad = gradients[0].clone()
    bad[3] = torch.nan
    with pytest.raises(FloatingPointError, match="gradient norm is nan at optimizer step 4"):
        optimizer.step(bad, 1e-2)
    assert optimizer.steps == 3
    for one, other in zip(before, (data, *optimizer.buffers), strict=True):
        assert torch.equal(one, other)
