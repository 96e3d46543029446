"""Stages of `gpu.py` that are Penstock's own commands, each in processes of its own.

A command that fails is an open figure with its last words, and the next one runs all the same.
What is timed runs alone. Where the question is only whether a path works on the device, small
commands run side by side.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from gpu_case import Bench, Figure

KILLS = 2
KILL_RESUME = Path(__file__).resolve().parent / "kill_resume.py"
SMALL = (
    *("task.num_train=64", "algorithm.num_steps=3", "evaluation.num_prompts=16"),
    *("algorithm.per_step.prompts=8", "algorithm.before.sft.num_steps=2"),
    "algorithm.before.sft.per_step.demos=8",
)
APART = (
    *("rollout=torch", "executor.groups.train=1", "executor.groups.rollout=1"),
    "+executor.nodes={actor.generate: rollout}",
)
"""Generation and training on groups of their own, in one process and on one device."""
REWARD_MODEL = tuple(
    f"algorithm.before.reward_modelling.{key}" for key in ("num_steps=40", "per_step.pairs=8")
)
AGENTS = ("algorithm=agent_grpo", "task=calculator")
PATHS: Mapping[str, Sequence[str]] = {
    "engine=fsdp": (*SMALL, "engine=fsdp", "rollout=torch"),
    "engine=megatron": (*SMALL, "engine=megatron", "rollout=torch"),
    "Gemma, through Hugging Face": (*SMALL, "model.architecture.model_type=gemma3_text"),
    "OLMo, through Hugging Face": (*SMALL, "model.architecture.model_type=olmo2"),
    "schedule=streaming": (*SMALL, *APART, "schedule=streaming"),
    "schedule=in_flight": (*SMALL, *APART, "schedule=in_flight"),
    "schedule=one_step_off": (*SMALL, *APART, "schedule=one_step_off"),
    "adapters": (*SMALL, "model.lora.rank=8"),
    "PPO, with a critic": (*SMALL, "algorithm=ppo", *REWARD_MODEL),
    "a conversation": (*SMALL, *AGENTS),
}
"""What had not been seen on a GPU, or not since the code was divided anew -> its options."""
SMALL_MODEL = ("model.tokenizer=task", "algorithm.roles.actor.start=model")
PLANNED = (
    *("model=qwen2.5-0.5b", *SMALL_MODEL, "engine=torch", "rollout=same"),
    *("task.max_response_tokens=24", "algorithm.per_step.prompts=16"),
)
RESPONSES = "{tokens: [8, 24], weights: [0.6, 0.4]}"
"""Of a model with random weights, which ends a response at any token: 15 of 24 on average."""
TINY_MODEL = tuple(
    f"model.architecture.{key}=64" for key in ("hidden_size", "intermediate_size")
) + ("model.architecture.num_attention_heads=2", "model.architecture.num_key_value_heads=2")


def runs(bench: Bench) -> Iterator[Figure]:
    """Time the steps of the default run, on the device and on two cores."""
    steps = 30 if bench.sizes.is_cuda else 2
    few = ("algorithm.before.sft.num_steps=20", "evaluation.num_prompts=128")
    yield _ran(bench, "the default run", (*few, f"algorithm.num_steps={steps}"))
    cores = ("executor.device=cpu", "executor.num_threads=2", "algorithm.num_steps=3")
    yield _ran(bench, "the default run on two cores", (*few, *cores))


def paths(bench: Bench) -> Iterator[Figure]:
    """Whether small runs of each path end, and a run that was killed comes to the same weights.

    All run at the same time, so their seconds mean little.
    """
    with ThreadPoolExecutor(len(PATHS) + 1) as pool:
        calls = [pool.submit(_ran, bench, name, words) for name, words in PATHS.items()]
        for call in as_completed([*calls, pool.submit(_killed, bench)]):
            yield call.result()


def _killed(bench: Bench) -> Figure:
    """Kill a run with SIGKILL in the middle and resume it, with `deterministic=true`."""
    name = "runs that were killed and came to the same weights"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "kills.json"
        words = ["--kills", str(KILLS), "--json", str(file), "engine.options.deterministic=true"]
        words.append(f"executor.device={_device(bench)}")
        failed, took_s = _command([str(KILL_RESUME), *words], bench.left_s)
        if not file.exists():
            return Figure(name=name, open=failed)
        found = json.loads(file.read_text())
    return Figure(
        name=name,
        value=float(found["same"]),
        goal=float(KILLS),
        details={"command_s": took_s, **found},
    )


def agents(bench: Bench) -> Iterator[Figure]:
    """Time conversations with a calculator, with a small model and with a large one's layers."""
    some = ("algorithm.num_steps=4", "evaluation.num_prompts=16", "task.num_train=640")
    yield _ran(bench, "conversations", (*AGENTS, *some, "algorithm.before.sft.num_steps=20"))
    shape = ("model=qwen2.5-0.5b", *SMALL_MODEL)
    shape += () if bench.sizes.is_cuda else TINY_MODEL
    yield _ran(bench, "conversations, qwen2.5-0.5b", (*AGENTS, *some, *shape))


