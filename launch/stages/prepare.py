"""A run made ready: everything that can be refused is refused here, before any model is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any, cast

from ...configs.schema import SAME, EvaluationConfig, ExecutorConfig, ModelConfig, model_spec
from ...dataflow.errors import ConfigError, nearest
from ...dataflow.graph.graph import RoleRef
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.engine import Source
from ...dataflow.scheduler.schedule import Schedule
from ...planner.plan.plan import Plan
from ...workers.agents.environment import TASK_AGENTS, check_converses
from ...workers.data.row_report import DataReport
from ...workers.data.task import Task
from ...workers.engines.registry import DEFAULT
from ...workers.models.architecture import empty_model
from ...workers.rewards.rule_reward import RuleRewardSpec
from ..inputs.data import Data, load_data
from ..inputs.env_specs import MODEL_TYPE, acted_in
from ..inputs.record import Stage
from ..inputs.run import Run, executor_kind
from ..inputs.sizes import check_lengths, longest_sampled
from ..inputs.suites import HeldOutRows, Suite, suites_of
from ..inputs.tables import longest_rows, sources_of, statistics_of
from ..placement.machine import idle_gpus, with_cluster
from ..placement.models import fetch_weights, with_models
from ..placement.place import (
    check_devices,
    choose,
    executor_of,
    make_executor,
    with_threads,
)
from ..run_dir.evaluations import LOSS, logged_name, names_of
from .evaluation import env_actors, evaluation_graph
from .memory_limit import check_memory
from .roles import MODEL, build_stages, place_stages
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
    """Return a line for every group that cannot be restarted exactly; none if all can."""
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
    for role, section in stage.roles.items():
        worker = stage.worker(role)
        talks = worker in TASK_AGENTS and task.converses
        if talks and not task.deterministic:
            yield (
                role,
                f"what answers in '{task.task_id}' may keep a state outside the run, or answer "
                "otherwise when a conversation is begun anew; to change that: tools and "
                "environments that follow from problem, seed and turns, and say `deterministic`",
            )
        if _asks_judge(worker, section.options):
            yield (
                role,
                "a judge behind an address may score the same response otherwise; to change that: "
                "a rule, or a reward model that the run computes itself",
            )
        if (
            worker == "env"
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
    from ...workers.envs.spec import why_not_exact

    found = why_not_exact(spec.env, num_before=_NUM_STEPS, num_after=_NUM_STEPS)
    return f"two environments '{spec.id}' that were tried {found}" if found else ""


def not_reproducible(run: Run) -> str:
    """Why what comes out does not follow from the seed alone, in words; "" if it does."""
    reasons = [run.config.schedule.why_not_reproducible]
    task = run.data.task
    if task.converses and not task.deterministic:
        why = f", as {task.why_not_deterministic}" if task.why_not_deterministic else ""
        reasons.append(f"the other side of '{task.task_id}' may answer a turn in two ways{why}")
    return "; ".join(filter(None, reasons))


def about_model(run: Run) -> str:
    """Which language model in which precision, where, and who computes it; "" if none."""
    model = run.model
    if model.architecture.get("model_type") == MODEL_TYPE:
        return ""
    config = model_spec(model).config
    computes = run.engines.train.computes(empty_model(config))
    commit = "" if model.revision is None else f" at {model.revision[:12]}"
    name = model.hub or model.package or model.folder or "random weights"
    return (
        f"model: {name}{commit}, {model.dtype} on {run.executor.device}, computed {computes} "
        f"({config.model_type})"
    )


def first_notes(run: Run, *, tries: bool = False) -> list[str]:
    """Describe before the first step placement, models, evaluations and rows left out."""
    lines = [run.note, run.data.about_tools]
    why = not_reproducible(run)
    lines.append(why and f"not reproducible: {why}")
    lines += not_exact(run.stages, run.config.schedule, run.data.task, run.spec, tries=tries)
    lines += [line for stage in run.stages for line in high_rates(stage, run.model)]
    lines.append(rounded_adapters(run))
    if run.held_out_rows and run.config.evaluation.num_prompts:
        why = _why_not_scored(run.data)
        lines.append(why and f"evaluations measure the loss alone, and no accuracy: {why}")
    for report in run.reports:
        lines += [str(report)] if report.num_bad else []
        for note, count in report.notes.items():
            lines.append(f"{note} ({count} rows)" if count else note)
    return [line for line in lines if line]


def statistics(run: Run) -> list[str]:
    """How long the rows of every stage are, each line once."""
    lines = [line for tables in run.sources.values() for line in statistics_of(tables)]
    num_held_out, asked = len(run.data.task.held_out), run.held_out
    if asked and asked.num_prompts < num_held_out:
        lines.append(
            f"evaluations ask {asked.num_prompts} of {num_held_out} held-out problems "
            "(evaluation.num_prompts)"
        )
    return list(dict.fromkeys(lines))


def model_folders(run: Run) -> set[str]:
    """The folders of models and tokenizers that are there before any stage has run."""
    starts = {start for stage in run.stages for role in stage.roles for start in stage.starts(role)}
    starts -= {MODEL, *(stage.name for stage in run.stages)}
    named = {*starts, run.model.folder, run.data.tokenizer_spec.folder}
    return {folder for folder in named if folder}


def prepare(run: Run, plan: Plan | None = None, *, dry: bool = False) -> Run:
    """Check a run through, place it and read its data: what can be refused is refused here.

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
    run = with_models(run if dry else with_cluster(run))
    run = build_stages(run, plan)
    for stage in run.stages:
        check_options(stage, run)
    if dry:
        executor_of(run.executor, executor_kind(run.executor.kind))
    else:
        make_executor(run.executor)
    run = _placed(run)
    if run.cluster is not None and (dry or run.cluster.device_type == "cuda"):
        check_devices(run.placed, run.cluster)  # what CPUs are said to have is a share of a machine
    run = _with_data(run)
    for options in _agents(run):
        check_agents([run.data, *(suite.data for suite in run.suites)], options)
    check_memory(run)
    check_groups(run)
    if not dry:
        fetch_weights(run)
    _check_lengths(run)
    return replace(run, longest_sequence=_longest_sampled(run))


