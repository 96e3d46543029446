"""Recording: what a step becomes, which weights each call reads, and calls that cannot be bound."""
# ruff: noqa: E501 - messages stand here as they are printed

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import pytest
import torch
from penstock.algorithms.losses import ClippedPolicyLoss, CrossEntropyLoss
from penstock.algorithms.ops.advantages import paired_baseline, remax_advantage
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.roles import (
    Demonstrations,
    PerSample,
    PerToken,
    Policy,
    PolicyBatch,
    PreferencePairs,
    Prompts,
    Reward,
    Rollout,
    Sampling,
    TokenMask,
    TrainMetrics,
)
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.axes import Axis, f32, i64
from penstock.dataflow.graph.check import check_lag
from penstock.dataflow.graph.graph import Graph, RoleRef
from penstock.dataflow.graph.role import Loss, Role, call
from penstock.dataflow.graph.tracer import build, op
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.runtime.placement import flow_of, one_group
from torch import Tensor

from ..refused import refused

if TYPE_CHECKING:
    from decimal import Decimal

SAMPLING = Sampling(num_samples=2)


@op(scope="row")
def scale(value: PerToken, *, by: float = 1.0) -> PerToken:
    """Multiply."""
    return by * value


@op(scope="batch", makes_rows=True)
def drop_unfinished(roll: Rollout) -> Rollout:
    """Keep finished rows."""
    keep = roll.finished
    return Rollout(
        prompt_id=roll.prompt_id[keep],
        tokens=roll.tokens[keep],
        mask=roll.mask[keep],
        behavior_logprob=roll.behavior_logprob[keep],
        finished=roll.finished[keep],
    )


@op(scope="row")
def mean_of(value: PerToken, mask: TokenMask) -> PerSample:
    """Mean over masked tokens."""
    return (value * mask).sum(1) / mask.sum(1)


@op(scope="row")
def priced(value: PerToken, price: Decimal) -> PerToken:
    """Has an annotation that only the type checker can see."""
    return float(price) * value


def imitate(demos: Demonstrations, actor: Policy) -> TrainMetrics:
    return actor.train(CrossEntropyLoss(), Demonstrations(tokens=demos.tokens, mask=demos.mask))


# --- an environment, to which a policy is passed as an argument --------------------------------

ENV = Axis("env")
TIME = Axis("time", ragged=True)
Seed = Annotated[Tensor, i64(ENV)]
Action = Annotated[Tensor, i64(ENV, TIME)]
Return = Annotated[Tensor, f32(ENV)]


@dataclass(frozen=True, kw_only=True)
class Seeds:
    seed: Seed


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    action: Action
    total: Return


@dataclass(frozen=True, kw_only=True)
class TrajectoryBatch:
    action: Action
    total: Return


class TrajectoryLoss(Loss[TrajectoryBatch, Tensor]):
    """Any loss; it is never called here."""


class Agent(Role):
    @call("train")
    def train(self, loss: Loss[TrajectoryBatch, Tensor], batch: TrajectoryBatch) -> TrainMetrics:
        raise NotImplementedError


class EnvPool(Role):
    @call("rollout")
    def rollout(self, seed: Seed, policy: Agent, *, horizon: int = 8) -> Trajectory:
        raise NotImplementedError


def env_step(seeds: Seeds, env: EnvPool, actor: Agent) -> TrainMetrics:
    trajectory = env.rollout(seeds.seed, actor, horizon=4)
    batch = TrajectoryBatch(action=trajectory.action, total=trajectory.total)
    return actor.train(TrajectoryLoss(), batch)


@op(scope="row")
def play(seed: Seed, policy: Agent) -> Trajectory:
    """An op that reads a role."""
    raise NotImplementedError


def test_a_role_as_an_argument_is_a_lagged_read_of_its_weights() -> None:
    graph = build(env_step)
    rollout = graph["env.rollout"]
    assert dict(rollout.arguments)["policy"] == RoleRef("actor")
    assert rollout.reads == (WeightRead("env", 0, True), WeightRead("actor", 0, True))
    flow = flow_of(graph, one_group(graph))
    assert flow.nodes[1].reads == (WeightRead("actor", 0, True),)
    assert "env.rollout  [rollout, row]  reads actor@0 or older" in str(graph)
    assert "policy = role actor" in str(graph)
    with pytest.raises(FlowError, match="reads no 'behavior_logprob'"):
        check_lag(graph, 1)


