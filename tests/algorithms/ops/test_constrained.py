"""Learning under constraints: the printed prompt, and what judges must never be outvoted on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.ops.rewards import calibrated_score
from penstock.algorithms.papers.cgpo import (
    MeanOver,
    best_passing,
    constrained_reward,
    kl_allowance,
    less_mean,
    passing_and_failing,
)
from penstock.algorithms.roles import Rollout
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import resolve, run_config
from penstock.launch.stages.prepare import build_stages
from torch import Tensor


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_close(actual: Tensor, *expected: float) -> None:
    torch.testing.assert_close(actual, f64(*expected), atol=1e-6, rtol=0)


def responses(*prompt_ids: int, length: int = 2) -> Rollout:
    """One response of `length` tokens per prompt id; its first token is its row's number."""
    rows = len(prompt_ids)
    tokens = torch.full((rows, 1 + length), 5)
    tokens[:, 1] = torch.arange(rows)
    mask = torch.ones_like(tokens).bool()
    mask[:, 0] = False
    return Rollout(
        prompt_id=torch.tensor(prompt_ids),
        tokens=tokens,
        mask=mask,
        behavior_logprob=-mask.float(),
        finished=torch.ones(rows).bool(),
    )


SCORE, PASSED, KL = f64(1, 0.2, -0.5, 0.8), f64(1, 1, 1, 0), f64(2, 12, 1, 4)
CALIBRATED = calibrated_score(SCORE, baseline_score=torch.full_like(SCORE, 0.3))
ONE_PROMPT = torch.zeros(4, dtype=torch.int64)


def shaped() -> Tensor:
    return constrained_reward(CALIBRATED, passed=PASSED, allowance=kl_allowance(KL, kl_max=10))


def test_the_policy_gradient_is_paid_for_what_passes_near_the_reference() -> None:
    assert_close(CALIBRATED, 0.668188, 0.475021, 0.310026, 0.622459)
    assert_close(shaped(), 0.53455, 0, 0.279023, 0)
    advantage = less_mean(shaped(), ONE_PROMPT, passed=PASSED)
    assert_close(advantage, 0.331157, -0.203393, 0.07563, -0.203393)


def test_a_verdict_that_is_no_number_is_not_a_failure() -> None:
    passed, near = PASSED * torch.tensor([1, torch.nan, 1, 1]), torch.ones(4)
    unsure = constrained_reward(CALIBRATED, passed=passed, allowance=near)
    assert unsure.isnan().tolist() == [False, True, False, False]
    known = torch.tensor([True, False, True, True])
    assert 1 not in (pair_of(CALIBRATED, passed) or [])
    left = chosen(CALIBRATED[known], passed[known], KL[known], fallback=True)
    assert chosen(CALIBRATED, passed, KL, fallback=True)[1] == left[1]


@pytest.mark.parametrize(
    ("mean_over", "means"), [("batch", (3.0, 3.0)), ("passing", (4.0, 4.0)), ("prompt", (1.5, 6.0))]
)
def test_whose_mean_is_taken_off(mean_over: MeanOver, means: tuple[float, float]) -> None:
    reward, ids = f64(1, 2, 6), torch.tensor([7, 7, 3])
    passed = f64(0, 1, 1)
    got = less_mean(reward, ids, passed=passed, mean_over=mean_over)
    first, second = means
    assert_close(got, 1 - first, 2 - first, 6 - second)


def test_an_unknown_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="mean_over 'bach' is unknown; choose 'batch'"):
        less_mean(shaped(), ONE_PROMPT, passed=PASSED, mean_over="bach")  # pyright: ignore[reportArgumentType]


def pair_of(score: Tensor, passed: Tensor) -> list[int] | None:
    """Row numbers of the chosen and the rejected response; None if the prompt is left out."""
    pairs = passing_and_failing(responses(*[9] * len(score)), score, passed=passed)
    assert pairs.chosen.tolist() == [True, False]
    assert pairs.pair_id.tolist() == [9, 9]
    return pairs.tokens[:, 1].tolist() if pairs.mask.any() else None


