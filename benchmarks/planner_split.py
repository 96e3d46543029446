"""Whether a split PPO on Ray is faster than the colocated one exactly when the planner says so.

Two steps on two ranks of this machine, each placed both ways: actor and reference on one rank with
critic and reward on the other, and everything on both ranks, data-parallel. In the first step two
large models take many optimizer steps on few rows, so sharing rows costs more than it brings; in
the second small models take one step on many rows. `penstock profile` measures the machine first;
then every placement is predicted and run, the two of a case taking turns step by step.

Ends with exit code 1 if the planner names the wrong placement, or if a step time is predicted with
an error above 20 %. Needs a machine that does nothing else.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench import parser, report, table
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.roles import Prompts, Sampling
from penstock.configs.plan_schema import ProfileConfig
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.launch.profile.profile import profile
from penstock.launch.profile.show import calibration_text
from penstock.launch.stages.checks import node_seconds
from penstock.planner.cost.calibration import Calibration
from penstock.planner.cost.engine_model import RoleEngines
from penstock.planner.inputs.model_shape import ModelShape, shape_of
from penstock.planner.inputs.workload import Lengths, Workload
from penstock.planner.plan.plan import Plan
from penstock.planner.plan.planner import plan_step
from penstock.planner.search.pins import Pins
from penstock.workers.engines.torch_engine.declaration import TORCH
from penstock.workers.engines.torch_engine.specs import (
    TorchPolicySpec,
    TorchRewardModelSpec,
    TorchValueSpec,
)
from penstock.workers.executors.on_ray.executor import RayExecutor, shutdown_ray
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec

VOCABULARY = 64
MOST_ERROR = 0.2
WARM_UP = 2
PINS: Mapping[str, Pins] = {
    "split": Pins(
        together=(("actor", "actor.generate", "ref"), ("critic", "reward")),
        apart=(("actor", "critic"),),
    ),
    "colocated": Pins(together=(("actor", "actor.generate", "ref", "critic", "reward"),)),
}


@dataclass(frozen=True)
class Case:
    """A PPO step.

    Attributes:
        name: What the tables call it.
        width: Hidden size of all four models.
        num_layers: Of each.
        num_prompts: With one response each.
        num_tokens: Of a prompt, and of a response.
        epochs: Optimizer steps of actor and critic, each on all rows.
    """

    name: str
    width: int
    num_layers: int
    num_prompts: int
    num_tokens: int
    epochs: int

    @property
    def architecture(self) -> dict[str, Any]:
        """Of all four models; heads of 64."""
        heads = max(1, self.width // 64)
        return {
            "model_type": "qwen2",
            "vocab_size": VOCABULARY,
            "hidden_size": self.width,
            "intermediate_size": 3 * self.width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 4 * self.num_tokens,
            "tie_word_embeddings": True,
        }

    @property
    def shape(self) -> ModelShape:
        """The same for the planner."""
        return shape_of(self.architecture, name=f"width {self.width}", dtype="float32")

    @property
    def workload(self) -> Workload:
        """Rows and tokens of a step."""
        return Workload(
            num_prompts=self.num_prompts,
            samples_per_prompt=1,
            prompt=Lengths.constant(self.num_tokens),
            response=Lengths.constant(self.num_tokens),
        )

    def graph(self) -> Graph:
        """The recorded step."""
        sampling = Sampling(num_samples=1, max_new_tokens=self.num_tokens)
        return build(ppo_step, cfg=PPO(sampling=sampling, epochs=self.epochs), name="ppo")

    def workers(self) -> dict[str, Any]:
        """All four roles; no token ends a response, so all have their full length."""
        model, optimizer = ModelSpec(architecture=self.architecture), OptimizerSpec(lr=1e-5)
        return {
            "actor": TorchPolicySpec(model=model, eos_token_id=VOCABULARY, optimizer=optimizer),
            "critic": TorchValueSpec(model=model, optimizer=optimizer),
            "ref": TorchPolicySpec(model=model, eos_token_id=VOCABULARY),
            "reward": TorchRewardModelSpec(model=model),
        }

    def batch(self, step: int) -> Prompts:
        """Random prompts, other ones in every step."""
        random = torch.Generator().manual_seed(step)
        size = (self.num_prompts, self.num_tokens)
        return Prompts(
            prompt=torch.randint(0, VOCABULARY, size, generator=random),
            prompt_id=torch.arange(self.num_prompts),
        )


CASES = (
    Case("many steps on few rows", 512, 4, num_prompts=4, num_tokens=16, epochs=12),
    Case("one step on many rows", 256, 4, num_prompts=64, num_tokens=32, epochs=1),
)


@dataclass
class Measured:
    """One placement of a case, as it ran."""

    plan: Plan
    steps_s: list[float]
    nodes_s: dict[str, list[float]]

    @property
    def predicted_s(self) -> float:
        """Of a step."""
        assert self.plan.prediction is not None
        return self.plan.prediction.step_time_s

    @property
    def measured_s(self) -> float:
        """Median of the steps."""
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1.0

    def as_data(self) -> dict[str, Any]:
        """For the result file."""
        assert self.plan.prediction is not None
        predicted = self.plan.prediction.durations_s
        return {
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error": self.error,
            "steps_s": self.steps_s,
            "groups": {group.name: list(group.devices) for group in self.plan.groups},
            "nodes": {
                name: {"predicted_s": predicted.get(name), "measured_s": statistics.median(taken)}
                for name, taken in self.nodes_s.items()
            },
        }


def planned(case: Case, calibration: Calibration, pins: Pins | None) -> Plan:
    """The best plan of a case on the measured machine, with what is pinned."""
    models = dict.fromkeys(case.workers(), case.shape)
    return plan_step(
        case.graph(),
        models,
        calibration.cluster,
        case.workload,
        max_lag=0,
        constants=calibration.constants_for(models.values()),
        engines=RoleEngines(TORCH.planned),
        pins=pins,
    )


def run(case: Case, plans: Mapping[str, Plan], threads: int, num_steps: int) -> dict[str, Measured]:
    """Run all placements of a case, a step of each in turn."""
    found = {name: Measured(plan, [], {}) for name, plan in plans.items()}
    engines = {
        name: Engine(
            (graph := case.graph()),
            plan.placement(graph),
            workers=case.workers(),
            executor=RayExecutor(num_threads=threads),
        )
        for name, plan in plans.items()
    }
    total = num_steps + WARM_UP
    try:
        streams = {name: e.run({"prompts": case}, total) for name, e in engines.items()}
        for step in range(total):
            for name, stream in streams.items():
                begin = time.perf_counter()
                result = next(stream)
                taken = time.perf_counter() - begin
                if step >= WARM_UP:
                    found[name].steps_s.append(taken)
                    for node, seconds in node_seconds(result.spans).items():
                        found[name].nodes_s.setdefault(node, []).append(seconds)
    finally:
        for engine in engines.values():
            engine.close()
    return found


def compared(case: Case, calibration: Calibration, num_steps: int) -> dict[str, Any]:
    """Predict and run one case both ways, and print it."""
    plans = {name: planned(case, calibration, pins) for name, pins in PINS.items()}
    found = run(case, plans, calibration.num_threads, num_steps)
    predicted = min(found, key=lambda name: found[name].predicted_s)
    measured = min(found, key=lambda name: found[name].measured_s)
    free = planned(case, calibration, None)
    print(f"\n{case.name}: {predicted} should be faster, {measured} is")
    rows = [
        [name, f"{one.predicted_s:.3f}", f"{one.measured_s:.3f}", f"{one.error:+.1%}"]
        for name, one in found.items()
    ]
    print(table(["placement", "predicted s", "measured s", "error"], rows))
    names = list(found[predicted].nodes_s)
    data = {name: one.as_data() for name, one in found.items()}
    print(table(["node", *(f"{p} {what}" for p in data for what in ("predicted", "measured"))], [
        [node, *(
            "-" if (value := data[p]["nodes"].get(node, {}).get(f"{what}_s")) is None
            else f"{value:.3f}"
            for p in data for what in ("predicted", "measured")
        )]
        for node in names
    ]))  # fmt: skip
    assert free.prediction is not None
    return {
        "case": case.name,
        "placements": data,
        "faster_predicted": predicted,
        "faster_measured": measured,
        "sign_agrees": predicted == measured,
        "max_abs_error": max(abs(one.error) for one in found.values()),
        "free_choice": {
            "groups": {group.name: list(group.devices) for group in free.groups},
            "predicted_s": free.prediction.step_time_s,
        },
    }


def main() -> int:
    """Measure the machine, then both cases."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--calibration", type=Path, metavar="FILE", help="do not measure again")
    options.add_argument("--steps", type=int, default=8, help="steps of each placement")
    args = options.parse_args()
    load = os.getloadavg()[0]
    if args.calibration is not None:
        calibration = Calibration.read(args.calibration)
    else:
        calibration = profile(ProfileConfig(num_ranks=2, num_threads=1))
    print(calibration_text(calibration))
    torch.set_num_threads(1)
    cases = [compared(case, calibration, args.steps) for case in CASES]
    shutdown_ray()
    agrees = all(case["sign_agrees"] for case in cases)
    worst = max(case["max_abs_error"] for case in cases)
    print(f"\nsigns agree: {'yes' if agrees else 'NO'}; largest error of a step time: {worst:.1%}")
    if load > 1:
        print(f"the load was {load:.1f} at the start: on a busy machine no time means anything")
    result = {
        "cases": cases,
        "signs_agree": agrees,
        "max_abs_error": worst,
        "load_at_start": load,
        "calibration": calibration.model_dump(mode="json"),
    }
    report(result, args.json)
    return 0 if agrees and worst <= MOST_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())
