"""What is configured for a role reaches a worker of one's own as it reaches ours, or is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.inputs.data import load_data
from penstock.launch.inputs.record import Stage
from penstock.launch.inputs.run import Run
from penstock.launch.main import main
from penstock.launch.placement.place import choose
from penstock.launch.stages.memory_limit import check_memory
from penstock.launch.stages.prepare import build_stages
from penstock.launch.stages.worker_specs import Results, worker_specs
from penstock.planner.inputs.layout import Layout
from safetensors.torch import load_file

from ..placement.test_place import config_of

WORDS = (
    "algorithm=own",
    "algorithm.step=own_workers:judged_step",
    "model=tiny",
    "task.num_train=64",
    "task.num_held_out=8",
    "algorithm.per_step.prompts=8",
    "algorithm.roles.actor.start=model",
)
SURPRISE = "algorithm.roles.judge.worker=own_workers:SurpriseSpec"
SHORTER = "algorithm.roles.judge.worker=own_workers:Shorter"
MODEL = "algorithm.roles.judge.start=model"
SLOW = "algorithm.roles.actor.worker=own_workers:slow_policy"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def made(*words: str) -> tuple[Run, Stage]:
    run = config_of(*WORDS, *words)
    return run, build_stages(run).stages[-1]


def specs(*words: str, results: Results | None = None) -> dict[str, Any]:
    run, stage = made(*words)
    run = replace(run, data=load_data(run.config.task, run.model))
    return dict(worker_specs(stage, run, results or {}))


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return path


# --- what reaches it


def test_a_worker_gets_the_model_and_the_tokenizer_that_it_asks_for() -> None:
    judge = specs(SURPRISE, MODEL, "algorithm.roles.judge.options.scale=0.5")["judge"]
    actor = specs(SHORTER)["actor"]
    assert judge.model == actor.model
    assert (judge.end_ids, judge.scale) == (actor.end_ids, 0.5)
    assert judge.tokenizer is not None


@pytest.mark.slow
def test_it_starts_where_it_is_told_to(tmp_path: Path) -> None:
    start = folder(tmp_path / "trained")
    judge = specs(SURPRISE, f"algorithm.roles.judge.start={start}")["judge"]
    assert judge.model.folder == str(start)
    other = specs(SURPRISE, MODEL, "algorithm.roles.judge.init_offset=3")["judge"]
    first = specs(SURPRISE, MODEL)["judge"]
    assert other.model.init_seed == first.model.init_seed + 3


def test_it_starts_from_an_earlier_stage() -> None:
    run, stage = made(SURPRISE, "algorithm.roles.judge.start=sft")
    (sft,) = (stage for stage in build_stages(run).stages if stage.name == "sft")
    assert stage.roles["judge"].start == "sft"
    data = load_data(run.config.task, run.model)
    judge: Any = worker_specs(stage, replace(run, data=data), {"sft": (sft, Path("models"))})[
        "judge"
    ]
    assert judge.model.folder == str(Path("models") / "actor")


def test_a_trained_one_gets_the_optimizer() -> None:
    words = (SLOW, SHORTER, "algorithm.optimizer.lr=0.5")
    assert specs(*words)["actor"].optimizer.lr == 0.5
    own = "algorithm.roles.actor.optimizer={lr: 0.25}"
    assert specs(*words, own, "algorithm.roles.actor.options.share=0.5")["actor"].optimizer.lr == (
        0.125
    )
    frozen = specs(*words, "algorithm.roles.actor.frozen=['model.embed_tokens.*']")["actor"]
    assert frozen.optimizer.frozen == ("model.embed_tokens.*",)


@pytest.mark.slow
def test_an_argument_of_another_type_is_its_own() -> None:
    words = ("algorithm=grpo", "algorithm.roles.reward.worker=own_workers:Named")
    run = config_of(*words, "algorithm.roles.actor.start=model")
    stage = build_stages(run).stages[-1]
    run = replace(run, data=load_data(run.config.task, run.model))
    reward: Any = worker_specs(stage, run, {})["reward"]
    assert reward.made.model == "small"
    assert stage.roles["reward"].start is None


# --- what is refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (SHORTER, "algorithm.roles.judge.start=/nowhere"),
            "'algorithm.roles.judge.start' is set, but 'own_workers:Shorter' does not ask for it\n"
            "    give it a parameter 'model' (ModelSpec), or leave the key out",
        ),
        (
            (SHORTER, "algorithm.roles.judge.start_mean={a: 0.5, b: 0.5}"),
            "'algorithm.roles.judge.start_mean' is set, but 'own_workers:Shorter' does not ask for "
            "it\n    give it a parameter 'model' (ModelSpec), or leave the key out",
        ),
        (
            (SURPRISE, "algorithm.roles.judge.start=/nowhere"),
            "'algorithm.roles.judge.start': '/nowhere' is neither a stage nor a model folder\n"
            "    stages are: sft; a model folder holds config.json and safetensors",
        ),
        (
            (SURPRISE, "algorithm.roles.judge.optimizer={lr: 1.0}"),
            "'algorithm.roles.judge.optimizer' is set, but judged does not train 'judge' "
            "with a loss\n"
            "    leave it out; roles with a loss are: actor",
        ),
        (
            (SURPRISE, "algorithm.roles.judge.frozen=['*']"),
            "'algorithm.roles.judge.frozen' is set, but judged does not train 'judge' "
            "with a loss\n"
            "    leave it out; roles with a loss are: actor",
        ),
        (
            (
                "algorithm.roles.actor.worker=own_workers:SurpriseSpec",
                SHORTER,
                "algorithm.roles.actor.frozen=['*']",
            ),
            "'algorithm.roles.actor.frozen' is set, but 'own_workers:SurpriseSpec' does not ask "
            "for it\n    give it a parameter 'optimizer' (OptimizerSpec), or leave the key out",
        ),
    ],
)
def test_what_would_not_reach_it_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(*words)
    assert str(caught.value) == message


def test_a_rule_has_no_weights_of_any_kind() -> None:
    with pytest.raises(ConfigError) as caught:
        build_stages(
            config_of(
                "algorithm=grpo",
                "algorithm.roles.reward.worker=rule",
                "algorithm.roles.reward.init_offset=1",
            )
        )
    assert str(caught.value) == (
        "'algorithm.roles.reward.init_offset' is set, but 'rule' has no weights\n"
        "    leave it out, or set algorithm.roles.reward.worker=reward_model"
    )


# --- what is planned


def plan_text(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    words = (*WORDS, *words, "cluster=cpu", "cluster.devices_per_node=2")
    assert main(["plan", *words]) == 0
    found = capsys.readouterr()
    return found.out, found.err


def test_a_role_with_a_model_is_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = plan_text(capsys, SURPRISE)
    assert "judge.mark" in out
    assert err == ""


def test_one_without_is_said_to_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = plan_text(capsys, SHORTER)
    assert "judge.mark" not in out
    assert err == (
        "penstock: note: 'judge' is left out: own_workers:Shorter asks for no model, so its memory "
        "and time are not known (plan.models.judge=MODEL says what it computes)\n"
    )


def test_a_run_says_it_as_well_and_keeps_the_worker_data_parallel() -> None:
    run = config_of(*WORDS, SHORTER, "executor=ray")
    assert choose(run).note.splitlines()[1:] == [
        "placement: 'judge' is left out: own_workers:Shorter asks for no model, so its memory and "
        "time are not known (plan.models.judge=MODEL says what it computes)"
    ]
    divided = config_of(*WORDS, SURPRISE, "executor=ray", "engine=fsdp", "rollout=torch")
    plan = choose(divided).placed
    assert (plan.layouts["judge.mark"].tp, plan.layouts["judge.mark"].zero) == (1, 0)


def test_the_planner_does_not_have_it_compute_activations_again() -> None:
    run, stage = made(SHORTER, SLOW, "executor.memory_limit=6GiB")
    layout = Layout(checkpointing=True)
    engine = run.engines.planned()[1]["actor"].train
    assert engine.why_not(layout, "train", None) == (
        "a worker of one's own is not told to compute activations again"
    )
    assert engine.why_not(Layout(offload=True), "forward", None) == (
        "a worker of one's own is not told to wait in host memory"
    )
    assert engine.why_not(Layout(dp=2), "train", None) is None
    with pytest.raises(ConfigError) as caught:
        check_memory(replace(run, stages=(stage,)))
    assert str(caught.value) == (
        "'executor.memory_limit' is set, but 'actor.generate' runs on a worker of your own, which "
        "is not predicted\n    leave it out"
    )


# --- a run


@pytest.mark.slow
def test_a_run_keeps_what_is_frozen_and_asks_the_judge(tmp_path: Path) -> None:
    words = (
        *WORDS,
        SURPRISE,
        MODEL,
        SLOW,
        "algorithm.roles.actor.frozen=['model.embed_tokens.*']",
        "algorithm.optimizer={lr: 1e-2, weight_decay: 0.1}",
        "algorithm.num_steps=2",
        "evaluation.num_prompts=0",
        "tracker=none",
    )
    assert main(["run", *words, "runs=a"]) == 0
    assert main(["run", *words, "runs=b", "algorithm.num_steps=1"]) == 0
    one, two = (
        load_file(next(Path(runs).glob("*/models/actor/model.safetensors"))) for runs in "ba"
    )
    moved = {name for name in one if not one[name].equal(two[name])}
    assert moved == one.keys() - {"model.embed_tokens.weight"}
