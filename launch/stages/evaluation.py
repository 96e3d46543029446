"""Evaluations: a policy on held-out problems, actors in held-out episodes, loss on held-out rows.

`Measuring` says when a stage is evaluated. Best step and early stop follow from what is kept in the
run's folder, so that a resumed run decides as it would have without a break.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from ...algorithms.evaluate import (
    EnvEvaluation,
    Evaluation,
    agent_evaluate_step,
    env_evaluate_step,
    evaluate_step,
)
from ...algorithms.roles.environment import Actor, EnvRows
from ...algorithms.roles.language_tables import PolicyOutput, Sampling, ScoreOutput
from ...configs.schema import EvaluationConfig
from ...dataflow.errors import WorkerError
from ...dataflow.graph.graph import Constant, Graph, Ref, RoleRef
from ...dataflow.graph.role import Role
from ...dataflow.graph.tracer import build
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.checkpoint import Interval, Pauses
from ...dataflow.runtime.engine import Engine, Source
from ...dataflow.runtime.executor import Program
from ...dataflow.runtime.placement import Placement, follow, one_group
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...dataflow.scheduler.schedule import Schedule
from ...workers.agents.environment import TASK_AGENTS
from ...workers.data.sample_log import ExampleFileSpec
from ...workers.data.task import TaskSpec
from ...workers.rewards.registry import RULES, takes_batches
from ...workers.rewards.rule_reward import RuleRewardSpec
from ..inputs.data import env_task
from ..inputs.record import Stage
from ..inputs.suites import HELD_OUT_LOSS, HeldOutRows, Suite
from ..run_dir.checkpoint import CheckpointStore
from ..run_dir.evaluations import LOSS, SHARES, WHOLE, Evaluations, Measured, logged_name
from ..run_dir.files import required_object
from ..run_dir.progress import StageProgress
from .worker_specs import agent_spec

_PROGRAM = "evaluate"
_ACTOR, _VERIFIER, _AGENT, _OBSERVER = "actor", "verifier", "agent", "observer"
_SCORED = ".converse/reward/"


def evaluation_graph(sampling: Sampling, *, max_turns: int = 0) -> Graph:
    """Record the graph of an evaluation, its policy called 'actor'."""
    if max_turns:
        cfg = Evaluation(sampling=sampling, max_turns=max_turns)
        return build(agent_evaluate_step, name=_PROGRAM, cfg=cfg)
    return build(evaluate_step, name=_PROGRAM, cfg=Evaluation(sampling=sampling))


class Evaluator:
    """Evaluates a policy on suites of problems.

    Answers to problems of the run's own task are scored as the stage's own rule scores them, with
    its time limit and other options; those of other tasks as the task says. By default it is the
    stage's policy on the workers that train it; on a device of its own it is a policy outside any
    run. Examples are passed through a file of the folder.
    """

    def __init__(
        self,
        suites: Sequence[Suite],
        num_examples: int,
        folder: Path,
        stage: Stage | None,
        device: str | None = None,
    ) -> None:
        self._suites = suites
        self._examples = folder / "examples.json"
        self.programs: dict[str, Program] = {}  # programs that the engine must run
        self.workers: dict[str, WorkerSpec | Role] = {}  # of all roles but the policy's
        self._thresholds: list[float] = []
        within = stage if device is None else None
        actor = within.policy if within is not None and within.policy else _ACTOR
        taken = within.graph.roles if within is not None else ()
        tasks: dict[int, int] = {}
        for number, suite in enumerate(suites):
            data = suite.data
            of_task = tasks.setdefault(id(data), len(tasks))
            verifier, observer = (_role(r, taken, of_task) for r in (_VERIFIER, _OBSERVER))
            if data.task.converses:
                options = {**_first_options(stage, TASK_AGENTS)[1], "unscored": math.nan}
                judge = agent_spec(_AGENT, data, suite.tokenizer_spec, options)
                threshold = None
            else:
                judge, threshold = _judge(stage if suite.is_own else None, suite)
            self.workers[verifier] = judge
            self._thresholds.append(data.task.correct_score if threshold is None else threshold)
            names = {_ACTOR: actor, _VERIFIER: verifier, _AGENT: verifier, _OBSERVER: observer}
            graph = renamed(evaluation_graph(suite.sampling, max_turns=suite.max_turns), names)
            if takes_batches("rule", {"verifier": getattr(judge, "verifier", None)}, data.spec):
                graph = in_whole_batches(graph, {verifier})
            if within is not None:
                placement = follow(graph, within.graph, within.placement)
            else:
                placement = one_group(graph, device=device or "cpu")
            self.programs[_program(number)] = Program(graph, placement)
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


def _judge(stage: Stage | None, suite: Suite) -> tuple[RuleRewardSpec, float]:
    """The stage's first role that is a rule, with its options; the task's own verifier else."""
    worker, options = _first_options(stage, RULES)
    spec = (RULES[worker] if worker else RuleRewardSpec)(
        task=suite.data.spec,
        tokenizer=suite.tokenizer_spec,
        task_fingerprint=suite.data.fingerprint,
        **options,
    )
    # `factor` and `unscored` only change what is learned from.
    measures = replace(spec, scale=1.0, unscored=math.nan)
    return measures, 1.0 if spec.verifier else suite.data.task.correct_score


def _first_options(stage: Stage | None, kinds: Container[str]) -> tuple[str, Mapping[str, Any]]:
    """Worker and options of a stage's first role that is of these kinds; none if there is none."""
    sections = stage.roles.values() if stage is not None else ()
    found = ((one.worker, one.options) for one in sections if one.worker and one.worker in kinds)
    return next(found, ("", {}))


