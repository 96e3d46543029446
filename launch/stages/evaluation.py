"""Measuring a policy on held-out problems, between the steps of a stage or by itself."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...algorithms.evaluate import Evaluation, agent_evaluate_step, evaluate_step
from ...algorithms.roles.language import Sampling
from ...dataflow.graph.graph import Argument, Graph, Node, RoleRef
from ...dataflow.graph.role import Role
from ...dataflow.graph.tracer import build
from ...dataflow.runtime.engine import Engine
from ...dataflow.runtime.executor import Program
from ...dataflow.runtime.placement import Placement, follow, one_group
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...dataflow.scheduler.schedule import Schedule
from ...workers.agents.registry import TASK_AGENTS
from ...workers.data.example_file import ExampleFileSpec
from ...workers.rewards.registry import RULES
from ...workers.rewards.rule_reward import RuleRewardSpec
from ..run_dir.evaluations import SHARES, Measured
from ..run_dir.run_files import required_object
from .stages import Stage
from .suites import Suite
from .worker_specs import agent_spec

_PROGRAM = "evaluate"
_ACTOR, _VERIFIER, _AGENT, _OBSERVER = "actor", "verifier", "agent", "observer"
_SCORED = ".converse/reward/"


def evaluation_graph(sampling: Sampling, *, max_turns: int = 0) -> Graph:
    """What an evaluation computes, its policy called 'actor'.

    Args:
        sampling: How it answers.
        max_turns: Most turns of a conversation; 0 where problems are answered in one.
    """
    if max_turns:
        cfg = Evaluation(sampling=sampling, max_turns=max_turns)
        return build(agent_evaluate_step, name=_PROGRAM, cfg=cfg)
    return build(evaluate_step, name=_PROGRAM, cfg=Evaluation(sampling=sampling))


class Evaluator:
    """Evaluates a policy on suites of problems.

    Answers to problems of the run's own task are scored by `rule`; those of other tasks as the
    task says.

    Args:
        suites: The problems, at least one suite.
        num_examples: Responses of each suite that are kept.
        folder: Where examples are passed through a file.
        actor: The policy's role.
        taken: Names of roles that are others'.
        rule: Makes the spec of what scores answers.
        agent_options: Fields of the spec of what the policy talks with.
        placed: Where the nodes of such a graph run.

    Attributes:
        programs: Programs that the engine must run.
        workers: Role -> who plays it; all but the policy's.
    """

    def __init__(
        self,
        suites: Sequence[Suite],
        num_examples: int,
        folder: Path,
        *,
        actor: str = _ACTOR,
        taken: Collection[str] = (),
        rule: Callable[..., RuleRewardSpec] = RuleRewardSpec,
        agent_options: Mapping[str, Any] | None = None,
        placed: Callable[[Graph], Placement] = one_group,
    ) -> None:
        self._suites = suites
        self._examples = folder / "examples.json"
        self.programs: dict[str, Program] = {}
        self.workers: dict[str, WorkerSpec | Role] = {}
        self._thresholds: list[float] = []
        tasks: dict[int, int] = {}
        for number, suite in enumerate(suites):
            data = suite.data
            of_task = tasks.setdefault(id(data), len(tasks))
            verifier, observer = (_role(r, taken, of_task) for r in (_VERIFIER, _OBSERVER))
            if data.task.converses:
                options = {**(agent_options or {}), "unscored": math.nan}
                judge = agent_spec(_AGENT, data, suite.tokenizer_spec, options)
                threshold = None
            else:
                judge, threshold = _judge(rule if suite.is_own else RuleRewardSpec, suite)
            self.workers[verifier] = judge
            self._thresholds.append(data.task.correct_score if threshold is None else threshold)
            names = {_ACTOR: actor, _VERIFIER: verifier, _AGENT: verifier, _OBSERVER: observer}
            graph = renamed(evaluation_graph(suite.sampling, max_turns=suite.max_turns), names)
            self.programs[_program(number)] = Program(graph, placed(graph))
            shown = [
                problem
                for other in suites
                if other.data is data
                for problem in other.prompts.problems[:num_examples]
            ]
            self.workers[observer] = ExampleFileSpec(
                path=str(self._examples.resolve()),
                tokenizer=suite.tokenizer_spec,
                num_examples=num_examples,
                conversations=data.prompts.conversations(shown),
            )

    def measure(self, engine: Engine) -> dict[str, Measured]:
        """Answer all problems with the current weights, suite by suite.

        Nothing else may be running.
        """
        return {
            suite.name: self._measured(engine, number) for number, suite in enumerate(self._suites)
        }

    def _measured(self, engine: Engine, number: int) -> Measured:
        prompts = {"prompts": self._suites[number].prompts}
        (result,) = engine.run(prompts, 1, program=_program(number))
        # What answered in conversations has scored them as well. A mean of no scores is left out.
        metrics = {
            f"{SHARES}/{name.partition(_SCORED)[2]}" if _SCORED in name else name: value
            for name, value in result.metrics.items()
            if not math.isnan(value)
        }
        found: dict[str, Any] = {}
        if self._examples.exists():
            found = required_object(self._examples)
            self._examples.unlink()
        threshold = torch.tensor(self._thresholds[number]).item()  # in float32, as scores are
        scores: dict[str, list[float | None]] = found.get("scores", {})
        # An answer without a score is never right, whatever the threshold.
        correct = {
            problem: sum(score is not None and score >= threshold for score in its)
            for problem, its in scores.items()
        }
        return Measured(
            metrics,
            metrics[f"{SHARES}/correct"],
            found.get("examples", []),
            scores=scores,
            correct=correct,
        )


def _judge(makes: Callable[..., RuleRewardSpec], suite: Suite) -> tuple[RuleRewardSpec, float]:
    """What scores answers, as the verifier says, and the score of a right one."""
    data, tokenizer = suite.data, suite.tokenizer_spec
    spec = makes(task=data.spec, tokenizer=tokenizer, task_fingerprint=data.fingerprint)
    # `factor` and `unscored` only change what is learned from.
    measures = replace(spec, scale=1.0, unscored=math.nan)
    return measures, 1.0 if spec.verifier else data.task.correct_score


def _program(number: int) -> str:
    """Name of a suite's program."""
    return f"{_PROGRAM}_{number}" if number else _PROGRAM


