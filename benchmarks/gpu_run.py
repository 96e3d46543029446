"""Stages of `gpu.py` that run the engine: GRPO steps against the planner, and SmolLM2."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_case import SAMPLES, Bench, Figure, Scale, prompts_of
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.roles import Prompts, Reward, Sampling
from penstock.configs.plan_schema import ProfileConfig
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.launch.placement.machine import analytic_cpus
from penstock.launch.profile.profile import profile
from penstock.launch.run_dir.samples import read_samples
from penstock.launch.stages.checks import node_seconds
from penstock.planner.cost.constants import CPU_DEFAULTS, Constants
from penstock.planner.cost.engine_model import RoleEngines
from penstock.planner.inputs.cluster import ClusterSpec
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.inputs.workload import Lengths, Workload
from penstock.planner.plan.planner import plan_step
from penstock.planner.plan.prediction import Prediction
from penstock.workers.engines.registry import DEFAULT
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor

STEP_ERROR = 0.15
WARM_UP = 1
SMOLLM2_S = 540.0
PROFILE_S = 240.0
HERE = Path(__file__).resolve().parent
CPU_CURVE = HERE / "results" / "instructions_cpu_2026-11-22.json"

# --- steps of GRPO


class EvenReward(Reward):
    """The share of a response's tokens that are even: something that differs, and costs nothing."""

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        """See `Reward.score`."""
        even = (tokens % 2 == 0) & mask
        return even.sum(1).float() / mask.sum(1).clamp(min=1)


@dataclass(frozen=True)
class EvenRewardSpec:
    """Recipe for an `EvenReward`."""

    def build(self, context: WorkerContext) -> EvenReward:
        """Make the reward."""
        del context
        return EvenReward()


class Case:
    """A GRPO step of the larger model.

    Args:
        bench: The sizes.
    """

    def __init__(self, bench: Bench) -> None:
        sizes = self.sizes = bench.sizes
        self.bench, self.num_prompts = bench, sizes.step_prompts // 4
        self.response = sizes.decode_tokens
        self.rows = self.num_prompts * SAMPLES

    def graph(self) -> Graph:
        """The recorded step."""
        sampling = Sampling(num_samples=SAMPLES, max_new_tokens=self.response)
        return build(grpo_step, cfg=GRPO(sampling=sampling), name="grpo")

    def batch(self, step: int) -> Prompts:
        """Random prompts, other ones in every step."""
        prompt = prompts_of(self.sizes, self.num_prompts, seed=step)
        return Prompts(prompt=prompt, prompt_id=torch.arange(self.num_prompts))

    def run(self) -> tuple[list[float], dict[str, float]]:
        """Seconds of each timed step, and the median of each node."""
        graph, name = self.graph(), self.sizes.large
        actor = TorchPolicySpec(
            model=self.bench.model(name),
            end_ids=(self.sizes.models[name]["vocab_size"],),
            optimizer=OptimizerSpec(lr=1e-6),
        )
        placement = one_group(graph, device=self.sizes.device.partition(":")[0])
        steps: list[float] = []
        nodes: dict[str, list[float]] = {}
        workers = {"actor": actor, "reward": EvenRewardSpec()}
        with Engine(graph, placement, workers=workers, executor=InProcess()) as engine:
            begin_s = time.perf_counter()
            for result in engine.run({"prompts": self}, WARM_UP + self.sizes.steps):
                end_s = time.perf_counter()
                steps.append(end_s - begin_s)
                begin_s = end_s
                for node, seconds in node_seconds(result.spans).items():
                    nodes.setdefault(node, []).append(seconds)
        return steps[WARM_UP:], {n: statistics.median(s[WARM_UP:]) for n, s in nodes.items()}

    def predicted(self) -> Prediction | None:
        """What the planner says of it, with a calibration that is measured now."""
        sizes = self.sizes
        cluster, constants = _calibrated(sizes, self.bench.shape(sizes.large))
        shape = self.bench.shape(sizes.large)
        workload = Workload(
            num_prompts=self.num_prompts,
            samples_per_prompt=SAMPLES,
            prompt=Lengths.constant(sizes.prompt),
            response=Lengths.constant(self.response),
        )
        return plan_step(
            self.graph(),
            {"actor": shape, "reward": None},
            cluster,
            workload,
            max_lag=0,
            constants=constants,
            engines=RoleEngines(DEFAULT.planned),
        ).prediction


