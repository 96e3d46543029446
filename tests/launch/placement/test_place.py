"""Where a run is placed: by the planner, from a plan's file, or as its groups say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from penstock.algorithms.env_ppo import EnvPPO, env_ppo_step
from penstock.dataflow.errors import ConfigError, PlanError
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.messages import TaskSpan
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.record import Stage
from penstock.launch.inputs.run import Run, resolved
from penstock.launch.placement.machine import threads_of
from penstock.launch.placement.place import (
    choose,
    make_executor,
    placed,
    placement_of,
    written_plan,
)
from penstock.launch.stages.prepare import build_stages
from penstock.launch.stages.report import (
    comparison_text,
    memory_text,
    nodes_summary,
)
from penstock.launch.stages.stage_result import node_seconds
from penstock.planner.cost.calibration import CPU_DEFAULTS, Calibration
from penstock.planner.inputs.cluster import ClusterSpec
from penstock.planner.inputs.layout import Layout
from penstock.planner.plan.plan import GroupPlan, Plan

from ...planner.cost.test_calibration import cluster
from ...planner.hand_made import ppo, split_plan

PPO = (
    "algorithm=ppo",
    "algorithm.roles.reward.worker=rule",
    "executor=ray",
    "task.num_train=64",
    "task.num_held_out=8",
    "algorithm.per_step.prompts=8",
)
SPLIT = Plan(groups=(GroupPlan(name="one"), GroupPlan(name="two")), nodes={"critic": "two"})


def config_of(*words: str) -> Run:
    composed = compose("run", list(words))
    composed.pop("resume")
    return resolved(composed)


def calibration(
    num_devices: int = 2, memory_bytes: int = 2**33, device: str = "cpu", threads: int = 3
) -> Calibration:
    made = cluster(num_devices)
    node = made.node_groups[0]
    spec = node.device.model_copy(update={"memory_bytes": memory_bytes, "name": device})
    own = node.model_copy(update={"device": spec})
    return Calibration(
        cluster=made.model_copy(update={"node_groups": (own,)}),
        constants=CPU_DEFAULTS.replaced(source="measured"),
        num_threads=threads,
        executor="ray",
        machine="some machine",
        date="2026-11-21",
    )


def planned(tmp_path: Path, made: Calibration, *words: str) -> tuple[Run, Run]:
    file = tmp_path / "measured.json"
    file.write_text(made.model_dump_json())
    config = config_of(*PPO, f"calibration={file}", *words)
    return config, choose(config)


def stages(config: Run, plan: Plan | None = None) -> dict[str, Stage]:
    return {stage.name: stage for stage in build_stages(config, plan).stages}


# --- auto


def test_one_process_needs_no_planner() -> None:
    config = config_of()
    assert config.config.placement == "auto"
    plan = written_plan(config)
    assert plan is not None
    assert plan.groups == (GroupPlan(name="all"),)


def test_on_ray_the_planner_is_asked(tmp_path: Path) -> None:
    config, choice = planned(tmp_path, calibration())
    assert written_plan(config) is None
    prediction = choice.placed.prediction
    assert prediction is not None
    assert prediction.calibration == "measured"
    assert set(prediction.nodes) == {
        "actor.generate", "ref.logprob", "critic.value", "actor.train", "critic.train",
    }  # fmt: skip
    assert choice.note.startswith("placement: {actor")
    assert choice.note.endswith(" per step predicted (measured)")
    main = stages(config, choice.placed)["ppo"]
    assert {group.name for group in main.placement.groups} == {g.name for g in choice.placed.groups}


def test_a_plan_is_made_with_analytic_defaults_where_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(*PPO)
    choice = choose(config)
    assert choice.placed.prediction is not None
    assert choice.placed.prediction.calibration == "analytic defaults for CPUs"
    assert isinstance(choice.placed.cluster, ClusterSpec)
    assert choice.executor.num_threads == threads_of(choice.placed.cluster.num_devices)


def test_a_calibration_is_found_in_the_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/calibration.json").write_text(calibration().model_dump_json())
    config = config_of(*PPO)
    assert choose(config).note.endswith("predicted (measured)")


def test_ranks_have_the_threads_they_were_measured_with(tmp_path: Path) -> None:
    for words, threads in (((), 3), (("executor.num_threads=5",), 5)):
        _, choice = planned(tmp_path, calibration(threads=3), *words)
        assert choice.executor.num_threads == threads


@pytest.mark.slow
@pytest.mark.parametrize("num_prompts", [7, 9, 10])
def test_every_batch_divides_by_its_ranks(tmp_path: Path, num_prompts: int) -> None:
    config, choice = planned(
        tmp_path, calibration(num_devices=4), f"algorithm.per_step.prompts={num_prompts}"
    )
    placement = stages(config, choice.placed)["ppo"].placement  # which checks the sizes
    for node in ("actor.train", "critic.train"):
        assert num_prompts % placement.group(placement.nodes[node]).num_ranks == 0
    assert all(placement.num_chunks % group.num_ranks == 0 for group in placement.groups)


def test_an_earlier_stage_has_as_many_ranks_as_divide_its_batch(tmp_path: Path) -> None:
    plan = Plan(groups=(GroupPlan(name="all", num_ranks=4),))
    config = config_of(*PPO, "algorithm.before.sft.per_step.demos=6")
    made = stages(config, plan)
    assert [group.num_ranks for group in made["sft"].placement.groups] == [3]
    assert [group.num_ranks for group in made["ppo"].placement.groups] == [4]


@pytest.mark.slow
def test_a_run_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="memory|needed|fit"):
        planned(tmp_path, calibration(memory_bytes=2**20))


def test_a_model_the_planner_does_not_know_runs_on_one_rank(tmp_path: Path) -> None:
    _, choice = planned(tmp_path, calibration(), "model.architecture.model_type=gemma")
    assert choice.placed.groups == (GroupPlan(name="all"),)
    assert choice.note.startswith(
        "placement: everything on one rank; nothing was planned: cannot plan for model_type 'gemma'"
    )


def test_a_calibration_of_other_devices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, calibration(device="h100"))
    assert str(caught.value) == (
        f"'calibration': {tmp_path / 'measured.json'} is of 'cuda' devices, but 'executor.device' "
        "is 'cpu'\n    measure them: penstock profile device=cpu output=FILE"
    )


# --- a plan's file


def written(tmp_path: Path, plan: Plan) -> str:
    file = tmp_path / "plan.json"
    file.write_text(plan.model_dump_json(exclude_defaults=True))
    return f"placement={file}"


def test_a_run_follows_the_plan_of_a_file(tmp_path: Path) -> None:
    config = config_of(*PPO, written(tmp_path, SPLIT))
    assert written_plan(config) == SPLIT
    made = stages(config)
    assert made["ppo"].placement.nodes["critic.train"] == "two"
    assert made["ppo"].placement.nodes["actor.train"] == "one"
    assert [group.name for group in made["sft"].placement.groups] == ["one"]


@pytest.mark.parametrize(
    ("plan", "words", "message"),
    [
        (
            SPLIT.model_copy(update={"nodes": {}}),
            PPO,
            "group 'two' of the plan would have nothing to do in ppo\n"
            "    plan again for this algorithm, or leave the group out",
        ),
        (
            SPLIT,
            ("algorithm=ppo",),
            "plan file FILE has 2 ranks, but executor=in_process has one\n    set executor=ray",
        ),
        (
            Plan(groups=(GroupPlan(name="all", device="cuda"),)),
            (*PPO, "executor.device=cpu"),
            "plan file FILE: group 'all' is on 'cuda', but 'executor.device' is "
            "'cpu'\n    set executor.device=cuda, or plan for another cluster",
        ),
        (
            Plan(
                groups=(GroupPlan(name="all", devices=(0, 1)),),
                layouts={"actor.train": Layout(tp=2)},
            ),
            PPO,
            "plan file FILE: node 'actor.train' has layout tp2, but the torch "
            "engine runs data-parallel only\n    plan for it: engine=torch",
        ),
        (
            SPLIT,
            (*PPO, "executor.groups.all=2"),
            "'placement' is 'FILE', but there are executor.groups as well\n"
            "    leave one of them out",
        ),
        (
            None,
            (*PPO, "executor.nodes.critic=b"),
            "'executor.nodes.critic': there is no group 'b'\n    executor.groups has: none",
        ),
    ],
)
def test_a_placement_that_cannot_be_is_refused(
    tmp_path: Path, plan: Plan | None, words: tuple[str, ...], message: str
) -> None:
    given = words if plan is None else (*words, written(tmp_path, plan))
    with pytest.raises((ConfigError, PlanError)) as caught:
        stages(config_of(*given))
    assert str(caught.value) == message.replace("FILE", str(tmp_path / "plan.json"))


# --- groups


def test_groups_are_used_instead_of_the_planner() -> None:
    config = config_of(*PPO, "executor.groups={a: 2, b: 1}", "executor.nodes.critic=b")
    plan = written_plan(config)
    assert plan is not None
    assert [(group.name, group.num_ranks) for group in plan.groups] == [("a", 2), ("b", 1)]
    assert placed(build_stages(config)).executor == config.executor
    assert stages(config)["ppo"].placement.nodes["critic.value"] == "b"


# --- predicted and measured


def span(node: str, rank: int, start_s: float, end_s: float) -> TaskSpan:
    return TaskSpan(node, 0, None, "all", rank, start_s, end_s)


def test_a_node_takes_as_long_as_its_busiest_rank() -> None:
    spans = [span("a", 0, 0.0, 1.0), span("a", 0, 5.0, 6.5), span("a", 1, 0.0, 2.0)]
    assert node_seconds([*spans, span("b", 1, 2.0, 2.25)]) == {"a": 2.5, "b": 0.25}


def test_predicted_and_measured_stand_side_by_side() -> None:
    times = {"actor.generate": [9.0, 10.0, 50.0], "gae": [0.5]}
    nodes = nodes_summary(ppo(), split_plan(), times, {})
    assert nodes["actor.generate"] == {"predicted_s": 12.0, "measured_s": 10.0}
    assert nodes["gae"] == {"predicted_s": None, "measured_s": 0.5}
    assert nodes["actor.train"] == {"predicted_s": 14.0, "measured_s": None}
    assert comparison_text(split_plan(), nodes, 25.0) == [
        "node            group  predicted  measured  error",
        "actor.generate  a         12.0 s    10.0 s   +20%",
        "a step                    30.0 s    25.0 s   +20%",
        "predicted with: analytic defaults",
    ]


def test_predicted_memory_stands_beside_what_gpus_held() -> None:
    peaks = {"actor.train": 60 * 10**9, "gae": 10**9, "ref.logprob": 0}
    nodes = nodes_summary(ppo(), split_plan(), {}, peaks)
    assert nodes["actor.train"] == {
        "predicted_s": 14.0,
        "measured_s": None,
        "predicted_bytes": 66 * 10**9,
        "peak_bytes": 60 * 10**9,
    }
    assert nodes["gae"]["predicted_bytes"] is None
    assert "peak_bytes" not in nodes["ref.logprob"]
    assert memory_text(nodes) == [
        "memory of a device  predicted  measured  error",
        "actor.train          61.5 GiB  55.9 GiB   +10%",
    ]
    assert memory_text(nodes_summary(ppo(), split_plan(), {}, {})) == []


def test_groups_can_be_served_by_others() -> None:
    words = (
        *("algorithm=env_ppo", "task=cartpole", "model=mlp", "executor=ray"),
        "executor.groups={main: 1, acting: 2, policy: 1}",
        "executor.nodes={env: acting}",
    )
    config = config_of(*words, "executor.served={acting: {actor: policy}}")
    plan = written_plan(config)
    assert plan is not None
    assert [group.served for group in plan.groups] == [{}, {"actor": "policy"}, {}]
    graph = build(env_ppo_step, cfg=EnvPPO())
    assert placement_of(graph, plan, config).serving(graph) == (("actor", "policy"),)
    idle = config_of(*words)
    with pytest.raises(PlanError, match=r"'executor.groups.policy' would have nothing to do"):
        build_stages(idle)
    with pytest.raises(ConfigError, match=r"'executor.served.acting2': there is no group"):
        stages(config_of(*words, "executor.served={acting2: {actor: policy}}"))


def test_without_a_prediction_there_is_no_table() -> None:
    assert comparison_text(SPLIT, {}, 1.0) == []


@pytest.mark.slow
def test_a_planned_run_says_what_was_predicted(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    file = tmp_path / "measured.json"
    file.write_text(calibration(num_devices=1, threads=1).model_dump_json())
    words = (*PPO, f"calibration={file}", "evaluation.num_prompts=0", "algorithm.num_steps=2")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "penstock.launch.main", "run", *words),
            *("algorithm.before.sft.num_steps=1", "task.num_train=256", "tracker=none"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["nodes"]["actor.train"]["predicted_s"] > 0
    assert summary["nodes"]["actor.train"]["measured_s"] > 0
    assert summary["predicted_step_time_s"] > 0
    assert summary["calibration"] == "measured"
    assert "predicted with: measured" in ended.stderr
    assert Plan.read(run / "plan.json").prediction is not None


def test_a_channel_that_is_gone_names_what_to_use() -> None:
    with pytest.raises(ConfigError) as error:
        config_of("algorithm=grpo", "executor=ray", "executor.transport=point_to_point")
    assert str(error.value) == (
        "'executor.transport': the channel 'point_to_point' is gone: the object store was faster "
        "in every case measured\n    leave executor.transport out, or set it to object_store"
    )


def test_one_process_has_nothing_to_transport() -> None:
    config = config_of("algorithm=grpo", "executor.transport=cuda_ipc")
    with pytest.raises(ConfigError) as error:
        make_executor(config.executor)
    assert str(error.value) == (
        "'executor.transport' is 'cuda_ipc', but in one process no weights travel\n"
        "    set executor=ray, or leave it out"
    )