def _role(name: str, taken: Collection[str], number: int) -> str:
    own = f"evaluation_{name}" if name in taken else name
    return f"{own}_{number}" if number else own


def stage_evaluator(
    stage: Stage, suites: Sequence[Suite], num_examples: int, folder: Path
) -> Evaluator:
    """Evaluates the policy of a stage, on the workers that train it.

    Answers are scored as the stage's own rule scores them, with its time limit and other options.

    Args:
        stage: The stage; it must train a policy.
        suites: The problems.
        num_examples: Responses of each suite that are kept.
        folder: Where examples are passed through a file.
    """
    return Evaluator(
        suites,
        num_examples,
        folder,
        actor=stage.policy or _ACTOR,
        taken=stage.graph.roles,
        rule=rule_of(stage),
        agent_options=options_of_agent(stage),
        placed=lambda graph: follow(graph, stage.graph, stage.placement),
    )


def evaluate(
    policy: WorkerSpec,
    suites: Sequence[Suite],
    num_examples: int,
    *,
    rule: Callable[..., RuleRewardSpec] = RuleRewardSpec,
    agent_options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    seed: int = 0,
    deadline_s: float | None = None,
) -> dict[str, Measured]:
    """Evaluate one policy in this process, outside any run.

    Args:
        policy: Who answers.
        suites: The problems, at least one suite.
        num_examples: Responses of each suite that are kept.
        rule: Makes the spec of what scores answers to the run's own problems.
        agent_options: Fields of the spec of what the policy talks with.
        device: Where the policy is.
        seed: Of what is sampled.
        deadline_s: Longest wait for the answers to one suite; None as in `Schedule`.

    Raises:
        ConfigError: If the policy cannot be built.
        WorkerError: If it, or a verifier, fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        evaluator = Evaluator(
            suites,
            num_examples,
            Path(folder),
            rule=rule,
            agent_options=agent_options,
            placed=lambda graph: one_group(graph, device=device),
        )
        main = evaluator.programs[_program(0)]
        with Engine(
            main.graph,
            main.placement,
            workers={_ACTOR: policy, **evaluator.workers},
            schedule=Schedule(deadline_s=deadline_s),
            seed=seed,
            also=evaluator.programs,
        ) as engine:
            return evaluator.measure(engine)


def rule_of(stage: Stage) -> Callable[..., RuleRewardSpec]:
    """The stage's first role that is a rule, with its options; the task's own verifier else."""
    rules = (plan for plan in stage.roles.values() if plan.worker in RULES)
    plan = next(rules, None)
    return partial(RULES[plan.worker], **plan.config.options) if plan else RuleRewardSpec


def options_of_agent(stage: Stage) -> Mapping[str, Any]:
    """Options of the stage's first role that answers a policy in conversation."""
    agents = (plan for plan in stage.roles.values() if plan.worker in TASK_AGENTS)
    plan = next(agents, None)
    return plan.config.options if plan else {}


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
