"""Signs of a bad run: rows of metrics in, warnings out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.launch.stages.signs import KINDS, RULES, BadSign, SignFacts, Signs

COUNTS = {"run/samples_per_s": 128.0, "run/step_time_s": 1.0, "actor.generate/response_length": 8.0}
GOOD = {
    **COUNTS,
    "actor.generate/truncated": 0.02,
    "actor.train/approx_kl_k3": 0.001,
    "actor.train/clip_fraction_high": 0.02,
    "actor.train/clip_fraction_low": 0.03,
    "actor.train/entropy": 0.7,
    "actor.train/ref_kl_k3_per_token": 0.05,
    "actor.train/rollout_k3": 1e-5,
    "reward.score/reward/equal_groups": 0.4,
    "reward.score/reward/mean": 0.5,
    "reward.score/reward/mean_square": 0.4,
    "run/lag_max": 0.0,
}
OPTIONS = {
    name: f"algorithm.cfg.{name}"
    for name in ("epochs", "entropy_coef", "eps_high", "eps_low", "correction", "num_samples")
}
FACTS = SignFacts(options={**OPTIONS, "temperature": "algorithm.cfg.sampling.temperature"})


def told(rows: Iterable[Mapping[str, float]], facts: SignFacts = FACTS) -> list[BadSign]:
    signs = Signs(facts)
    return [sign for step, row in enumerate(rows) for sign in signs.look(step, {**GOOD, **row})]


def scores(mean: float, square: float | None = None, equal: float = 1.0) -> dict[str, float]:
    at = "reward.score/reward"
    square = mean * mean if square is None else square
    return {f"{at}/mean": mean, f"{at}/mean_square": square, f"{at}/equal_groups": equal}


CASES: dict[str, tuple[list[dict[str, float]], str]] = {
    "reward_constant": (
        [scores(0.1)] * 4,
        "steps 0 to 2, reward.score: every response has the same score, 0.1\n"
        "    scores that do not differ teach nothing: all responses are wrong, or all are right, "
        "or the reward does not see what they say\n"
        "    remedy: read some responses (penstock samples); if all are wrong, warm up longer or "
        "take easier problems (task.pass_rates); if all are right, take harder ones; if they are "
        "all the same, raise algorithm.cfg.sampling.temperature",
    ),
    "groups_equal": (
        [scores(0.25, 0.25, equal=0.97)] * 6,
        "steps 0 to 4, reward.score: in 97% of the groups all scores are equal (mean of all "
        "scores 0.25)\n"
        "    a group teaches by the differences in it: most of what is sampled teaches nothing\n"
        "    remedy: take problems that are solved now and then (task.pass_rates); raise "
        "algorithm.cfg.num_samples; raise algorithm.cfg.sampling.temperature; let algorithm=dapo "
        "sample until groups differ",
    ),
    "cut_off": (
        [{"actor.generate/truncated": 0.99}] * 4,
        "steps 0 to 2, actor.generate: 99% of the responses were cut off, after 8 tokens on "
        "average\n"
        "    they have no room to end, or the model does not know how: its end-of-sequence token "
        "or its chat template is not the one it was trained with\n"
        "    remedy: raise task.max_response_tokens; set task.chat=true for a model that was "
        "trained on conversations",
    ),
    "entropy_collapse": (
        [{}] * 3 + [{"actor.train/entropy": 0.01}] * 4,
        "steps 3 to 5, actor.train: the entropy is 0.01 nats per token, and was 0.7 in the first "
        "steps\n"
        "    the policy always says the same, so nothing else is tried, and its reward does not "
        "rise for it\n"
        "    remedy: lower algorithm.optimizer.lr; set algorithm.cfg.entropy_coef above 0 (0.001 "
        "to 0.01); raise algorithm.cfg.eps_high above algorithm.cfg.eps_low (0.28); raise "
        "algorithm.cfg.sampling.temperature",
    ),
    "kl_blow_up": (
        [{"actor.train/approx_kl_k3": 0.5}] * 4,
        "steps 0 to 2, actor.train: a step moves the policy by 0.5 nats per token from what "
        "sampled\n"
        "    updates are so large that what is learned from a step's responses is not true of the "
        "policy it makes\n"
        "    remedy: lower algorithm.optimizer.lr; lower algorithm.cfg.epochs; lower "
        "algorithm.optimizer.max_grad_norm",
    ),
    "clip_fraction_high": (
        [{"actor.train/clip_fraction_low": 0.3}] * 4,
        "steps 0 to 2, actor.train: the clip stops the update of 32% of the tokens\n"
        "    updates run into the clip: most of what would be learned is thrown away\n"
        "    remedy: lower algorithm.optimizer.lr; lower algorithm.cfg.epochs",
    ),
    "mismatch": (
        [{"actor.train/rollout_k3": 0.02}] * 2,
        "step 0, actor.train: what sampled for it disagrees by 0.02 nats per token on the same "
        "weights; mismatch.warn_above is 0.01\n"
        "    the gradient is that of another policy than the one that sampled: kernels or "
        "precisions differ, or the copy that samples is not what is trained\n"
        "    remedy: set algorithm.cfg.correction.mode=token_truncate; set model.dtype=float32; "
        "end such runs with mismatch.stop_above",
    ),
}


def test_there_is_a_case_of_every_kind() -> None:
    assert set(CASES) == set(KINDS)


@pytest.mark.parametrize("kind", CASES)
def test_it_is_told_of_once(kind: str) -> None:
    rows, text = CASES[kind]
    (sign,) = told(rows)
    assert (sign.kind, str(sign)) == (kind, text)


@pytest.mark.parametrize("kind", CASES)
def test_shorter_than_that_it_may_be_luck(kind: str) -> None:
    rows, _ = CASES[kind]
    (sign,) = told(rows)
    assert told([*rows[: sign.step], {}, *rows[: sign.step]]) == []


@pytest.mark.parametrize("kind", CASES)
def test_it_is_told_of_again_only_if_it_had_gone_away(kind: str) -> None:
    rows, _ = CASES[kind]
    again = [row for row in rows if row] * 2
    assert len(told([*rows, *[{}] * 2, *again])) == 1
    assert len(told([*rows, *[{}] * 3, *again])) == 2


def test_a_good_run_is_told_nothing() -> None:
    assert told([{}] * 50) == []


@given(st.lists(st.sampled_from([{}, *(rows[-1] for rows, _ in CASES.values())]), max_size=40))
def test_no_kind_is_told_of_in_two_steps_next_to_each_other(rows: list[dict[str, float]]) -> None:
    found = told(rows)
    for kind in KINDS:
        steps = [sign.step for sign in found if sign.kind == kind]
        assert all(later - sooner > 3 for sooner, later in zip(steps, steps[1:], strict=False))


def test_few_responses_that_score_alike_are_luck() -> None:
    few = {"run/samples_per_s": 8.0}
    assert told([{**scores(0.0), **few}] * 20) == []
    assert len(told([{**scores(0.0), **few}] * 40)) == 1


def test_equal_scores_everywhere_are_not_told_of_twice() -> None:
    kinds = [sign.kind for sign in told([scores(0.0)] * 12)]
    assert kinds == ["reward_constant"]
    some = [scores(0.0), scores(0.0), scores(0.25, 0.25)]
    assert [sign.kind for sign in told(some * 4)] == ["groups_equal"]


def test_groups_are_judged_where_they_are_compared() -> None:
    rows, _ = CASES["groups_equal"]
    assert told(rows, SignFacts(compares_groups=False)) == []


def test_what_the_policy_does_not_learn_from_is_not_judged() -> None:
    rows = [scores(0.0)] * 9
    assert told(rows, SignFacts(needed=frozenset({"task.score"}))) == []


def test_a_low_entropy_of_a_better_policy_is_no_sign() -> None:
    low = {"actor.train/entropy": 0.01}
    better = [*[{}] * 10, *[scores(0.6, 0.9, 0.4)] * 10, *[{**low, **scores(0.6, 0.9, 0.4)}] * 9]
    assert told(better) == []
    assert [s.kind for s in told([*[{}] * 20, *[low] * 9])] == ["entropy_collapse"]
    solved = {**scores(0.95, 0.95, 0.5), "reward.score/reward/correct": 0.95}
    assert told([*[solved] * 3, *[{**low, **solved}] * 9]) == []


def test_a_policy_that_begins_certain_has_not_collapsed() -> None:
    assert told([{"actor.train/entropy": 0.05}] * 3 + [{"actor.train/entropy": 0.001}] * 9) == []


def test_the_entropy_of_continuous_actions_is_no_sign() -> None:
    rows = [{"actor.train/entropy": 1.4}] * 3 + [{"actor.train/entropy": -0.5}] * 9
    signs = Signs(SignFacts())
    assert [s for step, row in enumerate(rows) for s in signs.look(step, row)] == []


def test_the_kl_to_the_reference_counts_where_the_reward_does_not_rise() -> None:
    assert [s.kind for s in told([{"actor.train/ref_kl_k3_per_token": 0.5}] * 4)] == ["kl_blow_up"]
    far, better = {"actor.train/ref_kl_k3_per_token": 0.5}, scores(0.6, 0.9, 0.4)
    assert told([*[{}] * 10, *[better] * 10, *[{**far, **better}] * 9]) == []
    # A response's whole KL is divided by its length: 24 nats over 8 tokens.
    assert "is 3 nats per token" in str(told([{"response_kl/mean": 24.0}] * 4)[0])


def test_a_clip_of_whole_responses_is_meant_to_act() -> None:
    rows, _ = CASES["clip_fraction_high"]
    assert told(rows, SignFacts(judges_clip=False)) == []


def test_turns_that_are_cut_off_are_told_of() -> None:
    rows = [{"actor.converse/truncated": 0.94, "actor.converse/turns": 2.0}] * 4
    (sign,) = told(rows)
    assert (sign.kind, sign.node) == ("cut_off", "actor.converse")
    assert sign.seen == "94% of the conversations were cut off, or had a turn that was"
    assert told([{**rows[0], "actor.converse/truncated": 0.89}] * 9) == []


def test_responses_of_a_fixed_length_are_not_cut_off() -> None:
    rows, _ = CASES["cut_off"]
    assert told(rows, SignFacts(fixed_length=True)) == []


def test_a_mismatch_that_grows_is_told_of_below_its_limit() -> None:
    rows = [{"actor.train/rollout_k3": 1e-4 * (1 + step)} for step in range(20)]
    (sign,) = told(rows)
    assert sign.step == 13
    assert sign.seen == (
        "what sampled for it disagrees by 0.0012 nats per token on the same weights, and did by "
        "0.0003 in the first steps"
    )
    tiny = [{"actor.train/rollout_k3": 1e-6 * (1 + step)} for step in range(20)]
    assert told(tiny) == [], "rounding"


def test_engines_that_agree_to_the_bit_are_no_sign() -> None:
    exact = SignFacts(mismatch_above=0.0)
    assert told([{"actor.train/rollout_k3": 0.0}] * 20, exact) == []
    assert len(told([{"actor.train/rollout_k3": 1e-9}] * 20, exact)) == 1


def test_a_mismatch_with_staleness_in_it_is_not_judged() -> None:
    assert told([{"actor.train/rollout_k3": 0.5, "run/lag_max": 1.0}] * 3) == []
    assert told([{"actor.train/rollout_k3": 0.5}], SignFacts(mismatch_above=None)) == []


def test_a_mismatch_that_is_not_a_number_is_told_of() -> None:
    (sign,) = told([{"actor.train/rollout_k3": math.nan}])
    assert "disagrees by nan nats per token" in sign.seen


@pytest.mark.parametrize("kind", CASES)
def test_a_resumed_run_remembers_what_was_told(kind: str) -> None:
    rows, _ = CASES[kind]
    written: list[dict[str, Any]] = [
        {"step": step, **GOOD, **row, "reward.score/none": None} for step, row in enumerate(rows)
    ]
    signs = Signs(FACTS)
    signs.recall(written)
    assert signs.look(len(rows), {**GOOD, **rows[-1]}) == []


def test_the_documentation_has_every_rule_in_its_words() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "progress.md").read_text()
    for rule in RULES:
        assert f"| `{rule.kind}` |" in page
        assert f"| {rule.means} |" in page
