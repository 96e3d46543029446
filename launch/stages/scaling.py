"""What a stage makes of wishes for more or fewer replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ...dataflow.errors import ConfigError
from ...dataflow.runtime.engine import Engine
from ...dataflow.runtime.executor import groups_of
from ...dataflow.runtime.recovery.replicas import why_not_elastic
from ...dataflow.runtime.recovery.resizing import ElasticExecutor, Scale
from ..run_dir.scaling import ElasticGroup, read_wish, write_groups

__all__ = ["stage_scale"]


def stage_scale(engine: Engine, folder: Path, told: Callable[[str], None]) -> Scale:
    """Say in a run's folder which groups can have other ranks, and listen there for wishes.

    Args:
        engine: Of the main stage.
        folder: The run's.
        told: Is told what becomes of a wish.
    """
    write_groups(folder, _groups(engine))
    damaged: list[str] = []

    def wish() -> Mapping[str, int]:
        try:
            return read_wish(folder)
        except ConfigError as error:
            if not damaged:
                damaged.append(str(error))
                told(str(error))
            return {}

    return Scale(wish, told)


def _groups(engine: Engine) -> dict[str, ElasticGroup]:
    most = engine.programs["main"].placement.num_chunks
    alone = "" if isinstance(engine.executor, ElasticExecutor) else "one process does all the work"
    return {
        group.name: ElasticGroup(most, alone or why_not_elastic(engine.programs, group.name))
        for group in groups_of(engine.programs)
    }