def _placed(run: Run) -> Run:
    """The run with the plan of its main stage, and the threads of its ranks."""
    if run.model.architecture.get("model_type") == MODEL_TYPE:
        _refuse_engines(run)
        run = run.having(executor=_on_one_thread(run.executor))
    threads = None
    if run.plan is not None:
        run = replace(run, note=idle_gpus(run.executor))
    else:
        choice = choose(run)
        run, threads = place_stages(replace(run, note=choice.note), choice.plan), choice.num_threads
    return run.having(executor=with_threads(run.executor, run.placed, threads))


def _with_data(run: Run) -> Run:
    """The run with its task, the tables of its stages, and what it is evaluated on."""
    data = load_data(run.config.task, run.model)
    if _agents(run):
        check_converses(data.task)
    run = replace(run, data=data).having(model=_with_vocabulary(run.model, run.main, data))
    reports: list[DataReport] = [data.task.report]
    if (contaminated := data.contaminated[1]) is not None:
        reports.append(contaminated)
    sources: dict[str, Mapping[str, Source]] = {}
    for stage in run.stages:
        sources[stage.name], left_out = sources_of(stage, data)
        reports += left_out
    if any(stage.worker(role) == "rule" for stage in run.stages for role in stage.roles):
        RuleRewardSpec(task=data.spec, tokenizer=data.tokenizer_spec)
        _ = data.task.verifier  # asking for it says what is missing
    rows = HeldOutRows.of(run.main.graph, sources[run.main.name])
    run = replace(run, sources=sources, held_out_rows=rows, reports=tuple(reports))
    return replace(run, suites=_suites(run))


def _refuse_engines(run: Run) -> None:
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


def _check_lengths(run: Run) -> None:
    """No row may be longer than the model that reads it can take."""
    by_name = {stage.name: stage for stage in run.stages}
    num_tokens = run.data.tokenizer.vocab_size if run.data.has_text else 0
    for stage in run.stages:
        positions = model_positions(stage, by_name, run.model, num_tokens)
        check_lengths(
            stage.graph,
            stage.config.per_step,
            longest_rows(run.sources[stage.name]),
            positions,
            f"lower max_new_tokens ({stage.at}.cfg)",
        )
        if stage is run.main and stage.policy in positions:
            for suite in run.suites:
                check_suite_lengths(suite, positions[stage.policy])


def check_suite_lengths(suite: Suite, num_positions: int) -> None:
    """No prompt with its response may be longer than the model can read."""
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


def _longest_sampled(run: Run) -> int | None:
    """Tokens of the longest prompt with its response in any stage or suite; None if unknown."""
    lengths = [
        longest_sampled(stage.graph, stage.config.per_step, longest_rows(run.sources[stage.name]))
        for stage in run.stages
    ]
    lengths += [suite.longest for suite in run.suites]
    known = [length for length in lengths if length is not None]
    return max(known) if len(known) == len(lengths) else None


def _agents(run: Run) -> list[Mapping[str, Any]]:
    """Return the options of the roles that answer a policy in conversation."""
    sections = (section for stage in run.stages for section in stage.roles.values())
    return [section.options for section in sections if section.worker in TASK_AGENTS]


def _suites(run: Run) -> tuple[Suite, ...]:
    """Return the suites of the main stage's policy, besides the loss on held-out rows."""
    config, losses = run.config.evaluation, [LOSS] if run.held_out_rows else []
    if run.main.policy is None:
        if config.suites:
            raise ConfigError(
                f"'evaluation.suites' is set, but {run.main.graph.name} trains no policy to answer "
                "problems\n    leave it out"
            )
        actors = env_actors(run.main) if config.num_episodes else ()
        _check_metric(config, [*losses, *(f"{actor}/return" for actor in actors)])
        return ()
    if run.held_out_rows and _why_not_scored(run.data):
        config = config.model_copy(update={"num_prompts": 0})
    suites = suites_of(config, run.data, run.main.sampling)
    _check_metric(config, [*losses, *metrics_of(suites)])
    return suites


def metrics_of(suites: Sequence[Suite]) -> list[str]:
    """The metrics of these suites, as logged below `evaluation/`."""
    return [
        logged_name(suite.name, name)
        for suite in suites
        for name in names_of(suite.sampling.num_samples)
    ]


def _check_metric(config: EvaluationConfig, measured: Sequence[str]) -> None:
    """Refuse an `evaluation.keep_best` that no evaluation measures."""
    if config.keep_best is not None and config.keep_best not in measured:
        raise ConfigError(
            f"'evaluation.keep_best': '{config.keep_best}' is not measured"
            f"{nearest(config.keep_best, measured)}\n    what is: "
            f"{', '.join(measured) or 'nothing'}"
        )


def _why_not_scored(data: Data) -> str:
    """Return why the task cannot score answers to its problems; "" if it can."""
    try:
        _ = data.task.verifier
    except ConfigError as error:
        return str(error).splitlines()[0]
    return ""
