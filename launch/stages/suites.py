"""What a policy is evaluated on: suites of problems, each with its task and its sampling.

A task that tells kinds of held-out problems apart gives a suite of each; any other gives one that
has no name. Further suites are configured, each with a task of its own. All are answered with the
run's tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...algorithms.roles.language import Prompts, Sampling
from ...configs.schema import EvaluationConfig, SuiteConfig
from ...configs.validate import validated
from ...dataflow.errors import ConfigError, nearest, one_process
from ...workers.data.sources import PromptSource
from ...workers.data.task import build_task
from ...workers.models.tokenizer import TokenizerSpec
from ..inputs.data import Data, task_spec_of
from ..run_dir.evaluations import WHOLE, logged_name, names_of


class HeldOut:
    """Prompts of an evaluation as a source: the same in every step.

    Args:
        source: Of the task's prompts.
        problems: Indices into the task.

    Attributes:
        longest: Tokens of the task's longest prompt.
    """

    def __init__(self, source: PromptSource, problems: Sequence[int]) -> None:
        self._prompts = source.asked(problems)
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
        return self._prompts


@dataclass(frozen=True)
class Suite:
    """Problems that are evaluated together.

    Attributes:
        name: `WHOLE` for the held-out problems of a task that names no suites.
        data: Their task, with the run's tokenizer.
        prompts: The problems.
        sampling: How they are answered.
        is_own: Whether the task is the run's.
    """

    name: str
    data: Data
    prompts: HeldOut
    sampling: Sampling
    is_own: bool

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
    """All suites: those of the run's task first, then those that are configured.

    Args:
        config: The section `evaluation`.
        data: The run's.
        trained: How responses are sampled that the policy is trained on: what ends those ends these
            as well. By default what the model's generation_config.json says.

    Raises:
        ConfigError: If a suite's task cannot be made, or has fewer problems than its own
            `num_prompts`, a field of sampling is wrong, or two suites have one name.
    """
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
    source = _source(data)
    with one_process():
        named = task.suites()
    for name, problems in (named or {WHOLE: task.held_out}).items():
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
        source = _source(own)
    except ConfigError as error:
        raise ConfigError(f"'{at}.task': {error}") from error
    problems = source.usable(task.held_out or task.train)
    wanted = suite.num_prompts or min(len(problems), config.num_prompts or len(problems))
    if not 0 < wanted <= len(problems):
        raise ConfigError(
            f"'{at}.num_prompts' is {wanted}, but task '{task.task_id}' has {len(problems)} "
            "problems to ask\n    ask for fewer"
        )
    given = {"evaluation.sampling": config.sampling, f"{at}.sampling": suite.sampling}
    prompts = HeldOut(source, problems[:wanted])
    return Suite(name, own, prompts, _sampling(own, ends, given), is_own=False)


def _source(data: Data) -> PromptSource:
    return PromptSource(
        data.task,
        data.tokenizer,
        batch_size=1,
        seed=0,
        max_prompt_tokens=data.section.max_prompt_tokens,
        max_bad_fraction=data.section.max_bad_fraction,
        chat=data.chat,
    )


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


def check_metric(config: EvaluationConfig, known: Sequence[str]) -> None:
    """Refuse an `evaluation.keep_best` that no evaluation measures.

    Args:
        config: The section `evaluation`.
        known: What is measured, as logged below `evaluation/`.

    Raises:
        ConfigError: Naming what is measured.
    """
    if config.keep_best is not None and config.keep_best not in known:
        raise ConfigError(
            f"'evaluation.keep_best': '{config.keep_best}' is not measured"
            f"{nearest(config.keep_best, known)}\n    what is: {', '.join(known) or 'nothing'}"
        )


def metrics_of(suites: Sequence[Suite]) -> list[str]:
    """What evaluations of these suites are logged as, below `evaluation/`."""
    return [
        logged_name(suite.name, name)
        for suite in suites
        for name in names_of(suite.sampling.num_samples)
    ]
