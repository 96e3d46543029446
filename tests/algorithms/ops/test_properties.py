"""What every algorithm must keep, whatever the data: padding, order, splits, offsets, gradients.

Losses are those of `samples`, one row each; a new algorithm adds its row there, and one to
`ADVANTAGES`. Batches hold two responses to each of a few prompts, in any order, with garbage
wherever the mask is False.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.losses import rebel_loss
from penstock.algorithms.ops.advantages import (
    batch_std_advantage,
    group_advantage,
    leave_one_out,
    log_partition_advantage,
    remax_advantage,
    whiten,
)
from penstock.algorithms.ops.reductions import aggregate
from penstock.algorithms.ops.returns import return_to_go
from penstock.algorithms.papers.p3o import PairClip, p3o_loss
from torch import Tensor

from ..samples import (
    LOSSES,
    SCORED,
    SEEDS,
    Data,
    batch_of,
    loss_of_part,
    sample,
    value_and_slope,
)

Advantage = Callable[[Tensor, Tensor], Tensor]

ADVANTAGES: dict[str, Advantage] = {
    "grpo": lambda score, ids: group_advantage(score, ids, eps=0),
    "dr_grpo": lambda score, ids: group_advantage(score, ids, divide_by_std=False),
    "rloo": leave_one_out,
    "lite_ppo": lambda score, ids: batch_std_advantage(score, ids, std_of="centered"),
    "kimi": lambda score, ids: log_partition_advantage(score, ids, tau=0.5),
}


# --- padding, order, splits -----------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(seed=SEEDS, width=st.integers(1, 4))
def test_padding_changes_nothing(name: str, seed: int, width: int) -> None:
    data = sample(seed)
    before, slope = value_and_slope(name, data)
    after, wider = value_and_slope(name, data.widened(width))
    torch.testing.assert_close(after, before)
    if slope.ndim == 2:
        assert not wider[:, slope.shape[1] :].any()
        wider = wider[:, : slope.shape[1]]
    torch.testing.assert_close(wider, slope)
    assert before.isfinite()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(seed=SEEDS)
def test_the_order_of_rows_changes_nothing(name: str, seed: int) -> None:
    data = sample(seed)
    order = torch.randperm(len(data.logprob), generator=torch.Generator().manual_seed(seed))
    before, slope = value_and_slope(name, data)
    after, reordered = value_and_slope(name, data.take(order))
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(reordered, slope[order])


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(seed=SEEDS)
def test_parts_add_up_to_the_whole(name: str, seed: int) -> None:
    """Any split that keeps the rows of a group together, where the loss needs them together."""
    data = sample(seed)
    loss, kind = LOSSES[name]
    totals = loss.totals(batch_of(kind, data))
    unit = data.columns["prompt_id"] if loss.unit == "group" else torch.arange(len(data.logprob))
    first = unit % 2 == 0
    parts = [data.take(rows.nonzero()[:, 0]) for rows in (first, ~first) if rows.any()]
    whole, got = loss_of_part(name, data, totals), [loss_of_part(name, p, totals) for p in parts]
    torch.testing.assert_close(torch.stack([part.total for part in got]).sum(), whole.total)
    for metric, (amount, weight) in whole.metrics.items():
        assert not amount.requires_grad
        sums = [torch.stack([p.metrics[metric][at].double() for p in got]).sum() for at in (0, 1)]
        torch.testing.assert_close(sums, [amount.double(), weight.double()], msg=metric)
    added = sum((loss.totals(batch_of(kind, part)) for part in parts), torch.zeros(()))
    torch.testing.assert_close(added, totals)


def without_counted_tokens(data: Data) -> Data:
    """The same rows with nothing to train on, as `finished_only` leaves cut-off responses."""
    columns = dict(data.columns)
    columns["mask"] = torch.zeros_like(columns["mask"])
    columns["macro_id"] = torch.full_like(columns["macro_id"], -1)
    return Data(data.logprob, columns)


@pytest.mark.parametrize("name", [n for n, (_, k) in LOSSES.items() if k not in SCORED])
@settings(max_examples=3)
@given(seed=SEEDS)
def test_rows_without_counted_tokens_move_nothing(name: str, seed: int) -> None:
    """A micro-batch of such rows, or of no rows, still has a gradient to go backward through."""
    data = sample(seed)
    for rows in (without_counted_tokens(data), data.take(torch.arange(0))):
        total, slope = value_and_slope(name, rows)
        assert total.isfinite()
        assert not slope.any()


# --- advantages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=25)
@given(seed=SEEDS)
def test_advantages_follow_their_rows(name: str, seed: int) -> None:
    columns = sample(seed).columns
    order = torch.randperm(len(columns["score"]), generator=torch.Generator().manual_seed(seed))
    before = ADVANTAGES[name](columns["score"], columns["prompt_id"])
    after = ADVANTAGES[name](columns["score"][order], columns["prompt_id"][order])
    torch.testing.assert_close(after, before[order])


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=25)
@given(seed=SEEDS, shift=st.floats(-50, 50))
def test_an_offset_per_prompt_changes_nothing(name: str, seed: int, shift: float) -> None:
    columns = sample(seed).columns
    score, ids = columns["score"], columns["prompt_id"]
    moved = score + shift * (ids % 7)
    before, after = (ADVANTAGES[name](one, ids) for one in (score, moved))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@settings(max_examples=25)
@given(seed=SEEDS, scale=st.floats(0.1, 20))
def test_only_dividing_by_the_deviation_takes_the_scale_out(seed: int, scale: float) -> None:
    columns = sample(seed).columns
    score, ids = columns["score"], columns["prompt_id"]
    grpo, rloo = ADVANTAGES["grpo"], ADVANTAGES["rloo"]
    torch.testing.assert_close(grpo(scale * score, ids), grpo(score, ids))
    torch.testing.assert_close(rloo(scale * score, ids), scale * rloo(score, ids))
    lite = ADVANTAGES["lite_ppo"]
    torch.testing.assert_close(lite(scale * score, ids), lite(score, ids), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("clip", ["separate", "joint"])
@settings(max_examples=25)
@given(seed=SEEDS, shift=st.floats(-50, 50))
def test_losses_of_pairs_see_differences_only(clip: PairClip, seed: int, shift: float) -> None:
    random = torch.Generator().manual_seed(seed)
    logprob, before, score = torch.randn(3, 4, 2, generator=random, dtype=torch.float64)
    for loss in (
        lambda s: p3o_loss(  # pyright: ignore[reportUnknownLambdaType]
            sequence_logprob=logprob, behavior_sequence_logprob=before, score=s, clip=clip
        ),
        lambda s: rebel_loss(  # pyright: ignore[reportUnknownLambdaType]
            sequence_logprob=logprob, behavior_sequence_logprob=before, score=s
        ),
    ):
        torch.testing.assert_close(loss(score + shift), loss(score), atol=1e-6, rtol=1e-6)


@settings(max_examples=25)
@given(seed=SEEDS)
def test_a_bonus_that_is_the_baseline_gives_no_advantage(seed: int) -> None:
    """ReMax: a sample as good as the greedy response; returns to go less the return itself."""
    columns = sample(seed).columns
    mask, score = columns["mask"], columns["score"]
    assert not remax_advantage(score, mask, greedy_score=score).any()
    reward = torch.zeros(mask.shape, dtype=torch.float64)
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    reward[last] = score
    got = torch.where(mask, return_to_go(reward, mask) - score[:, None], 0.0)
    torch.testing.assert_close(got, torch.zeros_like(got))
    whitened = whiten(columns["advantage"], mask)[mask]
    torch.testing.assert_close(whitened.mean(), torch.zeros((), dtype=torch.float64))


# --- gradients ------------------------------------------------------------------------------------

LIKE_REINFORCE = {
    "reinforce": "seq-mean-token-sum",
    "ppo": "token-mean",
    "dual_clip": "token-mean",
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "cispo": "token-mean",
    "gspo": "seq-mean-token-mean",
    "gspo_token": "seq-mean-token-mean",
    "rloo": "seq-mean-token-sum",
    "kimi": "seq-mean-token-sum",
}
"""Losses that are the plain policy gradient while the policy is the one that sampled, and how that
weighs tokens."""


@pytest.mark.parametrize("name", LIKE_REINFORCE)
@settings(max_examples=10)
@given(seed=SEEDS)
def test_fresh_rollouts_give_the_plain_policy_gradient(name: str, seed: int) -> None:
    data = sample(seed, spread=0.0)
    logprob = data.logprob.clone().requires_grad_()
    mask = data.columns["mask"]
    advantage = torch.where(mask, data.columns["advantage"], 0)
    plain = aggregate(
        -advantage * torch.where(mask, logprob, 0),
        mask,
        mode=LIKE_REINFORCE[name],  # pyright: ignore[reportArgumentType] - one of its choices
    )
    expected = torch.autograd.grad(plain, logprob)[0]
    torch.testing.assert_close(value_and_slope(name, data)[1], expected)


@pytest.mark.parametrize("name", ["p3o", "p3o_joint", "rebel"])
@settings(max_examples=10)
@given(seed=SEEDS)
def test_fresh_pairs_give_the_pairwise_gradient(name: str, seed: int) -> None:
    """P3O: half the difference of scores, on the difference of log-probabilities; REBEL twice it,
    twice over."""
    data = sample(seed, spread=0.0)
    ids, score, mask = (data.columns[n] for n in ("prompt_id", "score", "mask"))
    partner = (ids[:, None] == ids[None, :]) & ~torch.eye(len(ids)).bool()
    other = score[partner.long().argmax(dim=1)]
    factor = 2.0 if name == "rebel" else 0.5
    expected = -factor * (score - other)[:, None] * mask / (len(ids) / 2)
    torch.testing.assert_close(value_and_slope(name, data)[1], expected)


WITHOUT_OTHER_TERMS = sorted(set(LIKE_REINFORCE) - {"kimi"} | {"a_lol", "a_lol_token", "dr_grpo"})


@pytest.mark.parametrize("name", WITHOUT_OTHER_TERMS)
@settings(max_examples=10)
@given(seed=SEEDS)
def test_no_advantage_no_gradient(name: str, seed: int) -> None:
    data = sample(seed)
    data.columns["advantage"] = torch.zeros_like(data.columns["advantage"])
    assert not value_and_slope(name, data)[1].any()
