"""What is known of a stage before its first step, and which keys its advice names."""

from __future__ import annotations

import pytest
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.stages.signs import RULES, SignFacts, facts_of
from penstock.workers.training.logprob_mismatch import MismatchLimits

from .test_stage_result import stage


def facts(*words: str, max_lag: int = 0) -> SignFacts:
    return facts_of(stage(*words), MismatchLimits(), Schedule(max_lag=max_lag))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "compares"),
    [("grpo", True), ("rloo", True), ("ppo", False), ("dapo", True), ("reinforce", False)],
)
def test_groups_are_compared_where_an_op_takes_them_whole(algorithm: str, compares: bool) -> None:
    assert facts(f"algorithm={algorithm}").compares_groups == compares


@pytest.mark.slow
def test_advice_names_the_keys_that_a_stage_has() -> None:
    options = facts("algorithm=reference_grpo", "algorithm.cfg.epochs=4").options
    assert options["entropy_coef"] == "algorithm.cfg.loss.entropy_coef"
    assert options["kl_coef"] == "algorithm.cfg.kl_coef"
    assert options["temperature"] == "algorithm.cfg.sampling.temperature"
    assert options["epochs"] == "algorithm.cfg.epochs"
    ppo = facts("algorithm=ppo").options
    assert ppo["entropy_coef"] == "algorithm.cfg.policy_loss.entropy_coef"
    assert "epochs" not in ppo, "there is one, which cannot be lowered"
    assert "max_lag" not in ppo
    assert facts("algorithm=ppo", max_lag=1).options["max_lag"] == "schedule.max_lag"


def test_every_rule_has_advice_for_every_algorithm() -> None:
    bare = SignFacts()
    assert all(bare.advice(*rule.parts) for rule in RULES)
    assert bare.advice("lower {lr}", "lower {epochs}") == "lower algorithm.optimizer.lr"


@pytest.mark.slow
def test_clips_of_whole_responses_and_fixed_lengths_are_known() -> None:
    assert facts("algorithm=grpo").judges_clip
    assert not facts("algorithm=gspo").judges_clip
    lengths = ("min_new_tokens=8", "max_new_tokens=8")
    words = [f"algorithm.cfg.sampling.{length}" for length in lengths]
    assert facts(*words, "algorithm.cfg.correction.mode=none").fixed_length
    assert not facts().fixed_length


def test_what_the_policy_learns_from_is_known() -> None:
    ppo = facts("algorithm=ppo")
    assert "reward.score" in ppo.needed
    assert "response_kl" not in ppo.needed
    assert ppo.order.index("reward.score") < ppo.order.index("response_kl")
