"""Observers of a stage: trackers, trace, console, health checks, samples.

A stage tells them of its steps, of its evaluations, and of events: bad signs and process deaths.

Which columns are kept as samples is found in the graph: no recipe says anything of it. Kept are the
rows that a policy is trained on and that were sampled in the step: their tokens, and whatever else
the graph says of each of them by one number, or by one per token as advantages are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...algorithms.roles.language import Conversations, Policy
from ...configs.references import load_object
from ...configs.schema import SamplesConfig
from ...dataflow.errors import ConfigError, one_process
from ...dataflow.graph.graph import Graph, Node, NodeKind, Ref
from ...dataflow.graph.role import Role
from ...dataflow.runtime.engine import StepResult
from ...dataflow.runtime.watch import Watch, watch_before
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...workers.data.sample_log import SampleLog, SampleLogSpec
from ..inputs.data import Data
from ..inputs.record import Stage
from ..inputs.run import Run
from ..run_dir.progress import StagePlan, StageProgress
from ..run_dir.run_folder import RunFolder
from ..run_dir.samples import SAMPLES, Sample, read_samples, sample_steps
from ..run_dir.samples import shown as sample_text
from ..run_dir.step_logs import EVENTS, EventLog, TraceLog, read_metrics
from ..run_dir.trackers import Trackers
from .evaluation import env_actors
from .signs import Signs, facts_of
from .stage_result import ObservedStep
from .worker_specs import stage_tokenizer


class StageObserver:
    """Watches a stage; what it does not override does nothing."""

    def on_stage(self, first_step: int) -> None:
        """The stage begins, or goes on from a checkpoint, at this step."""

    def on_step(self, step: ObservedStep) -> str | None:
        """A step is complete; `step.result.step` is its index, `step.values` are its metrics.

        Returns:
            Why the run is to end here, in words, with a checkpoint; None to go on.
        """

    def on_evaluation(self, step: int, found: Mapping[str, float], took_s: float | None) -> None:
        """The weights after so many steps were evaluated; `took_s` is None if that was before."""

    def on_event(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        """A sign of trouble, or a death that the run goes on from."""

    def on_end(self, num_steps: int) -> None:
        """The last step has been taken, and all that follows is in the stage's folder."""


