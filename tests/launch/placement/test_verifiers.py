"""Verifiers beside a language model: measured, planned with it, placed, reported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.placement.acting import setting_of
from penstock.launch.stages.prepare import prepare
from penstock.launch.stages.worker_specs import worker_specs
from penstock.planner.cost.verification import Verifier
from penstock.planner.inputs.task_profile import ExecutorProfile, TaskProfile, VerifierProfile
from penstock.planner.plan.plan import GroupPlan, Plan
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray

from ...workers.rewards.test_judge import completion, running, send
from ..cli.test_env_runs import config
from ..conftest import Penstock

WORDS = (
    "algorithm=grpo",
    "task=chain_sum",
    "model=tiny",
    "algorithm.roles.actor.start=model",
    "algorithm.per_step.prompts=2",
    "algorithm.cfg.sampling.num_samples=4",
    "algorithm.roles.reward.worker=math",
    "algorithm.num_steps=2",
)
RUN = ("tracker=none", "evaluation.num_prompts=0", "task_profile=task_profile.json")
PLAN = ("cluster=cpu", "cluster.devices_per_node=2", "cluster.cores_per_node=8", "plan.lags=[0]")


def profiled(file: str = "task_profile.json", seconds: float = 0.05) -> None:
    """A profile as if a response took so long to verify; nothing is measured."""
    found = VerifierProfile(item_s=(seconds,), item_cpu_s=seconds, most=256)
    made = TaskProfile(
        setting=setting_of(config(*WORDS)),
        rows={},
        loops={},
        calls={},
        verifiers={"reward.score": found},
        executor=ExecutorProfile(name="ray", call_s=0.0),
        cores=2,
        machine="a machine of two cores",
        date="2026-11-28",
    )
    Path(file).write_text(made.model_dump_json())


def planned(penstock: Penstock, *words: str) -> Plan:
    said = penstock("plan", *WORDS, *PLAN, "task_profile=task_profile.json", *words,
                    "output=plan.json")  # fmt: skip
    assert said.code == 0, said.err
    return Plan.read(Path("plan.json"))


@pytest.mark.slow
def test_a_verifier_is_measured_and_planned_with(penstock: Penstock) -> None:
    said = penstock("profile", *WORDS, "executor=in_process", "seconds=0.05", "output=p.json")
    assert said.code == 0, said.err
    assert "reward.score" in said.out
    (found,) = TaskProfile.model_validate_json(Path("p.json").read_text()).verifiers.values()
    assert len(found.item_s) == 16
    assert list(found.item_s) == sorted(found.item_s)
    assert 0 < found.item_cpu_s <= sum(found.item_s) / len(found.item_s)
    assert found.most == 256
    assert found.process_bytes > 2**20
    said = penstock("plan", *WORDS, *PLAN, "task_profile=p.json", "--json")
    assert said.code == 0, said.err
    assert "reward.score" in json.loads(said.out)["nodes"]


def thinks(handler: BaseHTTPRequestHandler, request: dict[str, Any]) -> None:
    time.sleep(0.2)
    send(handler, 200, completion("Score: 10"))


@pytest.mark.slow
def test_a_judge_is_measured_as_it_is_asked(penstock: Penstock) -> None:
    with running() as server:
        server.reply = thinks
        server.http.socket.listen(64)  # else some of 32 that connect at once wait for a second
        options = {"url": server.url, "model": "tiny", "concurrency": 32}
        words = [f"algorithm.roles.reward.options.{key}={value}" for key, value in options.items()]
        words += [*WORDS, "algorithm.roles.reward.worker=judge", "executor=in_process"]
        said = penstock("profile", *words, "seconds=0.05", "output=p.json")
    assert said.code == 0, said.err
    (found,) = TaskProfile.model_validate_json(Path("p.json").read_text()).verifiers.values()
    assert (found.at_once, found.most) == (32, None)
    # Of 64 responses 32 are asked for at once, though 16 were at hand to measure with.
    judge = Verifier("reward.score", "reward", found, 64)
    # Two turns of 0.2 s, longer on a busy machine; one after the other they take 12.8 s.
    assert 0.39 < judge.seconds(1, 32, cores=2.0) < 4.0


def test_a_plan_has_as_many_processes_as_pay_or_are_given(penstock: Penstock) -> None:
    profiled()
    plan = planned(penstock)
    processes = plan.role_options["reward"]["num_processes"]
    group = plan.group(plan.nodes["reward.score"])
    assert 8 % (processes * group.num_ranks) == 0
    assert processes * group.num_ranks > 2
    assert plan.prediction is not None
    assert plan.prediction.nodes["reward.score"].duration_s > 0
    pinned = planned(penstock, "plan.pins.num_processes.reward=3")
    assert pinned.role_options == {"reward": {"num_processes": 3}}
    given = planned(penstock, "algorithm.roles.reward.options.num_processes=2")
    assert given.role_options == {"reward": {"num_processes": 2}}
    Path("pins.yaml").write_text("num_processes: {reward: 1}\n")
    said = penstock("plan", *WORDS, *PLAN, "task_profile=task_profile.json",
                    "plan.compare=[pins.yaml]", "plan.sensitivity=true")  # fmt: skip
    assert said.code == 0, said.err
    assert "pins.yaml" in said.out
    assert "2 x cores" in said.out


def test_what_is_not_known_is_said_or_refused(penstock: Penstock) -> None:
    said = penstock("plan", *WORDS, *PLAN)
    assert said.code == 0, said.err
    assert said.err == (
        "penstock: note: 'reward' is counted as free: what grpo costs in this task is not known; "
        "measure it: penstock profile algorithm=grpo task=..., and the other keys of the run\n"
    )
    profiled()
    said = penstock("plan", *WORDS, *PLAN, "plan.pins.num_processes.actor=3")
    assert said.code == 2
    assert said.err == (
        "penstock: 'plan.pins.num_processes' names role 'actor', of which it is not known what it "
        "verifies\n    measure the task, or leave the pin out: penstock profile algorithm=grpo "
        "task=..., and the other keys of the run\n"
    )
    said = penstock("plan", *WORDS, *PLAN, "task_profile=task_profile.json",
                    "algorithm.cfg.epochs=2")  # fmt: skip
    assert said.code == 2
    assert "is of another task: 'algorithm.cfg' was" in said.err


def test_a_plan_file_says_in_how_many_processes_a_role_verifies() -> None:
    made = Plan(groups=(GroupPlan(name="all"),), role_options={"reward": {"num_processes": 3}})
    run = prepare(config(*WORDS, "tracker=none"), made)
    spec: Any = worker_specs(run.main, run, {})["reward"]
    assert spec.num_processes == 3


@pytest.fixture(scope="module")
def ray(forked_workers: None) -> Iterator[None]:
    """Ray, started before the test, because it leaves files open until it ends."""
    connect_ray()
    yield
    shutdown_ray()


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
def test_a_run_reports_what_verifying_takes_and_corrects_the_profile(
    penstock: Penstock, tmp_path: Path
) -> None:
    profiled(seconds=0.5)
    said = penstock("run", *WORDS, *RUN, "executor=ray", f"runs={tmp_path}/auto")
    assert said.code == 0, said.err
    (folder,) = Path("auto").iterdir()
    plan = Plan.read(folder / "plan.json")
    assert plan.role_options["reward"]["num_processes"] > 0
    summary = json.loads((folder / "summary.json").read_text())
    verified = summary["nodes"]["reward.score"]
    assert verified["predicted_s"] > 0.5
    assert verified["measured_s"] > 0
    said = penstock("plan", *WORDS, *PLAN, f"task_profile={folder}", "output=next.json")
    assert said.code == 0, said.err
    learned = Plan.read(Path("next.json")).prediction
    assert learned is not None
    assert learned.task is not None
    factor = verified["measured_s"] / verified["predicted_s"]
    assert learned.task.verifiers["reward.score"].item_s[0] == pytest.approx(0.5 * factor)
