"""The data of a run: its task, its tokenizer, and a source for every table a step reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...algorithms.roles.environment import EnvRows
from ...algorithms.roles.games import GameRows
from ...algorithms.roles.language import Demonstrations, PreferencePairs, Prompts, ScoredPairs
from ...configs.schema import RunConfig
from ...configs.validate import fields_of, validated
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph
from ...dataflow.runtime.engine import Source
from ...workers.data.row_report import DataReport
from ...workers.data.sources import (
    DemonstrationSource,
    PairSource,
    PromptSource,
    ScoredPairSource,
)
from ...workers.data.task import Task, TaskSpec, fingerprint, task_alphabet, task_spec
from ...workers.envs.rows import EnvRowSource, GameRowSource
from ...workers.envs.task import EnvTaskSpec
from ...workers.models.tokenizer import Tokenizer, TokenizerSpec
from .env_specs import (
    acted_in,
    env_task,
    game_task,
    refuse_other_value_loss,
    refuse_scaled_fitness,
)

__all__ = [
    "Data",
    "HeldOut",
    "check_tables",
    "load_data",
    "longest_rows",
    "sources_of",
    "task_spec_of",
]

_TABLES: Mapping[type, Any] = {
    Prompts: PromptSource,
    Demonstrations: DemonstrationSource,
    PreferencePairs: PairSource,
    ScoredPairs: ScoredPairSource,
    EnvRows: EnvRowSource,
    GameRows: GameRowSource,
}


@dataclass(frozen=True)
class Data:
    """A task and how its text becomes tokens."""

    spec: TaskSpec
    task: Task
    tokenizer_spec: TokenizerSpec
    tokenizer: Tokenizer

    @property
    def has_text(self) -> bool:
        """Whether its problems are texts; those of an environment are none."""
        return acted_in(self.spec) is None

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the problems: for a reward elsewhere, and for a run that is resumed."""
        return fingerprint(self.task)


def task_spec_of(config: RunConfig) -> TaskSpec:
    """The task's spec, its options validated.

    Raises:
        ConfigError: If the kind or an option is unknown, missing or of the wrong type.
    """
    section = config.task
    options = section.options
    kind = type(task_spec(section.kind, **options))
    if "max_bad_fraction" in (fields_of(kind) or {}):
        options["max_bad_fraction"] = section.max_bad_fraction
    spec: Any = validated(kind, options, "task")
    return spec


def load_data(config: RunConfig) -> Data:
    """Read or generate the task's problems, and make the tokenizer.

    Raises:
        ConfigError: If a file is missing or bad, or the task or tokenizer cannot be made.
    """
    spec = task_spec_of(config)
    task = spec.build()
    chosen = config.model.tokenizer
    if chosen == "task":
        tokenizer_spec = TokenizerSpec(kind="char", alphabet=task_alphabet(task))
    elif chosen == "folder":
        tokenizer_spec = TokenizerSpec(kind="folder", folder=config.model.folder)
    else:
        tokenizer_spec = chosen
    return Data(spec, task, tokenizer_spec, tokenizer_spec.build())


def check_tables(graph: Graph, at: str) -> None:
    """Refuse a step that reads a table no task can give.

    Raises:
        ConfigError: Naming the table.
    """
    for name, table in graph.sources.items():
        if table not in _TABLES:
            raise ConfigError(
                f"'{at}.step': {graph.name} reads a table '{name}' ({table.__name__}) that no task "
                f"gives\n    tasks give: {', '.join(kind.__name__ for kind in _TABLES)}; for "
                "another table, use Engine from Python with a source of your own"
            )


def sources_of(
    graph: Graph,
    per_step: Mapping[str, int],
    config: RunConfig,
    data: Data,
    num_groups: Mapping[str, int] | None = None,
) -> tuple[dict[str, Source], list[DataReport]]:
    """A source for every table, and what was left out while reading.

    Args:
        graph: What reads them.
        per_step: Items of each that one step takes.
        config: The run's configuration.
        data: Its task and tokenizer.
        num_groups: For tables of environments or games, the least number of groups.

    Raises:
        ConfigError: If too many rows are bad, or fewer are left than one step takes; or there are
            too few groups.
    """
    sources: dict[str, Source] = {}
    reports: list[DataReport] = []
    for name, table in graph.sources.items():
        if table in (EnvRows, GameRows):
            least = (num_groups or {}).get(name, 1)
            refuse_other_value_loss(graph, config.model.architecture)
            sources[name] = _acting_rows(graph, name, per_step[name], least, data)
            continue
        if acted_in(data.spec) is not None:
            raise ConfigError(
                f"{graph.name} reads {table.__name__}, and an environment or a game has none\n"
                "    choose a task with problems, such as task=chain_sum"
            )
        options: dict[str, Any] = {
            "batch_size": per_step[name],
            "seed": config.seed,
            "max_prompt_tokens": config.task.max_prompt_tokens,
            "max_bad_fraction": config.task.max_bad_fraction,
        }
        if table is not Prompts:
            options["max_response_tokens"] = config.task.max_response_tokens
        source = _TABLES[table](data.task, data.tokenizer, **options)
        sources[name] = source
        reports.append(source.report)
    return sources, reports


def _acting_rows(graph: Graph, name: str, count: int, least: int, data: Data) -> Source:
    """The table of environments or games called `name`: `count` rows in `least` groups or more."""
    table = graph.sources[name]
    wanted = env_task if table is EnvRows else game_task
    spec = wanted(data.spec, graph.name)
    refuse_scaled_fitness(graph, spec)
    whole = spec.num_agents if isinstance(spec, EnvTaskSpec) else 1
    size = spec.group_size or count // least // whole * whole
    if size == 0 or -(-count // size) < least:
        raise ConfigError(
            f"{graph.name} needs {least} groups of '{name}', and {count} rows in groups of "
            f"{size or whole} are {-(-count // (size or whole))}\n"
            f"    raise algorithm.per_step.{name}, or set task.group_size to {count // least} or "
            "less"
        )
    return _TABLES[table](count, size)


def longest_rows(sources: Mapping[str, Source]) -> dict[str, int]:
    """Tokens of the longest row of each table."""
    ours = (PromptSource, DemonstrationSource, PairSource)
    return {name: source.longest for name, source in sources.items() if isinstance(source, ours)}


class HeldOut:
    """The held-out prompts as a source: the same in every step.

    Attributes:
        longest: Tokens of the task's longest prompt.

    Raises:
        ConfigError: If too many prompts cannot be used.
    """

    def __init__(self, config: RunConfig, data: Data) -> None:
        source = PromptSource(
            data.task,
            data.tokenizer,
            batch_size=1,
            seed=0,
            max_prompt_tokens=config.task.max_prompt_tokens,
            max_bad_fraction=config.task.max_bad_fraction,
        )
        available = len(data.task.held_out) - source.report.num_bad
        self._prompts = source.held_out(min(config.evaluation.num_prompts, available))
        self.longest = source.longest

    @property
    def num_prompts(self) -> int:
        """How many problems are asked."""
        return len(self._prompts.prompt_id)

    def batch(self, step: int) -> Prompts:
        """All of them."""
        del step
        return self._prompts
