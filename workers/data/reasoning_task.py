"""Tasks of the reasoning-gym package: generated problems, scored by the package's own verifiers.

Problems are taken in order from the package's dataset and kept if their prompt is new; the first
`num_held_out` of them are held out, so the held-out set does not change with `num_train`. Because
repeats are dropped, rare problems are rarer in training than the generator makes them.
"""

from __future__ import annotations

import os
import string
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from typing_extensions import override

from ...dataflow.errors import ConfigError, nearest
from ..verifiers.pool import VerifierSpec
from .task import Task

EVALUATES_RESPONSES = frozenset(
    {
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "puzzle24"),
        *("polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion"),
    }
)
"""Tasks whose verifier in reasoning-gym 0.1.25 runs the response as Python (eval, or sympy's
parse_expr, which is eval underneath)."""

DEPENDS_ON_HASH_SEED = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Tasks whose problems follow the order of a set of strings, which differs between processes."""

_MOST_SECONDS = 5.0  # to make one problem, which takes most tasks microseconds

# Samples in a row without a new problem after which the task counts as exhausted.
_MAX_IDLE_SAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class ReasoningTaskSpec:
    """A reasoning-gym task and how many of its problems to use."""

    name: str
    """The task's name in reasoning-gym: "chain_sum"."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The task's own settings: `{"min_terms": 2, "max_digits": 1}`."""
    seed: int = 0
    """Seed of the generator; the run's seed does not change the problems."""
    num_train: int = 10_000
    """Training problems, at most: a small task may have fewer distinct ones."""
    num_held_out: int = 512
    """Problems kept for evaluation, exactly."""
    prompt_template: str = "{question}"
    """The prompt, with fields of the problem: `{question}` or an item of its metadata, as in
    "{expression}=". A small model learns a short prompt sooner; the verifier does not see it."""
    strip_spaces: bool = False
    """Whether to take the spaces out of the prompt: "3+4=" for "3 + 4 ="."""
    allow_eval: bool = False
    """Whether a verifier that runs responses as Python may be used (in a process of its own, under
    a time limit, but with your rights)."""

    def build(self) -> ReasoningTask:
        return ReasoningTask(self)


class ReasoningTask(Task):
    """Problems of one reasoning-gym task, scored by the package's verifier.

    Its score of 1 is right, and some tasks give part of it for near misses. A verifier that
    evaluates responses asks for a process and a limit.
    """

    def __init__(self, spec: ReasoningTaskSpec) -> None:
        _check_spec(spec)
        self.spec = spec
        self._dataset = _make_dataset(spec, size=_max_samples(spec))
        _check_repeatable(spec, self._dataset)
        self._fields = _template_fields(spec.prompt_template)
        problems = self._sample()
        held_out, train = problems[: spec.num_held_out], problems[spec.num_held_out :]
        self._problems = train + held_out
        prompts = [problem.prompt for problem in self._problems]
        super().__init__(spec.name, prompts, spec.num_held_out)
        if spec.name in EVALUATES_RESPONSES:
            arguments = {"name": spec.name, "config": dict(spec.config), "seed": spec.seed}
            self.verifier = VerifierSpec(
                factory="penstock.workers.data.reasoning_task:make_verifier",
                arguments={**arguments, "size": _max_samples(spec)},
            )

    @override
    def answer_text(self, index: int) -> str | None:
        answer = self._problems[index].entry["answer"]  # None where there are many
        return answer if isinstance(answer, str) else None

    @override
    def score(self, index: int, response: str) -> float:
        return float(self._dataset.score_answer(response, self._problems[index].entry))

    @override
    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        return (self._problems[index].number, response)

    @override
    def where(self, index: int) -> str:
        return f"{self.spec.name}[{self._problems[index].number}]"

    def _sample(self) -> list[_Problem]:
        wanted = self.spec.num_train + self.spec.num_held_out
        found: dict[str, _Problem] = {}
        samples = idle = 0
        for number in range(_max_samples(self.spec)):
            try:
                entry = _problem(self.spec, self._dataset, number)
            except IndexError:  # a few tasks hold a fixed number of problems
                break
            prompt, samples, idle = self._filled(entry), samples + 1, idle + 1
            if prompt not in found:
                found[prompt], idle = _Problem(number, prompt, entry), 0
            if len(found) == wanted or idle == _MAX_IDLE_SAMPLES:
                break
        if len(found) <= self.spec.num_held_out:
            raise ConfigError(
                f"task '{self.spec.name}' with {dict(self.spec.config)} gave only {len(found)} "
                f"distinct problems in {samples} samples; {self.spec.num_held_out} are to be held "
                "out and at least 1 must be left to train on\n"
                "    lower num_held_out, or widen the task's own settings (more digits, more terms)"
            )
        return list(found.values())

    def _filled(self, entry: Mapping[str, Any]) -> str:
        template = self.spec.prompt_template
        values = {**entry["metadata"], "question": entry["question"]}
        for name in self._fields:
            if name not in values:
                raise ConfigError(
                    f"prompt_template {template!r}: problems of '{self.spec.name}' have no field "
                    f"'{name}'{nearest(name, values)}\n"
                    f"    fields are: {', '.join(sorted(map(str, values)))}"
                )
        text = template.format_map(values)
        return text.replace(" ", "") if self.spec.strip_spaces else text


