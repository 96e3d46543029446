"""The worker of an `Agent` role: many conversations at once, in the process that samples for them.

Each is a coroutine that waits for the policy, a tool or an environment; while one waits, turns of
the others are sampled. What a conversation comes to is a function of its problem, its random
numbers and the weights: not of the others, nor of how long an answer took.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextvars import copy_context
from functools import partial
from typing import Literal

import torch
from pydantic import SkipValidation
from torch import Tensor

from ...algorithms.roles.language import ENDINGS, Agent, Conversations, Turns
from ...algorithms.roles.language_tables import Sampling
from ...dataflow.errors import ConfigError, WorkerError
from ...dataflow.graph.role import Metric, add_metrics
from ...dataflow.options import PositiveFloat, option_class
from ...dataflow.runtime.call_context import CallKey, call_key
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..data.chat import ChatOptions, PromptEncoder
from ..data.task import Message, Task, TaskSpec, checked_problems, same_task
from ..models.tokenizer import Tokenizer, TokenizerSpec
from ..rollout.sampling import turn_seed, turn_uniforms
from ..rollout.scores import MissingScores, check_unscored, filled_in, score_metrics
from .conversation import Conversation, Exchange, Floor, as_table
from .environment import Reply, check_converses
from .programs.program import ProgramHolder
from .rendering import TurnRenderer
from .tools.parsing import FORMATS, CallParser, FormatName, call_parser, format_of, format_shown

_LOG = logging.getLogger("penstock.agents")


@option_class
class AgentSpec:
    """Recipe for an `AgentWorker`; a `WorkerSpec`."""

    task: SkipValidation[TaskSpec]
    """The problems, and the environments that go with them."""
    tokenizer: SkipValidation[TokenizerSpec]
    """The policy's tokenizer, whose chat template renders what is shown."""
    task_fingerprint: str | None = None
    """`fingerprint` of the task the prompts come from, to be sure that both are the same."""
    chat: ChatOptions = ChatOptions()
    """Rendering of conversations."""
    calls: FormatName | Literal["auto"] = "auto"
    """Format of tool calls in a turn; `auto`: as the chat template has them, or as Hermes
    does where it shows no tools. Without tools, it is what the environment makes of the text."""
    answer_limit_s: PositiveFloat = 30.0
    """Longest wait for one answer of an environment, in seconds; then its conversation ends."""
    unscored: float | None = None
    """Score of a conversation whose environment fails or says None or nan; null leaves it out of
    training and ends a run in which nearly all are missing, nan allows any number of them."""
    keeps_history: bool = False
    """Whether the policy reads its turns as it said them though its chat template would leave out
    parts of earlier ones; such a template is refused otherwise."""

    def __post_init__(self) -> None:
        check_unscored(self.unscored)

    def build(self, context: WorkerContext) -> AgentWorker:
        return AgentWorker(self, context)

    def ways(
        self, task: Task, tokenizer: Tokenizer
    ) -> tuple[PromptEncoder, TurnRenderer, CallParser]:
        """Return how prompts are rendered, what follows a turn, and how turns are read."""
        check_converses(task)
        prompts = PromptEncoder(task, tokenizer, self.chat)
        variables = self.chat.template_kwargs
        renderer = TurnRenderer(tokenizer, variables, keeps_history=self.keeps_history)
        name = _calls_of(self, tokenizer, prompts, brings_tools=task.has_programs)
        if name is None:
            renderer.reads_calls = False
            return prompts, renderer, lambda text: (text, ())
        return prompts, renderer, call_parser(name, tokenizer)


