"""Suites of problems to evaluate on, each with its task and its sampling; held-out rows.

A task that tells kinds of held-out problems apart gives a suite of each; any other gives one that
has no name. Further suites are configured, each with a task of its own. All are answered with the
run's tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...algorithms.roles.language import Policy, RewardModel
from ...algorithms.roles.language_tables import Prompts, Sampling
from ...configs.schema import EvaluationConfig, SuiteConfig
from ...configs.validate import validated
from ...dataflow.errors import ConfigError, one_process
from ...dataflow.graph.axes import DType, Spec
from ...dataflow.graph.graph import Graph, Node, OutputColumn, Ref
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.engine import Source
from ...workers.data.sources import DemonstrationSource, PairSource, PromptSource
from ...workers.data.task import build_task
from ...workers.models.tokenizer import TokenizerSpec
from .data import Data, task_spec_of


class HeldOut:
    """Prompts of an evaluation as a source: the same in every step."""

    def __init__(self, source: PromptSource, problems: Sequence[int]) -> None:
        self._prompts = source.asked(problems)
        self.longest = source.longest  # tokens of the task's longest prompt

    @property
    def problems(self) -> list[int]:
        return self._prompts.prompt_id.tolist()

    @property
    def num_prompts(self) -> int:
        return len(self._prompts.prompt_id)

    def batch(self, step: int) -> Prompts:
        return self._prompts


@dataclass(frozen=True)
class Suite:
    name: str  # "" for the held-out problems of a task that names no suites
    data: Data  # their task, with the run's tokenizer
    prompts: HeldOut  # the problems
    sampling: Sampling  # how they are answered
    is_own: bool  # whether the task is the run's

    @property
    def tokenizer_spec(self) -> TokenizerSpec:
        """The run's tokenizer, with responses ending as they are sampled here."""
        return self.data.tokenizer_spec.sampled_by(self.sampling)

    @property
    def max_turns(self) -> int:
        """Most turns of a conversation about a problem; 0 where each is answered in one."""
        return self.data.section.max_turns if self.data.task.converses else 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with what follows it."""
        if self.max_turns:
            return self.sampling.max_total_tokens
        return self.prompts.longest + self.sampling.max_new_tokens


def suites_of(
    config: EvaluationConfig, data: Data, trained: Sampling | None = None
) -> tuple[Suite, ...]:
    """All suites: those of the run's task first, then those that are configured."""
    strings = data.tokenizer.end.strings if trained is None else trained.stop
    ends = {"stop": strings, "stop_token_ids": trained.stop_token_ids if trained else ()}
    own = list(_own(config, data, ends)) if config.num_prompts else []
    for name in config.suites:
        if name in (suite.name for suite in own):
            raise ConfigError(
                f"'evaluation.suites.{name}': task '{data.task.task_id}' names a suite '{name}' "
                "itself\n    choose another name"
            )
    others = [_configured(config, name, one, data, ends) for name, one in config.suites.items()]
    return (*own, *others)


def _own(config: EvaluationConfig, data: Data, ends: Mapping[str, Any]) -> Iterator[Suite]:
    """The run's own task as one suite, or as those that it names."""
    task, wanted = data.task, config.num_prompts
    if not len(task.held_out):
        return
    sampling = _sampling(data, ends, {"evaluation.sampling": config.sampling})
    source: PromptSource = data.source(PromptSource, batch_size=1, seed=0)
    with one_process():
        named = task.suites()
    for name, problems in (named or {"": task.held_out}).items():
        asked = source.usable(problems)[:wanted]
        if not asked:
            raise ConfigError(
                f"suite '{name}' of task '{task.task_id}' has no problem that can be asked\n"
                "    raise task.max_prompt_tokens, or ask none: evaluation.num_prompts=0"
            )
        yield Suite(name, data, HeldOut(source, asked), sampling, is_own=True)


