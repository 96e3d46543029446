"""Rewards from a task's verifier: a `Reward` worker that decodes responses and scores them.

A verifier that is quick and safe runs in this process. Any other runs in a pool of processes with a
time limit per call (see `VerifierPool`). A response on which the verifier fails, runs out of time
or says None or nan has no score; see `scores`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from pydantic import SkipValidation
from torch import Tensor

from ...algorithms.roles.language import Reward
from ...algorithms.roles.language_tables import PerSample, PromptId, TokenIds, TokenMask
from ...dataflow.errors import WorkerError, nearest, one_process
from ...dataflow.graph.role import Metric, add_metrics
from ...dataflow.options import FiniteFloat, Int, option_class
from ...dataflow.registry import imported
from ...dataflow.runtime.call_context import current_step
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..data.sample_files import write_parts
from ..data.task import Task, TaskSpec, checked_problems, response_facts, same_task
from ..isolation.child import USER_ERRORS, verdict
from ..models.tokenizer import Tokenizer, TokenizerSpec
from ..rollout.scores import (
    LARGEST,
    WINDOW,
    MissingScores,
    check_unscored,
    filled_in,
    score_metrics,
)
from ..verifiers.pool import (
    LONGEST_S,
    MOST_PROCESSES,
    SHORTEST_S,
    Outcome,
    RowsCall,
    VerifierPool,
    VerifierSpec,
    joined,
)
from ..verifiers.reward_function import RewardFunction, by_name, reward_specs

_Row = tuple[int, str, Sequence[int]]  # a problem, a response, and the response's tokens
_MOST_REPLY = 1 << 24  # bytes, about a batch


@option_class
class RuleRewardSpec:
    """Recipe for a `RuleReward`; a `WorkerSpec`."""

    task: SkipValidation[TaskSpec]
    """Source of prompts and verifier."""
    tokenizer: SkipValidation[TokenizerSpec]
    """The policy's tokenizer."""
    partial_credit: bool = True
    """Whether a score below the task's `correct_score` counts; if not, it becomes 0."""
    time_limit_s: Annotated[FiniteFloat, Ge(SHORTEST_S), Le(LONGEST_S)] = 5.0
    """Seconds a verifier in a process of its own may take for one response."""
    num_processes: Annotated[Int, Ge(1), Le(MOST_PROCESSES)] = 2
    """Processes for such verifiers."""
    verifier: str | Sequence[str] | Mapping[str, str] | None = None
    """Function that scores a response: `exact_match`, `math_verify`, `instructions`, `code_tests`,
    or your `module:function`; several, as a list or by names, are parts of a sum; by default the
    task's own."""
    verifier_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of that verifier, such as `{mode: loose}` of `instructions`."""
    weights: Mapping[str, FiniteFloat] | None = None
    """Factors on named parts of the score; by default `reward_weights` of the task."""
    scale: Annotated[FiniteFloat, Ge(-LARGEST), Le(LARGEST)] = 1.0
    """Factor on the score; metrics of correctness are without it."""
    unscored: float | None = None
    """Score where the verifier fails, runs out of time or says None or nan; it is never right. null
    leaves it out, and ends a run in which nearly all are missing, nan leaves out any number."""
    task_fingerprint: str | None = None
    """`fingerprint` of the task the prompts come from, to be sure that both are the same."""
    samples_folder: str | None = None
    """Folder of the run's samples, which show the parts of a score; null if none are kept."""

    def __post_init__(self) -> None:
        check_unscored(self.unscored)

    def check_verifiers(self, task: Task | None = None) -> None:
        """Load the verifier that it names, and see that the task has what it reads."""
        self._functions(task)

    def _functions(self, task: Task | None) -> dict[str, VerifierSpec] | None:
        """Return what it names; of a task that is not known, with all columns that it may read."""
        if self.verifier is None:
            return None
        known = task is not None
        columns, read_as = (task.column_names(), task.read_as) if known else (None, None)
        options = self.verifier_options
        return reward_specs(self.verifier, columns, read_as=read_as, options=options)

    def build(self, context: WorkerContext) -> RuleReward:
        asked = {name for one in (self._functions(None) or {}).values() for name in one.columns}
        spec = keeping(self.task, sorted(asked))
        task = same_task(spec, self.task_fingerprint, context.role)
        tokenizer = self.tokenizer.build()
        return RuleReward(self, task, tokenizer, self._functions(task), context.role)


