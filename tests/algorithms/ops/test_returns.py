"""GAE across the ends of episodes, and V-trace: printed numbers and the laws they obey."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.ops.advantages import whiten
from penstock.algorithms.ops.returns import gae, vtrace
from torch import Tensor

SEEDS = st.integers(0, 2**31 - 1)
DISCOUNTS = st.sampled_from([0.0, 0.5, 0.97, 1.0])


def f64(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def flags(*places: int, width: int = 4) -> Tensor:
    return torch.isin(torch.arange(width), torch.tensor(places))[None]


def assert_close(actual: Tensor, *expected: list[float]) -> None:
    torch.testing.assert_close(actual, f64(*expected), atol=1e-6, rtol=0)


# --- GAE over several episodes --------------------------------------------------------------------

MASK = torch.ones(1, 4).bool()
REWARD, VALUE = f64([1, 1, 1, 1]), f64([0.5, 0.6, 0.7, 0.8])


def test_classical_control() -> None:
    """The flag before step 2 is True: step 1 ended its episode."""
    targets = gae(
        MASK,
        reward=REWARD,
        value=VALUE,
        terminated=flags(1),
        bootstrap_value=torch.tensor([0.9], dtype=torch.float64),
        discount=0.99,
        lam=0.95,
    )
    assert_close(targets.advantage, [1.4702, 0.4, 2.118086, 1.091])
    assert_close(targets.value_target, [1.9702, 1, 2.818086, 1.891])
    minibatch = whiten(targets.advantage[:, :2], MASK[:, :2], variance="unbiased")
    assert_close(minibatch, [0.707107, -0.707107])


def test_a_truncated_step_expects_what_the_critic_says_and_carries_nothing_back() -> None:
    targets = gae(
        MASK,
        reward=REWARD,
        value=VALUE,
        truncated=flags(1),
        discount=0.99,
        lam=0.95,
    )
    delta_1 = 1 + 0.99 * 0.7 - 0.6
    delta_0 = 1 + 0.99 * 0.6 - 0.5
    delta_2, delta_3 = 1 + 0.99 * 0.8 - 0.7, 1 - 0.8
    decay = 0.99 * 0.95
    assert_close(
        targets.advantage,
        [delta_0 + decay * delta_1, delta_1, delta_2 + decay * delta_3, delta_3],
    )


def test_the_state_left_behind_stands_in_the_next_column_though_it_is_masked_out() -> None:
    """Environments that reset one step later: step 2 takes no action and gets no reward."""
    mask = flags(0, 1, 3)
    targets = gae(mask, reward=REWARD, value=VALUE, truncated=flags(1), discount=1.0, lam=1.0)
    assert_close(targets.advantage, [1 + 1 + 0.7 - 0.5, 1 + 0.7 - 0.6, 0, 1 - 0.8])
    ended = gae(mask, reward=REWARD, value=VALUE, terminated=flags(1), discount=1.0, lam=1.0)
    assert_close(ended.advantage, [1 + 1 - 0.5, 1 - 0.6, 0, 1 - 0.8])


def test_both_flags_mean_terminated_and_masked_ones_nothing() -> None:
    both = gae(MASK, reward=REWARD, value=VALUE, terminated=flags(1), truncated=flags(1))
    ended = gae(MASK, reward=REWARD, value=VALUE, terminated=flags(1))
    assert torch.equal(both.advantage, ended.advantage)
    mask = flags(0, 1, 3)
    plain = gae(mask, reward=REWARD, value=VALUE)
    marked = gae(mask, reward=REWARD, value=VALUE, terminated=flags(2), truncated=flags(2))
    assert torch.equal(marked.advantage, plain.advantage)


def test_a_truncated_last_column_needs_the_value_of_what_comes_after() -> None:
    with pytest.raises(ValueError, match="has a truncated step, .* pass bootstrap_value"):
        gae(MASK, reward=REWARD, value=VALUE, truncated=flags(3))
    after = torch.tensor([2.0], dtype=torch.float64)
    cut = gae(MASK, reward=REWARD, value=VALUE, truncated=flags(3), bootstrap_value=after)
    open_end = gae(MASK, reward=REWARD, value=VALUE, bootstrap_value=after)
    assert torch.equal(cut.advantage, open_end.advantage)


@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_flags_of_another_shape_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be bool\[1, 4\]"):
        gae(MASK, reward=REWARD, value=VALUE, **{name: torch.zeros(1, 3).bool()})  # pyright: ignore[reportArgumentType]


def sampled(seed: int) -> dict[str, Tensor]:
    """One row of steps, some masked out after an ending, as environments give them."""
    random = torch.Generator().manual_seed(seed)
    width = 9
    ends = torch.rand(1, width, generator=random) < 0.3
    cut = torch.rand(1, width, generator=random) < 0.5
    mask = ~torch.cat([torch.zeros(1, 1).bool(), ends[:, :-1]], dim=1)
    ends = ends & mask
    mask = ~torch.cat([torch.zeros(1, 1).bool(), ends[:, :-1]], dim=1)
    reward, value, logprob, behavior = torch.randn(
        4, 1, width, generator=random, dtype=torch.float64
    )
    return {
        "mask": mask,
        "reward": torch.where(mask, reward, torch.nan),
        "value": value,
        "terminated": ends & ~cut,
        "truncated": ends & cut,
        "bootstrap_value": torch.randn(1, generator=random, dtype=torch.float64),
        "logprob": logprob,
        "behavior_logprob": behavior,
    }


@settings(max_examples=40)
@given(seed=SEEDS, discount=DISCOUNTS, lam=DISCOUNTS)
def test_a_row_of_episodes_is_its_episodes_one_by_one(
    seed: int, discount: float, lam: float
) -> None:
    columns = sampled(seed)
    mask, value = columns["mask"], columns["value"]
    options = {"discount": discount, "lam": lam}
    policies = {name: columns.pop(name) for name in ("logprob", "behavior_logprob")}
    whole = (
        gae(**columns, **options),  # pyright: ignore[reportArgumentType]
        vtrace(**columns, **policies, **options, c_bar=0.9),  # pyright: ignore[reportArgumentType]
    )
    after = torch.cat([value[0, 1:], columns["bootstrap_value"]])
    start = 0
    for t in range(mask.shape[1]):
        ended = bool((columns["terminated"] | columns["truncated"])[0, t])
        if not ended and t + 1 < mask.shape[1]:
            continue
        own = torch.arange(start, t + 1)[mask[0, start : t + 1]]
        start = t + 1
        last = after[t : t + 1] * (~columns["terminated"][0, t] if ended else 1)
        if not len(own):
            continue
        part = {name: columns[name][:, own] for name in ("mask", "reward", "value")}
        alone = (
            gae(**part, bootstrap_value=last, **options),  # pyright: ignore[reportArgumentType]
            vtrace(
                **part,  # pyright: ignore[reportArgumentType]
                **{name: column[:, own] for name, column in policies.items()},
                **options,
                bootstrap_value=last,
                c_bar=0.9,
            ),
        )
        for together, single in zip(whole, alone, strict=True):
            torch.testing.assert_close(together.advantage[:, own], single.advantage)
            torch.testing.assert_close(together.value_target[:, own], single.value_target)


# --- V-trace --------------------------------------------------------------------------------------


def printed(ratios: list[float], **options: float | None) -> tuple[Tensor, Tensor]:
    targets = vtrace(
        torch.ones(1, 3).bool(),
        reward=f64([1, 0, 1]),
        value=f64([0.5, 0.4, 0.3]),
        logprob=f64(ratios).log(),
        behavior_logprob=torch.zeros(1, 3, dtype=torch.float64),
        bootstrap_value=torch.tensor([0.2], dtype=torch.float64),
        discount=0.9,
        **options,  # pyright: ignore[reportArgumentType]
    )
    return targets.value_target, targets.advantage


def test_vtrace() -> None:
    target, advantage = printed([0.5, 2, 1])
    assert_close(target, [1.2279, 1.062, 1.18])
    assert_close(advantage, [0.7279, 0.662, 0.88])
    fresh, _ = printed([1, 1, 1])
    assert_close(fresh, [1.9558, 1.062, 1.18])


def test_vtrace_bounds_and_lambda() -> None:
    """By hand; the ratio of step 1 is 2."""
    delta_2, delta_1, delta_0 = 1 + 0.18 - 0.3, 0.27 - 0.4, 1 + 0.36 - 0.5
    target, advantage = printed([0.5, 2, 1], rho_bar=None, c_bar=None, policy_rho_bar=None)
    error_1 = 2 * delta_1 + 0.9 * 2 * delta_2
    assert_close(target, [0.5 + 0.5 * delta_0 + 0.9 * 0.5 * error_1, 0.4 + error_1, 0.3 + delta_2])
    assert_close(
        advantage, [0.5 * (delta_0 + 0.9 * error_1), 2 * (delta_1 + 0.9 * delta_2), delta_2]
    )
    target, advantage = printed([0.5, 2, 1], lam=0.5)
    error_1 = delta_1 + 0.9 * 0.5 * delta_2
    assert_close(
        target,
        [0.5 + 0.5 * delta_0 + 0.9 * 0.5 * 0.5 * error_1, 0.4 + error_1, 0.3 + delta_2],
    )
    assert_close(
        advantage,
        [0.5 * (delta_0 + 0.9 * 0.5 * error_1), delta_1 + 0.9 * 0.5 * delta_2, delta_2],
    )


@settings(max_examples=40)
@given(seed=SEEDS, discount=DISCOUNTS, lam=DISCOUNTS)
def test_vtrace_on_policy_is_gae(seed: int, discount: float, lam: float) -> None:
    """The same targets; and with lambda 1 the same advantages, and n-step returns."""
    columns = sampled(seed)
    logprob = columns.pop("logprob")
    columns.pop("behavior_logprob")
    own = gae(**columns, discount=discount, lam=lam)  # pyright: ignore[reportArgumentType]
    other = vtrace(
        **columns,  # pyright: ignore[reportArgumentType]
        logprob=logprob,
        behavior_logprob=logprob,
        discount=discount,
        lam=lam,
    )
    torch.testing.assert_close(other.value_target, own.value_target)
    torch.testing.assert_close(other.advantage, own.advantage)


@settings(max_examples=25)
@given(seed=SEEDS, width=st.integers(1, 4))
def test_vtrace_does_not_see_padding(seed: int, width: int) -> None:
    columns = {n: c for n, c in sampled(seed).items() if n not in ("terminated", "truncated")}
    narrow = vtrace(**columns)  # pyright: ignore[reportArgumentType]
    wide = {
        name: torch.nn.functional.pad(
            c, (0, width), value=False if c.dtype == torch.bool else torch.nan
        )
        if c.ndim == 2
        else c
        for name, c in columns.items()
    }
    padded = vtrace(**wide)  # pyright: ignore[reportArgumentType]
    assert torch.equal(padded.advantage[:, :-width], narrow.advantage)
    assert torch.equal(padded.value_target[:, :-width], narrow.value_target)