def plan(bench: Bench) -> Iterator[Figure]:
    """Profile the device, plan a run with what was found, and carry the plan out."""
    sizes, device = bench.sizes, _device(bench)
    folder = _folder(bench, "plan")
    calibration, file = folder / "calibration.json", folder / "plan.json"
    widths = ",".join(str(width) for width in sizes.widths or (64,))
    words = ["profile", f"device={device}", "dispatch=in_process", "num_ranks=1",
             f"widths=[{widths}]", f"seconds={0.3 if sizes.is_cuda else 0.02}",
             f"deadline_s={bench.left_s}", f"output={calibration}"]  # fmt: skip
    failed, took_s = _command(["-m", "penstock.launch.main", *words], bench.left_s)
    if failed:
        yield Figure(name="penstock profile", open=failed)
        return
    found = json.loads(calibration.read_text())
    errors = [abs(one["predicted_s"] / one["measured_s"] - 1) for one in found["calls"]]
    name = "penstock profile: mean error over its calls"
    details = {"command_s": took_s, **found}
    yield Figure(name=name, value=sum(errors) / len(errors), details=details)
    own = PLANNED if sizes.is_cuda else (*PLANNED, *TINY_MODEL)
    words = ["plan", *own, "cluster=measured", f"plan.calibration={calibration}", f"output={file}",
             "workload.prompt=null", f"workload.response={RESPONSES}"]  # fmt: skip
    failed, took_s = _command(["-m", "penstock.launch.main", *words], bench.left_s)
    if failed:
        yield Figure(name="penstock plan", open=failed)
        return
    yield Figure(name="penstock plan", value=took_s, unit="s")
    few = ("algorithm.num_steps=6", "evaluation.num_prompts=16", f"placement={file}")
    yield _ran(bench, "a run by its plan", (*own, *few))


def _ran(bench: Bench, name: str, words: Sequence[str]) -> Figure:
    """Median seconds of a step of `penstock run`, or why it failed."""
    folder = _folder(bench, name)
    command = [
        *("-m", "penstock.launch.main", "run", "tracker=none", f"runs={folder}"),
        *(f"executor.device={_device(bench)}", *words),
    ]
    failed, took_s = _command(command, bench.left_s)
    what = f"a step: {name}"
    summaries = sorted(folder.glob("*/summary.json"))
    if failed or not summaries:
        return Figure(name=what, open=failed or "no summary", details={"command": command[2:]})
    found = json.loads(summaries[-1].read_text())
    lines = (summaries[-1].parent / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    kept = ("samples_per_s", "predicted_step_time_s", "nodes", "stage_times_s", "weights_sha256",
            "peak_memory_bytes", "suites", "warnings", "not_reproducible")  # fmt: skip
    details = {
        "command": command[2:],
        "command_s": took_s,
        "steps_s": [step["run/step_time_s"] for step in steps],
        "new_tokens": [v for step in steps for k, v in step.items() if k.endswith("/new_tokens")],
        **{key: found[key] for key in kept},
    }
    return Figure(name=what, value=found["step_time_s"], unit="s", details=details)


def _command(words: Sequence[str], limit_s: float) -> tuple[str, float]:
    """Run a command of Python's; why it failed, or nothing, and its seconds."""
    began_s = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        last = (error.stdout or b"").decode(errors="replace")[-1000:]
        return f"it took more than {limit_s:.0f} s; it said last: {last}", limit_s
    took_s = time.perf_counter() - began_s
    print(f"-- {took_s:.1f} s:", *words, done.stdout[-1500:], sep="\n   ", flush=True)
    return (done.stdout + done.stderr)[-1500:] if done.returncode else "", took_s


def _folder(bench: Bench, name: str) -> Path:
    base = bench.runs or Path(tempfile.mkdtemp(prefix="penstock-gpu-"))
    made = base / "".join(c if c.isalnum() else "-" for c in name)
    made.mkdir(parents=True, exist_ok=True)
    return made


def _device(bench: Bench) -> str:
    return bench.sizes.device.partition(":")[0]
