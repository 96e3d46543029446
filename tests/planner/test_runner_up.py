"""Why a plan lost: one sentence from what both plans are predicted to do."""

from __future__ import annotations

from penstock.planner.layout import Layout
from penstock.planner.plan import GroupPlan, Plan
from penstock.planner.prediction import NodePrediction, Prediction
from penstock.planner.runner_up import runner_up

from .hand_made import CALLS, ppo, split_plan


def predicted(**changes: float) -> Prediction:
    """A prediction with round durations; `actor__train=20.0` changes one."""
    seconds = {**CALLS, **{name.replace("__", "."): s for name, s in changes.items()}}
    nodes = {name: NodePrediction(duration_s=s) for name, s in seconds.items()}
    return Prediction(step_time_s=sum(seconds.values()), lower_bound_s=1.0, nodes=nodes)


def test_a_placement_lost_because_its_busiest_group_has_too_much_to_do() -> None:
    together = Plan(groups=(GroupPlan(name="all", devices=tuple(range(16))),),
                    prediction=predicted())  # fmt: skip
    found = runner_up(ppo(), split_plan(), together)
    assert found.description == "{actor, critic, ref, reward} on 16"
    assert found.step_time_s == 46.0
    assert found.why == "its group 'all' is busy 46.0 s of 46.0 s"


def test_a_placement_lost_because_a_chain_of_calls_crosses_groups() -> None:
    alone = Plan(
        groups=(
            GroupPlan(name="a", devices=tuple(range(8))),
            GroupPlan(name="b", devices=tuple(range(8, 12))),
            GroupPlan(name="c", devices=tuple(range(12, 16))),
        ),
        nodes={"actor": "a", "ref": "b", "critic": "c", "reward": "c", "gae": "c"},
        prediction=predicted(ref__logprob=9.0),
    )
    found = runner_up(ppo(), split_plan(), alone)
    assert found.why == (
        "no group of it is busy for more than 26.0 s, but a step waits for actor.generate 12.0 s, "
        "then ref.logprob 9.00 s, then actor.train 14.0 s"
    )


def test_layouts_alone_lost_because_of_one_call() -> None:
    other = split_plan().model_copy(
        update={
            "prediction": predicted(actor__train=20.0),
            "layouts": {**split_plan().layouts, "actor.train": Layout(tp=8)},
        }
    )
    found = runner_up(ppo(), split_plan(), other)
    assert found.why == "its actor.train in tp8 takes 20.0 s instead of 14.0 s"
    assert found.step_time_s == 36.0
