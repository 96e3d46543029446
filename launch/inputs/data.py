"""The data of a run: its task, its tokenizer, and the problems held out of training.

The kinds of task stand here, one line each. One of one's own is `task=own task.kind=module:Class`
with a dataclass that is a `TaskSpec`; its fields are the keys of the section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...algorithms.roles.language import Prompts
from ...configs.references import entry_or_own
from ...configs.schema import ModelConfig, TaskConfig
from ...configs.validate import check_finite, fields_of, nearest_key, validated
from ...dataflow.errors import ConfigError, one_process
from ...workers.data.chat import ChatOptions, PromptEncoder
from ...workers.data.file_task import FileTaskSpec
from ...workers.data.instruction_task import InstructionTaskSpec
from ...workers.data.reasoning_task import ReasoningTaskSpec
from ...workers.data.sources import PromptSource
from ...workers.data.task import Task, TaskSpec, fingerprint, task_alphabet
from ...workers.envs.games.task import BoardTaskSpec, LibraryGameTaskSpec
from ...workers.envs.task import EnvTaskSpec
from ...workers.models.tokenizer import Tokenizer, TokenizerSpec
from .env_specs import acted_in

__all__ = ["TASKS", "Data", "HeldOut", "load_data", "task_spec_of"]

TASKS: Mapping[str, Any] = {
    "reasoning_gym": ReasoningTaskSpec,
    "file": FileTaskSpec,
    "instructions": InstructionTaskSpec,
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

    @property
    def chat(self) -> ChatOptions:
        """How prompts that are conversations are rendered."""
        section = self.section
        return ChatOptions(wrap=section.chat, template_kwargs=section.chat_template_kwargs)

    @property
    def prompts(self) -> PromptEncoder:
        """The prompts as messages and as tokens."""
        return PromptEncoder(self.task, self.tokenizer, self.chat)

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


class HeldOut:
    """The held-out prompts as a source: the same in every step.

    Args:
        data: The run's.
        num_prompts: How many to ask at most.

    Attributes:
        longest: Tokens of the task's longest prompt.

    Raises:
        ConfigError: If too many prompts cannot be used.
    """

    def __init__(self, data: Data, num_prompts: int) -> None:
        source = PromptSource(
            data.task,
            data.tokenizer,
            batch_size=1,
            seed=0,
            max_prompt_tokens=data.section.max_prompt_tokens,
            max_bad_fraction=data.section.max_bad_fraction,
            chat=data.chat,
        )
        available = len(data.task.held_out) - source.report.num_bad
        self._prompts = source.held_out(min(num_prompts, available))
        self.longest = source.longest

    @property
    def problems(self) -> list[int]:
        """Indices of what is asked, in order."""
        return self._prompts.prompt_id.tolist()

    @property
    def num_prompts(self) -> int:
        """How many problems are asked."""
        return len(self._prompts.prompt_id)

    def batch(self, step: int) -> Prompts:
        """All of them."""
        del step
        return self._prompts