def keeping(spec: TaskSpec, columns: Sequence[str]) -> TaskSpec:
    """Return a task that keeps further columns for rewards, where it has rows."""
    own: Any = spec

    def of_part(_: str, part: TaskSpec) -> TaskSpec:
        return keeping(part, columns)

    if columns and hasattr(spec, "with_specs"):
        return own.with_specs(of_part)
    if not columns or not hasattr(spec, "reward_columns"):
        return spec
    return replace(own, reward_columns=(*own.reward_columns, *columns))


@option_class
class ExactRewardSpec(RuleRewardSpec):
    """1 for the task's answer, white space around it aside."""

    verifier: str | None = "exact_match"


@option_class
class MathRewardSpec(RuleRewardSpec):
    """1 for what equals the task's answer as mathematics."""

    verifier: str | None = "math_verify"


@option_class
class InstructionRewardSpec(RuleRewardSpec):
    """The share of the instructions in the task's answer that a response keeps."""

    verifier: str | None = "instructions"


@option_class
class CodeRewardSpec(RuleRewardSpec):
    """1 for a program that passes the tests in the task's answer; it runs in a sandbox."""

    verifier: str | None = "code_tests"
    time_limit_s: Annotated[FiniteFloat, Ge(SHORTEST_S), Le(LONGEST_S)] = 30.0


