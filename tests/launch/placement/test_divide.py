"""Groups of a plan become groups of processes: one for every engine and division of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError, PlanError
from penstock.dataflow.runtime.placement import Placement, sharing
from penstock.launch.placement.place import choose, divide_groups, written_plan
from penstock.launch.stages.prepare import build_stages
from penstock.planner.inputs.layout import Layout
from penstock.planner.plan.plan import GroupPlan, Plan

from .test_place import calibration, config_of, written

BOTH = (
    "algorithm=ppo",
    "algorithm.roles.reward.worker=rule",
    "executor=ray",
    "engine=megatron",
    "rollout=vllm",
    "task.num_train=64",
    "task.num_held_out=8",
    "algorithm.per_step.prompts=8",
)
ONE = Plan(
    groups=(GroupPlan(name="all", devices=(0, 1)),),
    layouts={
        "actor.generate": Layout(dp=2),
        "actor.train": Layout(tp=2),
        "critic.value": Layout(pp=2),
        "critic.train": Layout(pp=2),
        "ref.logprob": Layout(tp=2),
    },
)


def placed(*words: str) -> Placement:
    return build_stages(config_of(*BOTH, *words)).stages[-1].placement


def shapes(placement: Placement) -> dict[str, tuple[int, int, int]]:
    return {g.name: (g.num_ranks, g.tensor_parallel, g.pipeline_parallel) for g in placement.groups}


def test_calls_of_a_group_that_differ_get_processes_of_their_own(tmp_path: Path) -> None:
    placement = placed(written(tmp_path, ONE))
    assert shapes(placement) == {
        "all": (1, 2, 1),
        "all-rollout": (2, 1, 1),
        "all-tp1pp2": (1, 1, 2),
    }
    assert {group.devices for group in placement.groups} == {(0, 1)}
    assert all(len(others) == 2 for others in sharing(placement.groups).values())
    assert placement.nodes["actor.generate"] == "all-rollout"
    assert placement.nodes["critic.value"] == placement.nodes["critic.train"] == "all-tp1pp2"
    rest = placement.nodes.keys() - {"actor.generate", "critic.value", "critic.train"}
    assert {placement.nodes[name] for name in rest} == {"all"}
    assert placement.num_chunks == 2


def test_generation_with_another_engine_takes_turns_without_a_word_about_devices() -> None:
    placement = placed("executor.groups.all=1", "executor.tensor_parallel.all=2")
    assert shapes(placement) == {"all": (1, 2, 1), "all-rollout": (1, 2, 1)}
    assert sharing(placement.groups).keys() == {"all", "all-rollout"}


def test_our_own_generation_lives_in_the_processes_that_train() -> None:
    words = ("executor.groups.all=1", "executor.tensor_parallel.all=2", "rollout=torch")
    groups = {group.name: group for group in placed(*words).groups}
    assert {name: group.within for name, group in groups.items()} == {
        "all": "",
        "all-rollout": "all",
    }
    later = placed(*words, "schedule.max_lag=1")  # its weights are no longer there
    assert not any(group.within for group in later.groups)


VIEWED = Plan(
    groups=(GroupPlan(name="all", devices=(0, 1)),),
    layouts={
        "actor.generate": Layout(dp=2),
        "actor.train": Layout(tp=2),
        "critic.value": Layout(dp=2),
        "critic.train": Layout(pp=2),
        "ref.logprob": Layout(tp=2),
    },
)


def test_calls_in_another_layout_live_in_the_processes_that_train(tmp_path: Path) -> None:
    words = ("rollout=torch", written(tmp_path, VIEWED))
    groups = {group.name: group for group in placed(*words).groups}
    assert {name: (group.within, group.num_ranks) for name, group in groups.items()} == {
        "all": ("", 1),
        "all-tp1pp2": ("", 1),
        "all-rollout": ("all", 2),
        "all-critic-dp2": ("all-tp1pp2", 2),
    }
    later = placed(*words, "schedule.max_lag=1")
    assert not any(group.within for group in later.groups)
    assert later.nodes["critic.value"] == "all-tp1pp1"


def test_places_of_a_view_lie_where_their_part_is_trained() -> None:
    placement = placed(
        "rollout=torch",
        "model.architecture.num_key_value_heads=4",
        "executor.groups={train: 1, rollout: 2}",
        "executor.tensor_parallel={train: 4, rollout: 2}",
        "executor.devices={train: [0, 1, 2, 3], rollout: [0, 1, 2, 3]}",
        "executor.nodes={actor.generate: rollout}",
    )
    assert placement.group("rollout").within == "train"
    assert placement.group("rollout").devices == (0, 2, 1, 3)


def test_groups_of_the_command_line_may_name_the_same_devices() -> None:
    placement = placed(
        "executor.groups={train: 1, rollout: 2}",
        "executor.tensor_parallel.train=2",
        "executor.devices={train: [0, 1], rollout: [0, 1]}",
        "executor.nodes={actor.generate: rollout}",
    )
    assert shapes(placement) == {"train": (1, 2, 1), "rollout": (2, 1, 1)}
    assert sharing(placement.groups).keys() == {"train", "rollout"}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "executor.devices.all=[0]",
            "'executor.devices.all' names 1 devices for 2 processes\n    each has one: groups x "
            "tensor_parallel x pipeline_parallel of them",
        ),
        (
            "executor.devices.al=[0, 1]",
            "'executor.devices.al': there is no group 'al'; did you mean 'all'?\n"
            "    executor.groups has: all",
        ),
    ],
)
def test_devices_that_do_not_fit_are_refused(words: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        placed("executor.groups.all=2", words)
    assert str(caught.value) == text


def test_one_engine_in_one_layout_is_left_alone(tmp_path: Path) -> None:
    plan = Plan(groups=(GroupPlan(name="all", num_ranks=2),))
    config = config_of(*BOTH, "engine=torch", "rollout=same", written(tmp_path, plan))
    graph = build_stages(config).stages[-1].graph
    assert divide_groups(plan, graph, config.engines) is plan


def test_a_role_may_have_engines_of_its_own(tmp_path: Path) -> None:
    plan = Plan(
        groups=(GroupPlan(name="all", devices=(0, 1)),),
        layouts={
            "actor.generate": Layout(dp=2),
            "actor.train": Layout(tp=2),
            "critic.value": Layout(dp=2, zero=3),
            "critic.train": Layout(dp=2, zero=3),
            "ref.logprob": Layout(tp=2),
        },
    )
    words = ("algorithm.roles.critic.engine=fsdp", "algorithm.roles.actor.rollout=torch")
    config = config_of(*BOTH, *words, written(tmp_path, plan))
    placement = build_stages(config).stages[-1].placement
    assert shapes(placement) == {
        "all": (1, 2, 1),
        "all-rollout": (2, 1, 1),
        "all-fsdp-tp2pp1": (1, 2, 1),
    }
    assert placement.nodes["critic.train"] == "all-fsdp-tp2pp1"
    assert config.engines.words == (
        "engine=megatron rollout=vllm algorithm.roles.critic.engine=fsdp "
        "algorithm.roles.actor.rollout=torch"
    )
    assert config.engines.trainer("critic").name == "fsdp"
    generator = config.engines.generator("actor")
    assert generator is not None
    assert generator.name == "torch"
    # Options of the run's engine and rollout are for no other.
    assert config.engines.options_of("actor") is config.engines.options
    assert config.engines.options_of("critic") == config.engines.rollout_options_of("actor") == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "algorithm.roles.critic.engine=jax",
            "'algorithm.roles.critic.engine': 'jax' is no engine that trains\n    there are: "
            "torch, fsdp, megatron, or module:ENGINE for one of your own",
        ),
        (
            "algorithm.before.sft.roles.actor.engine=fsdp",
            "'algorithm.before.sft.roles.actor.engine' is set, but the roles of an earlier stage "
            "run on the engines that the main one's have\n    set algorithm.roles.actor.engine "
            "instead",
        ),
        (
            "algorithm.roles.reward.engine=fsdp algorithm.roles.reward.worker=own:spec",
            "'algorithm.roles.reward' has a worker of your own and an engine\n    leave out "
            "'engine' and 'rollout': the worker computes by itself",
        ),
    ],
)
def test_engines_that_a_role_cannot_have_are_refused(words: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(*BOTH, *words.split())
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("node", "layout", "problem"),
    [
        ("actor.generate", Layout(pp=2), "vLLM has no pipeline stages here"),
        ("actor.generate", Layout(cp=2), "engine 'vllm' has no cp and ep"),
        ("actor.train", Layout(dp=2, zero=3), "Megatron shares no more than the optimizer's state"),
    ],
)
def test_what_an_engine_does_not_run_is_refused(
    tmp_path: Path, node: str, layout: Layout, problem: str
) -> None:
    plan = ONE.model_copy(update={"layouts": {node: layout}})
    with pytest.raises(PlanError) as caught:
        placed(written(tmp_path, plan))
    assert str(caught.value) == (
        f"plan file {tmp_path / 'plan.json'}: node '{node}' has layout {layout}, but {problem}\n"
        "    plan for it: engine=megatron rollout=vllm"
    )


def test_a_run_with_other_engines_than_its_plan_is_told_which_that_has(tmp_path: Path) -> None:
    plan = ONE.model_copy(update={"engines": "engine=megatron rollout=vllm"})
    with pytest.raises(PlanError) as caught:
        placed("engine=torch", "rollout=same", written(tmp_path, plan))
    assert str(caught.value) == (
        f"plan file {tmp_path / 'plan.json'}: node 'critic.value' has layout pp2, but the torch "
        "engine runs data-parallel only\n    give the run the engines of the plan: "
        "engine=megatron rollout=vllm; or plan for it: engine=torch"
    )


def test_the_planner_places_both_engines(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(calibration(num_devices=2).model_dump_json())
    config = config_of(*BOTH, f"calibration={file}")
    assert written_plan(config) is None
    plan = choose(config).placed
    assert plan.prediction is not None
    main = build_stages(config, plan).stages[-1]
    kinds = {main.placement.nodes[name] for name in ("actor.generate", "actor.train")}
    assert len(kinds) == 2
    devices = {d for group in main.placement.groups for d in group.devices}
    assert devices <= {0, 1}
