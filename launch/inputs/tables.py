"""The tables that a step may read, one line each, and the sources that a task gives for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ...algorithms.roles.environment import EnvRows, GameRows
from ...algorithms.roles.language_tables import (
    Demonstrations,
    PreferencePairs,
    Prompts,
    ScoredPairs,
)
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
from .data import Data
from .env_specs import env_task, game_task, refuse_scaled_fitness
from .record import Stage

if TYPE_CHECKING:
    from ...workers.envs.task import EnvTaskSpec
    from .env_specs import GameTaskSpec


@dataclass(frozen=True)
class _Wanted:
    """A table that a step reads: its name, items of a step, and the least number of groups."""

    graph: Graph
    name: str
    count: int
    num_groups: int
    seed: int


def _texts(source: Any, wanted: _Wanted, data: Data) -> Source:
    """A table of a task's problems: prompts, or what is learned from beside them."""
    if not data.has_text:
        table = wanted.graph.sources[wanted.name]
        raise ConfigError(
            f"{wanted.graph.name} reads {table.__name__}, and an environment or a game has none\n"
            "    choose a task with problems, such as task=chain_sum"
        )
    limits: dict[str, Any] = {
        "max_prompt_tokens": data.section.max_prompt_tokens,
        "max_bad_fraction": data.section.max_bad_fraction,
        "chat": data.chat,
        "left_out": data.contaminated[0],
    }
    if source is PromptSource:
        limits["order"] = data.order
    else:
        # What is imitated of a conversation is all that follows the prompt.
        section = data.section
        limits["max_response_tokens"] = section.max_total_tokens or section.max_response_tokens
    return source(data.task, data.tokenizer, batch_size=wanted.count, seed=wanted.seed, **limits)


def _environments(wanted: _Wanted, data: Data) -> Source:
    from ...workers.envs.task import EnvRowSource  # with Gymnasium, which texts do without

    spec = env_task(data.spec, wanted.graph.name)
    refuse_scaled_fitness(wanted.graph, spec)
    return EnvRowSource(wanted.count, _group_size(wanted, spec, spec.num_agents))


def _games(wanted: _Wanted, data: Data) -> Source:
    from ...workers.envs.task import GameRowSource

    spec = game_task(data.spec, wanted.graph.name)
    return GameRowSource(wanted.count, _group_size(wanted, spec, 1))


def _group_size(wanted: _Wanted, spec: EnvTaskSpec | GameTaskSpec, whole: int) -> int:
    """Return how many rows step together, a multiple of `whole`."""
    count, least = wanted.count, wanted.num_groups
    size = spec.group_size or count // least // whole * whole
    if size == 0 or -(-count // size) < least:
        raise ConfigError(
            f"{wanted.graph.name} needs {least} groups of '{wanted.name}', and {count} rows in "
            f"groups of {size or whole} are {-(-count // (size or whole))}\n"
            f"    raise algorithm.per_step.{wanted.name}, or set task.group_size to "
            f"{count // least} or less"
        )
    return size


TABLES: Mapping[type, Callable[[_Wanted, Data], Source]] = {
    Prompts: partial(_texts, PromptSource),
    Demonstrations: partial(_texts, DemonstrationSource),
    PreferencePairs: partial(_texts, PairSource),
    ScoredPairs: partial(_texts, ScoredPairSource),
    EnvRows: _environments,
    GameRows: _games,
}
"""Table -> what makes its source."""


def check_tables(graph: Graph, at: str) -> None:
    """Refuse a step that reads a table no task can give.

    Raises:
        ConfigError: Naming the table.
    """
    for name, table in graph.sources.items():
        if table not in TABLES:
            raise ConfigError(
                f"'{at}.step': {graph.name} reads a table '{name}' ({table.__name__}) that no task "
                f"gives\n    tasks give: {', '.join(kind.__name__ for kind in TABLES)}; for "
                "another table, use Engine from Python with a source of your own"
            )


def sources_of(algorithm: Stage, data: Data) -> tuple[dict[str, Source], list[DataReport]]:
    """A source for every table of an algorithm, and what was left out while reading.

    Raises:
        ConfigError: If too many rows are bad, or fewer are left than one step takes; or there are
            too few groups.
    """
    sources: dict[str, Source] = {}
    config = algorithm.config
    for name in config.num_groups:
        if algorithm.graph.sources.get(name) not in (EnvRows, GameRows):
            raise ConfigError(
                f"'{algorithm.at}.num_groups.{name}': {algorithm.name} reads no environments or "
                f"games called '{name}'\n    leave it out"
            )
    for name, table in algorithm.graph.sources.items():
        groups = config.num_groups.get(name, 1)
        wanted = _Wanted(algorithm.graph, name, config.per_step[name], groups, algorithm.seed)
        try:
            sources[name] = TABLES[table](wanted, data)
        except ConfigError as error:
            key = f"{algorithm.at}.per_step.{name}"
            raise ConfigError(str(error).replace("batch_size", key)) from error
    return sources, [source.report for source in sources.values() if isinstance(source, _Reads)]


@runtime_checkable
class _Reads(Protocol):
    """A source of texts: what was left out, its longest row in tokens, a line on all lengths."""

    report: DataReport

    @property
    def longest(self) -> int: ...

    @property
    def statistics(self) -> str: ...


def longest_rows(sources: Mapping[str, Source]) -> dict[str, int]:
    """Tokens of the longest row of each table of texts."""
    return {name: source.longest for name, source in sources.items() if isinstance(source, _Reads)}


def statistics_of(sources: Mapping[str, Source]) -> list[str]:
    """A line on how long the rows of each table of texts are."""
    return [source.statistics for source in sources.values() if isinstance(source, _Reads)]
