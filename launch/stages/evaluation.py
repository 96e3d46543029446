"""Measuring the policy on held-out problems, between the steps of a stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...algorithms.evaluate import Evaluation, evaluate_step
from ...algorithms.roles.language import Sampling
from ...dataflow.graph.graph import Argument, Graph, Node, RoleRef
from ...dataflow.graph.role import Role
from ...dataflow.graph.tracer import build
from ...dataflow.runtime.engine import Engine
from ...dataflow.runtime.executor import Program
from ...dataflow.runtime.placement import follow
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...workers.data.example_file import ExampleFileSpec
from ...workers.rewards.kinds import RULES
from ...workers.rewards.rule_reward import RuleRewardSpec
from ..inputs.data import Data, HeldOut
from .stages import Stage

__all__ = ["Evaluator", "Measured", "evaluation_graph", "renamed"]

_PROGRAM = "evaluate"
_VERIFIER, _OBSERVER = "verifier", "observer"
_SHARES = f"{_VERIFIER}.score/reward"


@dataclass(frozen=True)
class Measured:
    """What one evaluation found.

    Attributes:
        metrics: Everything it reported.
        accuracy: Share of held-out problems answered right, 0 to 1; None if there are no problems.
        examples: The first responses: prompt_id, prompt or messages, response, score.
        episode_return: Actor -> what it earned in a held-out episode, on average.
        num_episodes: Episodes of each.
    """

    metrics: dict[str, float]
    accuracy: float | None = None
    examples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    episode_return: dict[str, float] = field(default_factory=dict[str, float])
    num_episodes: int = 0

    @property
    def errors(self) -> float | None:
        """Share of the answers on which the verifier failed, 0 to 1; they count as wrong."""
        return self.metrics.get(f"{_SHARES}/errors")

    @property
    def timeouts(self) -> float | None:
        """Share of the answers on which the verifier ran out of time; they count as wrong."""
        return self.metrics.get(f"{_SHARES}/timeouts")


def evaluation_graph(max_response_tokens: int) -> Graph:
    """What an evaluation computes, its policy called 'actor'."""
    sampling = Sampling(temperature=0.0, max_new_tokens=max_response_tokens)
    return build(evaluate_step, name=_PROGRAM, cfg=Evaluation(sampling=sampling))


class Evaluator:
    """Evaluates the policy of one stage, on the workers that train it.

    Answers are scored as the stage's own rule scores them, with its time limit and other options.

    Args:
        stage: The stage; it must train a policy.
        num_examples: Responses that are kept.
        data: The run's task and tokenizer.
        held_out: The problems.
        folder: Where examples are passed through a file.
    """

    def __init__(
        self, stage: Stage, num_examples: int, data: Data, held_out: HeldOut, folder: Path
    ) -> None:
        graph = evaluation_graph(data.section.max_response_tokens)
        names = {"actor": stage.policy or "actor"}
        for role in (_VERIFIER, _OBSERVER):
            names[role] = f"evaluation_{role}" if role in stage.graph.roles else role
        self._graph = renamed(graph, names)
        self._program = Program(self._graph, follow(self._graph, stage.graph, stage.placement))
        self._held_out = held_out
        self._examples = folder / "examples.jsonl"
        self.workers: dict[str, WorkerSpec | Role] = {
            names[_VERIFIER]: _rule(stage)(
                task=data.spec,
                tokenizer=data.tokenizer_spec,
                task_fingerprint=data.fingerprint,
            ),
            names[_OBSERVER]: ExampleFileSpec(
                path=str(self._examples.resolve()),
                tokenizer=data.tokenizer_spec,
                num_examples=num_examples,
                conversations=data.prompts.conversations(held_out.problems[:num_examples]),
            ),
        }

    @property
    def programs(self) -> dict[str, Program]:
        """What the engine must carry besides the stage's own graph."""
        return {_PROGRAM: self._program}

    def measure(self, engine: Engine) -> Measured:
        """Answer all held-out problems with the current weights; nothing else may be running."""
        (result,) = engine.run({"prompts": self._held_out}, 1, program=_PROGRAM)
        metrics = dict(result.metrics)
        examples: list[dict[str, Any]] = []
        if self._examples.is_file():
            examples = [json.loads(line) for line in self._examples.read_text().splitlines()]
            self._examples.unlink()
        return Measured(metrics, metrics[f"{_SHARES}/correct"], examples)


def _rule(stage: Stage) -> Callable[..., RuleRewardSpec]:
    """The stage's first role that is a rule, with its options; the task's own verifier else."""
    rules = (plan for plan in stage.roles.values() if plan.worker in RULES)
    plan = next(rules, None)
    return partial(RULES[plan.worker], **plan.config.options) if plan else RuleRewardSpec


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """The same graph with roles renamed, old name -> new: their workers are found by name."""

    def named(role: str) -> str:
        return names.get(role, role)

    def argument(value: Argument) -> Argument:
        return RoleRef(named(value.role)) if isinstance(value, RoleRef) else value

    def node(one: Node) -> Node:
        return replace(
            one,
            role=named(one.role) if one.role else one.role,
            arguments=tuple((name, argument(value)) for name, value in one.arguments),
            reads=tuple(replace(read, role=named(read.role)) for read in one.reads),
        )

    roles = {named(role): contract for role, contract in graph.roles.items()}
    return replace(graph, nodes=tuple(map(node, graph.nodes)), roles=roles)