class RuleReward(Reward):
    """Scores responses with a task's verifier.

    Metrics are those of `score_metrics`, shares of all rows: `reward/positive` (above 0),
    `reward/correct` (at least the task's `correct_score`), `reward/unscored` (without a score), and
    of these `reward/errors` and `reward/timeouts`, and of each named part `reward/NAME/mean`.
    """

    def __init__(
        self,
        spec: RuleRewardSpec,
        task: Task,
        tokenizer: Tokenizer,
        functions: Mapping[str, VerifierSpec] | None = None,  # in place of the task's own
        role: str = "reward",
    ) -> None:
        self.metrics: dict[str, Metric] = {}
        self._role, self._part_names, self._num_scored = role, set[str](), 0
        self._spec, self._task, self._tokenizer = spec, task, tokenizer
        self._functions = functions
        self._correct_score = task.correct_score if functions is None else 1.0
        named = {} if spec.verifier is None else by_name(spec.verifier)
        called = " and ".join(f" '{one}'" for one in named.values())
        self._missing = MissingScores(
            f"the verifier{called} of task '{task.task_id}'",
            spec.unscored,
            f"see what it raises, returns or waits for (time_limit_s={spec.time_limit_s:g})",
        )
        scorers = [task] if functions is not None else task.scorers()
        self._keys = {id(scorer): number for number, scorer in enumerate(scorers)}
        self._takes_batches = False
        self._here: dict[str, RewardFunction] = {}
        pooled: dict[str, VerifierSpec] = {}
        for scorer in scorers:
            for name, one in self._functions_of(scorer).items():
                self._takes_batches |= one.together == "batch"
                if one.in_process:
                    made = imported(one.factory)(**self._given(one))
                    self._here[self._key(scorer, name)] = made
                else:
                    pooled[self._key(scorer, name)] = one
        self._pool = self._started(pooled) if pooled else None

    def _key(self, task: Task, name: str) -> str:
        return f"{self._keys[id(task)]}/{name}"

    def _functions_of(self, task: Task) -> Mapping[str, VerifierSpec]:
        """Return name -> what scores a task's responses; empty if the task does so itself."""
        return task.verifiers() if self._functions is None else self._functions

    def _given(self, one: VerifierSpec) -> dict[str, Any]:
        """Return the arguments with which a function is made, wherever it is."""
        if one.asks is None:
            return dict(one.arguments)
        given = {**one.arguments, "time_limit_s": self._spec.time_limit_s}
        if "tokenizer" in one.asks:
            own = asdict(self._spec.tokenizer)
            plain = ("kind", "alphabet", "folder", "chat_template")
            given["tokenizer"] = {name: own[name] for name in plain}
        return given

    def _started(self, pooled: Mapping[str, VerifierSpec]) -> VerifierPool:
        made = {key: [one.factory, self._given(one)] for key, one in pooled.items()}
        return VerifierPool(
            VerifierSpec(
                factory="penstock.workers.verifiers.reward_function:RewardFunctions",
                arguments={"functions": made},
            ),
            num_processes=self._spec.num_processes,
            time_limit_s=self._spec.time_limit_s,
            most_bytes=_MOST_REPLY,
            closes=any(one.closes for one in pooled.values()),
        )

    def score(self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId) -> PerSample:
        """Score each row's response: its masked tokens up to the first end of sequence."""
        problems = checked_problems(self._task, prompt_id)
        responses = self._tokenizer.decode_responses(tokens, mask)
        ids = [row[own].tolist() for row, own in zip(tokens.cpu(), mask.cpu(), strict=True)]
        rows = list(zip(problems, responses, ids, strict=True))
        outcomes: list[Outcome] = []
        while len(outcomes) < len(rows):
            # A verifier that never works is found out before a large batch has waited for it.
            whole = self._missing.works or self._takes_batches
            until = None if whole else len(outcomes) + WINDOW
            found = self._outcomes(rows[len(outcomes) : until])
            self._missing.check([_failure(outcome) for outcome in found])
            outcomes += found
        scores = torch.tensor([self._value(o) for o in outcomes], dtype=torch.float32)
        scores = filled_in(scores, self._spec.unscored)
        self._count(outcomes, scores, prompt_id)
        self._check_weights(outcomes)
        folder, parts = self._spec.samples_folder, [outcome.parts for outcome in outcomes]
        if folder is not None and any(parts):
            write_parts(folder, current_step(), self._role, tokens.tolist(), parts)
        return scores.to(tokens.device)

    @property
    def first_error(self) -> str | None:
        """Return why the first response without a score has none, and where; logged once."""
        return self._missing.first

    def close(self) -> None:
        for one in self._here.values():
            one.close()
        if self._pool is not None:
            self._pool.close()

    def _outcomes(self, rows: Sequence[_Row]) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        of_task: dict[int, tuple[Task, list[int], list[_Row]]] = {}
        for place, (problem, said, ids) in enumerate(rows):
            # A function that was named for all tasks may be given a batch of all of them.
            task, own = self._task, problem
            if self._functions is None:
                task, own = task.scored_by(problem)
            _, places, its = of_task.setdefault(id(task), (task, [], []))
            places.append(place)
            its.append((own, said, ids))
        for task, places, its in of_task.values():
            found |= dict(zip(places, self._scored(task, its), strict=True))
        return [self._fitting(found[place]) for place in range(len(rows))]

    def _scored(self, task: Task, rows: Sequence[_Row]) -> list[Outcome]:
        functions = self._functions_of(task)
        if not functions:
            # A verifier's failure is data: counted, kept and shown, never fatal.
            with one_process():
                return [Outcome.of(verdict(task.score, row[:2])) for row in rows]
        each = {
            name: self._said(self._key(task, name), one, task, rows)
            for name, one in functions.items()
        }
        weights = task.reward_weights if self._spec.weights is None else self._spec.weights
        return [joined({n: of[row] for n, of in each.items()}, weights) for row in range(len(rows))]

    def _said(self, key: str, one: VerifierSpec, task: Task, rows: Sequence[_Row]) -> list[Outcome]:
        """Return what one function says of each response."""
        if one.asks is None:
            assert self._pool is not None, "what a task calls is pooled"
            call_of = one_process()(task.verifier_call)
            return self._pool.run([[key, *call_of(i, text)] for i, text, _ in rows])
        with one_process():
            facts = [response_facts(one, task, *row) for row in rows]
            if (here := self._here.get(key)) is not None:
                said = here.answers(current_step(), facts, caught=USER_ERRORS)
                return list(map(Outcome.of, said))
        assert self._pool is not None, "it is not here"
        size = 1
        if one.together:
            shares = self._spec.num_processes if one.together == "async" else 1
            size = -(-len(facts) // shares)
        calls = [
            RowsCall([key, current_step(), part], len(part), self._spec.time_limit_s * len(part))
            for part in (facts[at : at + size] for at in range(0, len(facts), size))
        ]
        return [found for part in self._pool.run_rows(calls) for found in part]

    def _fitting(self, outcome: Outcome) -> Outcome:
        if outcome.score is None or abs(self._spec.scale * outcome.score) <= LARGEST:
            return outcome
        factor = f", which times scale={self._spec.scale:g}" if self._spec.scale != 1 else ", which"
        return Outcome(
            error=f"the verifier returned {outcome.score:g}{factor} is beyond float32, whose "
            f"largest number is {LARGEST:g}\n"
        )

    def _value(self, outcome: Outcome) -> float:
        if outcome.score is None:
            return math.nan
        full = outcome.score >= self._correct_score
        return self._spec.scale * outcome.score if full or self._spec.partial_credit else 0.0

    def _check_weights(self, outcomes: Sequence[Outcome]) -> None:
        """Refuse weights of parts that no response has, once there are enough of them."""
        if self._num_scored >= WINDOW:
            return
        self._num_scored += sum(o.score is not None for o in outcomes)
        self._part_names |= {name for outcome in outcomes for name in outcome.parts}
        tasks = [self._task, *self._task.scorers()]
        given = (task.reward_weights for task in tasks) if self._spec.weights is None else ()
        weights = dict.fromkeys(name for one in (*given, self._spec.weights or {}) for name in one)
        unknown = [name for name in weights if name not in self._part_names]
        if unknown and self._num_scored >= WINDOW:
            raise WorkerError(
                f"weights of the reward name '{unknown[0]}', and none of {self._num_scored} "
                f"responses has such a part{nearest(unknown[0], self._part_names)}\n    parts are: "
                f"{', '.join(sorted(self._part_names)) or 'none, as it returns numbers'}"
            )

    def _count(self, outcomes: Sequence[Outcome], scores: Tensor, prompt_id: Tensor) -> None:
        known = [outcome.score for outcome in outcomes if outcome.score is not None]
        sums = {
            "positive": sum(self._value(o) > 0 for o in outcomes),
            "correct": sum(score >= self._correct_score for score in known),
            "unscored": len(outcomes) - len(known),
            "errors": sum(o.error is not None for o in outcomes),
            "timeouts": sum(o.timed_out for o in outcomes),
        }
        rows = float(len(outcomes))
        add_metrics(self.metrics, score_metrics(scores, prompt_id))
        means = {f"reward/{name}": Metric.mean(float(sums[name]), rows) for name in sums}
        for name in dict.fromkeys(name for outcome in outcomes for name in outcome.parts):
            parts = [value for o in outcomes if (value := o.parts.get(name)) is not None]
            means[f"reward/{name}/mean"] = Metric.mean(sum(parts), float(len(parts)))
        add_metrics(self.metrics, means)


def _failure(outcome: Outcome) -> tuple[str, str] | None:
    if outcome.score is not None:
        return None
    if outcome.timed_out:
        return "ran out of time", "no score within the time limit"
    if outcome.error is not None:
        return "failed", outcome.error
    return "could not say", "it returned None or nan"