@dataclass(frozen=True)
class _Problem:
    number: int
    prompt: str
    entry: dict[str, Any]


def _template_fields(template: str) -> list[str]:
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(
            f"prompt_template {template!r} cannot be read: {error}\n"
            "    write fields as {name}, and braces that are text twice: {{ }}"
        ) from error
    if any(form for _, _, form, _ in parsed):
        raise ConfigError(
            f"prompt_template {template!r} gives a field a format\n"
            "    fields are filled in as they are: {name}, without :"
        )
    fields = [name for _, name, _, _ in parsed if name is not None]
    if not fields:
        raise ConfigError(
            f"prompt_template {template!r} names no field of the problem, so all prompts would be "
            "the same\n    use {question}"
        )
    return fields


def make_verifier(name: str, config: Mapping[str, Any], seed: int, size: int) -> Any:
    """A verifier by place in the generator, for a process that scores and does nothing else."""
    spec = ReasoningTaskSpec(name=name, config=config, seed=seed)
    dataset = _make_dataset(spec, size)

    def verify(number: int, response: str) -> float:
        return float(dataset.score_answer(response, dataset[number]))

    return verify


def reasoning_task_names() -> tuple[str, ...]:
    """Names of all tasks that the installed reasoning-gym offers, sorted."""
    return tuple(sorted(_factory().DATASETS))


def _factory() -> ModuleType:
    with warnings.catch_warnings():
        # A dependency of reasoning-gym is compiled on first import with a SyntaxWarning.
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym.factory
    return reasoning_gym.factory


def _max_samples(spec: ReasoningTaskSpec) -> int:
    return 20 * (spec.num_train + spec.num_held_out) + _MAX_IDLE_SAMPLES


def _check_spec(spec: ReasoningTaskSpec) -> None:
    names = reasoning_task_names()
    if spec.name not in names:
        raise ConfigError(
            f"reasoning-gym has no task '{spec.name}'{nearest(spec.name, names)}\n"
            f"    it has {len(names)}: {', '.join(names)}"
        )
    if spec.num_train < 1 or spec.num_held_out < 0:
        raise ConfigError(
            f"task '{spec.name}': num_train={spec.num_train} and num_held_out={spec.num_held_out}"
            "\n    num_train must be at least 1 and num_held_out at least 0"
        )
    if spec.name in EVALUATES_RESPONSES and not spec.allow_eval:
        raise ConfigError(
            f"the verifier of reasoning-gym's '{spec.name}' runs responses as Python code\n"
            "    set allow_eval=true to let it, in a process of its own but with your rights"
        )
    if spec.name in DEPENDS_ON_HASH_SEED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise ConfigError(
            f"reasoning-gym's '{spec.name}' generates other problems in every process, because it "
            "follows Python's hash seed\n    set PYTHONHASHSEED=0 in the environment"
        )


def _make_dataset(spec: ReasoningTaskSpec, size: int) -> Any:
    factory = _factory()
    _, config_class = factory.DATASETS[spec.name]
    known = [n for n in config_class.__dataclass_fields__ if n not in ("seed", "size")]
    for key in spec.config:
        if key in ("seed", "size"):
            use = "seed" if key == "seed" else "num_train and num_held_out"
            raise ConfigError(f"task '{spec.name}': config.{key} is set by us\n    use {use}")
        if key not in known:
            raise ConfigError(
                f"task '{spec.name}' has no setting '{key}'{nearest(key, known)}\n"
                f"    its settings are: {', '.join(known)}"
            )
    try:
        return factory.create_dataset(spec.name, seed=spec.seed, size=size, **spec.config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"task '{spec.name}' refuses its settings {dict(spec.config)}: {error}\n"
            f"    its settings are: {', '.join(known)}"
        ) from error


def _problem(spec: ReasoningTaskSpec, dataset: Any, number: int) -> dict[str, Any]:
    # Imported here: it brings torch, which describing a task does without.
    from ...dataflow.runtime.call_context import DeadlineExceeded, deadline

    try:
        with deadline(_MOST_SECONDS):
            return dataset[number]
    except IndexError:
        raise
    except (Exception, DeadlineExceeded) as error:
        slow = isinstance(error, DeadlineExceeded)
        why = f"not within {_MOST_SECONDS:g} s" if slow else repr(error)
        raise ConfigError(
            f"reasoning-gym's '{spec.name}' cannot make problem {number} with "
            f"{dict(spec.config)}: {why}\n    change its settings: task.config"
        ) from error


def _check_repeatable(spec: ReasoningTaskSpec, dataset: Any) -> None:
    again = _make_dataset(spec, size=_max_samples(spec))
    for number in range(3):
        try:
            first, second = (_problem(spec, one, number) for one in (dataset, again))
        except IndexError:
            return
        if first["question"] != second["question"]:
            raise ConfigError(
                f"reasoning-gym's '{spec.name}' gives other problems each time for the same seed, "
                "so its answers could not be found again\n    choose another task"
            )