def _program(number: int) -> str:
    return f"{_PROGRAM}_{number}" if number else _PROGRAM


def _role(name: str, taken: Collection[str], number: int) -> str:
    own = f"evaluation_{name}" if name in taken else name
    return f"{own}_{number}" if number else own


def evaluate(
    policy: WorkerSpec,
    suites: Sequence[Suite],
    num_examples: int,
    stage: Stage | None = None,
    *,
    device: str = "cpu",
    seed: int = 0,
    deadline_s: float | None = None,
) -> dict[str, Measured]:
    """Evaluate one policy in this process, outside any run.

    Its answers are scored as a stage's, if there is one. The deadline is of the answers to one
    suite.
    """
    with tempfile.TemporaryDirectory() as folder:
        evaluator = Evaluator(suites, num_examples, Path(folder), stage, device)
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


def renamed(graph: Graph, names: Mapping[str, str]) -> Graph:
    """The same graph with roles renamed, old name -> new: their workers are found by name."""

    def named(role: str) -> str:
        return names.get(role, role)

    nodes = tuple(
        replace(
            node,
            role=node.role and named(node.role),
            arguments=tuple(
                (name, RoleRef(named(one.role)) if isinstance(one, RoleRef) else one)
                for name, one in node.arguments
            ),
            reads=tuple(replace(read, role=named(read.role)) for read in node.reads),
        )
        for node in graph.nodes
    )
    roles = {named(role): contract for role, contract in graph.roles.items()}
    return replace(graph, nodes=nodes, roles=roles)


