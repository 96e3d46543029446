"""A run made ready: everything that can be refused is refused here, before any model is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any, cast

from ...configs.schema import SAME, ExecutorConfig, ModelConfig, model_spec
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import NodeKind, RoleRef
from ...dataflow.runtime.engine import Source
from ...dataflow.scheduler.schedule import Schedule
from ...planner.plan.plan import Plan
from ...workers.agents.registry import TASK_AGENTS
from ...workers.agents.worker import check_converses
from ...workers.data.row_report import DataReport
from ...workers.data.task import Task
from ...workers.engines.registry import DEFAULT
from ...workers.models.architecture import empty_model
from ...workers.rewards.rule_reward import RuleRewardSpec
from ..inputs.compose import Resolved
from ..inputs.data import Data, load_data
from ..inputs.env_specs import MODEL_TYPE, acted_in
from ..inputs.sizes import check_lengths, longest_sampled
from ..inputs.tables import longest_rows, sources_of, statistics_of
from ..placement.auto_place import choose, idle_gpus
from ..placement.described import check_devices
from ..placement.place import (
    executor_kind,
    executor_of,
    make_executor,
    with_threads,
    written_plan,
)
from ..placement.reported import joined
from ..placement.settled import fetch_weights, settled
from ..run_dir.evaluations import LOSS, WHOLE
from .env_evaluation import env_actors
from .evaluation import evaluation_graph
from .held_out_loss import HeldOutRows
from .memory_limit import check_memory
from .stages import MODEL, Stage, stages_of
from .suites import HeldOut, Suite, check_metric, metrics_of, suites_of
from .worker_specs import (
    check_agents,
    check_groups,
    check_options,
    high_rates,
    model_positions,
    rounded_adapters,
)

if TYPE_CHECKING:
    from ...workers.envs.task import EnvTaskSpec

_NUM_STEPS = 16
"""Steps that are taken to try an environment before its state is saved, and after."""


def not_exact(
    stages: Sequence[Stage], schedule: Schedule, task: Task, spec: Any, *, tries: bool = False
) -> list[str]:
    """Return a line for every group that cannot be restarted exactly; none if all can.

    Args:
        stages: What is trained.
        schedule: How far generation may run ahead.
        task: The task that is trained on.
        spec: The section that the task was made of.
        tries: Whether environments are started and stepped to find out; they may be slow, or change
            something outside.
    """
    found = (
        (group, reason)
        for stage in stages
        for role, reason in _reasons(stage, schedule, task, spec, tries)
        for group in _groups(stage, role)
    )
    lines = (f"group '{group}' cannot be restarted exactly: {reason}" for group, reason in found)
    return list(dict.fromkeys(lines))


def _reasons(
    stage: Stage, schedule: Schedule, task: Task, spec: Any, tries: bool
) -> Iterator[tuple[str, str]]:
    """Yield the roles that cannot be restarted exactly, each with why and what to change."""
    for role in _sampling(stage):
        if schedule.order == "arrival":
            yield (
                role,
                "which weights its calls read depends on timing (schedule.order=arrival); to "
                "change that: schedule.order=step",
            )
        if schedule.in_flight:
            yield (
                role,
                "when new weights come while it samples depends on timing (schedule.in_flight); "
                "to change that: schedule.in_flight=false",
            )
    for role, plan in stage.roles.items():
        talks = plan.worker in TASK_AGENTS and task.converses
        if talks and not task.deterministic:
            yield (
                role,
                f"what answers in '{task.task_id}' may keep a state outside the run, or answer "
                "otherwise when a conversation is begun anew; to change that: tools and "
                "environments that follow from problem, seed and turns, and say `deterministic`",
            )
        if _asks_judge(plan.worker, plan.config.options):
            yield (
                role,
                "a judge behind an address may score the same response otherwise; to change that: "
                "a rule, or a reward model that the run computes itself",
            )
        if (
            plan.worker == "env"
            and (acted := acted_in(spec)) is not None
            and acted.acts_in == "environment"
            and (why := _why_random(acted, tries))
        ):
            yield (
                role,
                f"{why}, so an episode that is replayed may show something else, which ends the "
                "run; to change that: another version of the environment, whose episodes follow "
                "from seed and actions",
            )


def _sampling(stage: Stage) -> set[str]:
    nodes = stage.graph.nodes
    return {node.role for node in nodes if node.kind is NodeKind.ROLLOUT and node.role is not None}


def _groups(stage: Stage, role: str) -> list[str]:
    """Return the groups in which a role is called, or passed to a role that calls it."""
    nodes = [
        node.name
        for node in stage.graph.nodes
        if node.kind is not NodeKind.TRAIN
        and (
            node.role == role
            or any(isinstance(one, RoleRef) and one.role == role for _, one in node.arguments)
        )
    ]
    return list(dict.fromkeys(stage.placement.nodes[node] for node in nodes))


def _asks_judge(worker: str, options: Any) -> bool:
    """Whether a reward is a judge's, or a mixture with one."""
    if worker == "judge":
        return True
    if worker != "mixture":
        return False
    return any(value == "judge" for value in _values(options))


