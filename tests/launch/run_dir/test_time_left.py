"""How much of a run is left: what was measured, what was predicted, and what nobody knows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from penstock.launch.run_dir.time_left import Left, Share, StagePlan, TimeLeft


def test_a_later_stage_of_which_nothing_is_known_makes_it_a_lower_bound() -> None:
    time = TimeLeft([StagePlan("sft", 10), StagePlan("grpo", 30)])
    assert time.left("sft") == Left(None, None, True)
    time.step("sft", 1, 2.0, 8)
    assert time.left("sft") == Left(18.0, 18.0, True)
    assert time.share("grpo") == Share(0.75, False)


def test_a_prediction_stands_in_until_steps_are_measured() -> None:
    time = TimeLeft([StagePlan("sft", 10), StagePlan("ppo", 100, step_s=0.5)])
    time.step("sft", 1, 1.0, 8)
    assert time.left("sft") == Left(9.0, 59.0, False)
    assert time.share("sft") == Share(10 / 60, True)
    time.end("sft", 12.0)
    assert time.share("sft") == Share(12 / 62, True)
    time.step("ppo", 1, 0.25, 8)
    assert time.left("ppo") == Left(99 * 0.25, 99 * 0.25, False)


def test_evaluations_to_come_count_as_the_ones_before_took() -> None:
    time = TimeLeft([StagePlan("grpo", 4, evaluated_after=(0, 2, 4))])
    time.evaluation("grpo", 0, 3.0)
    time.step("grpo", 1, 1.0, 8)
    assert time.left("grpo").stage_s == 3 + 2 * 3
    time.step("grpo", 2, 1.0, 8)
    time.evaluation("grpo", 2, 5.0)
    assert time.left("grpo").stage_s == 2 + 4.0
    time.step("grpo", 4, 1.0, 8)
    assert time.left("grpo").stage_s == 4.0
    time.evaluation("grpo", 4, 4.0)
    assert time.left("grpo").stage_s == 0.0


def test_a_resumed_stage_has_only_the_rest_left() -> None:
    time = TimeLeft([StagePlan("grpo", 10)])
    time.begin("grpo", 8)
    time.step("grpo", 9, 2.0, 4)
    assert time.left("grpo") == Left(2.0, 2.0, False)
    assert time.rate("grpo") == 2.0


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.floats(0.1, 10))
def test_shares_add_up_to_the_run(num_steps: list[int], pace_s: float) -> None:
    stages = [StagePlan(f"stage {i}", n) for i, n in enumerate(num_steps)]
    time = TimeLeft(stages)
    for stage in stages:
        shares = [time.share(other.name) for other in stages]
        assert abs(sum(share.part for share in shares) - 1) < 1e-9
        time.step(stage.name, 1, pace_s, 1)
        time.end(stage.name, stage.num_steps * pace_s)
    assert all(time.share(stage.name).of_time for stage in stages)
