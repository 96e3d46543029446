"""How algorithms relate: without its distinguishing part each is another one."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.pairs import best_and_worst
from penstock.algorithms.ops.returns import GaeTargets
from penstock.algorithms.ops.rollout_correction import (
    RolloutCorrection,
    rollout_weight,
    weighted_advantage,
)
from penstock.algorithms.options import PolicyUpdates
from penstock.algorithms.papers.vtrace_ppo import VtracePPO, vtrace_targets
from penstock.algorithms.ppo import PPO, critic_states, gae_targets
from penstock.algorithms.roles import PolicyBatch, PolicyOutput, Rollout
from penstock.dataflow.graph.check import check_lag
from penstock.launch.inputs.record import recorded

from ..configured import NAMES, composed, options_of
from ..samples import SEEDS, Data, sample

WITH_KL = (
    *("agent_ppo", "decoupled_ppo", "ensemble_ppo", "ma_rlhf", "p3o", "pf_ppo", "ppo"),
    *("process_ppo", "rebel", "reinforce_pp", "remax", "rloo", "safe_rlhf", "salsa", "vtrace_ppo"),
)
ONLY_WITH_KL = ("adaptive_ppo", "reference_grpo")
"""Without one these are `ppo` and `grpo`, so they refuse to have none."""


@pytest.mark.slow
def test_all_algorithms_with_a_kl_to_a_reference_are_listed() -> None:
    found = [name for name in NAMES if hasattr(options_of(name), "kl_coef")]
    assert found == sorted((*WITH_KL, *ONLY_WITH_KL))


@pytest.mark.parametrize("name", NAMES)
def test_options_inherit_from_at_most_one_class_besides_those_that_many_share(name: str) -> None:
    kinds = [kind for kind in type(options_of(name)).__mro__ if dataclasses.is_dataclass(kind)]
    assert len(set(kinds) - {PolicyUpdates}) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_KL)
def test_without_a_kl_there_is_no_reference(name: str) -> None:
    assert "ref" in recorded(composed(name).algorithm, 0)[-1].graph.roles
    graph = recorded(composed(name, "algorithm.cfg.kl_coef=0.0").algorithm, 0)[-1].graph
    assert "ref" not in graph.roles
    assert "actor" in graph.trains_per_step


def loss_of(data: Data, behavior: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    loss = ClippedPolicyLoss()
    batch = PolicyBatch(
        tokens=data.columns["tokens"],
        mask=data.columns["mask"],
        behavior_logprob=behavior,
        advantage=advantage,
    )
    return loss(PolicyOutput(logprob=data.logprob), batch, loss.totals(batch)).total


@settings(max_examples=25)
@given(seed=SEEDS, cap=st.sampled_from([1.0, 2.0, None]))
def test_decoupled_ppo_on_fresh_rollouts_is_ppo(seed: int, cap: float | None) -> None:
    """The weights before the update are those that sampled: every factor is 1."""
    data = sample(seed)
    mask, behavior = data.columns["mask"], data.columns["behavior_logprob"]
    weight = rollout_weight(
        mask,
        logprob=behavior,
        behavior_logprob=behavior,
        correction=RolloutCorrection(cap=cap),
    )
    assert torch.equal(weight[mask], torch.ones_like(weight[mask]))
    corrected = weighted_advantage(data.columns["advantage"], weight)
    plain = loss_of(data, behavior, data.columns["advantage"])
    torch.testing.assert_close(loss_of(data, behavior, corrected), plain)


OPTIONS = [
    {},
    {"discount": 0.9, "gae_lambda": 0.5, "whiten_rewards": True},
    {"no_eos": "zero", "rho_bar": 2.0, "c_bar": 1.5},
    {"score_slot": "after_last", "rho_bar": None, "c_bar": None},
]


def targets_of(data: Data, cfg: PPO, age: float) -> GaeTargets:
    """Of rollouts whose weights thought of a token by up to `age` nats otherwise than today's."""
    columns = data.columns
    named = ("prompt_id", "tokens", "mask", "behavior_logprob")
    roll = Rollout(**{name: columns[name] for name in named}, finished=columns["chosen"])
    roll, states = critic_states(roll, cfg)
    noise = torch.rand(2, *roll.mask.shape, generator=torch.Generator().manual_seed(3)) - 0.5
    if not isinstance(cfg, VtracePPO):
        return gae_targets(roll, states, cfg, reward=noise[0], value=noise[1])
    logprob = roll.behavior_logprob + age * noise[0]
    return vtrace_targets(roll, states, cfg, reward=noise[0], value=noise[1], logprob=logprob)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=15)
@given(seed=SEEDS)
def test_vtrace_ppo_on_fresh_rollouts_is_ppo(seed: int, options: dict[str, Any]) -> None:
    """Advantages and the critic's targets are those of GAE, for bounds of 1 and more."""
    data = sample(seed)
    plain = {name: value for name, value in options.items() if not name.endswith("_bar")}
    traced = targets_of(data, VtracePPO(**options), age=0.0)
    expected = targets_of(data, PPO(**plain), age=0.0)
    torch.testing.assert_close(traced.advantage, expected.advantage)
    torch.testing.assert_close(traced.value_target, expected.value_target)


def test_vtrace_ppo_on_old_rollouts_has_other_targets_than_ppo() -> None:
    data = sample(0)
    traced = targets_of(data, VtracePPO(), age=1.0)
    expected = targets_of(data, PPO(), age=1.0)
    assert (traced.value_target - expected.value_target).abs().max() > 0.01
    assert (traced.advantage - expected.advantage).abs().max() > 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"correction": RolloutCorrection()},
            "V-trace corrects for the weights that sampled by itself; leave correction out, or "
            "take decoupled_ppo_step, which has nothing else",
        ),
        (
            {"gae_masking": "zeroed"},
            "gae_masking is 'zeroed', but V-trace passes over what was not sampled; leave it at "
            "'transparent'",
        ),
        ({"rho_bar": 0.0}, "rho_bar is 0.0; expected above 0"),
    ],
)
def test_options_that_vtrace_ppo_has_no_use_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        VtracePPO(**options)


def test_vtrace_ppo_takes_old_rollouts() -> None:
    algorithm = composed("vtrace_ppo", "schedule=one_step_off").algorithm
    check_lag(recorded(algorithm, 0)[-1].graph, 2)


@settings(max_examples=25)
@given(seed=SEEDS, shift=st.integers(-50, 50))
def test_pairs_are_the_same_whatever_a_prompt_s_scores_have_in_common(
    seed: int, shift: int
) -> None:
    columns = sample(seed).columns
    roll = Rollout(
        prompt_id=columns["prompt_id"],
        tokens=columns["tokens"],
        mask=columns["mask"],
        behavior_logprob=columns["behavior_logprob"],
        finished=columns["chosen"],
    )
    score = (8 * columns["score"]).round()
    moved = score + shift * (columns["prompt_id"] % 7)
    before, after = best_and_worst(roll, score), best_and_worst(roll, moved)
    for field in dataclasses.fields(before):
        if field.name != "score":
            assert torch.equal(getattr(before, field.name), getattr(after, field.name))
