"""Conversations that programs hold: each is served until its program has an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....algorithms.roles.language import Sampling
from ....dataflow.errors import one_process
from ...models.tokenizer import Tokenizer
from ...verifiers.child import as_score
from ..conversation import Conversation, Exchange
from ..floor import Floor
from ..rendering import TurnRenderer
from .endpoint import Endpoint, served
from .program import Access, HasPrograms, ProgramFailed, ProgramKilled
from .sequences import Sequences


@dataclass(frozen=True)
class ProgramHolder:
    """Holds conversations with the programs of a task.

    Attributes:
        task: Whose programs they are.
        prompt_of: What the user said last in a problem.
        tokenizer: The policy's.
        renderer: Renders messages.
    """

    task: HasPrograms
    prompt_of: Callable[[int], str]
    tokenizer: Tokenizer
    renderer: TurnRenderer

    async def hold(
        self,
        begun: Sequence[Conversation],
        floor: Floor,
        exchange: Exchange,
        sampling: Sampling,
        max_turns: int,
    ) -> list[Conversation]:
        """Hold all of them at once.

        Args:
            begun: One for each, with its prompt and no turn.
            floor: Has turns sampled.
            exchange: What goes between a policy and what answers it.
            sampling: How turns are sampled.
            max_turns: Most turns of a conversation, over all its rows.

        Returns:
            Their rows: those of one conversation are adjacent, in the order of `begun`.
        """
        endpoint = Endpoint()
        made = [self._sequences(one, exchange, sampling, max_turns) for one in begun]
        room = asyncio.Semaphore(self.task.max_running)

        async def run(number: int, one: Conversation) -> None:
            async with room:  # the time limit begins with its turn to run
                try:
                    await self._run(one, made[number], endpoint, exchange, is_last=False)
                except ProgramKilled:  # the same is said to the same
                    _release(floor, made[number])
                    made[number] = self._sequences(one, exchange, sampling, max_turns)
                    await self._run(one, made[number], endpoint, exchange, is_last=True)
            _release(floor, made[number])

        async with served(endpoint):
            running = {asyncio.create_task(run(*each)) for each in enumerate(begun)}
            await floor.serve(running, frees=True)
        rows = [row for sequences in made for row in sequences.rows()]
        if endpoint.refused:
            wrong = sum(endpoint.refused.values())
            rows[0].counts["stray_requests"] = float(wrong)
        return rows

    def _sequences(
        self, one: Conversation, exchange: Exchange, sampling: Sampling, max_turns: int
    ) -> Sequences:
        most = self.task.max_branches

        def begin(row: int) -> Conversation:
            return Conversation(row, one.problem, one.sample, [*one.tokens], [*one.messages])

        numbers = range(one.row * most, (one.row + 1) * most)
        return Sequences(begin, numbers, exchange, self.renderer, self._spell, sampling, max_turns)

    def _spell(self, token: Tensor) -> tuple[str, ...]:
        """The text of each token."""
        return tuple(self.tokenizer.decode([each]) for each in token.tolist())

    async def _run(
        self,
        one: Conversation,
        sequences: Sequences,
        endpoint: Endpoint,
        exchange: Exchange,
        *,
        is_last: bool,
    ) -> None:
        """Hold one conversation to its end, whatever the program does."""
        ending, failure = "done", None
        earned: float | None = 0.0
        with endpoint.opened(one.row, sequences) as (url, key):
            seed = exchange.seed(one.problem, one.sample, -1)
            access = Access(url, key, one.messages, self.prompt_of(one.problem), seed)
            limit = asyncio.timeout(self.task.time_limit_s)
            try:
                with one_process():
                    program = self.task.program(one.problem)
                    async with limit:
                        answer = await program(access)
                    earned = _earned(self.task.outcome(one.problem, answer))
            except TimeoutError as error:
                late = f"no answer in {self.task.time_limit_s:g} s"
                failure = ProgramFailed(late if limit.expired() else f"TimeoutError: {error}")
            except Exception as error:  # noqa: BLE001 - it may be anybody's code
                failure = error
        if failure is not None:
            ending = sequences.limit or "failed"
        await sequences.settled()
        if isinstance(failure, ProgramKilled) and not is_last:
            raise failure
        rows = sequences.rows()
        for row in rows:
            row.ending = ending
            row.scored = ending != "failed" and earned is not None
            if row.rewards:
                row.rewards[-1] += earned or 0.0
        rows[0].error = failure if ending == "failed" else None


def _release(floor: Floor, sequences: Sequences) -> None:
    for row in sequences.rows():
        floor.release(row.row)


def _earned(earned: Any) -> float | None:
    """Score an answer; None if it cannot be scored."""
    try:
        return as_score(earned)
    except ValueError as error:
        raise ProgramFailed(f"its answer earned {error}") from None
