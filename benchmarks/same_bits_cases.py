"""The cases of `same_bits.py`: commands, each of which is a short run or what follows on one.

In a word `{model}` is the folder that the case `BASE` left, `{run}` the run of the commands before,
`{output}` an empty folder, `{data}` the folder of `rows`, `{judge}` the address of a judge.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import yaml
from penstock import configs
from penstock.launch.main import main as penstock

CONFIGS = Path(str(configs.__file__)).parent
BASE, MAIN = "the model of the others", "make run"
ROWS = {"prompts": 16, "pairs": 16, "demos": 16, "rows": 8}
"""Rows of each kind in a step of a short run."""
SHORT = (
    "tracker=none",
    "executor.num_threads=1",
    "task.num_train=400",
    "task.num_held_out=32",
    "evaluation.num_prompts=32",
    "checkpoint_every=2",
)
MODEL = (
    "algorithm=sft",
    "algorithm.num_steps=30",
    "algorithm.per_step.demos=64",
    "evaluation.num_prompts=64",
    *SHORT[:2],
)
"""Enough that rewards differ, so that gradients are not zero."""
SMALL = (
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_hidden_layers=2",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=2",
)
TALKS = ("algorithm.before.sft.num_steps=30", "algorithm.cfg.sampling.num_samples=4", *SMALL)
"""Conversations begin from random weights: the default model has no characters for them."""
PLACES = {
    "env_ppo": ("task=cartpole", "model=mlp"),
    "a2c": ("task=cartpole", "model=mlp"),
    "impala": ("task=cartpole", "model=mlp"),
    "dqn": ("task=cartpole", "model=mlp", "algorithm.num_steps=40"),
    "population": ("task=cartpole", "model=mlp", "algorithm.per_step.rows=16"),
    "mappo": ("task=cover", "model=mlp", "algorithm.per_step.rows=12"),
    "self_play": ("task=tic_tac_toe", "model=mlp"),
    "agent_grpo": ("task=calculator", "model=tiny", *TALKS),
    "agent_ppo": ("task=calculator", "model=tiny", *TALKS),
    "archer": ("task=calculator", "model=tiny", *TALKS),
    "refuel": ("task=calculator", "model=tiny", *TALKS[:1], *SMALL),
}
"""Where an algorithm runs that is not for problems of the default task, and what it needs there."""
OTHER_SIZES = {"dapo": ("algorithm.per_step.prompts=48",)}
"""What the rows of `ROWS` do not fit."""

APART = ("executor=ray_split",)
REWARD = "algorithm.roles.reward"
FILE = (
    "task=file",
    "task.path={data}/sums.jsonl",
    "task.num_held_out=8",
    "task.max_response_tokens=5",
    "evaluation.num_prompts=8",
)
OWN = (
    "task=own",
    "task.kind=same_bits_workers:DoublesSpec",
    "task.max_response_tokens=5",
    "evaluation.num_prompts=8",
)
CALLS = "{kind: file, path: '{data}/calls.jsonl', response_field: response, num_held_out: 8}"
TOOLS = (
    "task=tools",
    f"task.task={CALLS}",
    "task.tells_calls=true",
    "task.max_turns=2",
    "task.max_response_tokens=80",
    "task.max_total_tokens=300",
    "model.architecture.max_position_embeddings=304",
    "algorithm.roles.agent.options.calls=hermes",
    "algorithm.before.sft.optimizer.lr=5e-3",
    "algorithm.before.sft.num_steps=60",
    "algorithm.num_steps=2",
    "algorithm.per_step.prompts=4",
    "algorithm.cfg.sampling.temperature=0.5",
    "evaluation.num_prompts=4",
)
OF_GRPO = {
    "grpo on Ray": ("executor=ray",),
    "grpo two ranks": ("executor=ray", "executor.groups={train: 2}"),
    "grpo one step off": (*APART, "schedule=one_step_off"),
    "grpo FSDP": ("engine=fsdp", "rollout=torch", *APART),
    "grpo FSDP two ranks": (
        "engine=fsdp",
        "rollout=torch",
        "executor=ray",
        "executor.groups={train: 2, rollout: 1}",
        "executor.nodes={actor.generate: rollout}",
    ),
    "grpo Megatron vLLM": (
        "engine=megatron",
        "rollout=vllm",
        *APART,
        "rollout.options={max_decode_rows: 32}",
    ),
    "streaming": (*APART, "schedule=streaming", "schedule.streaming=4"),
    "segments": (*APART, "schedule.max_lag=1", "schedule.segment_tokens=2"),
    "mixture": (
        "task=mixture",
        "task.tasks={sums: chain_sum, own: {kind: file, path: '{data}/sums.jsonl', "
        "num_held_out: 8}}",
        "task.weights={own: 0.25}",
        "task.max_response_tokens=5",
    ),
    "own task": OWN,
    "own task in the pool": (*OWN, "+task.pooled=true"),
    "own reward": (f"{REWARD}.worker=same_bits_workers:EvenTokens",),
    "own reward in the pool": (*FILE, "task.reward=same_bits_parts:closeness"),
    "judge": (f"{REWARD}.worker=judge", f"{REWARD}.options={{url: '{{judge}}', model: j}}"),
    "mixture of rewards": (
        *FILE,
        f"{REWARD}.worker=mixture",
        f"{REWARD}.options.parts={{right: {{worker: exact, weight: 1}}, close: {{worker: rule, "
        "weight: 0.5, options: {verifier: 'same_bits_parts:closeness'}}}",
    ),
    "evaluations": ("evaluation.every=1", "evaluation.keep_best=accuracy"),
}
"""What is added to the short run of `grpo`."""
OF_AGENT_GRPO = {
    "tools": (
        *TOOLS,
        "task.tools={own: {kind: functions, functions: ['same_bits_parts:add'], "
        "time_limit_s: 300}}",
    ),
    "MCP": (
        *TOOLS,
        f"task.tools={{own: {{kind: mcp, command: ['{sys.executable}', "
        f"'{Path(__file__).with_name('same_bits_parts.py')}'], deterministic: true, "
        "start_limit_s: 300, time_limit_s: 300}}",
    ),
    "program": (
        "task=program",
        "task.task=chain_sum",
        "task.function=same_bits_parts:asking_twice",
        "task.deterministic=true",
        "task.max_response_tokens=6",
        "task.max_total_tokens=64",
        "algorithm.per_step.prompts=8",
        "evaluation.num_prompts=4",
    ),
}
"""What is added to the short run of `agent_grpo`."""
LORA = ("model.lora.rank=4", "algorithm.optimizer.lr=1e-3")
SERVED = (
    "executor=ray",
    "task.group_size=2",
    "executor.groups={train: 1, acting: 2, policy: 1}",
    "executor.nodes={env: acting}",
    "executor.served={acting: {actor: policy}}",
)
OTHERS = {
    "LoRA": "reference_grpo",
    "LoRA from a folder": "reference_grpo",
    "served acting": "env_ppo",
    "resume": "grpo",
    "export": "grpo",
    "eval": "grpo",
    "SmolLM2": "",
}
"""Further cases, and the algorithm whose short run they begin with."""
SMOLLM2 = (
    "experiment=smollm2",
    "seed=0",
    "tracker=none",
    "executor.num_threads=1",
    "algorithm.num_steps=3",
    "algorithm.per_step.prompts=4",
    "algorithm.cfg.sampling.num_samples=4",
    "task.num_train=64",
    "task.num_held_out=8",
    "task.num_unseen=8",
    "task.max_response_tokens=16",
    "evaluation.num_prompts=4",
    "evaluation.num_examples=1",
)


def _composed(base: list[str]) -> dict[str, Any]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        penstock(["run", *base, "--cfg", "job"])
    return yaml.safe_load(text.getvalue())["algorithm"]


def short_words(algorithm: str) -> list[str]:
    """Give the command line of an algorithm's short run."""
    where = PLACES.get(algorithm, ("model=folder", "model.folder={model}"))
    apart = algorithm in PLACES
    talks = where[0] == "task=calculator"
    base = [f"algorithm={algorithm}", *where[:2]]
    base += [] if apart else ["model.dtype=float32"]  # on any machine
    composed = _composed([word.replace("{model}", "absent") for word in base])
    words = [*base, "algorithm.num_steps=4", *SHORT[:2]]
    words += [] if apart and not talks else SHORT[2:]
    words += ["algorithm.optimizer.warmup_calls=0"] * bool(
        composed["optimizer"].get("warmup_calls", 0)
    )
    words += [f"algorithm.per_step.{kind}={ROWS[kind]}" for kind in composed["per_step"]]
    for name, stage in composed.get("before", {}).items():
        before = f"algorithm.before.{name}"
        words.append(f"{before}.num_steps=4")
        words += [f"{before}.per_step.{kind}={ROWS[kind]}" for kind in stage["per_step"]]
        words.append(f"{before}.optimizer.warmup_calls=0")
    return _last_of_each([*words, *where[2:], *OTHER_SIZES.get(algorithm, ())])


