"""Rewards from a task's verifier: a `Reward` worker that decodes responses and scores them.

A verifier that is quick and safe runs in this process. Any other runs in a pool of processes with a
time limit per call (see `VerifierPool`). A response on which the verifier fails, runs out of time
or says None or nan has no score; see `scores`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le
from pydantic import SkipValidation
from torch import Tensor
from typing_extensions import override

from ...algorithms.roles.language import Reward
from ...algorithms.roles.language_tables import PerSample, PromptId, TokenIds, TokenMask
from ...dataflow.errors import one_process
from ...dataflow.graph.role import Metric, add_metrics
from ...dataflow.options import FiniteFloat, Int, option_class
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..data.task import Task, TaskSpec, WrappedTask, checked_problems, same_task
from ..isolation.child import verdict
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
    VerifierPool,
    VerifierSpec,
)
from ..verifiers.verifiers import load_verifier


class AnsweredTask(WrappedTask):
    """The problems of another task and a verifier by name."""

    def __init__(self, task: Task, verifier: str, options: Mapping[str, Any]) -> None:
        super().__init__(task)
        self.correct_score = 1.0  # what the named verifiers give a right response
        self._verify = load_verifier(verifier, options)
        if verifier != "exact_match":  # which is quick and safe
            self.verifier = VerifierSpec(
                factory="penstock.workers.verifiers.verifiers:make_verifier",
                arguments={"reward": verifier, "options": dict(options)},
            )

    @override
    def score(self, index: int, response: str) -> float | None:
        return self._verify(*self.verifier_call(index, response))

    @override
    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        return (self.prompt_text(index), response, self._task.reward_answer(index))


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
    verifier: str | None = None
    """Verifier that compares a response with the problem's answer: `exact_match`, `math_verify`,
    `instructions`, `code_tests`, or your `module:function`; the task's own by default."""
    verifier_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of that verifier, such as `{mode: loose}` of `instructions`."""
    scale: Annotated[FiniteFloat, Ge(-LARGEST), Le(LARGEST)] = 1.0
    """Factor on the score; metrics of correctness are without it."""
    unscored: float | None = None
    """Score where the verifier fails, runs out of time or says None or nan; it is never right. null
    leaves it out, and ends a run in which nearly all are missing, nan leaves out any number."""
    task_fingerprint: str | None = None
    """`fingerprint` of the task the prompts come from, to be sure that both are the same."""

    def __post_init__(self) -> None:
        check_unscored(self.unscored)

    def check_verifiers(self) -> None:
        """Load the verifier that it names; raises as `load_verifier`."""
        if self.verifier is not None:
            load_verifier(self.verifier, self.verifier_options)

    def build(self, context: WorkerContext) -> RuleReward:
        task = same_task(self.task, self.task_fingerprint, context.role)
        if self.verifier is not None:
            task = AnsweredTask(task, self.verifier, self.verifier_options)
        return RuleReward(self, task, self.tokenizer.build())


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

    Metrics are those of `score_metrics`, and shares of all rows: `reward/positive` (above 0),
    `reward/correct` (at least the task's `correct_score`), `reward/unscored` (without a score), and
    of these `reward/errors` and `reward/timeouts`. Totals are the counts.
    """

    def __init__(self, spec: RuleRewardSpec, task: Task, tokenizer: Tokenizer) -> None:
        self.metrics: dict[str, Metric] = {}
        self._spec, self._task, self._tokenizer = spec, task, tokenizer
        called = f" '{spec.verifier}'" if spec.verifier is not None else ""
        self._missing = MissingScores(
            f"the verifier{called} of task '{task.task_id}'",
            spec.unscored,
            f"see what it raises, returns or waits for (time_limit_s={spec.time_limit_s:g})",
        )
        self._pool: VerifierPool | None = None
        if task.verifier is not None:
            self._pool = VerifierPool(
                task.verifier, num_processes=spec.num_processes, time_limit_s=spec.time_limit_s
            )

    def score(self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId) -> PerSample:
        """Score each row's response: its masked tokens up to the first end of sequence."""
        problems = checked_problems(self._task, prompt_id)
        responses = self._tokenizer.decode_responses(tokens, mask)
        pairs = list(zip(problems, responses, strict=True))
        outcomes: list[Outcome] = []
        while len(outcomes) < len(pairs):
            # A verifier that never works is found out before a large batch has waited for it.
            until = None if self._missing.works else len(outcomes) + WINDOW
            found = self._outcomes(pairs[len(outcomes) : until])
            self._missing.check([_failure(outcome) for outcome in found])
            outcomes += found
        scores = torch.tensor([self._value(o) for o in outcomes], dtype=torch.float32)
        scores = filled_in(scores, self._spec.unscored)
        self._count(outcomes, scores, prompt_id)
        return scores.to(tokens.device)

    @property
    def first_error(self) -> str | None:
        """Return why the first response without a score has none, and where; logged once."""
        return self._missing.first

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _outcomes(self, pairs: Sequence[tuple[int, str]]) -> list[Outcome]:
        if self._pool is None:
            found = [self._here(index, response) for index, response in pairs]
        else:
            call_of = one_process()(self._task.verifier_call)
            found = self._pool.run([call_of(i, text) for i, text in pairs])
        return [self._fitting(outcome) for outcome in found]

    def _here(self, index: int, response: str) -> Outcome:
        # A verifier's failure is data: counted, kept and shown, never fatal.
        with one_process():
            found = verdict(self._task.score, (index, response))
            return Outcome(found.get("value"), found.get("error"))

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
        full = outcome.score >= self._task.correct_score
        return self._spec.scale * outcome.score if full or self._spec.partial_credit else 0.0

    def _count(self, outcomes: Sequence[Outcome], scores: Tensor, prompt_id: Tensor) -> None:
        known = [outcome.score for outcome in outcomes if outcome.score is not None]
        sums = {
            "positive": sum(self._value(o) > 0 for o in outcomes),
            "correct": sum(score >= self._task.correct_score for score in known),
            "unscored": len(outcomes) - len(known),
            "errors": sum(o.error is not None for o in outcomes),
            "timeouts": sum(o.timed_out for o in outcomes),
        }
        rows = float(len(outcomes))
        add_metrics(self.metrics, score_metrics(scores, prompt_id))
        means = {f"reward/{name}": Metric.mean(float(sums[name]), rows) for name in sums}
        add_metrics(self.metrics, means)


def _failure(outcome: Outcome) -> tuple[str, str] | None:
    if outcome.score is not None:
        return None
    if outcome.timed_out:
        return "ran out of time", "no score within the time limit"
    if outcome.error is not None:
        return "failed", outcome.error
    return "could not say", "it returned None or nan"
