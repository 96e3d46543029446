"""Environments from a profile of their task to a run: measured, planned, placed, reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.kinds import NodeKind
from penstock.launch.placement.acting import setting_of
from penstock.planner.inputs.task_profile import (
    CallProfile,
    ExecutorProfile,
    LoopProfile,
    TaskProfile,
)
from penstock.planner.plan.plan import Plan
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray

from ..cli.test_env_runs import config
from ..conftest import Penstock

WORDS = (
    "algorithm=env_ppo",
    "task=cartpole",
    "task.group_size=auto",
    "model=mlp",
    "algorithm.cfg.horizon=8",
    "algorithm.per_step.rows=4",
    "algorithm.cfg.num_minibatches=1",
    "algorithm.cfg.epochs=1",
    "algorithm.num_steps=3",
)
SELF_PLAY = (
    "algorithm=self_play",
    "task=tic_tac_toe",
    "model=mlp",
    "algorithm.per_step.rows=4",
    "algorithm.num_steps=2",
)
RUN = ("executor=ray", "tracker=none", "evaluation.num_episodes=0")


def slow_environments(*words: str, step_s: float = 5e-3, waits: bool = False) -> TaskProfile:
    """A profile of CartPole as if its steps took long; nothing is measured."""
    run = config(*words)
    names = [node.name for node in run.main.graph.nodes if node.kind is not NodeKind.SOURCE]
    loops = tuple(
        LoopProfile(
            rows=rows,
            turns=8,
            step_s=rows * step_s,
            step_cpu_s=0.01 * rows * step_s if waits else rows * step_s,
            ask_s=1e-4,
            ask_cpu_s=1e-4,
        )
        for rows in (1, 4)
    )
    return TaskProfile(
        setting=setting_of(run),
        rows={"env.rollout": 4},
        loops={"env.rollout": loops},
        calls={n: CallProfile(one_rank_s=2e-3) for n in names if n != "env.rollout"},
        executor=ExecutorProfile(
            name="ray", call_s=2e-3, publish_s=1e-3, request_s=5e-4, request_cpu_s=5e-4
        ),
        cores=2,
        machine="a machine of two cores",
        date="2026-11-28",
    )


def profiled(file: str = "task_profile.json", **fields: Any) -> None:
    Path(file).write_text(slow_environments(*WORDS, **fields).model_dump_json())


@pytest.mark.slow
@pytest.mark.parametrize("words", [WORDS, SELF_PLAY])
def test_a_task_is_measured_and_planned(penstock: Penstock, words: tuple[str, ...]) -> None:
    said = penstock("profile", *words, "executor=in_process", "seconds=0.05", "output=p.json")
    assert said.code == 0, said.err
    found = TaskProfile.model_validate_json(Path("p.json").read_text())
    (loops,) = found.loops.values()
    # Games have a group of the size that the task says; of environments it is the plan's.
    assert [loop.rows for loop in loops] == ([2, 4] if words is WORDS else [4])
    assert all(loop.step_cpu_s <= loop.step_s for loop in loops)
    assert all(list(q.values()) == sorted(q.values()) for q in (x.quantiles_s for x in loops))
    assert found.overlaps is (words is WORDS)
    assert "the actor" in said.out
    plan = penstock("plan", *words, "task_profile=p.json", "cluster=cpu", "--json")
    assert plan.code == 0, plan.err
    assert json.loads(plan.out)["gap"] == 0.0


def test_a_plan_follows_from_a_profile_and_pins(penstock: Penstock) -> None:
    profiled()
    words = (*WORDS, "task_profile=task_profile.json", "cluster=cpu")
    said = penstock("plan", *words, "plan.sensitivity=true", "output=plan.json")
    assert said.code == 0, said.err
    assert "2 x cores" in said.out
    plan = Plan.read(Path("plan.json"))
    assert plan.group("acting").num_ranks == 2
    assert plan.group_size == 2
    pinned = ("plan.pins.acting.inference=served", "plan.pins.acting.num_ranks=1")
    said = penstock("plan", *words, *pinned, "output=served.json")
    assert said.code == 0, said.err
    assert dict(Plan.read(Path("served.json")).group("acting").served) == {"actor": "policy"}
    assert "answers acting" in said.out


def test_a_cluster_of_gpus_is_planned_for_with_its_cores(penstock: Penstock) -> None:
    profiled()
    said = penstock("plan", *WORDS, "task_profile=task_profile.json", "cluster=h100")
    assert said.code == 0, said.err
    assert said.err == (
        "penstock: note: times of one core are those of a machine of two cores: a faster core is "
        "not known of\n"
    )
    unknown = ("cluster=h100", "cluster.cores_per_node=null")
    said = penstock("plan", *WORDS, "task_profile=task_profile.json", *unknown)
    assert said.code == 2
    assert "does not say how many cores its nodes have" in said.err


REFUSED = {
    "no profile": (
        (),
        "penstock: 'task_profile': what env_ppo costs in this task is not known; measure it: "
        "penstock profile algorithm=env_ppo task=..., and the other keys of the run\n",
    ),
    "a profile of another task": (
        ("task_profile=task_profile.json", "algorithm.cfg.horizon=16"),
        "penstock: task profile task_profile.json is of another task: 'algorithm.cfg' was ",
    ),
    "pins of a language model": (
        ("task_profile=task_profile.json", "plan.pins.num_devices.env=2"),
        "penstock: 'plan.pins' fixes more than 'acting', and 'env_ppo' has no language model\n"
        "    pin plan.pins.acting: inference, num_ranks, num_groups, num_overlapped, num_trainers, "
        "num_servers\n",
    ),
    "cores that are not there": (
        ("task_profile=task_profile.json", "plan.pins.acting.num_ranks=3"),
        "penstock: no placement of acting fits cluster 'cpu': plan.pins.acting.num_ranks=3 "
        "processes act, and it has 2 cores\n    pin fewer, or plan for a cluster with more cores "
        "(cluster.cores_per_node)\n",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_with_what_to_measure(penstock: Penstock, case: str) -> None:
    profiled()
    words, message = REFUSED[case]
    said = penstock("plan", *WORDS, "cluster=cpu", *words)
    assert said.code == 2
    assert said.err.startswith(message), said.err


def test_a_dry_run_places_a_planned_step(penstock: Penstock) -> None:
    profiled()
    words = (*WORDS, *RUN, "task_profile=task_profile.json")
    said = penstock("run", "--dry-run", *words, "cluster=cpu")
    assert said.code == 0, said.err
    assert "acting" in said.out


@pytest.fixture(scope="module")
def ray(forked_workers: None) -> Iterator[None]:
    """Ray, started before the test, because it leaves files open until it ends."""
    connect_ray()
    yield
    shutdown_ray()


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_a_run_follows_its_plan_wherever_acting_happens(penstock: Penstock, tmp_path: Path) -> None:
    """The automatic plan overlaps environments that wait, and every placement ends alike."""
    profiled("runs.json", waits=True)
    words = (*WORDS, *RUN, "task_profile=runs.json")
    said = penstock("run", *words, f"runs={tmp_path}/auto")
    assert said.code == 0, said.err
    (folder,) = Path("auto").iterdir()
    plan = Plan.read(folder / "plan.json")
    assert plan.role_options["env"]["num_overlapped"] == 4
    assert plan.group_size == 1
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["nodes"]["env.rollout"]["predicted_s"] > 0
    assert summary["nodes"]["env.rollout"]["measured_s"] > 0
    assert summary["predicted_step_time_s"] > 0
    hashes = {summary["weights_sha256"]}
    fewer = ("algorithm.num_steps=2", "algorithm.optimizer.total_calls=3")
    said = penstock("run", *words, *fewer, "checkpoint_every=1", f"runs={tmp_path}/stopped")
    assert said.code == 0, said.err
    (stopped,) = Path("stopped").iterdir()
    said = penstock("run", f"resume={tmp_path}/{stopped}", "algorithm.num_steps=3")
    assert said.code == 0, said.err
    hashes.add(json.loads((stopped / "summary.json").read_text())["weights_sha256"])
    learned = penstock("plan", *WORDS, f"task_profile={folder}", "cluster=cpu", "output=next.json")
    assert learned.code == 0, learned.err
    assert f"corrected by {folder.name}" in " ".join(learned.out.split())
    for inference, own in {"copied": (), "served": ("num_ranks=2", "num_servers=2")}.items():
        pins = [
            f"plan.pins.acting.{pin}" for pin in (f"inference={inference}", "num_groups=4", *own)
        ]
        made = penstock("plan", *WORDS, "task_profile=runs.json", "cluster=cpu", *pins,
                        "output=plan.json")  # fmt: skip
        assert made.code == 0, made.err
        said = penstock("run", *words, "placement=plan.json", f"runs={tmp_path}/{inference}")
        assert said.code == 0, said.err
        (folder,) = Path(inference).iterdir()
        summary = json.loads((folder / "summary.json").read_text())
        hashes.add(summary["weights_sha256"])
    assert len(hashes) == 1