def test_pairs_are_the_best_that_passes_and_the_worst_that_fails() -> None:
    assert pair_of(CALIBRATED, PASSED) == [0, 3]
    assert pair_of(CALIBRATED, torch.ones(4)) == [0, 2]
    assert pair_of(CALIBRATED, torch.zeros(4)) is None
    assert pair_of(SCORE - 9, f64(0, 0, 1, 0)) == [2, 1]
    assert pair_of(f64(1, 1, 1), f64(1, 1, 1)) == [0, 2]
    assert pair_of(f64(1), f64(1)) is None


def chosen(score: Tensor, passed: Tensor, kl: Tensor, *, fallback: bool) -> tuple[int, float]:
    """First token of the chosen row, -1 for the fallback's, and its weight."""
    other = responses(4, length=3)
    other.tokens[:, 1] = -7
    rows = best_passing(
        responses(*[4] * len(score)),
        other,
        score=score,
        passed=passed,
        kl=kl,
        fallback_passed=f64(float(fallback)),
        kl_max=10,
    )
    assert len(rows.tokens) == 1
    assert bool(rows.mask.any()) == (rows.weight[0] != 0)
    assert rows.tokens[0][rows.mask[0]].ge(-7).all()
    return int(rows.tokens[0, 1]), float(rows.weight[0])


def test_the_best_that_passes_near_the_reference_is_imitated() -> None:
    assert chosen(CALIBRATED, PASSED, KL, fallback=True) == (0, pytest.approx(0.668188, abs=1e-6))
    far = f64(11, 12, 11, 4)
    assert chosen(CALIBRATED, PASSED, far, fallback=True) == (-7, 0.5)
    assert chosen(CALIBRATED, PASSED, far, fallback=False) == (-7, 0.0)
    assert chosen(SCORE - 9, f64(0, 0, 1, 0), KL, fallback=True)[0] == 2


def test_rows_of_both_rollouts_are_padded_and_every_prompt_needs_a_fallback() -> None:
    rolls, other = responses(4, 6, 4), responses(6, 4, length=3)
    columns = {"score": f64(1, 2, 3), "kl": f64(0, 0, 0), "kl_max": 1.0}
    rows = best_passing(
        rolls,
        other,
        passed=f64(0, 1, 0),
        fallback_passed=f64(1, 1),
        **columns,  # pyright: ignore[reportArgumentType]
    )
    assert rows.tokens.tolist() == [[5, 1, 5, 5], [5, 1, 5, -1]]
    assert rows.mask.tolist() == [[False, True, True, True], [False, True, True, False]]
    assert rows.weight.tolist() == [0.5, 2.0]
    assert rows.behavior_logprob.tolist() == [[0, -1, -1, -1], [0, -1, -1, 0]]
    with pytest.raises(ValueError, match="prompt 6 has no fallback"):
        best_passing(
            rolls,
            responses(4),
            passed=f64(0, 1, 0),
            fallback_passed=f64(1),
            **columns,  # pyright: ignore[reportArgumentType]
        )


def test_the_configured_judges_say_whether_all_constraints_hold() -> None:
    data = compose("run", ["algorithm=cgpo"])
    data.pop("resume")
    config = run_config(data)
    judges = config.algorithm.roles["judges"]
    assert judges.worker == "mixture"
    assert judges.options["output"] == "passed"
    assert judges.options["parts"] == {"correct": {"worker": "rule", "at_least": 1.0}}
    stages = {stage.name: stage for stage in build_stages(resolve(config)).stages}
    assert list(stages) == ["sft", "reward_modelling", "cgpo"]
    roles = stages["cgpo"].roles
    assert (roles["reward"].worker, roles["reward"].start) == ("reward_model", "reward_modelling")
    assert (roles["ref"].start, roles["actor"].start) == ("sft", "sft")


SCORES = st.lists(st.tuples(st.floats(-50, 50), st.booleans()), min_size=1, max_size=6)


@given(SCORES)
def test_no_score_makes_up_for_a_violation(rows: list[tuple[float, bool]]) -> None:
    score, passed = f64(*(s for s, _ in rows)), f64(*(float(p) for _, p in rows))
    pair = pair_of(score, passed)
    allowed = [row for row, (_, passes) in enumerate(rows) if passes]
    assert pair is None or pair[0] in allowed
    row, _ = chosen(score, passed, torch.zeros_like(score), fallback=True)
    assert row in (allowed or [-7])
    positive = constrained_reward(score.exp(), passed=passed, allowance=torch.ones_like(score))
    assert ((positive > 0) == (passed > 0)).all()