def _calibrated(sizes: Scale, shape: ModelShape) -> tuple[ClusterSpec, Constants]:
    """The GPU, and what our engine gets out of it, measured; of a CPU what nobody has measured."""
    if not sizes.is_cuda:
        cluster = analytic_cpus()
        (node,) = cluster.node_groups
        one = node.model_copy(update={"devices_per_node": 1})
        return cluster.model_copy(update={"node_groups": (one,)}), CPU_DEFAULTS
    found = profile(
        ProfileConfig(
            device="cuda",
            num_ranks=1,
            dispatch="in_process",
            widths=list(sizes.widths),
            dtypes=["bfloat16"],
            seconds=0.3,
            deadline_s=PROFILE_S,
        )
    )
    return found.cluster, found.constants_for([shape])


def step(bench: Bench) -> Iterator[Figure]:
    """A GRPO step: how long it takes, and whether that was predicted."""
    case, name = Case(bench), bench.sizes.large
    predicted = case.predicted()
    if predicted is None:
        raise RuntimeError("the planner predicts nothing")
    steps, nodes = case.run()
    measured_s = statistics.median(steps)
    details = {
        "predicted_s": predicted.step_time_s,
        "measured_s": measured_s,
        "steps_s": steps,
        "predicted_nodes_s": dict(predicted.durations_s),
        "measured_nodes_s": nodes,
    }
    yield Figure(
        name=f"predicted step time, error, {name}",
        value=abs(predicted.step_time_s / measured_s - 1),
        goal=STEP_ERROR,
        most=True,
        details=details,
    )
    ours = case.rows / measured_s
    yield Figure(name=f"GRPO, {name}", value=ours, unit="samples/s", details={"rows": case.rows})


# --- SmolLM2


def smollm2(bench: Bench) -> Iterator[Figure]:
    """The run of `make smollm2`: the same gain as on a CPU, and in what time."""
    name = "points gained by `make smollm2`, kinds of instruction that were trained on"
    if bench.smollm2 is None:
        yield Figure(name=name, open="no folder of the model was given: --smollm2 FOLDER")
        return
    sizes = bench.sizes
    with tempfile.TemporaryDirectory() as runs:
        words = [
            *("model=folder", f"model.folder={bench.smollm2}", "experiment=smollm2"),
            *("tracker=none", f"runs={runs}", f"executor.device={sizes.device.partition(':')[0]}"),
            *(() if sizes.is_cuda else TINY_SMOLLM2),
        ]
        begin_s = time.perf_counter()
        command = [sys.executable, "-m", "penstock.launch.main", "run", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SMOLLM2_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the run failed: {done.stderr[-2000:]}")
        took_s = time.perf_counter() - begin_s
        (file,) = Path(runs).glob("*/summary.json")
        summary = json.loads(file.read_text())
        curve = _rewards(file.parent)
    low, high = _cpu_points()
    gained = 100 * summary["suites"]["seen_kinds"]["change"]
    yield Figure(
        name=name,
        value=gained,
        unit="points",
        goal=low,
        details={
            "on_cpus_by_seed": [low, high],
            "interval_95": [100 * x for x in summary["suites"]["seen_kinds"]["interval_95"]],
            "rewards": curve,
            "command_s": took_s,
            "samples_per_s": summary["samples_per_s"],
        },
    )


TINY_SMOLLM2 = ("algorithm.num_steps=1", "evaluation.num_prompts=8", "algorithm.per_step.prompts=2")


def _rewards(run: Path) -> list[float]:
    """Mean reward of each step."""
    by_step: dict[int, list[float]] = {}
    for row in read_samples(run, None):
        by_step.setdefault(row.step, []).append(row.reward or 0.0)
    return [statistics.fmean(by_step[step]) for step in sorted(by_step)]


def _cpu_points() -> tuple[float, float]:
    """The lowest and highest gain of the seeds that ran on a CPU, less and more its half-width."""
    seeds = json.loads(CPU_CURVE.read_text())["seeds"]["weights"]
    ends = [seed["seen_kinds"]["interval_95_points"] for seed in seeds]
    return min(low for low, _ in ends), max(high for _, high in ends)
