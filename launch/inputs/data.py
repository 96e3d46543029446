"""The data of a run: its task and its tokenizer.

The kinds of task stand here, one line each. One of one's own is `task=own task.kind=module:Class`
with a dataclass that is a `TaskSpec`; its fields are the keys of the section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...configs.references import entry_or_own
from ...configs.schema import ModelConfig, TaskConfig
from ...configs.validate import check_finite, fields_of, nearest_key, validated
from ...dataflow.errors import ConfigError, one_process
from ...workers.data.file_task import FileTaskSpec
from ...workers.data.reasoning_task import ReasoningTaskSpec
from ...workers.data.task import Task, TaskSpec, fingerprint, task_alphabet
from ...workers.envs.games.task import BoardTaskSpec, LibraryGameTaskSpec
from ...workers.envs.task import EnvTaskSpec
from ...workers.models.tokenizer import Tokenizer, TokenizerSpec
from .env_specs import acted_in

__all__ = ["TASKS", "Data", "load_data", "task_spec_of"]

TASKS: Mapping[str, Any] = {
    "reasoning_gym": ReasoningTaskSpec,
    "file": FileTaskSpec,
    "gymnasium": EnvTaskSpec,
    "board_game": BoardTaskSpec,
    "library_game": LibraryGameTaskSpec,
}
"""Kind -> the dataclass of its options, which builds the task."""


@dataclass(frozen=True)
class Data:
    """A task and how its text becomes tokens.

    Attributes:
        section: What was configured of it: the lengths that are allowed.
        spec: Its recipe.
        task: Its problems.
        tokenizer_spec: The tokenizer's recipe.
        tokenizer: And the tokenizer.
    """

    section: TaskConfig
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
    with one_process():
        spec: Any = validated(kind, options, "task")
    check_finite(options, "task")
    return spec


def load_data(section: TaskConfig, model: ModelConfig) -> Data:
    """Read or generate the task's problems, and make the tokenizer that the model says.

    Raises:
        ConfigError: If a file is missing or bad, or the task or tokenizer cannot be made.
    """
    spec = task_spec_of(section)
    with one_process():
        task = spec.build()
    chosen = model.tokenizer
    if chosen == "task":
        tokenizer_spec = TokenizerSpec(kind="char", alphabet=task_alphabet(task))
    elif chosen == "folder":
        tokenizer_spec = TokenizerSpec(kind="folder", folder=model.folder)
    else:
        tokenizer_spec = chosen
    return Data(section, spec, task, tokenizer_spec, tokenizer_spec.build())
