"""The data of a run: its task, its tokenizer, and a source for each table that a step reads.

The kinds of task are listed here, one line each. Your own is `task=own task.kind=module:Class`
with a dataclass that is a `TaskSpec`; its fields are the keys of the section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...algorithms.roles.environment import ActorCritic, EnvRows, GameRows
from ...algorithms.roles.language_tables import (
    Demonstrations,
    Feedback,
    PreferencePairs,
    Prompts,
    ScoredPairs,
)
from ...configs.references import entry_or_own, option_file, options_of
from ...configs.schema import ModelConfig, TaskConfig
from ...configs.validate import check_finite, fields_of, validated
from ...dataflow.errors import ConfigError, nearest, one_process
from ...dataflow.graph.graph import Graph
from ...dataflow.registry import Registry
from ...dataflow.runtime.engine import Source
from ...workers.data.chat import TURNS, ChatOptions, PromptEncoder
from ...workers.data.orders import Order, contaminated
from ...workers.data.sources import (
    DemonstrationSource,
    FeedbackSource,
    PairSource,
    PromptSource,
    ScoredPairSource,
    TaskSource,
)
from ...workers.data.task import DataReport, Task, TaskSpec, build_task, fingerprint, task_alphabet
from ...workers.models.tokenizer import Tokenizer, TokenizerSpec, folder_end
from ...workers.models.tokenizer_trial import check_tokenizer
from .record import Stage

if TYPE_CHECKING:
    from ...workers.envs.games.libraries import LibraryGameTaskSpec
    from ...workers.envs.games.mnk_games import BoardTaskSpec
    from ...workers.envs.task import EnvTaskSpec

    GameTaskSpec = BoardTaskSpec | LibraryGameTaskSpec

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


def env_task(spec: TaskSpec, reader: str) -> EnvTaskSpec:
    if getattr(spec, "acts_in", None) == "environment":
        return cast("EnvTaskSpec", spec)
    raise ConfigError(
        f"{reader} acts in environments, and the task is none\n"
        "    choose one: task=cartpole, or task=gymnasium task.id=NAME"
    )


def acted_in(spec: TaskSpec) -> EnvTaskSpec | GameTaskSpec | None:
    """Return the task if it is an environment or a game, which has no problems to solve."""
    return cast("EnvTaskSpec | GameTaskSpec", spec) if hasattr(spec, "acts_in") else None


def game_task(spec: TaskSpec, reader: str) -> GameTaskSpec:
    if getattr(spec, "acts_in", None) == "game":
        return cast("GameTaskSpec", spec)
    raise ConfigError(
        f"{reader} plays a game, and the task is none\n"
        "    choose one: task=tic_tac_toe, task=connect_four, or task=envpool_game or "
        "task=pettingzoo_game with task.id=NAME"
    )


def refuse_scaled_fitness(graph: Graph, spec: EnvTaskSpec | GameTaskSpec) -> None:
    """Require rewards as they are of a step that compares what its actors have earned."""
    compares = any(
        node.role is not None
        and issubclass(graph.roles[node.role], ActorCritic)
        and node.method == ActorCritic.inherit.__name__
        for node in graph.nodes
    )
    if compares and spec.acts_in == "environment" and spec.normalization.rewards:
        raise ConfigError(
            f"{graph.name} compares what its members have earned, and every group of environments "
            "scales rewards by what it has seen itself\n    set task.normalization.rewards=false"
        )


@dataclass(frozen=True)
class Data:
    section: TaskConfig  # what was configured of it: the lengths that are allowed
    spec: TaskSpec  # its recipe
    task: Task  # its problems
    tokenizer_spec: TokenizerSpec  # the tokenizer's recipe
    tokenizer: Tokenizer  # and the tokenizer

    @property
    def has_text(self) -> bool:
        """True if problems are texts, false for environments and games."""
        return acted_in(self.spec) is None

    @property
    def chat(self) -> ChatOptions:
        """Options of rendering conversations, and texts where another side answers."""
        wrap = self.section.chat or self.task.converses
        return ChatOptions(wrap=wrap, template_kwargs=self.section.chat_template_kwargs)

    @cached_property
    def contaminated(self) -> tuple[frozenset[int], DataReport | None]:
        """Training problems that share too many words with held-out ones, and a report on them."""
        if self.section.decontaminate_words is None or not self.has_text:
            return frozenset(), None
        if self.task.buffer_rows:
            raise ConfigError(
                "'task.decontaminate_words' compares all problems, and a stream's are not known\n"
                "    leave it out, or read the rows before the run starts: task.streaming=false"
            )
        return contaminated(self.task, self.prompts.written, self.section.decontaminate_words)

    def source(self, kind: Any, *, batch_size: int, seed: int, **options: Any) -> Any:
        """Make a source of the task's rows, of one of the kinds of `TEXTS`."""
        return kind(
            self.task,
            self.tokenizer,
            batch_size=batch_size,
            seed=seed,
            max_prompt_tokens=self.section.max_prompt_tokens,
            max_bad_fraction=self.section.max_bad_fraction,
            chat=self.chat,
            **options,
        )

    @property
    def prompts(self) -> PromptEncoder:
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

    @property
    def why_not_scored(self) -> str:
        """Why the task cannot score answers to its problems; "" if it can."""
        try:
            _ = self.task.needs_process
        except ConfigError as error:
            return str(error).splitlines()[0]
        return ""

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the problems: for a reward elsewhere, and for a run that is resumed."""
        return fingerprint(self.task)


def task_spec_of(section: TaskConfig) -> TaskSpec:
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
                f"{nearest(option, known) or (other if kept else '')}\n"
                f"    its options are: {', '.join(known)}"
            )
    if "max_bad_fraction" in known:
        options["max_bad_fraction"] = section.max_bad_fraction
    with one_process():
        spec: Any = validated(kind, options, "task")
    check_finite(options, "task")
    return spec.with_specs(_part) if hasattr(spec, "with_specs") else spec


def _part(at: str, given: Any) -> TaskSpec:
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
    """Read or generate the task's problems, and make the tokenizer that the model says."""
    spec = task_spec_of(section)
    for key in ("chat", "order", "pass_rates", "decontaminate_words"):
        default = TaskConfig.model_fields[key].default
        if acted_in(spec) is not None and getattr(section, key) != default:
            raise ConfigError(
                f"'task.{key}' is for prompts, and an environment or a game has none\n"
                "    leave it out, or choose a task with prompts"
            )
    task, chosen = build_task(spec), model.tokenizer
    if chosen == "task":
        tokenizer_spec = TokenizerSpec(kind="char", alphabet=task_alphabet(task))
    elif chosen == "folder":
        tokenizer_spec = TokenizerSpec(kind="folder", folder=model.folder)
    else:
        tokenizer_spec = chosen
    template = section.chat_template_kwargs.get("chat_template")
    if tokenizer_spec.kind != "folder" and tokenizer_spec.chat_template is None:
        if template is None:
            template = task.chat_template or (TURNS if task.converses else None)
        tokenizer_spec = replace(tokenizer_spec, chat_template=template)
    if tokenizer_spec.kind == "folder" and tokenizer_spec.folder is not None:
        check_tokenizer(Path(tokenizer_spec.folder), template)
    if model.folder is not None and model.folder != tokenizer_spec.folder:
        tokenizer_spec = tokenizer_spec.ending(folder_end(Path(model.folder)))
    return Data(section, spec, task, tokenizer_spec, tokenizer_spec.build())


