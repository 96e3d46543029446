"""Which responses are shown to whoever watches, and what is known of stages before the first."""

from __future__ import annotations

import pytest
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import resolved
from penstock.launch.run_dir.progress import StagePlan
from penstock.launch.stages.observers import is_shown, stage_plans
from penstock.launch.stages.prepare import prepare


@pytest.mark.parametrize(
    ("every", "live", "steps"),
    [
        (None, True, [1, 10, 100, 250]),
        (None, False, []),
        (0, True, []),
        (100, False, [100, 200]),
    ],
)
def test_responses_are_shown_now_and_then(every: int | None, live: bool, steps: list[int]) -> None:
    shown = [step + 1 for step in range(250) if is_shown(step, 250, every, live=live)]
    assert shown == steps


def test_what_is_to_be_done_is_known_before_the_first_step() -> None:
    words = ["algorithm.num_steps=50", "evaluation.every=20", "task.num_train=200"]
    composed = compose("run", [*words, "task.num_held_out=8", "evaluation.num_prompts=8"])
    composed.pop("resume")
    assert stage_plans(prepare(resolved(composed))) == [
        StagePlan("sft", 150),
        StagePlan("grpo", 50, evaluated_after=(0, 20, 40, 50)),
    ]
