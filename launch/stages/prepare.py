"""A run made ready: everything that can be refused is refused here, before any model is built.

A stage is one algorithm with its graph, its placement and, for each role, who plays it and where
its weights come from. Stages named under `before` run first; one from which nothing starts is left
out, so giving a model folder, or a rule for a reward, skips the warm-up that would have made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

from ...algorithms.roles.language import RewardModel
from ...configs.schema import SAME, ModelConfig, model_spec
from ...dataflow.errors import ConfigError, nearest
from ...dataflow.runtime.engine import Source
from ...planner.plan.plan import Plan, one_group_plan
from ...workers.agents.environment import AGENT, TASK_AGENTS, check_converses
from ...workers.data.sources import TaskSource
from ...workers.data.task import DataReport
from ...workers.engines.registry import DEFAULT
from ...workers.models.architecture import empty_model
from ...workers.models.lora import check_lora
from ...workers.models.spec import Head, ModelSpec
from ...workers.rewards.registry import check_verifiers, takes_batches
from ...workers.rewards.rule_reward import RuleRewardSpec
from ..inputs.data import Data, load_data, sources_of, task_spec_of
from ..inputs.engines import ENV_SPECS, MODEL_TYPE
from ..inputs.record import Stage
from ..inputs.run import Run, check_model
from ..inputs.sizes import check_lengths, check_streams, longest_sampled
from ..inputs.suites import HeldOutRows, Suite, suites_of
from ..placement.machine import with_cluster
from ..placement.models import fetch_weights, with_models
from ..placement.place import check_devices, make_executor, placed, with_placement, written_plan
from ..run_dir.evaluations import LOSS, logged_name, names_of
from .evaluation import env_actors, evaluation_graph, in_whole_batches
from .memory_limit import check_memory
from .worker_specs import (
    MODEL,
    agent_spec,
    check_groups,
    check_options,
    first_start,
    head_of,
    own_text_of,
    with_roles,
)


def prepare(run: Run, plan: Plan | None = None, *, dry: bool = False) -> Run:
    """Check a run through, place it and read its data.

    Args:
        run: The run.
        plan: Where the main stage's nodes run, if that has been decided before: a resumed run goes
            on where it ran.
        dry: Whether it is not to be carried out: devices need not be here, and no weights are
            downloaded.
    """
    run = with_models(run if dry else with_cluster(run))
    run = build_stages(run, plan)
    for stage in run.stages:
        check_options(stage, run)
    make_executor(run.executor, dry=dry)
    if run.model.architecture.get("model_type") == MODEL_TYPE:
        run = _of_perceptrons(run)
    run = placed(run)
    if run.cluster is not None and (dry or run.cluster.device_type == "cuda"):
        check_devices(run.placed, run.cluster)  # what CPUs are said to have is a share of a machine
    sections = [section for stage in run.stages for section in stage.roles.values()]
    agents = [section.options for section in sections if section.worker in TASK_AGENTS]
    run = _with_data(run, converses=bool(agents))
    for options in agents:
        check_agents([run.data, *(suite.data for suite in run.suites)], options)
    check_memory(run)
    check_groups(run)
    if not dry:
        fetch_weights(run)
    return _with_lengths(run)


def build_stages(run: Run, plan: Plan | None = None) -> Run:
    """The run with roles and placement of its stages, without stages from which nothing starts.

    The main stage's nodes run as the plan says, or the configuration; what that leaves to the
    planner is on one rank, and the run has no plan yet.
    """
    check_model(run.model)
    plan = plan or written_plan(run)
    stages: list[Stage] = []
    for stage in run.stages:
        stages.append(_with_whole_batches(with_roles(stage, run.model, stages), run))
    on_one_rank = one_group_plan(device=run.executor.device)
    run = with_placement(replace(run, stages=tuple(stages)), plan or on_one_rank)
    # The main stage, and those from which it starts, directly or through others.
    wanted: set[str] = {run.main.name}
    for stage in reversed(run.stages):
        if stage.name in wanted:
            wanted |= {start for role in stage.roles for start in stage.starts(role)}
    run = replace(run, stages=tuple(s for s in run.stages if s.name in wanted), plan=plan)
    check_streams(run.stages, run.config.schedule)
    return run


def _with_whole_batches(stage: Stage, run: Run) -> Stage:
    """The stage, with one call of the whole batch where a reward function must see all of it."""
    section = run.config.task
    has_functions = section.options.keys() & {"reward", "tasks", "task"}
    task = task_spec_of(section) if has_functions else None
    roles = {
        role
        for role, own in stage.roles.items()
        if takes_batches(own.worker or "", own.options, task)
    }
    return replace(stage, graph=in_whole_batches(stage.graph, roles)) if roles else stage


def _of_perceptrons(run: Run) -> Run:
    """Networks of environments' actors: no engine computes them, and one thread does so fastest."""
    engines, section = run.engines, run.executor
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
    if section.num_threads is not None:
        return run
    # The order of a sum, and so its last bits, depends on how many threads share it: with one each,
    # results do not depend on how many ranks share the machine's cores.
    return run.having(executor=section.model_copy(update={"num_threads": 1}))


