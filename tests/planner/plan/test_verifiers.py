"""Steps whose responses are verified on cores: planned with the models, by the same search."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.roles import Sampling
from penstock.dataflow import build
from penstock.dataflow.errors import PlanError
from penstock.planner.cost.calibration import GPU_DEFAULTS
from penstock.planner.cost.verification import Verifier
from penstock.planner.inputs.calls import Lengths, Workload, calls_of
from penstock.planner.inputs.cluster import ClusterSpec, Mesh
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.inputs.task_profile import ExecutorProfile, TaskProfile, VerifierProfile
from penstock.planner.plan.plan import Plan
from penstock.planner.plan.planner import plan_step
from penstock.planner.plan.simulate import simulate_plan
from penstock.planner.search.option_table import ModelTable, call_nodes
from penstock.planner.search.options import CallNode, Option
from penstock.planner.search.pins import Pins

from ..hand_made import h100
from ..search.brute_force import all_plans
from ..shapes import llama, model_of

GRPO_GRAPH = build(grpo_step, cfg=GRPO(sampling=Sampling(num_samples=8)))
TINY = model_of("tiny", 128, 4, 4, 4, 384)


def profile(*item_s: float, waits: float = 0.0, **fields: object) -> TaskProfile:
    """A profile of a verifier whose responses take these seconds."""
    found = {
        "item_s": sorted(item_s),
        "item_cpu_s": (1.0 - waits) * sum(item_s) / len(item_s),
        "most": 256,
        **fields,
    }
    return TaskProfile(
        setting={},
        rows={},
        loops={},
        calls={},
        verifiers={"reward.score": VerifierProfile.model_validate(found)},
        executor=ExecutorProfile(name="ray", call_s=0.0),
        cores=8,
        machine="a machine of eight cores",
        date="2026-11-28",
    )


def cluster(devices: int, cores: int, nodes: int = 1) -> ClusterSpec:
    made = h100(nodes, devices)
    (node,) = made.node_groups
    own = node.model_copy(update={"cores_per_node": cores})
    return made.model_copy(update={"node_groups": (own,)})


def plan(
    on: ClusterSpec, task: TaskProfile | None, lag: int = 0, model: ModelShape = TINY,
    num_prompts: int = 8, **more: object,
) -> Plan:  # fmt: skip
    return plan_step(
        GRPO_GRAPH,
        {"actor": model, "reward": None},
        on,
        workload(num_prompts),
        max_lag=lag,
        constants=GPU_DEFAULTS,
        task=task,
        **more,  # pyright: ignore[reportArgumentType] - as the test likes
    )


def workload(num_prompts: int) -> Workload:
    return Workload(
        num_prompts=num_prompts, prompt=Lengths.constant(64), response=Lengths.constant(128)
    )


@dataclass(frozen=True)
class EveryNumber:
    """A table in which a verifier has an option for every number of processes."""

    models: ModelTable
    verifier: Verifier
    lagged: bool

    def options(
        self, call_group: str, mesh: Mesh, *, beside: tuple[str, ...] = (), lagged: bool = False
    ) -> Sequence[Option]:
        one = self.verifier
        if call_group != one.name:
            return self.models.options(call_group, mesh, beside=beside, lagged=self.lagged)
        cores, ranks = mesh.cores(lagged=self.lagged), min(mesh.num_devices, one.num_rows)
        return [
            Option({one.name: one.seconds(ranks, number, cores)}, 0, {one.name: 0}, {})
            for number in range(1, -(-one.num_rows // ranks) + 1)
        ]


@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_what_looking_at_everything_finds(seed: int) -> None:
    rng = random.Random(seed)
    devices, nodes = rng.choice([(1, 1), (2, 1), (3, 1), (2, 2)])
    on, lag = cluster(devices, rng.choice([2, 4, 9]), nodes), rng.choice([0, 1])
    seconds, model = rng.choice([1e-3, 1e-2, 0.2]), rng.choice([TINY, llama(1)])
    waits, num_prompts = rng.choice([0.0, 0.5]), rng.choice([1, 2])
    task = profile(seconds, waits=waits)
    models: dict[str, ModelShape | None] = {"actor": model, "reward": None}
    made = plan(on, task, lag, model, num_prompts)
    assert made.prediction is not None
    verifier = Verifier("reward.score", "reward", task.verifiers["reward.score"], 8 * num_prompts)
    calls = calls_of(GRPO_GRAPH, workload(num_prompts), models, ["reward.score"])
    generate, train = call_nodes(calls)
    assert (generate.after, train.after) == ((), ("actor.generate", "reward.score"))
    own = CallNode("reward.score", "reward.score", ("actor.generate",), "reward")
    table = EveryNumber(ModelTable(calls, GPU_DEFAULTS), verifier, lag > 0)
    best, *_ = all_plans((generate, own, train), table, on, lag)
    found_s = made.prediction.step_time_s
    # Only powers of two of what waits are looked at; of what computes they hold the best, and the
    # fewest processes are taken that are within 1 % of it.
    assert best.step_time_s <= found_s * (1 + 1e-9)
    assert found_s <= best.step_time_s * (1.01 if waits == 0.0 else 1.3)
    assert made.prediction.gap < 1e-9
    assert simulate_plan(GRPO_GRAPH, made).step_time_s == pytest.approx(found_s, rel=1e-9)


def test_the_number_of_processes_and_the_group_follow_from_what_verifying_takes() -> None:
    on = cluster(4, 32)
    quick, slow = plan(on, profile(1e-6), lag=1), plan(on, profile(0.5), lag=1)
    assert quick.prediction is not None
    assert slow.prediction is not None
    # A verifier in one rank's processes has the cores of its node; the models have the rest.
    assert slow.prediction.nodes["reward.score"].parts_s["verification"] > 0.5
    group = slow.group(slow.group_of(GRPO_GRAPH["reward.score"]))
    processes = slow.role_options["reward"]["num_processes"] * group.num_ranks
    assert 16 <= processes <= 40
    free, task = plan(on, None, lag=1), profile(0.5)
    assert not free.role_options
    assert slow.prediction.step_time_s > quick.prediction.step_time_s
    pinned = plan(on, task, pins=Pins(num_processes={"reward": 3}))
    assert pinned.role_options == {"reward": {"num_processes": 3}}
    together = plan(on, task, pins=Pins(together=(("actor", "actor.generate", "reward.score"),)))
    assert len(together.groups) == 1
    apart = Pins(apart=(("actor.generate", "reward.score"),))
    streamed = plan(on, task, model=llama(7), num_prompts=32, pins=apart, streaming=4).prediction
    assert streamed is not None
    assert streamed.streamed is not None
    # Responses are verified while others are still sampled.
    assert streamed.streamed.step_time_s < streamed.step_time_s - 0.8
    judged = plan(on, profile(0.5, waits=1.0, most=None))
    assert not judged.role_options


def test_a_cluster_must_say_how_many_cores_it_has() -> None:
    with pytest.raises(PlanError, match="does not say how many cores its nodes have"):
        plan(h100(1), profile(0.5))
    assert plan(h100(1), None).prediction is not None


def test_a_run_corrects_what_a_verifier_takes() -> None:
    learned = profile(0.1, 0.3).learned("runs/1", {"reward.score": 2.0}, {"reward.score": 3.0})
    one = learned.verifiers["reward.score"]
    assert one.item_s == pytest.approx((0.15, 0.45))
    assert one.item_cpu_s == pytest.approx(0.3)
    assert "corrected by runs/1" in learned.source
