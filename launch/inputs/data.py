"""The data of a run: its task, its tokenizer, and the problems held out of training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...algorithms.roles.language import Prompts
from ...configs.schema import ModelConfig, TaskConfig
from ...workers.data.sources import PromptSource
from ...workers.data.task import Task, TaskSpec, fingerprint, task_alphabet
from ...workers.models.tokenizer import Tokenizer, TokenizerSpec
from .env_specs import acted_in
from .tasks import task_spec_of

__all__ = ["Data", "HeldOut", "load_data"]


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


def load_data(section: TaskConfig, model: ModelConfig) -> Data:
    """Read or generate the task's problems, and make the tokenizer that the model says.

    Raises:
        ConfigError: If a file is missing or bad, or the task or tokenizer cannot be made.
    """
    spec = task_spec_of(section)
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
        )
        available = len(data.task.held_out) - source.report.num_bad
        self._prompts = source.held_out(min(num_prompts, available))
        self.longest = source.longest

    @property
    def num_prompts(self) -> int:
        """How many problems are asked."""
        return len(self._prompts.prompt_id)

    def batch(self, step: int) -> Prompts:
        """All of them."""
        del step
        return self._prompts
