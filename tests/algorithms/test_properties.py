"""What every algorithm must keep, whatever the data: padding, order, splits, offsets, gradients.

One row per loss and per advantage; a new algorithm adds its row. Batches hold two responses to each
of a few prompts, in any order, with garbage wherever the mask is False.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.advantages import (
    batch_std_advantage,
    group_advantage,
    leave_one_out,
    log_partition_advantage,
    remax_advantage,
    return_to_go,
    whiten,
)
from penstock.algorithms.losses import (
    ALoLLoss,
    CappedWeightLoss,
    ClippedPolicyLoss,
    MirrorDescentLoss,
    P3OLoss,
    RebelLoss,
    ReferenceKLPolicyLoss,
    ReinforceLoss,
    p3o_loss,
    policy_loss,
    rebel_loss,
)
from penstock.algorithms.reductions import aggregate
from penstock.algorithms.roles import PolicyBatch, PolicyOutput, ReferencePolicyBatch
from penstock.algorithms.sequence_losses import ComparedPairBatch
from penstock.algorithms.sequence_terms import PairClip
from penstock.dataflow.role import Loss
from torch import Tensor

SEEDS = st.integers(0, 2**31 - 1)
GARBAGE = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30], dtype=torch.float64)


@dataclass(frozen=True)
class Data:
    """Columns of some rows, and what a policy says of them now."""

    logprob: Tensor
    columns: dict[str, Tensor]

    def take(self, rows: Tensor) -> Data:
        return Data(self.logprob[rows], {name: c[rows] for name, c in self.columns.items()})

    def widened(self, width: int) -> Data:
        """More padding at the end of every row."""

        def wider(column: Tensor) -> Tensor:
            fill = (
                False if column.dtype == torch.bool else -1 if column.dtype == torch.long else 9.0
            )
            return torch.nn.functional.pad(column, (0, width), value=fill)

        columns = {n: wider(c) if c.ndim == 2 else c for n, c in self.columns.items()}
        return Data(wider(self.logprob), columns)


def draw(seed: int, spread: float = 0.3) -> Data:
    """Two responses to each of 2 to 4 prompts, shuffled."""
    random = torch.Generator().manual_seed(seed)
    num_prompts, width = 2 + seed % 3, 7
    rows = 2 * num_prompts
    start = torch.randint(1, 3, (rows, 1), generator=random)
    length = torch.randint(1, 5, (rows, 1), generator=random)
    place = torch.arange(width)
    mask = (place >= start) & (place < start + length)
    behavior = -torch.rand(rows, width, generator=random, dtype=torch.float64) - 0.5
    noise = torch.randn(rows, width, generator=random, dtype=torch.float64)
    reference = behavior + 0.1 * noise.flip(0)
    row_advantage = torch.randn(rows, 1, generator=random, dtype=torch.float64)
    ids = torch.arange(num_prompts).repeat(2)[torch.randperm(rows, generator=random)] + 40
    garbage = GARBAGE[torch.randint(0, 4, (rows, width), generator=random)]

    def spoilt(column: Tensor) -> Tensor:
        return torch.where(mask, column, garbage)

    return Data(
        spoilt(behavior + spread * noise),
        {
            "tokens": torch.where(place < start + length, place + 1, -1),
            "mask": mask,
            "behavior_logprob": spoilt(behavior),
            "advantage": spoilt(row_advantage.expand(rows, width)),
            "ref_logprob": spoilt(reference),
            "prompt_id": ids,
            "score": torch.randn(rows, generator=random, dtype=torch.float64),
        },
    )


LOSSES: dict[str, tuple[Loss[Any, Any], type]] = {
    "reinforce": (ReinforceLoss(aggregation="seq-mean-token-sum"), PolicyBatch),
    "ppo": (ClippedPolicyLoss(), PolicyBatch),
    "dual_clip": (ClippedPolicyLoss(dual_clip=3.0), PolicyBatch),
    "grpo": (ClippedPolicyLoss(aggregation="seq-mean-token-mean"), PolicyBatch),
    "dr_grpo": (ClippedPolicyLoss(aggregation="constant", aggregation_length=9), PolicyBatch),
    "dapo": (ClippedPolicyLoss(eps_high=0.28), PolicyBatch),
    "rloo": (
        ClippedPolicyLoss(ratio_level="sequence_product", aggregation="seq-mean-token-mean"),
        PolicyBatch,
    ),
    "gspo": (
        ClippedPolicyLoss(ratio_level="sequence_mean", aggregation="seq-mean-token-mean"),
        PolicyBatch,
    ),
    "gspo_token": (
        ClippedPolicyLoss(ratio_level="sequence_mean_token", aggregation="seq-mean-token-mean"),
        PolicyBatch,
    ),
    "cispo": (CappedWeightLoss(), PolicyBatch),
    "reference_grpo": (ReferenceKLPolicyLoss(kl_coef=0.1), ReferencePolicyBatch),
    "reinforce_pp_baseline": (
        ReferenceKLPolicyLoss(kl_coef=0.1, kl_estimator="k2"),
        ReferencePolicyBatch,
    ),
    "kimi": (MirrorDescentLoss(), PolicyBatch),
    "a_lol": (ALoLLoss(), PolicyBatch),
    "a_lol_token": (ALoLLoss(ratio="token"), PolicyBatch),
    "a_lol_kl": (ALoLLoss(ratio="none", kl_coef=0.1), PolicyBatch),
    "p3o": (P3OLoss(), ComparedPairBatch),
    "p3o_joint": (P3OLoss(clip="joint"), ComparedPairBatch),
    "rebel": (RebelLoss(), ComparedPairBatch),
}

Advantage = Callable[[Tensor, Tensor], Tensor]

ADVANTAGES: dict[str, Advantage] = {
    "grpo": lambda score, ids: group_advantage(score, ids, eps=0),
    "dr_grpo": lambda score, ids: group_advantage(score, ids, divide_by_std=False),
    "rloo": leave_one_out,
    "lite_ppo": lambda score, ids: batch_std_advantage(score, ids, std_of="centred"),
    "kimi": lambda score, ids: log_partition_advantage(score, ids, tau=0.5),
}


def batch_of(kind: type, data: Data) -> Any:
    return kind(**{f.name: data.columns[f.name] for f in dataclasses.fields(kind)})


def value_and_slope(name: str, data: Data) -> tuple[Tensor, Tensor]:
    """A loss over all rows, and its gradient on the log-probabilities."""
    loss, kind = LOSSES[name]
    batch = batch_of(kind, data)
    logprob = data.logprob.clone().requires_grad_()
    total = loss(PolicyOutput(logprob=logprob), batch, loss.totals(batch)).total
    return total.detach(), torch.autograd.grad(total, logprob)[0]


# --- padding, order, splits -----------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(seed=SEEDS, width=st.integers(1, 4))
def test_padding_changes_nothing(name: str, seed: int, width: int) -> None:
    data = draw(seed)
    before, slope = value_and_slope(name, data)
    after, wider = value_and_slope(name, data.widened(width))
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(wider[:, : slope.shape[1]], slope)
    assert not wider[:, slope.shape[1] :].any()
    assert before.isfinite()


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(seed=SEEDS)
def test_the_order_of_rows_changes_nothing(name: str, seed: int) -> None:
    data = draw(seed)
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
    data = draw(seed)
    loss, kind = LOSSES[name]
    expected, _ = value_and_slope(name, data)
    totals = loss.totals(batch_of(kind, data))
    unit = data.columns["prompt_id"] if loss.unit == "group" else torch.arange(len(data.logprob))
    first = unit % 2 == 0
    parts = [data.take(rows.nonzero()[:, 0]) for rows in (first, ~first) if rows.any()]
    got = sum(
        loss(PolicyOutput(logprob=part.logprob), batch_of(kind, part), totals).total
        for part in parts
    )
    torch.testing.assert_close(torch.as_tensor(got), expected)
    added = sum((loss.totals(batch_of(kind, part)) for part in parts), torch.zeros(()))
    torch.testing.assert_close(added, totals)


# --- advantages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=25)
@given(seed=SEEDS)
def test_advantages_follow_their_rows(name: str, seed: int) -> None:
    columns = draw(seed).columns
    order = torch.randperm(len(columns["score"]), generator=torch.Generator().manual_seed(seed))
    before = ADVANTAGES[name](columns["score"], columns["prompt_id"])
    after = ADVANTAGES[name](columns["score"][order], columns["prompt_id"][order])
    torch.testing.assert_close(after, before[order])


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=25)
@given(seed=SEEDS, shift=st.floats(-50, 50))
def test_an_offset_per_prompt_changes_nothing(name: str, seed: int, shift: float) -> None:
    columns = draw(seed).columns
    score, ids = columns["score"], columns["prompt_id"]
    moved = score + shift * (ids % 7)
    before, after = (ADVANTAGES[name](one, ids) for one in (score, moved))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@settings(max_examples=25)
@given(seed=SEEDS, scale=st.floats(0.1, 20))
def test_only_dividing_by_the_deviation_takes_the_scale_out(seed: int, scale: float) -> None:
    columns = draw(seed).columns
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
    columns = draw(seed).columns
    mask, score = columns["mask"], columns["score"]
    assert not remax_advantage(score, mask, greedy_score=score).any()
    reward = torch.zeros(mask.shape, dtype=torch.float64)
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    reward[last] = score
    got = return_to_go(reward, mask, baseline=score)
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
    data = draw(seed, spread=0.0)
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
    data = draw(seed, spread=0.0)
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
    data = draw(seed)
    data.columns["advantage"] = torch.zeros_like(data.columns["advantage"])
    assert not value_and_slope(name, data)[1].any()


@settings(max_examples=25)
@given(seed=SEEDS, dual_clip=st.floats(1.1, 5))
def test_dual_clip_never_raises_the_loss(seed: int, dual_clip: float) -> None:
    data = draw(seed, spread=1.5)
    loss = partial(
        policy_loss,
        logprob=data.logprob,
        behavior_logprob=data.columns["behavior_logprob"],
        advantage=data.columns["advantage"],
        mask=data.columns["mask"],
    )
    assert loss(dual_clip=dual_clip) <= loss() + 1e-12
