"""The data of a run: its task and its tokenizer.

The kinds of task are listed here, one line each. Your own is `task=own task.kind=module:Class`
with a dataclass that is a `TaskSpec`; its fields are the keys of the section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...configs.references import entry_or_own, option_file, options_of
from ...configs.schema import ModelConfig, TaskConfig
from ...configs.validate import check_finite, fields_of, nearest_key, validated
from ...dataflow.errors import ConfigError, nearest, one_process
from ...dataflow.registry import Registry
from ...workers.data.chat import TURNS, ChatOptions, PromptEncoder
from ...workers.data.orders import Order, contaminated
from ...workers.data.row_report import DataReport
from ...workers.data.task import Task, TaskSpec, build_task, fingerprint, task_alphabet
from ...workers.models.tokenizer import Tokenizer, TokenizerSpec, folder_end
from ...workers.models.tokenizer_trial import check_tokenizer
from .env_specs import acted_in

_DATA = "penstock.workers.data"
_AGENTS = "penstock.workers.agents"
_ENVS = "penstock.workers.envs"

TASKS = Registry[Any](
    {
        "reasoning_gym": f"{_DATA}.reasoning_task:ReasoningTaskSpec",
        "file": f"{_DATA}.row_sources:FileTaskSpec",
        "hf": f"{_DATA}.row_sources:HfTaskSpec",
        "instructions": f"{_DATA}.instruction_task:InstructionTaskSpec",
        "calculator": f"{_AGENTS}.tasks.calculator:CalculatorTaskSpec",
        "maze": f"{_AGENTS}.tasks.lmrl_gym:MazeTaskSpec",
        "twenty_questions": f"{_AGENTS}.tasks.lmrl_gym:TwentyQuestionsTaskSpec",
        "search": f"{_AGENTS}.tasks.tool_questions:SearchTaskSpec",
        "table_questions": f"{_AGENTS}.tasks.tool_questions:TableQuestionsSpec",
        "gymnasium_text": f"{_AGENTS}.adapters.text_environments:GymnasiumTextTaskSpec",
        "verifiers": f"{_AGENTS}.adapters.verifiers_task:VerifiersTaskSpec",
        "openenv": f"{_AGENTS}.adapters.text_environments:OpenEnvTaskSpec",
        "tools": f"{_AGENTS}.tasks.tools_and_programs:ToolTaskSpec",
        "program": f"{_AGENTS}.tasks.tools_and_programs:ProgramTaskSpec",
        "mixture": f"{_DATA}.mixture_task:MixtureTaskSpec",
        "gymnasium": f"{_ENVS}.task:EnvTaskSpec",
        "board_game": f"{_ENVS}.games.mnk_games:BoardTaskSpec",
        "library_game": f"{_ENVS}.games.libraries:LibraryGameTaskSpec",
    }
)
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
        """True if problems are texts, false for environments and games."""
        return acted_in(self.spec) is None

    @property
    def chat(self) -> ChatOptions:
        """Options of rendering conversations, and texts where another side answers."""
        section = self.section
        wrap = section.chat or self.task.converses
        return ChatOptions(wrap=wrap, template_kwargs=section.chat_template_kwargs)

    @property
    def order(self) -> Order:
        """The order in which problems are sampled."""
        section = self.section
        return Order(
            kind=section.order,
            curriculum_steps=section.curriculum_steps,
            pass_rates=section.pass_rates,
        )

    @cached_property
    def contaminated(self) -> tuple[frozenset[int], DataReport | None]:
        """Training problems that share too many words with held-out ones, and a report on them."""
        if self.section.decontaminate_words is None or not self.has_text:
            return frozenset(), None
        return contaminated(self.task, self.prompts.written, self.section.decontaminate_words)

    @property
    def prompts(self) -> PromptEncoder:
        """The prompts as messages and as tokens."""
        return PromptEncoder(self.task, self.tokenizer, self.chat)

    @cached_property
    def about_tools(self) -> str:
        """A note if the chat template shows no tools, which go into the first message; else ""."""
        if not self.has_text or self.prompts.has_tool_template or not self.prompts.has_tools:
            return ""
        return (
            f"tools: the chat template of '{self.tokenizer.name or self.task.task_id}' shows none, "
            "so schemas are written into the first message; calls and results have Hermes' format"
        )

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
            # A changed 'kind' leaves the keys of the option of task= that was composed before it.
            kept = option in (fields_of(TASKS["reasoning_gym"]) or ())
            other = "; 'task.kind' alone keeps the keys of task=chain_sum, so choose an option too"
            raise ConfigError(
                f"a '{section.kind}' task has no option '{option}'"
                f"{nearest_key(option, known) or (other if kept else '')}\n"
                f"    its options are: {', '.join(known)}"
            )
    if "max_bad_fraction" in known:
        options["max_bad_fraction"] = section.max_bad_fraction
    with one_process():
        spec: Any = validated(kind, options, "task")
    check_finite(options, "task")
    return spec.with_specs(_part) if hasattr(spec, "with_specs") else spec


def _part(at: str, given: Any) -> TaskSpec:
    """Return the spec of a task within another, from its own section."""
    if isinstance(given, str):
        if given not in options_of("task"):
            raise ConfigError(
                f"{at}: there is no option '{given}' of task="
                f"{nearest(given, options_of('task'))}\n"
                "    give an option of task=, or keys such as {kind: file, path: problems.jsonl}"
            )
        given = option_file("task", given)
    if not isinstance(given, Mapping) or "kind" not in given:
        raise ConfigError(
            f"{at} says no kind of task\n"
            "    give an option of task=, or keys such as {kind: file, path: problems.jsonl}"
        )
    try:
        spec = task_spec_of(TaskConfig.model_validate(given))
    except ConfigError as error:
        raise ConfigError(f"{at}: {error}") from error
    if acted_in(spec) is not None or hasattr(spec, "is_mixture"):
        raise ConfigError(f"{at} has no problems of its own\n    give a task with prompts")
    return spec


def load_data(section: TaskConfig, model: ModelConfig) -> Data:
    """Read or generate the task's problems, and make the tokenizer that the model says.

    Raises:
        ConfigError: If a file is missing or bad, or the task or tokenizer cannot be made.
    """
    spec = task_spec_of(section)
    _check_has_text(section, spec)
    task, chosen = build_task(spec), model.tokenizer
    if chosen == "task":
        tokenizer_spec = TokenizerSpec(kind="char", alphabet=task_alphabet(task))
    elif chosen == "folder":
        tokenizer_spec = TokenizerSpec(kind="folder", folder=model.folder)
    else:
        tokenizer_spec = chosen
    if tokenizer_spec.kind != "folder" and tokenizer_spec.chat_template is None:
        template = section.chat_template_kwargs.get("chat_template")
        if template is None:
            template = task.chat_template or (TURNS if task.converses else None)
        tokenizer_spec = replace(tokenizer_spec, chat_template=template)
    if tokenizer_spec.kind == "folder" and tokenizer_spec.folder is not None:
        given = section.chat_template_kwargs.get("chat_template")
        check_tokenizer(Path(tokenizer_spec.folder), given)
    if model.folder is not None and model.folder != tokenizer_spec.folder:
        tokenizer_spec = tokenizer_spec.ending(folder_end(Path(model.folder)))
    return Data(section, spec, task, tokenizer_spec, tokenizer_spec.build())


_OF_TEXTS = ("chat", "order", "pass_rates", "decontaminate_words")
"""Keys of problems that are texts."""


def _check_has_text(section: TaskConfig, spec: TaskSpec) -> None:
    if acted_in(spec) is None:
        return
    for key in _OF_TEXTS:
        if getattr(section, key) != TaskConfig.model_fields[key].default:
            raise ConfigError(
                f"'task.{key}' is for prompts, and an environment or a game has none\n"
                "    leave it out, or choose a task with prompts"
            )
