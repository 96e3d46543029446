"""A trainer does not train on what another model has sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.rollout_correction import RolloutCorrection, with_rollout_logprob
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.role import Role
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.training.logprob_mismatch import MismatchError, MismatchLimits
from penstock.workers.training.optimizer import OptimizerSpec
from torch_models import make_batch, make_policy

from ...algorithms import runs

OPTIMIZER = OptimizerSpec(lr=1e-3)


def policy_and_batch(offset: float = 0.0, **limits: Any) -> tuple[PolicyWorker, Any]:
    """A policy, and what it sampled, said to have been `offset` nats likelier."""
    policy = make_policy(optimizer=OPTIMIZER, mismatch=MismatchLimits(**limits))
    batch = make_batch(policy)
    return policy, replace(batch, behavior_logprob=batch.behavior_logprob + offset * batch.mask)


def train(
    policy: PolicyWorker, batch: Any, step: int = 0, staleness: int | None = 0
) -> dict[str, Any]:
    with call_scope(step, 0, staleness):
        found = policy.train(ClippedPolicyLoss(), batch, num_minibatches=2)
    return {n: metric.value for n, metric in found.metrics.items() if n.startswith("rollout_")}


def test_a_sampled_token_that_had_no_probability_is_refused() -> None:
    policy, batch = policy_and_batch()
    wrong = batch.behavior_logprob.clone()
    row, place = torch.nonzero(batch.mask)[0]
    wrong[row, place] = -math.inf
    with pytest.raises(ValueError, match="behavior_logprob is infinite at 1 of"):
        policy.train(ClippedPolicyLoss(), replace(batch, behavior_logprob=wrong))


def test_what_is_reported_of_a_known_difference() -> None:
    found = train(*policy_and_batch(offset=0.5))
    assert found == {
        "rollout_k3": pytest.approx(math.exp(-0.5) - 1 + 0.5, abs=1e-4),
        "rollout_logprob_max_diff": pytest.approx(0.5, abs=1e-4),
        "rollout_ess": pytest.approx(1, abs=1e-6),  # all weights are alike
    }


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0.5, math.nan])
def test_a_call_that_is_refused_changes_nothing(offset: float) -> None:
    policy, batch = policy_and_batch(offset, stop_above=0.01)
    before = policy.weights_sha256()
    with pytest.raises(MismatchError) as error:
        train(policy, batch, step=3)
    assert policy.weights_sha256() == before
    said = "0.107" if offset == 0.5 else "nan"
    assert str(error.value).startswith(
        f"step 3: 'actor' and what sampled for it disagree by {said} nats per token on the same "
        "weights (largest difference "
    )
    assert str(error.value).endswith(
        "); mismatch.stop_above is 0.01. Nothing was updated\n    compare dtypes and kernels of "
        "the two engines, or set a correction (algorithm.cfg.correction)"
    )
    good = make_batch(policy)
    assert train(policy, good)["rollout_k3"] < 1e-8
    assert policy.weights_sha256() != before


def test_a_corrected_call_is_compared_with_what_sampled() -> None:
    """Its ratio is against the trainer's own log-probabilities, which say nothing of the other."""
    policy, batch = policy_and_batch(stop_above=0.01)
    other = batch.behavior_logprob + 0.5 * batch.mask
    with pytest.raises(MismatchError, match=r"disagree by 0.107 nats per token"):
        train(policy, with_rollout_logprob(batch, other))
    assert train(policy, batch)["rollout_k3"] < 1e-8


@pytest.mark.parametrize("staleness", [1, None])
def test_what_ran_ahead_is_measured_and_not_judged(staleness: int | None) -> None:
    policy, batch = policy_and_batch(0.5, stop_above=0.01)
    assert train(policy, batch, staleness=staleness)["rollout_k3"] > 0.1


@pytest.mark.slow
def test_it_compares_every_so_many_steps_and_at_the_first() -> None:
    policy, batch = policy_and_batch(every=3)
    compared = [step for step in range(1, 8) if train(policy, batch, step)]
    assert compared == [1, 3, 6]


@dataclass(frozen=True)
class GarbledSpec:
    """Generates with two rows of its embedding swapped, from a certain step on."""

    spec: Any
    from_step: int

    def build(self, context: WorkerContext) -> Role:
        worker = self.spec.build(context)
        generate, calls = worker.generate, iter(range(100))

        def garbled(**arguments: Any) -> Any:
            embedding = worker.local_tensors()["model.embed_tokens.weight"]
            swapped = [9, 8] if next(calls) >= self.from_step else [8, 9]
            with torch.no_grad():
                embedding[[8, 9]] = embedding[swapped]
                rollout = generate(**arguments)
                embedding[[8, 9]] = embedding[swapped]
            return rollout

        worker.generate = garbled
        return worker


@pytest.mark.slow
@pytest.mark.parametrize(("from_step", "max_lag"), [(0, 0), (0, 1), (2, 0)])
def test_a_generator_with_garbled_weights_stops_the_run(from_step: int, max_lag: int) -> None:
    run = runs.make("grpo")
    limits = MismatchLimits(stop_above=1e-4)
    actor = replace(run.workers["actor"], mismatch=limits)  # pyright: ignore[reportArgumentType]

    def start(spec: Any) -> Engine:
        workers = {**run.workers, "actor": spec}
        schedule = Schedule(max_lag=max_lag)
        return Engine(run.graph, one_group(run.graph), workers=workers, schedule=schedule)

    with start(actor) as engine:
        initial = engine.call("actor", "weights_sha256")
        steps = list(engine.run(run.sources, 2))
        assert all(step.metrics["actor.train/rollout_k3"] < 1e-8 for step in steps[:1])
        trained = engine.call("actor", "weights_sha256")
    with start(GarbledSpec(actor, from_step)) as engine:
        with pytest.raises(WorkerError, match=f"step {from_step}: 'actor' and what sampled"):
            list(engine.run(run.sources, 4))
        assert engine.call("actor", "weights_sha256") == (trained if from_step else initial)


def test_with_a_correction_a_run_tells_how_far_the_engines_are_apart() -> None:
    run = runs.make("grpo")
    graph = build(run.step, cfg=replace(run.cfg, correction=RolloutCorrection()))
    workers = {**run.workers, "actor": GarbledSpec(run.workers["actor"], 1)}
    with Engine(graph, one_group(graph), workers=workers) as engine:
        good, garbled = [step.metrics for step in engine.run(run.sources, 2)]
    assert good["actor.train/rollout_k3"] < 1e-8
    assert garbled["actor.train/rollout_k3"] > 1e-3
    assert garbled["actor.train/rollout_ess"] < 1