def _with_data(run: Run, *, converses: bool) -> Run:
    data = load_data(run.config.task, run.model)
    if converses:
        check_converses(data.task)
    run = replace(run, data=data)
    architecture = run.model.architecture
    if data.has_text and architecture and "vocab_size" not in architecture:
        # Tensor parallelism divides it; nothing is ever trained to say what is added for that. It
        # stays if the run goes on in another layout.
        parts = lcm(*(group.tensor_parallel for group in run.main.placement.groups))
        size = -(-data.tokenizer.vocab_size // parts) * parts
        architecture = {**architecture, "vocab_size": size}
        run = run.having(model=run.model.model_copy(update={"architecture": architecture}))
    reports: list[DataReport] = [data.task.report]
    if (contaminated := data.contaminated[1]) is not None:
        reports.append(contaminated)
    sources: dict[str, Mapping[str, Source]] = {}
    for stage in run.stages:
        sources[stage.name], left_out = sources_of(stage, data)
        reports += left_out
    if any(stage.worker(role) == "rule" for stage in run.stages for role in stage.roles):
        RuleRewardSpec(task=data.spec, tokenizer=data.tokenizer_spec)
        _ = data.task.needs_process  # asking for it says what is missing
    for stage in run.stages:
        for role, section in stage.roles.items():
            check_verifiers(stage.worker(role), section.options, data.task)
    rows = HeldOutRows.of(run.main.graph, sources[run.main.name])
    run = replace(run, sources=sources, held_out_rows=rows, reports=tuple(reports))
    return replace(run, suites=_suites(run))


def _suites(run: Run) -> tuple[Suite, ...]:
    """Return the suites of the main stage's policy, besides the loss on held-out rows."""
    config, measured = run.config.evaluation, [LOSS] if run.held_out_rows else []
    suites: tuple[Suite, ...] = ()
    if run.main.policy is not None:
        if run.held_out_rows and run.data.why_not_scored:
            config = config.model_copy(update={"num_prompts": 0})
        suites = suites_of(config, run.data, run.main.sampling)
        measured += metrics_of(suites)
    elif config.suites:
        raise ConfigError(
            f"'evaluation.suites' is set, but {run.main.graph.name} trains no policy to answer "
            "problems\n    leave it out"
        )
    elif config.num_episodes:
        measured += [f"{actor}/return" for actor in env_actors(run.main)]
    if config.keep_best is not None and config.keep_best not in measured:
        raise ConfigError(
            f"'evaluation.keep_best': '{config.keep_best}' is not measured"
            f"{nearest(config.keep_best, measured)}\n    what is: "
            f"{', '.join(measured) or 'nothing'}"
        )
    return suites


def metrics_of(suites: Sequence[Suite]) -> list[str]:
    return [
        logged_name(suite.name, name)
        for suite in suites
        for name in names_of(suite.sampling.num_samples)
    ]


def _with_lengths(run: Run) -> Run:
    by_name = {stage.name: stage for stage in run.stages}
    num_tokens = run.data.tokenizer.vocab_size if run.data.has_text else 0
    lengths: list[int | None] = []
    for stage in run.stages:
        texts = {role: own_text_of(stage, role, run) for role in stage.roles}
        own = {role: text.num_tokens for role, text in texts.items() if text is not None}
        positions = model_positions(stage, by_name, run.model, num_tokens, own)
        graph, per_step = stage.graph, stage.config.per_step
        tables = run.sources[stage.name].items()
        longest = {name: one.longest for name, one in tables if isinstance(one, TaskSource)}
        shorten = f"lower max_new_tokens ({stage.at}.cfg)"
        check_lengths(graph, per_step, longest, positions, shorten)
        lengths.append(longest_sampled(graph, per_step, longest))
        if stage is run.main and stage.policy in positions:
            for suite in run.suites:
                check_suite_lengths(suite, positions[stage.policy])
    lengths += [suite.longest for suite in run.suites]
    known = [length for length in lengths if length is not None]
    return replace(run, longest_sequence=max(known) if len(known) == len(lengths) else None)


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


def model_folders(run: Run) -> set[str]:
    """The folders of models and tokenizers that are there before any stage has run."""
    starts = {start for stage in run.stages for role in stage.roles for start in stage.starts(role)}
    starts -= {MODEL, *(stage.name for stage in run.stages)}
    named = {*starts, run.model.folder, run.data.tokenizer_spec.folder}
    return {folder for folder in named if folder}


def check_agents(datas: Sequence[Data], options: Mapping[str, Any]) -> None:
    """Refuse problems whose conversations could not be rendered or read."""
    for data in {id(data): data for data in datas if data.task.converses}.values():
        spec = agent_spec(AGENT, data, data.tokenizer_spec, options)
        spec.ways(data.task, data.tokenizer)


def model_positions(
    stage: Stage,
    stages: Mapping[str, Stage],
    model: ModelConfig,
    num_tokens: int,
    own_tokens: Mapping[str, int],
) -> dict[str, int]:
    """Look at the models that roles start from, without their weights."""
    found: dict[str, int] = {}
    looked_at: set[tuple[str, Head | None]] = set()
    for role in stage.roles:
        worker = stage.worker(role)
        if worker in ENV_SPECS:
            continue
        head = head_of(stage.roles[role])
        for start in stage.starts(role):
            if start not in stages and (start, head) not in looked_at:
                looked_at.add((start, head))
                tokens = own_tokens.get(role, num_tokens)
                _check_model(f"{stage.at}.roles.{role}.start", start, head, model, tokens)
            if head and head.name == "score" and role not in stage.changed_roles:
                _check_has_score(f"{stage.at}.roles.{role}", head, start, stages, model)
        first = first_start(stage, role, stages)
        if not first or role in own_tokens:
            continue
        positions = _started_model(first, model).num_positions
        if positions is not None:
            found[role] = positions
    return found


def _check_has_score(
    at: str, head: Head, start: str, stages: Mapping[str, Stage], model: ModelConfig
) -> None:
    if start in stages:
        trained = stages[start].trained(RewardModel) is not None
    else:
        trained = head.is_saved(_started_model(start, model).folder)
    if not trained:
        raise ConfigError(
            f"'{at}' is a reward model that starts from '{start}', which has no head that scores: "
            "all scores would be random\n    train one in a stage before (algorithm.before), give "
            f"the folder of one ({at}.start=PATH), or set {at}.worker=rule"
        )


def _started_model(start: str, model: ModelConfig) -> ModelSpec:
    return model_spec(model) if start == MODEL else ModelSpec(folder=start)


def _check_model(
    at: str, start: str, head: Head | None, model: ModelConfig, num_tokens: int
) -> None:
    spec = _started_model(start, model)
    at = "model.folder" if start == MODEL else at
    try:
        vocab_size: int | None = getattr(spec.config, "vocab_size", None)
        if head is not None:
            head.check(spec)
            if model.lora:
                check_lora(model.lora, empty_model(spec.config))
    except ConfigError as error:
        # What is wrong with an architecture is said with its key.
        raise ConfigError(str(error) if spec.folder is None else f"'{at}': {error}") from error
    if vocab_size is not None and vocab_size < num_tokens:
        key = "model.architecture.vocab_size" if spec.folder is None else at
        raise ConfigError(
            f"'{key}': the model knows {vocab_size} tokens, and the tokenizer has {num_tokens}\n"
            "    give the model's own tokenizer, or an architecture without vocab_size, which then "
            "is the tokenizer's"
        )
