"""Macro actions: how responses are cut, and advantages from one to the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.macro_actions import (
    macro_actions,
    macro_gae,
    macro_mask,
    sum_over_macros,
)
from penstock.algorithms.ops.returns import gae
from penstock.algorithms.papers.ma_rlhf import (
    MARLHF,
    MacroPolicyBatch,
    MacroPolicyLoss,
    ma_rlhf_step,
)
from penstock.algorithms.roles import PolicyBatch, PolicyOutput
from penstock.dataflow.graph.tracer import build
from torch import Tensor

VALUE = torch.arange(1, 8).double()[None] / 10
REWARD = torch.tensor([[-0.01, 0.02, 0, -0.03, 0.01, 0, 1]]).double()
MASK = torch.ones(1, 7, dtype=torch.bool)
TOKENS = torch.arange(7)[None]


def cut(mask: Tensor, **options: Any) -> Tensor:
    tokens = torch.where(mask, torch.arange(mask.shape[1]), -1)
    return macro_actions(tokens, mask, torch.zeros(mask.shape), **options)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("equal", [0.2, 0.5, 0.7]),
        ("unit", [0.3, 0.6, 0.7]),
        ("position", [0.163636, 0.463636, 0.7]),
    ],
)
def test_values_of_macro_actions(kind: Any, values: list[float]) -> None:
    """With lambda and gamma 0 the advantage is the reward less the value."""
    macro_id = cut(MASK, length=3)
    assert macro_id.tolist() == [[0, 0, 0, 1, 1, 1, 2]]
    nothing = torch.zeros_like(REWARD)
    target = macro_gae(
        MASK, macro_id, reward=nothing, value=VALUE, discount=0.0, lam=0.0, macro_value=kind
    )
    expected = -torch.tensor(values).double()[macro_id]
    torch.testing.assert_close(target.advantage, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(target.value_target, nothing)


@pytest.mark.parametrize(
    ("kind", "advantages"),
    [("mean", [0.75775, 0.478333, 0.3]), ("sum", [0.75175, 0.465, 0.3])],
)
def test_every_token_has_its_macro_action_s_advantage(kind: Any, advantages: list[float]) -> None:
    macro_id = cut(MASK, length=3)
    target = macro_gae(MASK, macro_id, reward=REWARD, value=VALUE, macro_reward=kind)
    expected = torch.tensor(advantages).double()[macro_id]
    torch.testing.assert_close(target.advantage, expected, atol=1e-6, rtol=0)


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Mask with holes, rewards and values, with garbage where the mask is False."""
    count, width = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    mask = torch.rand(count, width, generator=seed) < 0.7
    reward, value = torch.randn(2, count, width, generator=seed).double()
    return mask, reward.masked_fill(~mask, torch.nan), value.masked_fill(~mask, torch.inf)


@settings(max_examples=30)
@given(rows(), st.sampled_from(["equal", "unit", "position"]))
def test_one_token_per_macro_action_is_plain_gae(
    case: tuple[Tensor, Tensor, Tensor], kind: Any
) -> None:
    mask, reward, value = case
    plain = gae(mask, reward=reward, value=value, discount=0.9, lam=0.8)
    macro = macro_gae(
        mask,
        cut(mask, length=1),
        reward=reward,
        value=value,
        discount=0.9,
        lam=0.8,
        macro_value=kind,
    )
    torch.testing.assert_close(macro.advantage, plain.advantage)
    torch.testing.assert_close(macro.value_target, plain.value_target)


@settings(max_examples=30)
@given(rows())
def test_one_macro_action_per_row_is_a_bandit(case: tuple[Tensor, Tensor, Tensor]) -> None:
    mask, reward, value = case
    target = macro_gae(mask, cut(mask, length=None), reward=reward, value=value)
    for row in range(len(mask)):
        kept = mask[row]
        if kept.any():
            expected = reward[row, kept].sum() - value[row, kept].mean()
            assert target.advantage[row, kept].tolist() == pytest.approx(
                [float(expected)] * int(kept.sum())
            )
        assert not target.advantage[row, ~kept].any()