def test_a_role_as_an_argument_of_an_op_is_read_at_the_current_version() -> None:
    def step(seeds: Seeds, actor: Agent) -> object:
        one = play(seeds.seed, actor)
        batch = TrajectoryBatch(action=one.action, total=one.total)
        return actor.train(TrajectoryLoss(), batch), play(seeds.seed, actor)

    graph = build(step)
    assert graph["play"].reads == (WeightRead("actor", 0, False),)
    assert graph["play#2"].reads == (WeightRead("actor", 1, False),)


# --- versions, names, kinds ---------------------------------------------------------------------


def test_each_call_reads_the_weights_current_at_its_line() -> None:
    def step(demos: Demonstrations, actor: Policy, other: Policy) -> object:
        before = actor.logprob(demos.tokens, demos.mask)
        first = imitate(demos, actor)
        between = actor.logprob(demos.tokens, demos.mask)
        second = imitate(demos, actor)
        after = actor.logprob(demos.tokens, demos.mask)
        return before, first, between, second, after, other.logprob(demos.tokens, demos.mask)

    graph = build(step)
    versions = {node.name: node.reads for node in graph.nodes if node.reads}
    assert versions == {
        "actor.logprob": (WeightRead("actor", 0),),
        "actor.train": (WeightRead("actor", 0),),
        "actor.logprob#2": (WeightRead("actor", 1),),
        "actor.train#2": (WeightRead("actor", 1),),
        "actor.logprob#3": (WeightRead("actor", 2),),
        "other.logprob": (WeightRead("other", 0),),
    }
    assert graph.trains_per_step == {"actor": 2}
    assert [graph[name].ordinal for name in ("actor.logprob", "actor.logprob#3")] == [0, 2]


def test_a_node_knows_the_line_that_made_it() -> None:
    graph = build(imitate)
    where = graph["actor.train"].where
    assert where.file == __file__
    assert where.line == imitate.__code__.co_firstlineno + 1
    assert where.source.startswith("return actor.train(CrossEntropyLoss()")
    assert graph["demos"].where.short == f"test_tracer.py:{imitate.__code__.co_firstlineno}"


def test_sources_roles_and_results_come_from_the_signature_and_the_return() -> None:
    def step(
        demos: Demonstrations, actor: Policy, pairs: PreferencePairs, note: str = "x"
    ) -> object:
        assert note == "y"
        return {"trained": [imitate(demos, actor)], "pairs": pairs}

    graph = build(step, name="renamed", note="y")
    assert graph.name == "renamed"
    assert dict(graph.sources) == {"demos": Demonstrations, "pairs": PreferencePairs}
    assert dict(graph.roles) == {"actor": Policy}
    assert graph.results == ("actor.train", "pairs")


def test_rows_follow_the_node_that_made_them() -> None:
    def step(prompts: Prompts, actor: Policy) -> object:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, SAMPLING)
        kept = drop_unfinished(roll)
        return mean_of(scale(kept.behavior_logprob), kept.mask), scale(roll.behavior_logprob)

    graph = build(step)
    assert {column.rows for column in graph["actor.generate"].outputs} == {"actor.generate"}
    assert {column.rows for column in graph["drop_unfinished"].outputs} == {"drop_unfinished"}
    assert graph["scale"].output("out").rows == "drop_unfinished"
    assert graph["mean_of"].output("out").rows == "drop_unfinished"
    assert graph["scale#2"].output("out").rows == "actor.generate"


def test_marks_of_a_table_reach_its_columns() -> None:
    graph = build(ppo_step, cfg=PPO())
    outputs = graph["actor.generate"].outputs
    assert [column.name for column in outputs if column.group_id] == ["prompt_id"]
    assert [column.name for column in outputs if column.behavior] == ["behavior_logprob"]


def test_an_op_called_with_tensors_simply_runs() -> None:
    assert torch.equal(scale(torch.ones(1, 2), by=3.0), torch.full((1, 2), 3.0))

    def step(demos: Demonstrations, actor: Policy) -> TrainMetrics:
        assert scale(torch.ones(1, 1)).item() == 1.0  # with no column among its arguments
        return imitate(demos, actor)

    assert len(build(step).nodes) == 2