class AgentWorker(Agent):
    """Holds conversations as its spec says.

    Attributes:
        metrics: Of the last call: turns of a conversation, how many ended in which way, mean score
            and share of right ones, whatever the environments counted, seconds in which all waited
            for them (`waiting_s`), and those of a conversation (`answer_s`).
        first_error: The first failure of an environment; logged once as a warning.
    """

    def __init__(self, spec: AgentSpec, context: WorkerContext) -> None:
        self.spec = spec
        self.context = context
        self.metrics: dict[str, Metric] = {}
        self.first_error: str | None = None
        self._works = False
        self._task: Task = same_task(spec.task, spec.task_fingerprint, context.role)
        self._missing = MissingScores(
            f"what answers in task '{self._task.task_id}'", spec.unscored, "see what it raises"
        )
        check_converses(self._task)
        if self._task.has_programs:
            self.max_pieces = self._task.max_branches
        self._tokenizer: Tokenizer = spec.tokenizer.build()
        self._prompts, self._renderer, self._parse = spec.ways(self._task, self._tokenizer)
        self._runner: asyncio.Runner | None = None

    def hold(
        self,
        turns: Turns,
        prompt: Tensor,
        prompt_id: Tensor,
        sampling: Sampling,
        *,
        max_turns: int,
        branch: bool,
    ) -> Conversations:
        if branch:
            self._check_branches()
        problems = checked_problems(self._task, prompt_id)
        key = call_key(self.context.role, "hold")
        begun = [
            Conversation(
                place * sampling.num_samples + sample,
                problem,
                sample,
                [token for token in row if token >= 0],
                [*(self._prompts.messages(problem) or ())],
                self._branch(key, problem, sample, max_turns) if branch else None,
            )
            for place, (row, problem) in enumerate(zip(prompt.tolist(), problems, strict=True))
            for sample in range(sampling.num_samples)
        ]
        if self._runner is None:
            self._runner = asyncio.Runner()
        # The runner would keep the context of its first run, and with it the step and the weights.
        talk = self._hold_all(turns, begun, key, sampling, max_turns)
        held = self._runner.run(talk, context=copy_context())
        if not self._task.shares_environments:
            self.close()  # nothing is shared with the next call
        self._report(held)
        return as_table(held)

    def _check_branches(self) -> None:
        if self._task.deterministic and not self._task.has_programs:
            return
        why = (
            "a program decides by itself where its own go on"
            if self._task.has_programs
            else "its environments may answer the same in different ways"
        )
        raise ConfigError(
            f"conversations of task '{self._task.task_id}' are to branch, and {why}\n    choose "
            "another algorithm, or a task whose environments say `deterministic = True`"
        )

    def _branch(self, key: CallKey, problem: int, sample: int, max_turns: int) -> int:
        pair = sample - sample % 2
        return turn_seed(self.context.seed, self.context.role, key, problem, pair) % max_turns

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        try:
            if self._task.shares_environments:
                runner.run(self._task.close_environments())
        finally:
            runner.close()

    async def _hold_all(
        self,
        turns: Turns,
        begun: Sequence[Conversation],
        key: CallKey,
        sampling: Sampling,
        max_turns: int,
    ) -> Sequence[Conversation]:
        """Go on until all have ended; the rows of each, next to each other."""
        floor = Floor(turns)

        async def run(one: Conversation) -> None:
            exchange = self._exchange(one.problem, floor, key)
            await one.hold(self._task.environment, exchange, sampling, max_turns)
            floor.release(one.row)

        if self._task.has_programs:
            exchange = self._exchange(None, floor, key)
            holder = ProgramHolder(
                self._task, self._tokenizer, self._renderer, floor, exchange, sampling, max_turns
            )
            begun = await holder.hold(begun)
        else:
            await floor.serve({asyncio.create_task(run(one)) for one in begun})
        add_metrics(self.metrics, {"waiting_s": Metric.sum(floor.waiting_s)})
        return begun

    def _exchange(self, problem: int | None, floor: Floor, key: CallKey) -> Exchange:
        seed, role = self.context.seed, self.context.role
        tools = None if problem is None else self._prompts.tools(problem)

        def reply_of(number: int, token: Tensor, finished: bool) -> Reply:
            text = self._tokenizer.said(token.tolist())
            return Reply(number, text, *self._parse(text), finished)

        def shown(before: Sequence[Message], after: Sequence[Message], finished: bool) -> list[int]:
            return self._renderer.after(before, after, tools, finished=finished)

        return Exchange(
            speak=floor.speak,
            reply_of=reply_of,
            shown=shown,
            uniform=partial(turn_uniforms, seed, role, key),
            seed=partial(turn_seed, seed, role, key),
            limit_s=self.spec.answer_limit_s,
        )

    def _report(self, held: Sequence[Conversation]) -> None:
        first = [one for one in held if not one.piece]
        rows = float(len(first))
        scores = [one.score for one in first]  # nan is neither positive nor correct
        right = sum(score >= self._task.correct_score for score in scores)
        endings = [one.ending for one in first]
        truncated = [
            one.ending == "out of tokens" or any(not turn.finished for _, turn in one.turns)
            for one in first
        ]
        sums = {
            "turns": float(sum(len(one.turns) for one in held)),
            "reward/positive": float(sum(score > 0 for score in scores)),
            "reward/correct": float(right),
            "reward/unscored": float(sum(not one.scored for one in first)),
            "truncated": float(sum(truncated)),
            **{f"ended/{e.replace(' ', '_')}": float(endings.count(e)) for e in ENDINGS},
        }
        for one in held:
            for name, count in one.counts.items():
                sums[name] = sums.get(name, 0.0) + count
        add_metrics(self.metrics, {name: Metric.mean(sums[name], rows) for name in sums})
        problems = torch.tensor([one.problem for one in first], dtype=torch.int64)
        # float32 would round them.
        exact = filled_in(torch.tensor(scores, dtype=torch.float64), self.spec.unscored)
        add_metrics(self.metrics, score_metrics(exact, problems))
        sampled = float(sum(len(turn.token) for one in held for _, turn in one.turns))
        add_metrics(self.metrics, {"new_tokens": Metric.sum(sampled)})
        self._show_first_error(held)
        self._missing.check([self._failure(one) for one in first])
        named = self.spec.unscored
        for one in held:
            if not one.scored and named is not None and not math.isnan(named) and one.rewards:
                one.scored, one.rewards = True, [*(0.0 for _ in one.rewards[1:]), named]

    @staticmethod
    def _failure(one: Conversation) -> tuple[str, str] | None:
        if one.scored:
            return None
        if one.error is not None:
            return "failed", f"{type(one.error).__name__}: {one.error}"
        return "could not say", "a reward was None or nan"

    def _show_first_error(self, held: Sequence[Conversation]) -> None:
        failed = next((one for one in held if one.error is not None), None)
        self._works = self._works or any(one.ending != "failed" for one in held)
        if failed is None or self.first_error is not None:
            return
        self.first_error = f"{type(failed.error).__name__}: {failed.error}"
        self._missing.first = self.first_error
        _LOG.warning(
            "an environment of task '%s' failed in a conversation about problem %d (%s); such "
            "conversations end there without a score and are counted in ended/failed. The first "
            "failure: %s",
            self._task.task_id,
            failed.problem,
            self._task.where(failed.problem),
            self.first_error,
        )
        if not self._works:
            raise WorkerError(
                f"all of the first {len(held)} conversations of '{self.context.role}' failed, and "
                f"there is nothing to learn from them\n    the first failure: {self.first_error}"
            )


