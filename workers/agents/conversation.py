"""One conversation: what is said in turn, and the row that comes of it."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...algorithms.roles.language import ENDINGS, Conversations, Turn, TurnRequest, Turns
from ...algorithms.roles.language_tables import Sampling
from ...dataflow.errors import one_process
from ..data.task import Message
from ..isolation.child import as_score
from .environment import Environment, Reply, TurnResult

T = TypeVar("T")

_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Exchange:
    speak: Callable[[TurnRequest], Awaitable[Turn]]  # has a turn sampled
    # What the policy said in turn n, from its tokens and whether it ended it.
    reply_of: Callable[[int, Tensor, bool], Reply]
    # Tokens between a turn and the next: of the messages before it, those after it, and whether the
    # turn was finished.
    shown: Callable[[Sequence[Message], Sequence[Message], bool], list[int]]
    # Random numbers of turn n of a prompt's sample: so many.
    uniform: Callable[[int, int, int, int], Tensor]
    # 63 bits of a turn of a prompt's sample; of turn -1, those of the other side.
    seed: Callable[[int, int, int], int]
    limit_s: float  # longest wait for one answer of the other side


@dataclass
class Conversation:
    """A row, and how it comes about."""

    row: int  # its number in the call
    problem: int  # index into the task
    sample: int  # which of the problem's conversations of this step
    tokens: list[int]  # prompt, turns and what was shown
    messages: list[Message]  # the same as messages
    # The turn from which it goes on with random numbers of its own; before, with those of the even
    # sample of its pair. None if it has no partner.
    branch: int | None = None
    # What was sampled, and at which place each turn begins.
    turns: list[tuple[int, Turn]] = field(default_factory=list[tuple[int, Turn]])
    rewards: list[float] = field(default_factory=list[float])  # of each turn
    scored: bool = True  # whether it has a score: nothing has broken, and each reward was a number
    ending: str = "last turn"  # one of `ENDINGS`
    # What the other side counted.
    counts: dict[str, float] = field(default_factory=dict[str, float])
    error: BaseException | None = None  # what broke; None if nothing did
    piece: int = 0  # which of its conversation's rows; what was counted is with the first

    async def hold(
        self,
        make: Callable[[int], Environment],
        exchange: Exchange,
        sampling: Sampling,
        max_turns: int,
    ) -> None:
        """Go on to the end; whatever the other side does, there is one."""
        environment: Environment | None = None
        try:
            environment = make(self.problem)
            # What answers is the same for both of a pair.
            seed = exchange.seed(self.problem, self._stream(-1), -1)
            await _answered(partial(environment.reset, self.problem, seed), exchange.limit_s)
            for number in range(max_turns):
                if await self._exchange(number, environment, exchange, sampling):
                    break
        except Exception as error:  # noqa: BLE001 - it may be anybody's code
            self.ending, self.error, self.scored = "failed", error, False
        finally:
            try:
                if environment is not None:
                    await _answered(environment.close, exchange.limit_s)
            except Exception as error:  # noqa: BLE001 - as above
                self.error = self.error or error

    @property
    def score(self) -> float:
        """Sum of the rewards; nan if the conversation has no score."""
        return sum(self.rewards) if self.scored else math.nan

    def _stream(self, turn: int) -> int:
        if self.branch is None or turn >= self.branch:
            return self.sample
        return self.sample - self.sample % 2

    async def _exchange(
        self, number: int, environment: Environment, exchange: Exchange, sampling: Sampling
    ) -> bool:
        most = min(sampling.max_new_tokens, sampling.max_total_tokens - len(self.tokens))
        asked = TurnRequest(
            self.row,
            tuple(self.tokens),
            most,
            exchange.uniform(self.problem, self._stream(number), number, most),
            exchange.seed(self.problem, self._stream(number), number),
        )
        turn = await exchange.speak(asked)
        self.turns.append((len(self.tokens), turn))
        self.tokens += turn.token.tolist()
        self.rewards.append(0.0)
        reply = exchange.reply_of(number, turn.token, turn.finished)
        before = [*self.messages]
        self.messages.append({"role": "assistant", "content": reply.text})
        began = time.perf_counter()
        result = _checked(await _answered(partial(environment.step, reply), exchange.limit_s))
        waited_s = self.counts.get("answer_s", 0.0) + time.perf_counter() - began
        reward = as_score(result.reward)
        self.rewards[-1], self.scored = reward or 0.0, self.scored and reward is not None
        for name, count in result.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + count
        self.counts["answer_s"] = waited_s
        self.messages += result.messages
        if result.done:
            self.ending = "done"
            return True
        shown = exchange.shown(before, result.messages, turn.finished)
        if len(self.tokens) + len(shown) >= sampling.max_total_tokens:
            self.ending = "out of tokens"
            return True
        self.tokens += shown
        return False


class BadAnswer(Exception):
    """A fault of the other side, in words."""


async def _answered(call: Callable[[], Awaitable[T] | T], limit_s: float) -> T:
    try:
        return await asyncio.wait_for(_called(call), limit_s)
    except TimeoutError as error:
        raise BadAnswer(f"no answer in {limit_s:g} s") from error


async def _called(call: Callable[[], Awaitable[T] | T]) -> T:
    try:
        with one_process():
            given: Any = call()
            return await given if inspect.isawaitable(given) else given
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BadAnswer("it says that it was cancelled") from None
    except TimeoutError as error:  # its own, not ours
        raise BadAnswer(f"TimeoutError: {error}") from error
    except (SystemExit, GeneratorExit) as error:
        raise BadAnswer(f"it raised {type(error).__name__}") from error


def _checked(result: Any) -> TurnResult:
    if not isinstance(result, TurnResult):
        raise BadAnswer(f"it answered {result!r:.80}; expected a TurnResult")
    try:
        numbers: dict[str, Any] = {"reward": as_score(result.reward) or 0.0, **result.counts}
    except ValueError as error:
        raise BadAnswer(f"its reward is {error}") from None
    for name, number in numbers.items():
        if not isinstance(number, (int, float)) or not abs(number) <= _LARGEST:
            raise BadAnswer(f"its {name} is {number!r:.80}; expected a number")
    messages: Any = result.messages
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise BadAnswer(f"it showed {message!r:.80}; expected a message with a text")
    return result


def as_table(held: Sequence[Conversation]) -> Conversations:
    width = max((len(one.tokens) for one in held), default=0)
    shape = (len(held), width)
    tokens = torch.full(shape, -1, dtype=torch.int64)
    turn = torch.full(shape, -1, dtype=torch.int64)
    version = torch.full(shape, -1, dtype=torch.int64)
    logprob, reward = torch.zeros(shape), torch.zeros(shape)
    for row, one in enumerate(held):
        tokens[row, : len(one.tokens)] = torch.tensor(one.tokens)
        version[row, : len(one.tokens)] = 0
        for number, (start, said) in enumerate(one.turns):
            own = slice(start, start + len(said.token))
            turn[row, own] = number
            logprob[row, own], version[row, own] = said.logprob, said.version
            reward[row, own.stop - 1] = one.rewards[number]
    finished = [one.ending == "done" or (one.turns and one.turns[-1][1].finished) for one in held]
    scored = torch.tensor([one.scored for one in held], dtype=torch.bool)
    return Conversations(
        prompt_id=torch.tensor([one.problem for one in held], dtype=torch.int64),
        tokens=tokens,
        mask=turn >= 0,
        behavior_logprob=logprob,
        finished=torch.tensor([bool(each) for each in finished], dtype=torch.bool),
        version=version,
        turn=turn,
        reward=reward,
        score=torch.where(scored, reward.sum(1), math.nan),
        ending=torch.tensor([ENDINGS.index(one.ending) for one in held], dtype=torch.int64),
        branch=torch.tensor([one.branch or 0 for one in held], dtype=torch.int64),
        piece=torch.tensor([one.piece for one in held], dtype=torch.int64),
    )


class Floor:
    """Gives conversations their turns to speak.

    Attributes:
        waiting_s: Seconds in which nothing was sampled, as all waited for their other sides.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.waiting_s = 0.0
        self._speaking: dict[int, asyncio.Future[Turn]] = {}
        self._idle: set[int] = set()
        self._asked = asyncio.Event()

    async def speak(self, request: TurnRequest) -> Turn:
        said = self._speaking[request.row] = asyncio.get_running_loop().create_future()
        self._idle.discard(request.row)
        self._turns.ask(request)
        self._asked.set()
        return await said

    def release(self, row: int) -> None:
        """Forget a row that is over; nothing of it is open."""
        self._idle.discard(row)
        self._turns.release(row)

    async def serve(self, running: set[asyncio.Task[Any]], *, frees: bool = False) -> None:
        """Sample until all conversations have ended; whatever goes wrong, none is left."""
        try:
            await self._sample(running, frees=frees)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        for task in running:
            task.result()

    async def _sample(self, running: set[asyncio.Task[Any]], *, frees: bool) -> None:
        while open_ := {task for task in running if not task.done()}:
            if frees and self._speaking and not self._turns.num_open:
                for row in sorted(self._idle):
                    self.release(row)
            if self._turns.num_open:
                for turn in self._turns.step():
                    self._idle.add(turn.row)
                    self._speaking.pop(turn.row).set_result(turn)
                await asyncio.sleep(0)  # conversations that wait go on as far as they can
                continue
            began = time.perf_counter()
            self._asked.clear()
            asked = asyncio.create_task(self._asked.wait())
            await asyncio.wait({*open_, asked}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            with suppress(asyncio.CancelledError):
                await asked
            self.waiting_s += time.perf_counter() - began
