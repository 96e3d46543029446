"""Commands, exit codes, and one clear message for everything that cannot run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import penstock.configs
import pytest

from .conftest import Penstock

CONFIGS = Path(str(penstock.configs.__file__)).parent
ALGORITHMS = ", ".join(sorted(path.stem for path in CONFIGS.glob("algorithm/*.yaml")))
STEPS = '''\
"""Steps with a mistake in each."""

from dataclasses import dataclass

from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import (
    Policy, PolicyBatch, Prompts, Reward, Sampling, TrainMetrics
)


class Judge(Reward):
    pass


@dataclass(frozen=True, kw_only=True)
class Cfg:
    sampling: Sampling = Sampling()
    """How responses are sampled."""


def wrong_axes(prompts: Prompts, actor: Policy, reward: Reward, cfg: Cfg) -> TrainMetrics:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    return actor.train(ClippedPolicyLoss(), PolicyBatch(
        tokens=roll.tokens, mask=roll.mask, behavior_logprob=roll.behavior_logprob,
        advantage=score))


def lagging(prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: Cfg):
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    logprob = ref.logprob(roll.tokens, roll.mask)
    return actor.train(ClippedPolicyLoss(), PolicyBatch(
        tokens=roll.tokens, mask=roll.mask, behavior_logprob=logprob, advantage=logprob))


def judged(prompts: Prompts, actor: Policy, judge: Judge, cfg: Cfg):
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    return judge.score(roll.tokens, roll.mask, roll.prompt_id)
'''


@pytest.fixture
def steps(tmp_path: Path) -> None:
    (tmp_path / "steps_with_mistakes.py").write_text(STEPS)
    (tmp_path / "broken_step.py").write_text("import math\nx = 1 / 0\n")
    (tmp_path / "half_step.py").write_text("def step(:\n")


def refused(penstock: Penstock, *words: str) -> str:
    said = penstock("run", *words)
    assert said.code == 2, said
    assert said.out == ""
    assert "Traceback" not in said.err
    assert said.err.startswith("penstock: ")
    assert not Path("runs").exists()
    return said.err.removeprefix("penstock: ").rstrip("\n")


def test_help_lists_the_commands(penstock: Penstock) -> None:
    said = penstock("--help")
    assert said.code == 0
    assert "run      train as" in said.out
    assert "graph    show" in said.out


def test_version(penstock: Penstock) -> None:
    assert penstock("--version").out == "penstock 0.1.0\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from penstock.launch.main import main; main(['--help']); "
        "print(sorted({'torch', 'transformers', 'hydra', 'pydantic', 'ray'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.splitlines()[-1] == "[]"


def test_an_unknown_command_is_refused_with_the_nearest_one(penstock: Penstock) -> None:
    said = penstock("rum")
    assert said.code == 2
    assert said.err == (
        "penstock: penstock has no command 'rum'; did you mean 'run'?\n"
        "    commands are: run, graph, plan, eval, export, profile, samples, scale, runs, watch, "
        "doctor\n"
    )


@pytest.mark.slow
def test_the_commands_help_names_groups_and_keys(penstock: Penstock) -> None:
    said = penstock("run", "--help")
    assert said.code == 0
    assert f"algorithm: {ALGORITHMS}\n" in said.out
    assert "max_lag: 0" in said.out


def test_cfg_job_prints_the_composition(penstock: Penstock) -> None:
    said = penstock("run", "--cfg", "job", "algorithm=ppo", "seed=3")
    assert said.code == 0
    assert "seed: 3" in said.out
    assert "ppo_step" in said.out
    assert list(Path().iterdir()) == []


REFUSED = {
    "algorithm.cfg.samplng.num_samples=4": (
        "there is no key 'algorithm.cfg.samplng'; did you mean 'algorithm.cfg.sampling'?\n"
        "    algorithm.cfg has: sampling, correction, epochs, num_minibatches, finished_only, "
        "divide_by_std, std_variance, std_eps, loss"
    ),
    "--cfg job sede=4": "there is no key 'sede'; did you mean 'seed'?\n<any>",
    "task.num_trian=4": (
        "a 'reasoning_gym' task has no option 'num_trian'; did you mean 'num_train'?<any>"
    ),
    "algorithm=gropo": (
        "there is no algorithm 'gropo'; did you mean 'grpo'?\n"
        f"    algorithm is one of: {ALGORITHMS}"
    ),
    "seed=[1": "'seed=[1' cannot be read: <any>",
    "algorithm=own algorithm.step=steps_with_mistakes:wrong_axes": (
        "steps_with_mistakes.py:24\n"
        "    return actor.train(ClippedPolicyLoss(), PolicyBatch(\n"
        "node 'actor.train', input 'batch.advantage': expected f32[sample, token~], got "
        "f32[sample]\n"
        "    'reward.score.out' was produced at steps_with_mistakes.py:23\n"
        "    one value per sample was given where one per token is needed; use an op such as "
        "broadcast_over_tokens(..., mask=...)"
    ),
    "algorithm=own algorithm.step=steps_with_mistakes:lagging schedule.max_lag=1": (
        "<any>'actor.train' may see samples up to 1 optimizer step(s) old (Schedule.max_lag=1) but "
        "reads no 'behavior_logprob'<any>"
    ),
    "algorithm=own algorithm.step=steps_with_mistakes:judged": (
        "judged has a role 'judge' (Judge) that is not provided\n"
        "    say who plays it: algorithm.roles.judge.worker=module:factory, a function that "
        "returns a worker or its spec"
    ),
    "task=file task.path=no/such.jsonl evaluation.num_prompts=0": (
        "there is no file 'no/such.jsonl'\n<any>"
    ),
    "model=folder model.folder=no/such": (
        "'model.folder': 'no/such' does not exist\n"
        "    give a local folder that save_pretrained wrote, or a model of a hub: model=org/name"
    ),
    "model=folder": "'model.folder' has no value yet\n    give it: model.folder=...",
    "resume=no/such": "'no/such' is not the folder of a run<any>",
    "algorithm.step=no_such_module:step": (
        "'algorithm.step': there is no module 'no_such_module'\n<any>"
    ),
    "algorithm.step=broken_step:step": (
        "<any>broken_step.py:2\n    x = 1 / 0\n    ZeroDivisionError: division by zero<any>"
    ),
    "algorithm.step=half_step:step": "<any>half_step.py:1\n    def step(:\n    SyntaxError: <any>",
    "algorithm.per_step.prompts=30 algorithm.cfg.sampling.num_samples=4 "
    "algorithm.cfg.num_minibatches=7": (
        "'actor.train' trains on 30 prompts x 4 samples = 120 rows per step, which 7 minibatches "
        "do not divide\n    choose algorithm.per_step.prompts or num_minibatches so that the rows "
        "divide evenly"
    ),
    "algorithm=sft executor=ray executor.groups.all=3 evaluation=null": (
        "<any>'evaluation': expected a mapping of keys, got null<any>"
    ),
    "algorithm=sft executor=ray executor.groups.all=3": "<any>the 3 ranks of group 'all'<any>",
    "algorithm=sft task.num_train=20 task.num_held_out=512": (
        "<any>but task 'chain_sum' has only 20<any>"
    ),
    "executor.groups.all=2": (
        "'executor.groups.all' is 2, but executor=in_process has one rank\n"
        "    set executor=ray, or 1"
    ),
    "algorithm.cfg.sampling.num_samples=many": (
        "'algorithm.cfg.sampling.num_samples': expected an integer, got the text 'many'\n"
        "    num_samples: Responses per prompt."
    ),
    "algorithm.before.sft.cfg.epochs=0": (
        "'algorithm.before.sft.cfg': epochs is 0; expected at least 1"
    ),
    "algorithm.roles.reward.options.time_limit_s=0.0": (
        "'algorithm.roles.reward.options': time_limit_s is 0.0; expected at least 0.001 and at "
        "most 86400"
    ),
}
"""What a run refuses, and what it says; "<any>" stands for any text."""


@pytest.mark.slow
@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_run_is_refused(penstock: Penstock, words: str) -> None:
    message = "(?s:.*)".join(map(re.escape, REFUSED[words].split("<any>")))
    assert re.fullmatch(message, refused(penstock, *words.split(" ")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["algorithm.cfg.sampling.max_new_tokens=125"],
            "'actor.generate' has prompts of up to 6 tokens with responses of up to 125, but the "
            "model of 'actor' has 128 positions\n    lower max_new_tokens (algorithm.cfg), or "
            "leave long prompts out: task.max_prompt_tokens",
        ),
        (
            ["algorithm.cfg.sampling.max_total_tokens=6"],
            "'actor.generate' has prompts of up to 6 tokens, and max_total_tokens is 6: none are "
            "left for a response\n    raise cfg.sampling.max_total_tokens, or leave long prompts "
            "out: task.max_prompt_tokens",
        ),
        (
            ["model.architecture.max_position_embeddings=8"],
            "'actor.train' has demos of up to 10 tokens, but the model of 'actor' has 8 positions\n"
            "    leave long rows out: task.max_prompt_tokens, task.max_response_tokens",
        ),
        (
            ["algorithm=sft", "task.max_response_tokens=123"],
            "'actor.generate' has prompts of up to 6 tokens with responses of up to 123, but the "
            "model of 'actor' has 128 positions\n    lower task.max_response_tokens, or leave "
            "long prompts out: task.max_prompt_tokens",
        ),
        (
            ["model.architecture.model_type=qwen7"],
            "'model.architecture.model_type' is 'qwen7', which transformers does not know; did you "
            "mean 'qwen3'?\n    give the model_type of a causal language model, such as qwen2",
        ),
    ],
)
def test_rows_longer_than_the_model_reaches(
    penstock: Penstock, words: list[str], message: str
) -> None:
    said = refused(penstock, *words)
    assert said[: len(message)] == message