def in_whole_batches(graph: Graph, roles: Collection[str]) -> Graph:
    """Return the graph with these rewards called once in a step, with all of its responses."""
    nodes = (
        replace(node, scope="batch") if node.role in roles and node.method == "score" else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def env_actors(stage: Stage) -> dict[str, str]:
    """Trained role -> the role of the environments that it acts in, if they are workers of ours."""
    graph, found = stage.graph, dict[str, str]()
    for node in graph.nodes:
        role = node.role or ""
        if node.kind is not NodeKind.ROLLOUT or stage.roles[role].worker != "env":
            continue
        for read in node.reads:
            trained = read.role in graph.trains_per_step
            if trained and issubclass(graph.roles[read.role], Actor):
                found[read.role] = role
    return found


class EnvEvaluator:
    """Lets every actor of a stage play held-out episodes, on the workers that train it."""

    def __init__(
        self,
        stage: Stage,
        config: EvaluationConfig,
        sources: Mapping[str, Source],
        task: TaskSpec,
    ) -> None:
        table = next(name for name, kind in stage.graph.sources.items() if kind is EnvRows)
        self._rows = sources[table]
        num_envs = len(self._rows.batch(0).env) // env_task(task, stage.name).num_agents
        cfg = EnvEvaluation(
            num_episodes=-(-config.num_episodes // num_envs),
            max_episode_steps=config.max_episode_steps,
        )
        self._num_episodes = cfg.num_episodes * num_envs
        self.programs: dict[str, Program] = {}
        self.workers: dict[str, WorkerSpec | Role] = {}
        self._actors: dict[str, str] = {}
        for actor, env in env_actors(stage).items():
            graph = build(env_evaluate_step, name=f"{_PROGRAM}_{actor}", cfg=cfg)
            graph = renamed(graph, {"actor": actor, "env": env})
            placement = follow(graph, stage.graph, stage.placement)
            self.programs[graph.name] = Program(graph, placement)
            self._actors[actor] = graph.name

    def measure(self, engine: Engine) -> dict[str, Measured]:
        """Play all episodes with the current weights; nothing else may be running."""
        returns: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for actor, program in self._actors.items():
            (result,) = engine.run({"rows": self._rows}, 1, program=program)
            returns[actor] = result.metrics["env.evaluate/episode_return"]
            metrics |= {f"{actor}/{key}": value for key, value in result.metrics.items()}
        return {WHOLE: Measured(metrics, episode_return=returns, num_episodes=self._num_episodes)}


def measured_losses(rows: HeldOutRows, engine: Engine, program: str) -> dict[str, float]:
    """Return the loss with the current weights and, for pairs, the share that is told apart."""
    given = dict(rows.train.arguments)
    batch: Any = given["batch"]
    made = rows.graph.nodes[-1]
    refs = {name: ref for name, ref in batch.fields if isinstance(ref, Ref)}
    keep = [str(Ref(made.name, "out")), *map(str, refs.values())]
    sources = {name: _SameRows(table) for name, table in rows.tables.items()}
    (result,) = engine.run(sources, 1, program=program, keep=keep)
    columns = {name: result.kept[str(ref)] for name, ref in refs.items()}
    constants = {n: value.value for n, value in batch.fields if isinstance(value, Constant)}
    table, out = batch.table(**columns, **constants), result.kept[keep[0]].double()
    loss: Any = rows.train.constants.get("loss")
    of_words = made.method == "logprob"
    output = PolicyOutput(logprob=out) if of_words else ScoreOutput(score=out)
    with torch.no_grad():
        found = loss.checked(output, table, loss.totals(table).double())
    shares = {name: s / w for name, (s, w) in found.metrics.items() if name == "accuracy" and w}
    losses = {f"{LOSS}/{name}": float(share) for name, share in shares.items()}
    return {LOSS: float(found.total), **losses}


class _SameRows(NamedTuple):
    """A source that gives the same table in every step."""

    table: Any

    def batch(self, step: int) -> Any:
        return self.table


class HeldOutLoss:
    """Measures the loss on held-out rows, besides what another evaluator measures."""

    def __init__(self, rows: HeldOutRows, inner: Evaluates | None, placement: Placement) -> None:
        self._rows, self._inner = rows, inner
        own = {HELD_OUT_LOSS: Program(rows.graph, placement)}
        self.programs = {**(inner.programs if inner else {}), **own}
        self.workers: dict[str, WorkerSpec | Role] = inner.workers if inner else {}

    def measure(self, engine: Engine) -> dict[str, Measured]:
        """Measure with the other evaluator, and add the loss to the suite without a name."""
        found = self._inner.measure(engine) if self._inner else {}
        losses = measured_losses(self._rows, engine, HELD_OUT_LOSS)
        return {**found, WHOLE: replace(found.get(WHOLE, Measured({})), losses=losses)}


def held_out_losses(
    rows: HeldOutRows,
    workers: Mapping[str, WorkerSpec | Role],
    *,
    device: str,
    seed: int,
    deadline_s: float | None,
) -> dict[str, float]:
    """Return the loss of some weights in this process, outside any run; see `evaluate`."""
    with Engine(
        rows.graph,
        one_group(rows.graph, device=device),
        workers={role: workers[role] for role in rows.graph.roles},
        schedule=Schedule(deadline_s=deadline_s),
        seed=seed,
    ) as engine:
        return measured_losses(rows, engine, "main")


class Evaluates(Protocol):
    """Measures the weights of a stage."""

    programs: dict[str, Program]  # that the engine must carry besides the stage's own
    workers: dict[str, WorkerSpec | Role]  # of roles that only these programs have

    def measure(self, engine: Engine) -> dict[str, Measured]:
        """Suite -> what was found with the current weights; nothing else may be running."""
        ...


def logged(found: Mapping[str, Measured]) -> dict[str, float]:
    return {
        f"evaluation/{logged_name(suite, name)}": value
        for suite, measured in found.items()
        for name, value in measured.values.items()
    }


class Measuring:
    """The evaluations of one stage."""

    def __init__(
        self,
        evaluator: Evaluates | None,
        config: EvaluationConfig,
        kept: Evaluations,
        first_step: int,
        num_steps: int,
        store: CheckpointStore,
        shown: StageProgress,
    ) -> None:
        self._evaluator, self._config, self._kept = evaluator, config, kept
        self._first_step, self._num_steps, self._store = first_step, num_steps, store
        self._shown = shown
        self._latest_s: float | None = None
        # is called with a step, its metrics, and the seconds of the latest evaluation
        self._report: Callable[[int, Mapping[str, float], float | None], None]
        for step in kept.steps() if evaluator else ():
            if step <= first_step:
                kept.read(step)
        # what was found before the first step; empty if nothing was measured
        self.before: dict[str, Measured] = {}
        self.after: dict[str, Measured] = {}  # and after the last
        # the step at which the run ends for want of improvement; None if it does not
        self.stopped: int | None = None
        self.took_s = 0.0  # seconds spent so far between steps

    def begin(
        self, engine: Engine, report: Callable[[int, Mapping[str, float], float | None], None]
    ) -> None:
        """Measure what the stage begins with, unless the run did before it was interrupted."""
        self._report, first_step = report, self._first_step
        if self._evaluator is None:
            return
        self._kept.rewind(first_step)
        if 0 not in self._kept.steps():
            self._kept.write(0, self._timed(self._evaluator, engine))
        self.before = self._kept.read(0)
        if first_step in self._kept.steps():
            self._report(first_step, logged(self._kept.read(first_step)), self._latest_s)
        self._judge(first_step if first_step in self._kept.steps() else 0)

    def pauses(self, engine: Engine) -> Pauses:
        """Steps at which the run is to be interrupted, and the measurement there."""
        due = range(0, self._num_steps, self._config.every or self._num_steps)
        steps = frozenset(due) - {0, *self._kept.steps()}

        def between(interval: Interval) -> bool:
            since_s = time.monotonic()
            self._measure(engine, interval.step)
            is_best = self._judge(interval.step)
            if not interval.saved and (is_best or self.stopped is not None):
                interval.save()
            self.took_s += time.monotonic() - since_s
            return self.stopped is not None

        return Pauses(frozenset() if self._evaluator is None else steps, between)

    def end(self, engine: Engine, num_steps: int) -> WorkerError | None:
        """Measure what the stage ends with; returns what that failed of, if it did."""
        if self._evaluator is None:
            return None
        if self.stopped is not None:
            self.after = self._kept.read(self.stopped)
            return None
        try:
            self.after = self._measure(engine, num_steps)
        except WorkerError as error:
            return error
        self._judge(num_steps)
        return None

    @property
    def why_stopped(self) -> str:
        """Why the run ends before its last step, in words; "" if it does not."""
        if self.stopped is None or self._config.keep_best is None:
            return ""
        return (
            f"stopped after {self.stopped} of {self._num_steps} steps: "
            f"evaluation/{self._config.keep_best} has not improved in "
            f"{self._config.stop_after} evaluations"
        )

    def _measure(self, engine: Engine, step: int) -> dict[str, Measured]:
        assert self._evaluator is not None, "nothing is measured without an evaluator"
        found = self._timed(self._evaluator, engine)
        self._kept.write(step, found)
        self._report(step, logged(found), self._latest_s)
        return found

    def _timed(self, evaluator: Evaluates, engine: Engine) -> dict[str, Measured]:
        since_s = time.monotonic()
        with self._shown.evaluation():
            found = evaluator.measure(engine)
        self._latest_s = time.monotonic() - since_s
        return found

    def _judge(self, step: int) -> bool:
        """Keep the best step's checkpoint, and see whether to stop; True if this is the best."""
        metric, patience = self._config.keep_best, self._config.stop_after
        if metric is None:
            return False
        if patience is not None and step:
            worse = self._kept.without_improvement(metric) >= patience
            self.stopped = step if worse else None
        best = self._kept.best(metric)
        self._store.kept = frozenset({best} if best else ())
        return best == step
