"""The text that explains a plan, as it is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.plan.plan import GroupPlan, Plan
from penstock.planner.plan.simulate import simulate_plan
from penstock.planner.report.explain import explain
from penstock.planner.report.html_report import to_html

from ..hand_made import memory_a, ppo, predicting, prediction, split_plan

GOLDEN = """\
plan of ppo on h100: 2 nodes x 8 h100 = 16 devices, max_lag 0
  workload     1,024 prompts x 1 response; prompt 1,024 tokens, response 1,024 tokens
  step         30.0 s; the scheduler, played through with these times, takes 30.0 s
  cost         0.133 device-hours per step
  bound        at most 2.0 % could be gained: no plan takes less than 29.4 s
  search       1.25 s
  runner-up    {actor, critic, ref, reward} on 16: 34.5 s, 1.15 x as long
               its group 'all' is busy 34.5 s of 34.5 s
  schedule     max_lag 0 wins; max_lag 1: 33.0 s, 1.10 x as long
  calibration  analytic defaults

placement
  group  devices  number  roles
  a      0-7           8  actor, ref
  b      8-15          8  critic, reward

nodes
  node            group  model     layout     seconds  of which
  actor.generate  a      llama-7b  tp2 dp4     12.0 s  decode 9.50 s, prefill 1.50 s, reshard 1.00 s
  reward.score    b      llama-7b  dp8         2.00 s  compute 2.00 s
  critic.value    b      llama-7b  dp8 zero1   2.00 s  compute 2.00 s
  ref.logprob     a      llama-7b  dp8 mb4     3.00 s  compute 3.00 s
  actor.train     a      llama-7b  dp8 zero1   14.0 s  compute 12.0 s, gradient sync 2.00 s
  critic.train    b      llama-7b  dp8 zero1   13.0 s  compute 13.0 s

timeline of one step, 30.0 s
  a |AAAAAAAAAAAAAAAAAAAAAAAAAAAAADDDDDDD..EEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE| idle 3.3 %
  b |.............................BBBBBCCCCFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF..| idle 43 %
  A actor.generate   B reward.score   C critic.value   D ref.logprob   E actor.train
  F critic.train
  critical path: actor.generate 12.0 s > reward.score 2.00 s > critic.value 2.00 s
     > actor.train 14.0 s

memory of each device of a: 61.5 of 71.7 GiB (86 %)
                              weights  gradients  optimizer  kv cache  logits  activations   all
  always  actor                  1.86       3.73       19.6         -       -            -  25.1
  always  ref                    13.0          -          -         -       -            -  13.0
  while   actor.generate         6.52          -          -      11.2    0.47            -  18.2
  while   ref.logprob               -          -          -         -    3.73         1.86  5.59
  while   actor.train (peak)        -          -          -         -    7.45         15.8  23.3

memory of each device of b: 53.1 of 71.7 GiB (74 %)
                               weights  gradients  optimizer  activations   all
  always  critic                  1.86       3.73       18.6            -  24.2
  always  reward                  13.0          -          -            -  13.0
  while   reward.score               -          -          -         1.86  1.86
  while   critic.value               -          -          -         1.86  1.86
  while   critic.train (peak)        -          -          -         15.8  15.8
"""


def test_a_plan_is_explained() -> None:
    assert explain(ppo(), split_plan()) + "\n" == GOLDEN


def test_the_cost_of_a_run_is_told_with_its_steps() -> None:
    text = explain(ppo(), split_plan().model_copy(update={"num_steps": 1200}))
    assert (
        "  cost         0.133 device-hours per step; 160 for the 1,200 steps of the run, which "
        "take 10.0 h\n"
    ) in text


def test_lag_shows_calls_of_two_steps_in_one_timeline() -> None:
    plan = split_plan().model_copy(update={"max_lag": 1})
    text = explain(ppo(), plan)
    timeline = text[text.index("timeline") : text.index("memory")]
    assert (
        timeline
        == """\
timeline of one step, 29.0 s
  a |DDDDDDDaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE| idle 0 %
  b |.......FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFbbbbbccccc......................| idle 41 %
  A actor.generate   B reward.score   C critic.value   D ref.logprob   E actor.train
  F critic.train
  small letters: calls of the next step
  critical path: actor.generate 12.0 s > actor.train 14.0 s > ref.logprob 3.00 s

"""
    )


def test_a_plan_written_by_hand_has_a_placement_and_no_more() -> None:
    plan = Plan(groups=(GroupPlan(name="train"), GroupPlan(name="rollout")),
                nodes={"actor.generate": "rollout"})  # fmt: skip
    assert (
        explain(ppo(), plan)
        == """\
plan of ppo on some cluster

placement
  group    devices  number  roles
  train    any cpu       1  actor.train, critic, ref, reward
  rollout  any cpu       1  actor.generate"""
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lower_bound_s": 30.0}, "  bound        no plan is faster\n"),
        ({"stopped_at_deadline": True}, "  search       1.25 s, stopped at its deadline\n"),
        ({"lower_bound_s": 0.0}, "  bound        nothing is proved: the search had too little"),
        ({"models": {}}, "node            group  layout"),
    ],
    ids=["proved", "stopped", "nothing proved", "no models"],
)
def test_what_is_found_or_missing_is_said(changes: dict[str, object], said: str) -> None:
    assert said in explain(ppo(), predicting(**changes))


def test_a_search_that_proved_nothing_says_so_on_the_page() -> None:
    page = to_html(ppo(), predicting(lower_bound_s=0.0))
    assert "too little time to prove anything" in page


def test_without_a_runner_up_none_is_named() -> None:
    assert "runner-up" not in explain(ppo(), predicting(runner_up=None))


def test_lines_stay_readable() -> None:
    lost = prediction().runner_up
    assert lost is not None
    lost = lost.model_copy(update={"why": "it is slower for a reason " * 8})
    text = explain(ppo(), predicting(runner_up=lost))
    assert max(map(len, text.splitlines())) <= 105


def test_a_call_shorter_than_a_column_is_still_seen() -> None:
    nodes = prediction().nodes
    short = nodes["reward.score"].model_copy(update={"duration_s": 0.01})
    plan = predicting(nodes={**nodes, "reward.score": short})
    bars = [line for line in explain(ppo(), plan).splitlines() if "|" in line]
    assert "B" in bars[1]


@pytest.mark.slow
@given(held=st.integers(0, 200))
def test_a_share_of_memory_is_of_the_capacity(held: int) -> None:
    memory = memory_a().model_copy(
        update={"resident_bytes": {"x": {"weights": held}}, "transient_bytes": {},
                "capacity_bytes": 200}
    )  # fmt: skip
    text = explain(ppo(), predicting(memory={"a": memory}))
    share = text[text.index("memory of each device of a") :].splitlines()[0]
    assert f"{held} of 200 B" in share


def test_the_simulation_can_be_given() -> None:
    simulation = simulate_plan(ppo(), split_plan())
    assert explain(ppo(), split_plan(), simulation) == explain(ppo(), split_plan())
    assert simulation.step_time_s == pytest.approx(30.0)