def _values(options: Any) -> Iterator[Any]:
    if isinstance(options, Mapping):
        for value in cast("Mapping[str, Any]", options).values():
            yield from _values(value)
    elif isinstance(options, list | tuple):
        for value in cast("Sequence[Any]", options):
            yield from _values(value)
    else:
        yield options


def _why_random(spec: EnvTaskSpec, tries: bool) -> str:
    """Return why seed and actions do not fix an environment's episodes, as declared or tried."""
    if spec.backend == "gymnasium":
        import gymnasium

        if gymnasium.spec(spec.id.rpartition(":")[2]).nondeterministic:
            return f"Gymnasium lists '{spec.id}' as nondeterministic"
    if not tries:
        return ""
    from ...workers.envs.exactness import why_not_exact

    found = why_not_exact(spec.env, num_before=_NUM_STEPS, num_after=_NUM_STEPS)
    return f"two environments '{spec.id}' that were tried {found}" if found else ""


@dataclass(frozen=True)
class Job:
    """A run, ready to be carried out.

    Attributes:
        run: What its configuration says, with the threads and the vocabulary that were found.
        plan: Where the main stage's nodes run.
        note: What was chosen for it, or why nothing was, in one line; "" if nothing was to choose.
        stages: What is trained, in order; the main one last.
        data: Its task and tokenizer.
        sources: For each stage, a source for every table it reads.
        suites: The problems to measure accuracy on; empty if there are none.
        held_out_rows: Rows that the main stage's loss is measured on; None if there are none.
        reports: What was left out of the data, one for each way it is read.
    """

    run: Resolved
    plan: Plan
    note: str
    stages: tuple[Stage, ...]
    data: Data
    sources: Mapping[str, Mapping[str, Source]]
    suites: tuple[Suite, ...]
    held_out_rows: HeldOutRows | None
    reports: tuple[DataReport, ...]

    @property
    def main(self) -> Stage:
        """The stage the run is for."""
        return self.stages[-1]

    @property
    def not_reproducible(self) -> str:
        """Why what comes out does not follow from the seed alone, in words; "" if it does."""
        reasons = [self.run.schedule.why_not_reproducible]
        task = self.data.task
        if task.converses and not task.deterministic:
            why = f", as {task.why_not_deterministic}" if task.why_not_deterministic else ""
            reasons.append(f"the other side of '{task.task_id}' may answer a turn in two ways{why}")
        return "; ".join(filter(None, reasons))

    def not_exact(self, *, tries: bool = False) -> list[str]:
        """Which groups cannot be restarted exactly, each with what to change.

        Args:
            tries: Whether environments are tried.
        """
        run = self.run
        return not_exact(self.stages, run.schedule, self.data.task, run.spec, tries=tries)

    @property
    def about_model(self) -> str:
        """Which language model in which precision, where, and who computes it; "" if none."""
        model, device = self.run.model, self.run.placement.executor.device
        if model.architecture.get("model_type") == MODEL_TYPE:
            return ""
        config = model_spec(model).config
        computes = self.run.engines.train.computes(empty_model(config))
        commit = "" if model.revision is None else f" at {model.revision[:12]}"
        name = model.hub or model.package or model.folder or "random weights"
        return (
            f"model: {name}{commit}, {model.dtype} on {device}, computed {computes} "
            f"({config.model_type})"
        )

    def notes(self, *, tries: bool = False) -> list[str]:
        """Describe before the first step placement, models, evaluations and rows left out.

        Args:
            tries: As of `not_exact`.
        """
        lines = [self.note, self.data.about_tools]
        lines.append(self.not_reproducible and f"not reproducible: {self.not_reproducible}")
        lines += self.not_exact(tries=tries)
        lines += [line for stage in self.stages for line in high_rates(stage, self.run.model)]
        lines.append(rounded_adapters(self.stages, self.run))
        if self.held_out_rows and self.run.evaluation.num_prompts:
            why = _why_not_scored(self.data)
            lines.append(why and f"evaluations measure the loss alone, and no accuracy: {why}")
        for report in self.reports:
            lines += [str(report)] if report.num_bad else []
            for note, count in report.notes.items():
                lines.append(f"{note} ({count} rows)" if count else note)
        return [line for line in lines if line]

    @property
    def statistics(self) -> list[str]:
        """How long the rows of every stage are, each line once."""
        lines = [line for tables in self.sources.values() for line in statistics_of(tables)]
        num_held_out, asked = len(self.data.task.held_out), self.held_out
        if asked and asked.num_prompts < num_held_out:
            lines.append(
                f"evaluations ask {asked.num_prompts} of {num_held_out} held-out problems "
                "(evaluation.num_prompts)"
            )
        return list(dict.fromkeys(lines))

    @property
    def held_out(self) -> HeldOut | None:
        """The problems of the suite that has no name; None if there is none."""
        return next((suite.prompts for suite in self.suites if suite.name == WHOLE), None)

    @property
    def model_folders(self) -> set[str]:
        """The folders of models and tokenizers that are there before any stage has run."""
        plans = [plan for stage in self.stages for plan in stage.roles.values()]
        starts = {start for plan in plans for start in (plan.start, *plan.start_mean)}
        starts -= {MODEL, *(stage.name for stage in self.stages)}
        named = {*starts, self.run.model.folder, self.data.tokenizer_spec.folder}
        return {folder for folder in named if folder}