def test_recording_ends_with_the_step_even_when_it_fails() -> None:
    def step(demos: Demonstrations) -> object:
        raise RuntimeError("the user's own error")

    with pytest.raises(RuntimeError, match="the user's own error"):
        build(step)
    assert scale(torch.ones(1, 1)).item() == 1.0


# --- calls that cannot be bound -----------------------------------------------------------------


@refused(
    """node 'reward.score': missing a required argument: 'prompt_id'
        its parameters are (tokens, mask, prompt_id)"""
)
def test_a_missing_argument(demos: Demonstrations, reward: Reward) -> object:
    return reward.score(demos.tokens, demos.mask)  # pyright: ignore[reportCallIssue]


@refused(
    """node 'scale': too many positional arguments
        its parameters are (value, by)"""
)
def test_an_argument_too_many(demos: Demonstrations, actor: Policy) -> object:
    return scale(actor.logprob(demos.tokens, demos.mask), 2.0)  # pyright: ignore[reportCallIssue]


@refused(
    """node 'actor.logprob': got an unexpected keyword argument 'temprature'
        its parameters are (tokens, mask, temperature)"""
)
def test_a_misspelt_parameter(demos: Demonstrations, actor: Policy) -> object:
    return actor.logprob(demos.tokens, demos.mask, temprature=1.0)  # pyright: ignore[reportCallIssue]


def test_a_batch_takes_keywords_only() -> None:
    def step(demos: Demonstrations) -> object:
        return Demonstrations(demos.tokens, demos.mask)  # pyright: ignore[reportCallIssue]

    def incomplete(demos: Demonstrations) -> object:
        return PolicyBatch(tokens=demos.tokens, mask=demos.mask)  # pyright: ignore[reportCallIssue]

    with pytest.raises(TypeError, match="takes 1 positional argument but 3 were given"):
        build(step)
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments: 'behavior_log"):
        build(incomplete)


@refused(
    """parameter 'epochs' of 'test_a_parameter_without_a_value' is neither a table nor a role and has no value
        pass it: build(test_a_parameter_without_a_value, epochs=...)""",
    line=0,
)
def test_a_parameter_without_a_value(demos: Demonstrations, actor: Policy, epochs: int) -> object:
    return imitate(demos, actor)


def test_a_value_for_a_parameter_that_is_not_there() -> None:
    with pytest.raises(FlowError) as caught:
        build(ppo_step, cgf=PPO())
    assert caught.value.what == "'ppo_step' has no parameter 'cgf'"
    assert caught.value.fix == "did you mean 'cfg'?"
    assert caught.value.where.source == "build(ppo_step, cgf=PPO())"


@refused(
    """an annotation of 'priced' cannot be resolved: name 'Decimal' is not defined
        define or import that name at the top level of the module, outside 'if TYPE_CHECKING'"""
)
def test_an_annotation_that_only_the_type_checker_sees(
    demos: Demonstrations, actor: Policy
) -> object:
    return priced(actor.logprob(demos.tokens, demos.mask), 3)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class OddTable:
    tokens: PerToken
    size: int


@refused(
    """table 'OddTable', field 'size' is not a column
        annotate it with Annotated[Tensor, f32(...)], i64(...) or boolean(...)""",
    line=0,
)
def test_a_table_with_a_field_that_is_no_column(odd: OddTable) -> object:
    return odd.tokens


# --- rows of several producers, and roles that nobody asks --------------------------------------


@op(scope="batch", makes_rows=True)
def either(first: Rollout, second: Rollout) -> Rollout:
    return first if len(first.prompt_id) else second


@op(scope="row")
def difference(first: PerToken, mask: TokenMask, *, second: PerToken) -> PerToken:
    return (first - second) * mask


def trained(actor: Policy, roll: Rollout, advantage: PerToken) -> TrainMetrics:
    batch = PolicyBatch(
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        advantage=advantage,
    )
    return actor.train(ClippedPolicyLoss(), batch)


def joined_step(prompts: Prompts, actor: Policy, reward: Reward) -> TrainMetrics:
    """`reward` is asked for nothing."""
    first = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
    second = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
    roll = either(first, second)
    return trained(actor, roll, roll.behavior_logprob)


