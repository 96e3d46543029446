"""Importance weights between rollout engine and trainer, against worked examples."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.rollout_correction import (
    RolloutCorrection,
    rollout_weight,
    self_normalized,
    weighted_advantage,
    weighted_tokens,
)
from penstock.algorithms.roles import PolicyBatch, PolicyOutput
from penstock.dataflow.errors import ConfigError, FlowError
from penstock.dataflow.graph.check import check_lag
from penstock.dataflow.graph.graph import Ref
from penstock.launch.inputs.record import recorded
from torch import Tensor, tensor

from ..configured import NAMES, composed, options_of

MASK = torch.ones(1, 4, dtype=torch.bool)
BEHAVIOR = torch.full((1, 4), -1.0)
TRAINER = BEHAVIOR + tensor([[0.2, -0.2, 1.2, 0.0]])
POLICY = TRAINER + tensor([[0.3, 0.1, 0.05, -0.4]])
ADVANTAGE = tensor([[1.0, 1.0, -1.0, -1.0]])


def weights(correction: RolloutCorrection) -> Tensor:
    return rollout_weight(MASK, logprob=TRAINER, behavior_logprob=BEHAVIOR, correction=correction)


@pytest.mark.parametrize(
    ("correction", "expected", "loss"),
    [
        (RolloutCorrection(cap=5.0), [1.221403, 0.818731, 3.320117, 1.0], 0.479956),
        (RolloutCorrection(cap=2.0), [1.221403, 0.818731, 2.0, 1.0], 0.133005),
        (RolloutCorrection(mode="token_mask"), [1.221403, 0.818731, 0.0, 1.0], -0.39263),
    ],
)
def test_token_weights_and_the_loss_they_give(
    correction: RolloutCorrection, expected: list[float], loss: float
) -> None:
    weight = weights(correction)
    torch.testing.assert_close(weight, tensor([expected]), atol=1e-6, rtol=0)
    batch = PolicyBatch(
        tokens=torch.zeros(1, 4, dtype=torch.int64),
        mask=MASK,
        behavior_logprob=TRAINER,
        advantage=ADVANTAGE * weight,
    )
    clipped = ClippedPolicyLoss(eps_low=0.2, eps_high=0.2)
    total = clipped(PolicyOutput(POLICY), batch, clipped.totals(batch)).total
    assert float(total) == pytest.approx(loss, abs=1e-6)


def test_sequence_weights_are_the_product_over_tokens() -> None:
    cut = weights(RolloutCorrection(mode="sequence_truncate", cap=4.0))
    torch.testing.assert_close(cut, torch.full((1, 4), 3.320117), atol=1e-6, rtol=0)
    assert weights(RolloutCorrection(mode="sequence_truncate", cap=3.0)).tolist() == [[3.0] * 4]
    assert weights(RolloutCorrection(mode="sequence_mask", cap=3.0)).tolist() == [[0.0] * 4]


def test_masked_tokens_count_for_nothing() -> None:
    mask = tensor([[False, True, True, False]])
    noise = tensor([[float("nan"), 0.0, 0.0, float("inf")]])
    weight = rollout_weight(
        mask,
        logprob=TRAINER + noise,
        behavior_logprob=BEHAVIOR,
        correction=RolloutCorrection(mode="sequence_truncate", cap=9.0),
    )
    product = float(torch.tensor(1.0).exp())
    torch.testing.assert_close(weight, tensor([[0.0, product, product, 0.0]]))


def test_bounds_that_let_nothing_through_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cap is 0\.5; expected above 0\.9"):
        RolloutCorrection(floor=0.9, cap=0.5)


def test_responses_can_be_left_out_by_their_mean_weight() -> None:
    """The product 3.320117 is 1.349859 a token, well outside [0.99, 1.01]."""
    tight = RolloutCorrection(mean_floor=0.99, mean_cap=1.01)
    assert not weights(tight).any()
    wide = weights(RolloutCorrection(cap=5.0, mean_floor=1.3, mean_cap=1.4))
    torch.testing.assert_close(wide, tensor([[1.221403, 0.818731, 3.320117, 1.0]]))
    unbounded = weights(RolloutCorrection(mode="sequence_truncate", cap=None))
    torch.testing.assert_close(unbounded, torch.full((1, 4), 3.320117), atol=1e-6, rtol=0)


WITHOUT = {
    "codpo",
    "crraft",
    "distillation",
    "gkd",
    "kimi",
    "online_dpo",
    "p3o",
    "rebel",
    "refuel",
}
"""Algorithms that sample, and whose loss is not proportional to advantages of tokens."""

_NO_KEY = "there is no key 'algorithm.cfg.correction'"
REFUSED = {name: _NO_KEY for name in WITHOUT} | {"vtrace_ppo": "V-trace corrects for the weights"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_that_samples_takes_a_correction_or_refuses_it(name: str) -> None:
    word = "+algorithm.cfg.correction={mode: token_truncate, cap: 3.0}"
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            options_of(name, word)
        return
    if not hasattr(options_of(name), "sampling"):
        return
    assert options_of(name, word).correction == RolloutCorrection(cap=3.0)
    graph = recorded(composed(name, word).algorithm, 0)[-1].graph
    inputs = {node.name: dict(node.inputs) for node in graph.nodes}
    trained, weighed = inputs["actor.train"], inputs["rollout_weight"]
    assert trained["batch.advantage"] == Ref("weighted_advantage", "out")
    assert trained["batch.behavior_logprob"] == weighed["logprob"] == Ref("actor.logprob", "out")
    assert trained["batch.rollout_logprob"] == weighed["behavior_logprob"]


def test_weights_may_be_divided_by_their_mean() -> None:
    weight, mask = tensor([[4.0, 2, 9]]), tensor([[True, True, False]])
    assert self_normalized(weight, mask)[mask].tolist() == pytest.approx([4 / 3, 2 / 3])
    assert not self_normalized(0 * weight, mask).any()
    assert not self_normalized(weight, ~mask & mask).isnan().any()


def test_the_trainer_s_numbers_without_weights_and_weights_of_mean_1() -> None:
    """The one has no weights, so old rollouts are refused; the other divides by a mean."""
    word = "+algorithm.cfg.correction={mode: none}"
    graph = recorded(composed("grpo", word).algorithm, 0)[-1].graph
    train = dict(graph["actor.train"].inputs)
    assert train["batch.behavior_logprob"].node == "actor.logprob"
    assert train["batch.advantage"].node == "broadcast_over_tokens"
    check_lag(graph, 0)
    with pytest.raises(FlowError, match="may see samples up to 1 optimizer step"):
        check_lag(graph, 1)
    word = "+algorithm.cfg.correction={self_normalized: true}"
    graph = recorded(composed("grpo", word).algorithm, 0)[-1].graph
    check_lag(graph, 1)
    assert dict(graph["weighted_advantage"].inputs)["weight"].node == "self_normalized"
    mode_none = RolloutCorrection(mode="none")
    weight = rollout_weight(MASK, logprob=TRAINER, behavior_logprob=BEHAVIOR, correction=mode_none)
    assert torch.equal(weight, torch.ones(1, 4))


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_mask"])
def test_a_log_probability_that_is_no_number_is_not_hidden(mode: Any) -> None:
    found = rollout_weight(
        tensor([[True, True]]),
        logprob=tensor([[-1.0, -1.0]]),
        behavior_logprob=tensor([[-1.0, float("nan")]]),
        correction=RolloutCorrection(mode=mode),
    )
    assert found[0, 1].isnan()


@pytest.mark.parametrize(("zero_weights", "loss"), [("counted", -0.39263), ("left_out", -0.523507)])
def test_what_a_mask_leaves_out_is_counted_in_the_divisor_or_not(
    zero_weights: Literal["counted", "left_out"], loss: float
) -> None:
    """Three of four tokens: the sum is divided by 4, or by 3."""
    word = f"+algorithm.cfg.correction={{mode: token_mask, zero_weights: {zero_weights}}}"
    graph = recorded(composed("grpo", word).algorithm, 0)[-1].graph
    weight = weights(RolloutCorrection(mode="token_mask", zero_weights=zero_weights))
    mask, source = MASK, "actor.generate"
    if zero_weights == "left_out":
        mask, source = weighted_tokens(MASK, weight), "weighted_tokens"
    assert dict(graph["actor.train"].inputs)["batch.mask"].node == source
    batch = PolicyBatch(
        tokens=torch.zeros(1, 4, dtype=torch.int64),
        mask=mask,
        behavior_logprob=TRAINER,
        advantage=weighted_advantage(ADVANTAGE, weight),
    )
    policy = ClippedPolicyLoss()
    found = policy(PolicyOutput(logprob=POLICY), batch, policy.totals(batch))
    assert float(found.total) == pytest.approx(loss, abs=1e-6)
