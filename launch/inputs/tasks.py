"""The kinds of task there are, one line each, and the one that a configuration describes.

A task of one's own is `task=own task.kind=module:Class` with a dataclass that is a `TaskSpec`; its
fields are the keys of the section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...configs.references import entry_or_own
from ...configs.schema import TaskConfig
from ...configs.validate import fields_of, nearest_key, validated
from ...dataflow.errors import ConfigError
from ...workers.data.file_task import FileTaskSpec
from ...workers.data.reasoning_task import ReasoningTaskSpec
from ...workers.data.task import TaskSpec
from ...workers.envs.games.task import BoardTaskSpec, LibraryGameTaskSpec
from ...workers.envs.task import EnvTaskSpec

__all__ = ["TASKS", "task_spec_of"]

TASKS: Mapping[str, Any] = {
    "reasoning_gym": ReasoningTaskSpec,
    "file": FileTaskSpec,
    "gymnasium": EnvTaskSpec,
    "board_game": BoardTaskSpec,
    "library_game": LibraryGameTaskSpec,
}
"""Kind -> the dataclass of its options, which builds the task."""


def task_spec_of(section: TaskConfig) -> TaskSpec:
    """The task's spec, its options validated.

    Raises:
        ConfigError: If the kind or an option is unknown, missing, of the wrong type or out of
            range.
    """
    kind = entry_or_own(section.kind, TASKS, "task.kind", "task kind")
    known = fields_of(kind)
    if known is None or not hasattr(kind, "build"):
        raise ConfigError(
            f"'task.kind': '{section.kind}' is no kind of task\n    give a dataclass whose fields "
            "are the task's options, with a method build() that returns a Task"
        )
    options = section.options
    for option in options:
        if option not in known:
            raise ConfigError(
                f"a '{section.kind}' task has no option '{option}'{nearest_key(option, known)}\n"
                f"    its options are: {', '.join(known)}"
            )
    if "max_bad_fraction" in known:
        options["max_bad_fraction"] = section.max_bad_fraction
    spec: Any = validated(kind, options, "task")
    return spec