def baseline_step(prompts: Prompts, actor: Policy, reward: Reward) -> TrainMetrics:
    sampling = Sampling()
    roll = actor.generate(prompts.prompt, prompts.prompt_id, sampling)
    once = replace(sampling, temperature=0.0)
    greedy = actor.generate(prompts.prompt, prompts.prompt_id, once)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    greedy_score = reward.score(greedy.tokens, greedy.mask, greedy.prompt_id)
    baseline = paired_baseline(
        roll.prompt_id, baseline=greedy_score, baseline_prompt_id=greedy.prompt_id
    )
    return trained(actor, roll, remax_advantage(score, roll.mask, greedy_score=baseline))


def without_behavior(graph: Graph, name: str) -> Graph:
    """As if that node's log-probabilities were not marked as a behavior's."""
    nodes = tuple(
        replace(node, outputs=tuple(replace(o, behavior=False) for o in node.outputs))
        if node.name == name
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def test_only_an_op_that_makes_rows_takes_those_of_several_producers() -> None:
    def mixed_step(prompts: Prompts, actor: Policy) -> PerToken:
        first = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
        second = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
        return difference(first.behavior_logprob, first.mask, second=second.behavior_logprob)

    assert build(joined_step)["either"].outputs[0].rows == "either"
    with pytest.raises(FlowError, match="of different rows: 'actor.generate' made the one and"):
        build(mixed_step)


def test_a_role_that_is_asked_for_nothing_is_no_part_of_the_graph() -> None:
    assert list(build(joined_step).roles) == ["actor"]
    assert list(build(baseline_step).roles) == ["actor", "reward"]


def test_a_rollout_that_only_scores_others_needs_no_correction() -> None:
    check_lag(build(baseline_step), 1)


def test_joined_rollouts_are_trained_on_through_the_op_that_joins_them() -> None:
    graph = build(joined_step)
    check_lag(graph, 1)
    with pytest.raises(FlowError, match="but reads no 'behavior_logprob'"):
        check_lag(without_behavior(graph, "either"), 1)


# --- cost ---------------------------------------------------------------------------------------

FRESH = """
import sys
from penstock.dataflow.graph.tracer import build
from penstock.algorithms.ppo import PPO, ppo_step
import torch
build(ppo_step, cfg=PPO())
assert not torch.cuda.is_initialized(), "recording started CUDA"
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"ray", "transformers", "vllm"})
assert not heavy, f"recording imported {heavy}"
"""


@pytest.mark.slow
def test_recording_touches_no_device_and_imports_nothing_heavy() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr


MISTAKES = """
from penstock.algorithms.losses import ClippedPolicyLoss, ClippedValueLoss
from penstock.algorithms.roles import Demonstrations, Policy, Reward, ValueBatch


def step(demos: Demonstrations, actor: Policy, reward: Reward) -> None:
    print(demos.maks)
    actor.genrate(demos.tokens)
    reward.score(demos.tokens, demos.mask)
    batch = Demonstrations(tokens=demos.tokens, mask=demos.mask)
    actor.train(ClippedPolicyLoss(), batch)
    values = ValueBatch(
        tokens=demos.tokens, mask=demos.mask, old_value=demos.mask, value_target=demos.mask
    )
    actor.train(ClippedValueLoss(), values)
    Demonstrations(demos.tokens, demos.mask)
"""


@pytest.mark.slow
def test_the_type_checker_catches_what_types_can_catch(tmp_path: Path) -> None:
    file = tmp_path / "mistakes.py"
    file.write_text(MISTAKES)
    pyright = Path(sys.executable).with_name("pyright")
    root = Path(__file__).parents[3]
    ran = subprocess.run(
        [pyright, "--outputjson", "--project", root, file],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = {
        (error["range"]["start"]["line"] + 1, error["rule"])
        for error in json.loads(ran.stdout)["generalDiagnostics"]
    }
    assert found == {
        (7, "reportAttributeAccessIssue"),
        (8, "reportAttributeAccessIssue"),
        (9, "reportCallIssue"),
        (11, "reportArgumentType"),
        (15, "reportArgumentType"),
        (16, "reportCallIssue"),
    }