class Observers(StageObserver):
    """The observers of one stage, told in order."""

    def __init__(self, every: Sequence[StageObserver], check_there: Callable[[], None]) -> None:
        self._every, self._check_there = every, check_there

    @override
    def on_stage(self, first_step: int) -> None:
        for one in self._every:
            one.on_stage(first_step)

    @override
    def on_step(self, step: ObservedStep) -> str | None:
        self._check_there()
        return next(iter(filter(None, [one.on_step(step) for one in self._every])), None)

    @override
    def on_evaluation(self, step: int, found: Mapping[str, float], took_s: float | None) -> None:
        for one in self._every:
            one.on_evaluation(step, found, took_s)

    @override
    def on_event(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        for one in self._every:
            one.on_event(kind, step, text, fields)

    @override
    def on_end(self, num_steps: int) -> None:
        for one in self._every:
            one.on_end(num_steps)


class TrackerObserver(StageObserver):
    def __init__(self, trackers: Trackers, stage: str, *, curves: bool) -> None:
        self._trackers, self._stage, self._curves = trackers, stage, curves

    @override
    def on_stage(self, first_step: int) -> None:
        self._trackers.rewind(first_step, self._stage)

    @override
    def on_step(self, step: ObservedStep) -> None:
        self._trackers.log(step.result.step, self._stage, step.values)

    @override
    def on_evaluation(self, step: int, found: Mapping[str, float], took_s: float | None) -> None:
        self._trackers.note(step, self._stage, found, recorded=self._curves)


class LogObserver(StageObserver):
    """Writes the timeline, and `events.jsonl`."""

    def __init__(self, trace: TraceLog, events: EventLog) -> None:
        self._trace, self._events = trace, events

    @override
    def on_step(self, step: ObservedStep) -> None:
        self._trace.write(step.result.spans)
        # What conversations wait for is apart from what they generate.
        waits = {name: value for name, value in step.values.items() if name.endswith("/waiting_s")}
        self._trace.write_counters(step.result.step, step.ended_s, {**step.headline, **waits})

    @override
    def on_event(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        self._events.write({"kind": kind, "step": step, **fields})


class ConsoleObserver(StageObserver):
    """Shows how the stage goes to a person, or as JSON to a program."""

    def __init__(self, shown: StageProgress, graph: Graph) -> None:
        self._shown, self._waits = shown, Waits(graph)

    @override
    def on_step(self, step: ObservedStep) -> None:
        self._shown.step(
            step.result.step,
            took_s=step.took_s,
            amount=step.env_steps or step.samples,
            values=step.headline,
            unit=step.env_unit if step.env_steps else "samples",
            waits_s=self._waits.of(step.result, step.ended_s - step.took_s, step.ended_s),
        )

    @override
    def on_evaluation(self, step: int, found: Mapping[str, float], took_s: float | None) -> None:
        if took_s is not None:
            short = {name.removeprefix("evaluation/"): value for name, value in found.items()}
            self._shown.evaluated(step, took_s, short)

    @override
    def on_event(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        self._shown.warn(kind, step, text, fields)


class HealthObserver(StageObserver):
    """Looks for signs that the stage goes wrong, and reports each as an event."""

    def __init__(self, signs: Signs, metrics: Path, report: Callable[..., None]) -> None:
        self._signs, self._metrics, self._report = signs, metrics, report

    @override
    def on_stage(self, first_step: int) -> None:
        if first_step:
            self._signs.recall(read_metrics(self._metrics))

    @override
    def on_step(self, step: ObservedStep) -> None:
        for sign in self._signs.look(step.result.step, step.values):
            self._report(sign.kind, sign.step, str(sign), asdict(sign))


class SampleObserver(StageObserver):
    """Shows a response now and then, and gives responses to the trackers that have tables."""

    def __init__(
        self,
        shown: StageProgress,
        trackers: Trackers,
        home: Path,
        stage: Stage,
        config: SamplesConfig,
    ) -> None:
        self._shown, self._trackers, self._home = shown, trackers, home
        self._stage, self._config, self._next_step = stage, config, 0

    @override
    def on_stage(self, first_step: int) -> None:
        self._next_step = first_step

    @override
    def on_step(self, step: ObservedStep) -> None:
        number, num_steps = step.result.step, self._stage.config.num_steps
        if is_shown(number, num_steps, self._config.show_every, live=self._shown.run.is_live):
            found = read_samples(self._home, sample_steps(self._home)[-1:])
            if found:  # of another prompt each time
                self._shown.run.show(sample_text(found[number % len(found)]))
        self._send(number)

    @override
    def on_end(self, num_steps: int) -> None:
        self._send(num_steps)

    def _send(self, last: int) -> None:
        every = self._config.track_every
        if every is None:
            return
        for step in sample_steps(self._home):
            if not self._next_step <= step <= last:
                continue
            self._next_step = step + 1
            if not (step + 1) % every and (found := self._kept(step)):
                self._trackers.log_samples(step, self._stage.name, found)

    def _kept(self, step: int) -> list[Sample]:
        try:
            return read_samples(self._home, [step])
        except ConfigError:
            if step in sample_steps(self._home):
                raise
            return []  # dropped meanwhile, as `samples.keep_steps` says


def callback_class(reference: str) -> type[StageObserver]:
    """Return the class of the user's own that `module:Class` names."""
    kind = load_object(reference, "callbacks")
    if isinstance(kind, type) and issubclass(kind, StageObserver):
        return kind
    raise ConfigError(
        f"'callbacks': '{reference}' is no class derived from penstock.StageObserver\n"
        "    derive it, and override what it is to do: on_step, on_evaluation, on_end"
    )


@contextmanager
def observing(
    run: Run,
    stage: Stage,
    home: RunFolder,
    shown: StageProgress,
    trackers: Trackers,
    first_step: int,
    own: Sequence[StageObserver] = (),
) -> Generator[Observers]:
    config = run.config
    tracker = TrackerObserver(trackers, stage.name, curves=config.evaluation.every is not None)
    with ExitStack() as stack:
        check_there = stack.enter_context(home.watched())
        trace = stack.enter_context(TraceLog(home.trace, first_step=first_step))
        log = LogObserver(trace, EventLog(home.path / EVENTS, first_step=first_step))
        console = ConsoleObserver(shown, stage.graph)
        signs = Signs(facts_of(stage, config.mismatch, config.schedule))
        reported = Observers([log, console], check_there)
        health = HealthObserver(signs, home.metrics, reported.on_event)
        shows = SampleObserver(shown, trackers, home.path, stage, config.samples)
        # The tracker first: it cuts the metrics off that the health checks read again.
        observers = Observers([tracker, log, console, health, shows, *own], check_there)
        observers.on_stage(first_step)
        yield observers
        check_there()  # models are written next


def is_shown(step: int, num_steps: int, every: int | None, *, live: bool) -> bool:
    done = step + 1
    if every is None:
        return live and (done == num_steps or str(done).strip("0") == "1")
    return every > 0 and done % every == 0


def stage_plans(run: Run) -> list[StagePlan]:
    """The steps, evaluations and predicted times of each stage."""
    prediction, config = run.placed.prediction, run.config.evaluation
    plans: list[StagePlan] = []
    for stage in run.stages:
        num_steps, step_s = stage.config.num_steps, None
        evaluated: tuple[int, ...] = ()
        if stage is run.main:
            step_s = prediction.step_time_s if prediction else None
            if run.suites or (config.num_episodes and env_actors(stage)):
                evaluated = (*range(0, num_steps, config.every or num_steps), num_steps)
        plans.append(StagePlan(stage.name, num_steps, step_s, evaluated))
    return plans


class Waits:
    """Measures what the steps of one stage wait for."""

    def __init__(self, graph: Graph) -> None:
        self._what = {node.name: _what(graph, node) for node in graph.nodes}

    def of(self, result: StepResult, begin_s: float, end_s: float) -> Mapping[str, float]:
        """Return what was waited for -> seconds; in "other" ones no worker was at work."""
        spans: dict[str, list[tuple[float, float]]] = {}
        for span in result.spans:
            spans.setdefault(self._what[span.node], []).append((span.start_s, span.end_s))
        if result.weights_s:
            spans["weights"] = list(result.weights_s)
        every = [one for each in spans.values() for one in each]
        found = {what: union_s(its, begin_s, end_s) for what, its in spans.items()}
        found["other"] = max(0.0, end_s - begin_s - union_s(every, begin_s, end_s))
        return found


def union_s(spans: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Return the seconds between two moments in which at least one span was going on."""
    total_s, reached_s = 0.0, begin_s
    for start_s, stop_s in sorted(spans):
        start_s, stop_s = max(start_s, reached_s), min(stop_s, end_s)
        if stop_s > start_s:
            total_s += stop_s - start_s
            reached_s = stop_s
    return total_s


def _what(graph: Graph, node: Node) -> str:
    match node.kind:
        case NodeKind.ROLLOUT:
            is_policy = issubclass(graph.roles[node.role or ""], Policy)
            return "generation" if is_policy else "environments"
        case NodeKind.TRAIN:
            return "training"
        case NodeKind.FORWARD:
            return "reward" if node.method == "score" else "forward passes"
        case _:
            return "ops"


def sample_watch(
    stage: Stage, config: SamplesConfig, data: Data, home: Path
) -> tuple[Watch | None, Mapping[str, WorkerSpec | Role]]:
    """The watch on the stage's responses, and its worker; neither if nothing is kept."""
    trained = sample_node(stage.graph)
    if trained is None or not config.max_rows:
        return None, {}
    role = SAMPLES
    while role in stage.graph.roles:
        role += "_log"
    with one_process():
        # A program's prompt may differ from the problem's, so it is decoded from the tokens.
        from_task = data.section.chat or (
            not data.task.has_programs and any(data.task.messages(i) for i in data.task.listed)
        )
    spec = SampleLogSpec(
        folder=str((home / SAMPLES).resolve()),
        tokenizer=stage_tokenizer(stage, data),
        versions_per_step=stage.graph.trains_per_step[trained.role or ""],
        max_rows=config.max_rows,
        keep_steps=config.keep_steps,
        max_bytes=config.max_mib << 20,
        task=data.spec if from_task else None,
        chat=data.chat,
    )
    columns = sample_columns(stage.graph, trained)
    worker = (role, SampleLog, SampleLog.record.__name__)
    return watch_before(trained, columns, worker, stage.graph, stage.placement), {role: spec}


def sample_node(graph: Graph) -> Node | None:
    """The train node whose rows are kept: the first with advantages, or else the first of all."""
    found = [node for node in graph.nodes if _trains_on_samples(graph, node)]
    with_advantage = [node for node in found if _input(node, "advantage")]
    return next(iter((*with_advantage, *found)), None)


def _trains_on_samples(graph: Graph, node: Node) -> bool:
    if not node.learns or not _input(node, "tokens") or not _input(node, "mask"):
        return False
    return any(graph[n].kind is NodeKind.ROLLOUT for n in graph.ancestors(node.name))


def _input(node: Node, column: str) -> Ref | None:
    return next((ref for path, ref in node.inputs if path.endswith(f".{column}")), None)


def sample_columns(graph: Graph, trained: Node) -> dict[str, Ref]:
    """Name in the file -> column, of the rows that `trained` is given.

    A column is named after the node that makes it, such as "reward.score", and "reward" is the
    last of those that a role gave, or a table calls "score".
    """
    tokens, mask = _input(trained, "tokens"), _input(trained, "mask")
    assert tokens is not None, "looked at before"
    assert mask is not None, "looked at before"
    rows = graph[tokens.node].output(tokens.column).rows
    if any(output.name == "mask" for output in graph[rows].outputs):
        mask = Ref(rows, "mask")  # the trained mask may lack rows without a score
    found = {"tokens": tokens, "mask": mask}
    before = graph.ancestors(trained.name)
    for node in graph.nodes:
        if node.name not in before:
            continue
        for output in node.outputs:
            ref, spec = Ref(node.name, output.name), output.spec
            if output.rows != rows or spec.row_axis is None or spec.ragged_axis is not None:
                continue
            if node.name == rows and output.group_id:
                found["prompt_id"] = ref
            elif node.name == rows and output.name == "finished":
                found["finished"] = ref
            elif spec.dtype.value == "f32":
                found[node.name if node.output_table is None else str(ref)] = ref
                if node.kind is NodeKind.FORWARD or output.name == "score":
                    found["reward"] = ref
    if any(output.name == "version" for output in graph[rows].outputs):
        found["version"] = Ref(rows, "version")
    if graph[rows].output_table is Conversations:
        found |= {"turn": Ref(rows, "turn"), "turn_reward": Ref(rows, "reward")}
        found |= {"piece": Ref(rows, "piece")}
    advantage = _input(trained, "advantage")
    if advantage is not None and graph[advantage.node].output(advantage.column).rows == rows:
        found = {name: ref for name, ref in found.items() if ref != advantage}
        found["advantage"] = advantage
    return found
