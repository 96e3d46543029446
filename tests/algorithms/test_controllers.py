"""The multiplier of a constraint: its rule, its worker, and what Safe RLHF does with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.controllers import Ascent
from penstock.algorithms.papers.safe_rlhf import SafeRLHF, mixed_advantage, safe_rlhf_step
from penstock.algorithms.ppo import PPO
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.training.controllers import LagrangeMultiplier, MultiplierSpec

from .test_steps import (
    LOG_RATIO,
    MASK,
    PROMPTS,
    VALUES,
    ScriptedCritic,
    ScriptedPolicy,
    ScriptedReward,
    run_ppo,
)


def test_one_step_of_the_multiplier() -> None:
    after = Ascent().next_log(0.0, mean_cost=0.8)
    assert after == pytest.approx(0.08, abs=1e-6)
    assert math.exp(after) == pytest.approx(1.083287, abs=1e-6)


def test_reward_and_cost_mix() -> None:
    reward, cost = torch.tensor([[1.0], [-0.5], [1.0]]).double(), torch.tensor([[0.4], [-0.2], [9]])
    prices = torch.tensor([1.0, math.exp(0.08), 0.0]).double()
    every = torch.ones(3, 1, dtype=torch.bool)
    mixed = mixed_advantage(every, reward=reward, cost=cost.double(), multiplier=prices)
    assert mixed[:, 0].tolist() == pytest.approx([0.3, -0.136007, 1.0], abs=1e-6)


@given(st.floats(0.01, 3), st.floats(0.01, 0.5))
def test_a_broken_constraint_raises_it_ever_faster_up_to_the_bound(
    excess: float, lr: float
) -> None:
    values, ascent = [0.0], Ascent(threshold=1, lr=lr, highest=4)
    for _ in range(40):
        values.append(ascent.next_log(values[-1], mean_cost=1 + excess))
    free = [value for value in values if value < math.log(4)]
    changes = [after - before for before, after in zip(free[:-1], free[1:], strict=True)]
    assert all(change > 0 for change in changes)
    assert changes == sorted(changes)
    assert max(values) <= math.log(4)


def make(initial: float = 1.0) -> LagrangeMultiplier:
    return MultiplierSpec(initial=initial).build(WorkerContext("multiplier"))


def price(worker: LagrangeMultiplier) -> float:
    prices = worker.price(torch.zeros(3))
    assert len(set(prices.tolist())) == 1
    return float(prices[0])


def test_the_worker_averages_recent_costs() -> None:
    worker = make()
    report = worker.update(torch.tensor([9.0, 0.6, 1.0]), Ascent(window=2))
    assert price(worker) == pytest.approx(1.083287, abs=1e-6)
    assert report.metrics["recent_cost"].value == pytest.approx(0.8)
    assert report.metrics["multiplier"].value == pytest.approx(1.083287, abs=1e-6)
    worker.update(torch.tensor([-1.4]), Ascent(window=2))
    assert price(worker) < 1.083287


def test_it_may_wait_before_it_moves() -> None:
    worker, ascent = make(), Ascent(delay_steps=2)
    prices: list[float] = []
    for _ in range(3):
        worker.update(torch.ones(1), ascent)
        prices.append(price(worker))
    assert prices == [1, 1, pytest.approx(math.exp(0.1))]


def test_a_saved_multiplier_goes_on_where_it_was(tmp_path: Path) -> None:
    one, other = make(0.3), make()
    one.update(torch.rand(5), Ascent(window=3, delay_steps=1))
    one.save_state(tmp_path / "m")
    other.load_state(tmp_path / "m")
    for worker in (one, other):
        worker.update(torch.tensor([0.25]), Ascent(window=3, delay_steps=1))
    assert one.export_weights() == other.export_weights()
    assert price(one) == price(other) != pytest.approx(0.3)
    copied = make()
    copied.load_weights(one.export_weights())
    assert price(copied) == price(one)


# --- the step -------------------------------------------------------------------------------------


def run_safe(cfg: SafeRLHF, initial: float, costs: list[float]) -> dict[str, Any]:
    actor = ScriptedPolicy(LOG_RATIO - 1, [True, True], [0, 1])
    ref = ScriptedPolicy(torch.full_like(LOG_RATIO, -1), [True, True], [0, 1])
    critic, cost_critic = ScriptedCritic(VALUES), ScriptedCritic(VALUES)
    worker = make(initial)
    scores, costly = ScriptedReward([2, -1]), ScriptedReward(costs)
    roles = (actor, critic, cost_critic, ref, scores, costly, worker)
    safe_rlhf_step(PROMPTS, *roles, cfg)
    return {
        "advantage": actor.trained["batch"].advantage,
        "target": critic.trained["batch"].value_target,
        "cost_target": cost_critic.trained["batch"].value_target,
        "price": price(worker),
    }


def test_without_a_price_it_is_ppo() -> None:
    found = run_safe(SafeRLHF(ascent=Ascent(lr=0.0)), 1e-12, [1, 1])
    actor, critic, _ = run_ppo(PPO(whiten_advantages=False, kl_coef=0.02))
    expected = actor.trained["batch"].advantage
    torch.testing.assert_close(found["advantage"], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(found["target"], critic.trained["batch"].value_target)


def test_costs_are_weighed_at_the_price_after_the_update() -> None:
    found = run_safe(SafeRLHF(ascent=Ascent(lr=0.1)), 1.0, [0.6, 1.0])
    assert found["price"] == pytest.approx(1.083287, abs=1e-6)
    reward = found["target"] - VALUES
    cost = found["cost_target"] - VALUES
    prices = torch.full((len(reward),), found["price"])
    mixed = mixed_advantage(MASK, reward=reward, cost=cost, multiplier=prices)
    torch.testing.assert_close(found["advantage"], torch.where(MASK, mixed, 0.0))


@pytest.mark.parametrize(("split", "coef"), [("full", 0.02), ("half", 0.01)])
def test_the_kl_is_in_both_streams(split: Any, coef: float) -> None:
    """With lambda 1 the first target is the sum of a row's rewards: the score less the KL."""
    cfg = SafeRLHF(kl_split=split, gae_lambda=1.0)
    found = run_safe(cfg, 1.0, [3, 4])
    kl = LOG_RATIO[0].sum().item()
    assert found["target"][0, 1].item() == pytest.approx(2 - coef * kl, abs=1e-6)
    assert found["cost_target"][0, 1].item() == pytest.approx(3 + coef * kl, abs=1e-6)