def _calls_of(
    spec: AgentSpec, tokenizer: Tokenizer, prompts: PromptEncoder, *, brings_tools: bool
) -> FormatName | None:
    """Return the format in which the model is shown calls; None if they are not to be read."""
    variables, shown = spec.chat.template_kwargs, prompts.has_tool_template
    if not (brings_tools or prompts.has_tools):
        template = variables.get("chat_template") or tokenizer.backend.chat_template
        return format_of(str(template)) if spec.calls == "auto" else spec.calls
    if not shown and spec.calls not in ("auto", "hermes"):
        raise ConfigError(
            f"options.calls of the agent is '{spec.calls}', but the chat template of "
            f"'{tokenizer.name}' shows no tools, so they are written into the prompt with calls as "
            "Hermes has them\n    leave it out, give a template that shows tools "
            "(task.chat_template_kwargs={chat_template: ...}), or say that the task teaches calls: "
            "task.tells_calls=true"
        )
    if spec.calls != "auto" or not shown:
        return "hermes" if spec.calls == "auto" else spec.calls
    found = format_shown(tokenizer, variables)
    if found is None and not brings_tools:
        raise ConfigError(
            f"the chat template of '{tokenizer.name}' shows tools, but how it writes calls is not "
            "known, so every call would count as an answer\n    say it, such as "
            f"algorithm.roles.agent.options.calls=hermes; there are {', '.join(FORMATS)}"
        )
    return found
