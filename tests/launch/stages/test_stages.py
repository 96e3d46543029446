"""Which stages a run needs, who plays each role, and where its weights come from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError, PlanError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.record import Stage
from penstock.launch.inputs.run import Run, resolved
from penstock.launch.stages.prepare import build_stages
from penstock.launch.stages.report import whose_accuracy
from penstock.launch.stages.worker_specs import check_options, optimizer_of

from ...docs.pages import ROOT


def config_of(*overrides: str) -> Run:
    composed = compose("run", list(overrides))
    composed.pop("resume")
    return resolved(composed)


def stages(*overrides: str) -> dict[str, Stage]:
    return {stage.name: stage for stage in build_stages(config_of(*overrides)).stages}


def starts(stage: Stage) -> dict[str, tuple[str, str | None]]:
    return {role: (stage.worker(role), section.start) for role, section in stage.roles.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.slow
def test_ppo_starts_from_both_warm_ups() -> None:
    made = stages("algorithm=ppo")
    assert list(made) == ["sft", "reward_modelling", "ppo"]
    assert starts(made["reward_modelling"]) == {"reward": ("reward_model", "sft")}
    assert starts(made["ppo"]) == {
        "actor": ("policy", "sft"),
        "critic": ("value", "sft"),
        "ref": ("policy", "sft"),
        "reward": ("reward_model", "reward_modelling"),
    }


def test_the_critic_may_start_from_the_reward_model() -> None:
    made = stages("algorithm=ppo", "algorithm.roles.critic.start=reward_modelling")
    assert starts(made["ppo"])["critic"] == ("value", "reward_modelling")


def test_a_model_folder_leaves_the_policys_warm_up_out(folder: Path) -> None:
    made = stages("algorithm=ppo", "model=folder", f"model.folder={folder}")
    assert list(made) == ["reward_modelling", "ppo"]
    assert starts(made["ppo"])["actor"] == ("policy", "model")


def test_a_reward_folder_leaves_reward_modelling_out(folder: Path) -> None:
    made = stages("algorithm=ppo", f"algorithm.roles.reward.start={folder}")
    assert list(made) == ["sft", "ppo"]
    assert starts(made["ppo"])["reward"] == ("reward_model", str(folder))


def test_a_rule_leaves_reward_modelling_out() -> None:
    made = stages("algorithm=ppo", "algorithm.roles.reward.worker=rule")
    assert list(made) == ["sft", "ppo"]


def test_grpo_is_rewarded_by_the_rule() -> None:
    assert starts(stages()["grpo"]) == {"actor": ("policy", "sft"), "reward": ("rule", None)}


def test_a_worker_of_ones_own() -> None:
    made = stages(
        "algorithm.roles.reward.worker=penstock.workers.rewards.rule_reward:RuleRewardSpec"
    )
    assert (
        starts(made["grpo"])["reward"][0] == "penstock.workers.rewards.rule_reward:RuleRewardSpec"
    )


def test_split_groups_place_warm_ups_on_the_groups_they_use() -> None:
    made = stages("executor=ray_split")
    assert [group.name for group in made["sft"].placement.groups] == ["train"]
    assert made["grpo"].placement.nodes["actor.generate"] == "rollout"
    assert made["grpo"].placement.nodes["actor.train"] == "train"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["algorithm.roles.actor.start=nowhere"],
            "'algorithm.roles.actor.start': 'nowhere' is neither a stage nor a model folder\n"
            "    stages are: sft; a model folder holds config.json and safetensors",
        ),
        (
            ["algorithm=ppo", "algorithm.roles.actor.start=reward_modelling"],
            "'algorithm.roles.actor.start': stage 'reward_modelling' trains no policy, so a policy "
            "cannot start from it\n    stages that do: sft",
        ),
        (
            ["algorithm=ppo", "algorithm.roles.ref.optimizer.lr=0.1"],
            "'algorithm.roles.ref.optimizer' is set, but ppo does not train 'ref' with a loss\n"
            "    leave it out; roles with a loss are: actor, critic",
        ),
        (
            ["algorithm.roles.actr.start=sft"],
            "'algorithm.roles' names a role 'actr', which grpo does not have; did you mean "
            "'actor'?\n    its roles are: actor, reward",
        ),
        (
            ["algorithm.roles.reward.worker=polcy"],
            "'algorithm.roles.reward.worker': there is no worker 'polcy'; did you mean 'policy'?\n"
            "    workers are: policy, value, reward_model, rule, exact, math, instructions, code, "
            "trl, judge, served, mixture, process_reward, agent, env, board, actor_critic, "
            "team_critic, q_network, replay, or module:factory for your own",
        ),
        (
            ["algorithm.per_step.promts=3"],
            "'algorithm.per_step' names a table 'promts', which grpo does not read; did you mean "
            "'prompts'?\n    it reads: prompts",
        ),
        (
            ["+algorithm.per_step.rows=8"],
            "'algorithm.per_step' names a table 'rows', which grpo does not read\n    it reads: "
            "prompts; '~algorithm.per_step.rows' takes away what the algorithm's YAML says",
        ),
        (
            ["executor=ray_split", "executor.nodes={actor.generate: rolout}"],
            "'executor.nodes.actor.generate': there is no group 'rolout'; did you mean 'rollout'?\n"
            "    executor.groups has: train, rollout",
        ),
        (
            ["model.tokenizer=folder"],
            "'model.tokenizer' is 'folder', but 'model.folder' is not set\n"
            "    set model.tokenizer=task, or give a model folder",
        ),
    ],
)
def test_refusals(words: list[str], message: str) -> None:
    with pytest.raises((ConfigError, PlanError)) as caught:
        stages(*words)
    assert str(caught.value) == message


def test_a_group_without_work_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'executor.groups.spare' would have nothing to do"):
        stages("executor=ray_split", "executor.groups.spare=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "total"),
    [
        ("algorithm=grpo schedule=cosine num_steps=7", {"actor": 7}),
        ("algorithm=sft schedule=linear num_steps=5", {"actor": 5}),
        ("algorithm=grpo schedule=linear total_calls=3", {"actor": 3}),
        ("algorithm=ppo schedule=constant num_steps=4", {"actor": 0, "critic": 0}),
    ],
)
def test_a_schedule_takes_the_steps_of_its_stage(words: str, total: dict[str, int]) -> None:
    for key, full in (
        (" schedule", " algorithm.optimizer.schedule"),
        (" total_calls", " algorithm.optimizer.total_calls"),
        (" num_steps", " algorithm.num_steps"),
    ):
        words = words.replace(key, full)
    stage = build_stages(config_of(*words.split())).stages[-1]
    found = {
        role: spec.total_calls
        for role in stage.roles
        if (spec := optimizer_of(stage, role)) is not None
    }
    assert found == total


def test_a_warm_up_of_all_steps_is_refused_with_its_key() -> None:
    words = ("algorithm.optimizer={schedule: cosine, warmup_calls: 9}", "algorithm.num_steps=9")
    run = config_of(*words)
    with pytest.raises(ConfigError, match=r"^'algorithm\.optimizer\.warmup_calls': "):
        check_options(build_stages(run).stages[-1], run)


def test_accuracy_says_whose_it_is_if_several_policies_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", [*sys.path])
    one = config_of("algorithm=sft").stages[-1]
    assert whose_accuracy(one) == ""
    words = ["--config-dir", "configs", "algorithm=proposer_solver"]
    assert whose_accuracy(config_of(*words).stages[-1]) == "solver's "