def _configured(
    config: EvaluationConfig, name: str, suite: SuiteConfig, data: Data, ends: Mapping[str, Any]
) -> Suite:
    at = f"evaluation.suites.{name}"
    try:
        spec = task_spec_of(suite.task)
        task = build_task(spec)
        own = Data(suite.task, spec, task, data.tokenizer_spec, data.tokenizer)
        if not own.has_text:
            raise ConfigError(
                f"a '{suite.task.kind}' task has no prompts\n    give one of problems"
            )
        source: PromptSource = own.source(PromptSource, batch_size=1, seed=0)
    except ConfigError as error:
        raise ConfigError(f"'{at}.task': {error}") from error
    problems = source.usable(task.held_out or task.listed)
    wanted = suite.num_prompts or min(len(problems), config.num_prompts or len(problems))
    if not 0 < wanted <= len(problems):
        raise ConfigError(
            f"'{at}.num_prompts' is {wanted}, but task '{task.task_id}' has {len(problems)} "
            "problems to ask\n    ask for fewer"
        )
    given = {"evaluation.sampling": config.sampling, f"{at}.sampling": suite.sampling}
    prompts = HeldOut(source, problems[:wanted])
    return Suite(name, own, prompts, _sampling(own, ends, given), is_own=False)


def _sampling(
    data: Data, ends: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]]
) -> Sampling:
    """Greedy unless one of these sections says otherwise, each of which wins over those before."""
    longest = data.section.max_response_tokens
    fields: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": longest, **ends}
    if data.task.converses:  # a turn ends with a token
        fields |= {"max_total_tokens": data.section.max_total_tokens, "stop": ()}
    sampling = Sampling(**fields)
    for at, section in given.items():
        fields = {**fields, **section}
        sampling = validated(Sampling, fields, at)
    if sampling.num_samples > 1 and not sampling.temperature:
        at = [at for at, section in given.items() if "num_samples" in section][-1]
        raise ConfigError(
            f"'{at}.num_samples' is {sampling.num_samples}, but at temperature 0 all samples of a "
            "prompt are the same\n    set temperature above 0 as well"
        )
    return sampling


HELD_OUT_LOSS = "held_out_loss"  # the program that computes the loss on held-out rows


@dataclass(frozen=True)
class HeldOutRows:
    """A step's tables of held-out rows, and how their loss is computed."""

    # computes the loss's inputs: all that the train call reads, and its role's outputs
    graph: Graph
    train: Node  # the train call
    tables: Mapping[str, Any]  # table -> held-out rows

    @classmethod
    def of(cls, graph: Graph, sources: Mapping[str, Source]) -> HeldOutRows | None:
        """Return the rows of a step that learns from rows alone; None for others or without rows.

        A loss that reads more than log-probabilities or scores is left out as well.
        """
        rows = {
            name: source.held_out()
            for name, source in sources.items()
            if isinstance(source, DemonstrationSource | PairSource)
        }
        trains = [node for node in graph.nodes if node.kind is NodeKind.TRAIN]
        if len(rows) < len(sources) or None in rows.values() or len(trains) != 1:
            return None
        (train,) = trains
        loss = getattr(dict(train.arguments).get("loss"), "value", None)
        before = graph.ancestors(train.name)
        nodes = [node for node in graph.nodes if node.name in before]
        forward = None if loss is None or loss.needs_entropy else _forward(graph, train)
        if forward is None or any(node.kind is NodeKind.ROLLOUT for node in nodes):
            return None
        roles = {node.role for node in (*nodes, forward)}
        kept = {role: contract for role, contract in graph.roles.items() if role in roles}
        own = Graph(HELD_OUT_LOSS, (*nodes, forward), kept, graph.sources, results=(forward.name,))
        return cls(own, train, rows)


def _forward(graph: Graph, train: Node) -> Node | None:
    """Return the call that computes what a train call's loss reads; None if there is none."""
    given = dict(train.arguments)
    fields: dict[str, Any] = dict(getattr(given["batch"], "fields", ()))
    contract, tokens = graph.roles[train.role or ""], fields.get("tokens")
    if not isinstance(tokens, Ref) or "mask" not in fields or "words" in fields:
        return None
    made = graph[tokens.node].output(tokens.column)
    arguments: dict[str, Any] = {"tokens": tokens, "mask": fields["mask"]}
    if issubclass(contract, Policy):
        method, axes = "logprob", made.spec.axes
        arguments |= {key: given[key] for key in ("temperature",) if key in given}
    elif issubclass(contract, RewardModel) and "pair_id" in fields:
        method, axes = "score", made.spec.axes[:1]
        arguments["prompt_id"] = fields["pair_id"]
    else:
        return None
    return replace(
        train,
        name=f"{train.role}.{HELD_OUT_LOSS}",
        kind=NodeKind.FORWARD,
        scope="row",
        method=method,
        arguments=tuple(arguments.items()),
        outputs=(OutputColumn("out", Spec(DType.F32, axes), made.rows),),
    )