def _last_of_each(words: list[str]) -> list[str]:
    return list({word.partition("=")[0]: word for word in words}.values())


def case_names() -> list[str]:
    """Give the names of all cases."""
    algorithms = sorted(path.stem for path in (CONFIGS / "algorithm").glob("*.yaml"))
    algorithms.remove("own")  # it has no step of its own
    return [BASE, MAIN, *algorithms, *OF_GRPO, *OF_AGENT_GRPO, *OTHERS]


def commands_of(name: str) -> list[list[str]]:
    """Give the commands of a case, one after another."""
    if name == MAIN:
        return [["run", "seed=0"]]
    if name == BASE:
        return [["run", *MODEL]]
    if name == "SmolLM2":
        return [["run", *SMOLLM2]]
    words = {**OF_GRPO, **OF_AGENT_GRPO}.get(name, ())
    algorithm = OTHERS.get(name) or ("grpo" if name in OF_GRPO else name)
    algorithm = "agent_grpo" if name in OF_AGENT_GRPO else algorithm
    words = SERVED if name == "served acting" else words
    words = LORA if name.startswith("LoRA") else words
    base = short_words(algorithm)
    if any(word.startswith("task=") for word in words):
        base = [word for word in base if not word.startswith("task")]
    run = ["run", *_last_of_each([*base, *words])]
    adapter = ["export", "run={run}", "adapter=true", "output={output}/adapter"]
    second = [word for word in run if not word.startswith("model.lora")]
    return {
        "LoRA": [run, adapter],
        "LoRA from a folder": [
            run,
            adapter,
            [*second, "model.lora.folder={output}/adapter", "seed=1"],
        ],
        "resume": [
            [*run, "algorithm.num_steps=2"],
            ["run", "resume={run}", "algorithm.num_steps=4"],
        ],
        "export": [run, ["export", "run={run}", "output={output}/model"]],
        "eval": [run, ["eval", "run={run}", "output={output}/eval.json"]],
    }.get(name, [run])