def prepare(run: Resolved, plan: Plan | None = None, *, dry: bool = False) -> Job:
    """Check a run through, place it and read its data.

    Args:
        run: The run.
        plan: Where the main stage's nodes run, if that has been decided before: a resumed run goes
            on where it ran.
        dry: Whether it is not to be carried out: devices need not be here, and no weights are
            downloaded.

    Raises:
        ConfigError: If a key, a role, a file or a size is wrong.
        FlowError: If a step's loss cannot correct for the schedule's lag.
        PlanError: If the placement does not fit.
    """
    run = settled(run if dry else joined(run))
    stages = stages_of(run, plan)
    for stage in stages:
        check_options(stage, run)
    section = run.placement.executor
    if dry:
        executor_of(section, executor_kind(section.kind, "executor.kind"))
    else:
        make_executor(section)
    run, plan, note = _placed(run, plan)
    _check_cluster(run, plan, dry)
    stages = stages_of(run, plan)
    data, agents = load_data(run.task, run.model), _agents(stages)
    if agents:
        check_converses(data.task)
    run = replace(run, model=_with_vocabulary(run.model, stages[-1], data))
    reports: list[DataReport] = [data.task.report]
    if (contaminated := data.contaminated[1]) is not None:
        reports.append(contaminated)
    sources: dict[str, Mapping[str, Source]] = {}
    for stage in stages:
        sources[stage.name], left_out = sources_of(stage, data)
        reports += left_out
    if any(plan.worker == "rule" for stage in stages for plan in stage.roles.values()):
        _check_rule(data)
    held_out_rows = HeldOutRows.of(stages[-1].graph, sources[stages[-1].name])
    suites = _suites(run, stages[-1], data, held_out_rows)
    for options in agents:
        check_agents([data, *(suite.data for suite in suites)], options)
    check_memory(run, stages[-1], suites)
    check_groups(stages, run, data)
    if not dry:
        fetch_weights(run)
    _check_lengths(run.model, stages, sources, suites, data)
    run = replace(run, longest_sequence=_longest_sampled(stages, sources, suites))
    return Job(run, plan, note, stages, data, sources, suites, held_out_rows, tuple(reports))


def _placed(run: Resolved, plan: Plan | None) -> tuple[Resolved, Plan, str]:
    """The plan of the main stage, with the threads of its ranks, and a line about it."""
    inputs, section, threads, note = run.placement, run.placement.executor, None, ""
    if run.model.architecture.get("model_type") == MODEL_TYPE:
        _refuse_engines(run)
        section = _on_one_thread(section)
    plan = plan or written_plan(inputs, run.engines)
    if plan is not None:
        note = idle_gpus(section)
    else:
        choice = choose(run)
        plan, threads, note = choice.plan, choice.num_threads, choice.note
    inputs = replace(inputs, executor=with_threads(section, plan, threads))
    return replace(run, placement=inputs), plan, note


def _check_cluster(run: Resolved, plan: Plan, dry: bool) -> None:
    """Refuse a plan for other devices than those of the cluster that was described or joined.

    What CPUs are said to have is a share of a machine, so a run may have more if it is not dry.
    """
    cluster = run.placement.cluster
    if cluster is not None and (dry or cluster.device_type == "cuda"):
        check_devices(plan, cluster)


def _refuse_engines(run: Resolved) -> None:
    """Networks of environments' actors are computed by workers of their own; no engine is asked."""
    engines = run.engines
    for key, value, default in (
        ("engine.kind", engines.name, DEFAULT.name),
        ("engine.options", engines.options, {}),
        ("rollout.kind", engines.rollout_name, SAME),
        ("model.dtype", run.model.dtype, "float32"),
    ):
        if value != default:
            raise ConfigError(
                f"'{key}' is {value!r}, but a {MODEL_TYPE} is computed by its own worker, which "
                "does not read it\n    leave it out"
            )