TEXTS: Mapping[type, Any] = {
    Prompts: PromptSource,
    Demonstrations: DemonstrationSource,
    PreferencePairs: PairSource,
    ScoredPairs: ScoredPairSource,
    Feedback: FeedbackSource,
}
"""Table of texts that a step may read -> the source that a task gives for it."""


def check_tables(graph: Graph, at: str) -> None:
    tables = (*TEXTS, EnvRows, GameRows)
    for name, table in graph.sources.items():
        if table not in tables:
            raise ConfigError(
                f"'{at}.step': {graph.name} reads a table '{name}' ({table.__name__}) that no task "
                f"gives\n    tasks give: {', '.join(kind.__name__ for kind in tables)}; for "
                "another table, use Engine from Python with a source of your own"
            )


def sources_of(stage: Stage, data: Data) -> tuple[dict[str, Source], list[DataReport]]:
    """A source for every table of a stage, and what was left out while reading."""
    for name in stage.config.num_groups:
        if stage.graph.sources.get(name) not in (EnvRows, GameRows):
            raise ConfigError(
                f"'{stage.at}.num_groups.{name}': {stage.name} reads no environments or "
                f"games called '{name}'\n    leave it out"
            )
    sources: dict[str, Source] = {}
    for name in stage.graph.sources:
        try:
            sources[name] = _source(stage, name, data)
        except ConfigError as error:
            key = f"{stage.at}.per_step.{name}"
            raise ConfigError(str(error).replace("batch_size", key)) from error
    return sources, [source.report for source in sources.values() if isinstance(source, TaskSource)]


def _source(stage: Stage, name: str, data: Data) -> Source:
    graph, count = stage.graph, stage.config.per_step[name]
    table = graph.sources[name]
    if table not in TEXTS:
        # Imported here: few runs act, and these import what environments need.
        from ...workers.envs.task import EnvRowSource, GameRowSource

        act = EnvRowSource if table is EnvRows else GameRowSource
        return act(count, _group_size(stage, name, data.spec))
    kind = TEXTS[table]
    if not data.has_text:
        raise ConfigError(
            f"{graph.name} reads {table.__name__}, and an environment or a game has none\n"
            "    choose a task with problems, such as task=chain_sum"
        )
    section = data.section
    options: dict[str, Any] = {"left_out": data.contaminated[0]}
    if kind is PromptSource:
        options["order"] = Order(
            kind=section.order,
            curriculum_steps=section.curriculum_steps,
            pass_rates=section.pass_rates,
        )
    else:
        # What is imitated of a conversation is all that follows the prompt.
        options["max_response_tokens"] = section.max_total_tokens or section.max_response_tokens
    if kind is DemonstrationSource:
        options |= {"loss_on": section.loss_on, "pack_tokens": section.pack_tokens}
    return data.source(kind, batch_size=count, seed=stage.seed, **options)


def _group_size(stage: Stage, name: str, spec: TaskSpec) -> int:
    """Return how many environments or games step together, with all agents of each."""
    graph, whole = stage.graph, 1
    if graph.sources[name] is EnvRows:
        acted = env_task(spec, graph.name)
        refuse_scaled_fitness(graph, acted)
        whole = acted.num_agents
    else:
        acted = game_task(spec, graph.name)
    count, least = stage.config.per_step[name], stage.config.num_groups.get(name, 1)
    given = acted.group_size
    # A plan has written its size here; `auto` is left where no plan was made.
    size = given if isinstance(given, int) else count // least // whole * whole
    if size == 0 or -(-count // size) < least:
        raise ConfigError(
            f"{graph.name} needs {least} groups of '{name}', and {count} rows in "
            f"groups of {size or whole} are {-(-count // (size or whole))}\n"
            f"    raise algorithm.per_step.{name}, or set task.group_size to "
            f"{count // least} or less"
        )
    return size