def test_random_lengths_repeat_and_follow_the_row() -> None:
    mask = torch.ones(2, 40, dtype=torch.bool)
    tokens = torch.stack([torch.arange(40), torch.arange(40) + 1])
    nothing = torch.zeros(2, 40)
    one = macro_actions(tokens, mask, nothing, termination="random", lengths=(1, 2, 5))
    again = macro_actions(
        tokens[1:], mask[1:], nothing[1:], termination="random", lengths=(1, 2, 5)
    )
    assert torch.equal(one[1:], again)
    assert not torch.equal(one[0], one[1])
    lengths = {int((one[0] == number).sum()) for number in one[0].unique()[:-1]}
    assert lengths <= {1, 2, 5}


def test_a_macro_action_ends_where_likelihood_stops_rising() -> None:
    logprob = torch.tensor([[9.0, -3, -2, -1, -1, 9, -0.5, -4]])
    mask = torch.tensor([[False, True, True, True, True, False, True, True]])
    macro_id = macro_actions(TOKENS.new_ones(1, 8), mask, logprob, termination="perplexity")
    assert macro_id.tolist() == [[-1, 0, 0, 0, 1, -1, 1, 2]]


def test_sums_over_macro_actions_ignore_what_is_outside() -> None:
    macro_id = torch.tensor([[-1, 0, 0, 1], [0, -1, -1, -1]])
    column = torch.tensor([[torch.nan, 1.0, 2, 4], [8, torch.inf, 0, 0]])
    assert macro_mask(macro_id).tolist() == [[True, True], [True, False]]
    assert sum_over_macros(column, macro_id).tolist() == [[3, 4], [8, 0]]
    assert sum_over_macros(torch.zeros(2, 0), torch.zeros(2, 0).long()).shape == (2, 0)


def batch_of(macro_id: Tensor) -> MacroPolicyBatch:
    return MacroPolicyBatch(
        tokens=TOKENS,
        mask=macro_id >= 0,
        behavior_logprob=torch.full((1, 7), -1.0),
        advantage=torch.where(macro_id == 0, 1.0, -2.0),
        macro_id=macro_id,
    )


def test_a_joint_ratio_is_the_product_over_the_macro_action() -> None:
    """Ratios e^.3 and e^-.4: A 1 gives -1.2 (clipped), A -2 gives 1.6 (clipped); their mean."""
    macro_id = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    logprob = torch.full((1, 7), -0.9) - torch.where(macro_id == 1, 0.2, 0.0)
    loss, batch = MacroPolicyLoss(policy=ClippedPolicyLoss()), batch_of(macro_id)
    result = loss(PolicyOutput(logprob), batch, loss.totals(batch))
    assert float(result.total) == pytest.approx((-1.2 + 1.6) / 2, abs=1e-6)
    ratio = result.metrics["ratio_mean"]
    expected = (torch.tensor(0.3).exp() + torch.tensor(-0.4).exp()) / 2
    assert float(ratio[0] / ratio[1]) == pytest.approx(float(expected), abs=1e-6)


def test_joint_ratios_of_single_tokens_are_the_token_loss() -> None:
    macro_id = torch.arange(7)[None]
    batch = batch_of(macro_id)
    plain = PolicyBatch(**{name: c for name, c in vars(batch).items() if name != "macro_id"})
    logprob = torch.linspace(-1.5, -0.5, 7)[None]
    loss = MacroPolicyLoss()
    joint = loss(PolicyOutput(logprob), batch, loss.totals(batch)).total
    token = loss.policy(PolicyOutput(logprob), plain, loss.policy.totals(plain)).total
    assert float(joint) == pytest.approx(float(token), abs=1e-6)


@pytest.mark.parametrize("options", [{"whiten_rewards": True}, {"gae_masking": "zeroed"}])
def test_options_of_ppo_that_macro_actions_do_not_read_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="leave whiten_rewards and gae_masking out"):
        MARLHF(**options)


def test_a_response_without_a_score_has_no_macro_actions() -> None:
    """The loss does not divide by it, metrics do not count it, and it takes no part in GAE."""
    graph = build(ma_rlhf_step, cfg=MARLHF(macro_ratio="joint"))
    for name in ("macro_actions", "macro_gae"):
        assert str(dict(graph[name].arguments)["mask"]) == "scored_tokens.out"
    mask = torch.tensor([[False, True, True, True], [False] * 4])
    macro_id = macro_actions(torch.zeros(2, 4).long(), mask, torch.zeros(2, 4), length=2)
    assert macro_id.tolist() == [[-1, 0, 0, 1], [-1] * 4]
    assert macro_mask(macro_id).tolist() == [[True, True], [False, False]]