def _on_one_thread(section: ExecutorConfig) -> ExecutorConfig:
    """For perceptrons, which one thread computes fastest.

    The order of a sum, and so its last bits, depends on how many threads share it: with one each,
    results do not depend on how many ranks share the machine's cores.
    """
    if section.num_threads is not None:
        return section
    return section.model_copy(update={"num_threads": 1})


def _with_vocabulary(model: ModelConfig, main: Stage, data: Data) -> ModelConfig:
    """With the size of the model's vocabulary, which stays if the run goes on in another layout.

    Tensor parallelism divides it; nothing is ever trained to say what was added for that.
    """
    if not data.has_text or not model.architecture or "vocab_size" in model.architecture:
        return model
    parts = lcm(*(group.tensor_parallel for group in main.placement.groups))
    size = -(-data.tokenizer.vocab_size // parts) * parts
    return model.model_copy(update={"architecture": {**model.architecture, "vocab_size": size}})


def _check_lengths(
    model: ModelConfig,
    stages: tuple[Stage, ...],
    sources: Mapping[str, Mapping[str, Source]],
    suites: tuple[Suite, ...],
    data: Data,
) -> None:
    """No row may be longer than the model that reads it can take."""
    by_name = {stage.name: stage for stage in stages}
    num_tokens = data.tokenizer.vocab_size if data.has_text else 0
    for stage in stages:
        positions = model_positions(stage, by_name, model, num_tokens)
        check_lengths(
            stage.graph,
            stage.config.per_step,
            longest_rows(sources[stage.name]),
            positions,
            f"lower max_new_tokens ({stage.at}.cfg)",
        )
        if stage is stages[-1] and stage.policy in positions:
            for suite in suites:
                check_suite_lengths(suite, positions[stage.policy])


def check_suite_lengths(suite: Suite, num_positions: int) -> None:
    """No prompt with its response may be longer than the model can read.

    Raises:
        ConfigError: If one may be.
    """
    own = "task" if suite.is_own else f"evaluation.suites.{suite.name}.task"
    by_task = suite.sampling.max_new_tokens == suite.data.section.max_response_tokens
    key = f"{own}.max_response_tokens" if by_task else "max_new_tokens of evaluation.sampling"
    check_lengths(
        evaluation_graph(suite.sampling, max_turns=suite.max_turns),
        {"prompts": suite.prompts.num_prompts},
        {"prompts": suite.prompts.longest},
        {"actor": num_positions},
        f"lower {key}",
    )


def _longest_sampled(
    stages: tuple[Stage, ...],
    sources: Mapping[str, Mapping[str, Source]],
    suites: tuple[Suite, ...],
) -> int | None:
    """See `Resolved.longest_sequence`."""
    lengths = [
        longest_sampled(stage.graph, stage.config.per_step, longest_rows(sources[stage.name]))
        for stage in stages
    ]
    lengths += [suite.longest for suite in suites]
    known = [length for length in lengths if length is not None]
    return max(known) if len(known) == len(lengths) else None


def _check_rule(data: Data) -> None:
    """A rule needs the task's verifier; asking for it says what is missing."""
    RuleRewardSpec(task=data.spec, tokenizer=data.tokenizer_spec)
    _ = data.task.verifier


def _agents(stages: Sequence[Stage]) -> list[Mapping[str, Any]]:
    """Return the options of the roles that answer a policy in conversation."""
    plans = (plan for stage in stages for plan in stage.roles.values())
    return [plan.config.options for plan in plans if plan.worker in TASK_AGENTS]


def _suites(run: Resolved, main: Stage, data: Data, rows: HeldOutRows | None) -> tuple[Suite, ...]:
    """Return the suites that evaluate the main stage's policy, besides the loss on `rows`."""
    config, losses = run.evaluation, [LOSS] if rows else []
    if main.policy is None:
        if config.suites:
            raise ConfigError(
                f"'evaluation.suites' is set, but {main.graph.name} trains no policy to answer "
                "problems\n    leave it out"
            )
        actors = env_actors(main) if config.num_episodes else ()
        check_metric(config, [*losses, *(f"{actor}/return" for actor in actors)])
        return ()
    if rows and _why_not_scored(data):
        config = config.model_copy(update={"num_prompts": 0})
    suites = suites_of(config, data, main.sampling)
    check_metric(config, [*losses, *metrics_of(suites)])
    return suites


def _why_not_scored(data: Data) -> str:
    """Return why the task cannot score answers to its problems; "" if it can."""
    try:
        _ = data.task.verifier
    except ConfigError as error:
        return str(error).splitlines()[0]
    return ""
