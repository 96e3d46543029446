"""A run made ready: everything that can be refused is refused here, before any model is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from ...configs.schema import RunConfig
from ...dataflow.errors import ConfigError
from ...dataflow.runtime.engine import Source
from ...planner.plan.plan import Plan
from ...workers.data.row_report import DataReport
from ...workers.rewards.rule_reward import RuleRewardSpec
from ..inputs.data import Data, HeldOut, load_data, longest_rows, sources_of, task_spec_of
from ..inputs.env_specs import MODEL_TYPE
from ..inputs.sizes import check_lengths
from ..placement.auto_place import choose
from ..placement.place import make_executor, with_threads, written_plan
from .evaluation import evaluation_graph
from .stages import Stage, stages_of
from .worker_specs import check_options, model_positions

__all__ = ["Job", "prepare"]


@dataclass(frozen=True)
class Job:
    """A run, ready to be carried out.

    Attributes:
        config: Its configuration.
        plan: Where the main stage's nodes run.
        note: What was chosen for it, or why nothing was, in one line; "" if nothing was to choose.
        stages: What is trained, in order; the main one last.
        data: Its task and tokenizer.
        sources: For each stage, a source for every table it reads.
        held_out: The problems to measure accuracy on; None if there is nothing to measure.
        reports: What was left out of the data, one for each way it is read.
    """

    config: RunConfig
    plan: Plan
    note: str
    stages: tuple[Stage, ...]
    data: Data
    sources: Mapping[str, Mapping[str, Source]]
    held_out: HeldOut | None
    reports: tuple[DataReport, ...]

    @property
    def main(self) -> Stage:
        """The stage the run is for."""
        return self.stages[-1]


def prepare(config: RunConfig, plan: Plan | None = None) -> Job:
    """Check a run through, place it and read its data.

    Args:
        config: The run's configuration.
        plan: Where the main stage's nodes run, if that has been decided before: a resumed run goes
            on where it ran.

    Raises:
        ConfigError: If a key, a role, a file or a size is wrong.
        FlowError: If a step is no valid graph.
        PlanError: If the placement does not fit.
    """
    stages = stages_of(config, plan)
    for stage in stages:
        check_options(stage, config)
    task_spec_of(config)
    make_executor(config)
    config, plan, note = _placed(config, plan, stages[-1])
    stages = stages_of(config, plan)
    data = load_data(config)
    config = _with_vocabulary(config, stages[-1], data)
    reports: list[DataReport] = [data.task.report]
    sources: dict[str, Mapping[str, Source]] = {}
    for stage in stages:
        seeded = config.model_copy(update={"seed": stage.seed(config)})
        made, left_out = sources_of(
            stage.graph, stage.config.per_step, seeded, data, stage.config.num_groups
        )
        sources[stage.name] = made
        reports += left_out
    if any(plan.worker == "rule" for stage in stages for plan in stage.roles.values()):
        _check_rule(data)
    held_out = _held_out(config, stages[-1], data)
    _check_lengths(config, stages, sources, held_out)
    return Job(config, plan, note, stages, data, sources, held_out, tuple(reports))


def _placed(config: RunConfig, plan: Plan | None, main: Stage) -> tuple[RunConfig, Plan, str]:
    """The plan of the main stage, with the threads of its ranks, and a line about it."""
    if config.model.architecture.get("model_type") == MODEL_TYPE:
        config = _on_one_thread(config)
    plan = plan or written_plan(config)
    if plan is not None:
        return with_threads(config, plan), plan, ""
    choice = choose(config, main.graph)
    return with_threads(config, choice.plan, choice.num_threads), choice.plan, choice.note


def _on_one_thread(config: RunConfig) -> RunConfig:
    """For perceptrons, which one thread computes fastest.

    The order of a sum, and so its last bits, depends on how many threads share it: with one each,
    results do not depend on how many ranks share the machine's cores.
    """
    if config.executor.num_threads is not None:
        return config
    executor = config.executor.model_copy(update={"num_threads": 1})
    return config.model_copy(update={"executor": executor})


def _with_vocabulary(config: RunConfig, main: Stage, data: Data) -> RunConfig:
    """With the size of the model's vocabulary, which stays if the run goes on in another layout.

    Tensor parallelism divides it; nothing is ever trained to say what was added for that.
    """
    model = config.model
    if not data.has_text or not model.architecture or "vocab_size" in model.architecture:
        return config
    parts = lcm(*(group.tensor_parallel for group in main.placement.groups))
    size = -(-data.tokenizer.vocab_size // parts) * parts
    architecture = {**model.architecture, "vocab_size": size}
    return config.model_copy(
        update={"model": model.model_copy(update={"architecture": architecture})}
    )


def _check_lengths(
    config: RunConfig,
    stages: tuple[Stage, ...],
    sources: Mapping[str, Mapping[str, Source]],
    held_out: HeldOut | None,
) -> None:
    """No row may be longer than the model that reads it can take."""
    by_name = {stage.name: stage for stage in stages}
    for stage in stages:
        positions = model_positions(stage, by_name, config)
        check_lengths(
            stage.graph,
            stage.config.per_step,
            longest_rows(sources[stage.name]),
            positions,
            f"lower max_new_tokens ({stage.at}.cfg)",
        )
        if stage is stages[-1] and held_out is not None and stage.policy in positions:
            check_lengths(
                evaluation_graph(config),
                {"prompts": held_out.num_prompts},
                {"prompts": held_out.longest},
                {"actor": positions[stage.policy]},
                "lower task.max_response_tokens",
            )


def _check_rule(data: Data) -> None:
    """A rule needs the task's verifier; asking for it says what is missing."""
    RuleRewardSpec(task=data.spec, tokenizer=data.tokenizer_spec)
    _ = data.task.verifier


def _held_out(config: RunConfig, main: Stage, data: Data) -> HeldOut | None:
    if main.policy is None or not config.evaluation.num_prompts or not len(data.task.held_out):
        return None
    if config.evaluation.num_prompts > len(data.task.held_out):
        raise ConfigError(
            f"'evaluation.num_prompts' is {config.evaluation.num_prompts}, but task "
            f"'{data.task.task_id}' holds out {len(data.task.held_out)} problems\n"
            "    ask for fewer, or raise task.num_held_out"
        )
    return HeldOut(config, data)
