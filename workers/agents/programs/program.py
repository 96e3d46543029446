"""Programs that act by asking a policy, and how they are run.

A program is given an address and a key, as any client of an OpenAI-compatible server is, and asks
for as many turns as it likes. What it comes to is its answer, which is scored. It is code of
others: whatever it does ends its own conversation at most.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ....algorithms.roles.language_tables import Sampling
from ....dataflow.errors import one_process
from ...data.task import Message, Task
from ...isolation.child import as_score, supervised, was_killed
from ...isolation.pool import OwnThread
from ...models.tokenizer import Tokenizer
from ..conversation import Conversation, Exchange, Floor
from ..rendering import TurnRenderer
from .endpoint import Endpoint, ProgramSequences, served

_MOST_BYTES = 1 << 20  # of what a command prints
_END_S = 30.0  # for a command's supervisor to kill what it has started
_SHOWN = 500  # characters of what a command complained of


class ProgramFailed(Exception):
    """A fault of a program, in words."""


class ProgramKilled(ProgramFailed):
    """A program's process was killed, which may be no fault of its own."""


@dataclass(frozen=True)
class Access:
    """The address and key with which a program asks the policy."""

    base_url: str  # of the server, for this conversation
    api_key: str  # of this conversation, until it ends
    messages: Sequence[Message]  # the problem, as a conversation that ends with the user
    prompt: str  # what the user said last
    seed: int  # 63 bits: the same for the same run, step, problem and sample


class AgentProgram(Protocol):
    """Answers problems by asking the policy. If cancelled, it has to end."""

    async def __call__(self, access: Access) -> str:
        """The answer to one problem.

        Raises:
            ProgramKilled: If its process was killed; then it is run once more, from the beginning.
            Exception: Of any other kind, if it fails.
        """
        ...


@dataclass(frozen=True)
class FunctionProgram:
    """A function of Python, plain or a coroutine function, in a thread of its own.

    It is given those of its arguments that are fields of `Access`. A thread cannot be ended: one
    that takes too long is left alone, and the key that it has opens nothing any more.
    """

    function: Callable[..., Any]  # what returns the answer
    arguments: tuple[str, ...]  # names of what it is given

    async def __call__(self, access: Access) -> str:
        given = {name: getattr(access, name) for name in self.arguments}

        def run() -> Any:
            try:
                result = self.function(**given)
                return asyncio.run(result) if inspect.iscoroutine(result) else result
            except BaseException as error:  # it is anybody's code
                raise ProgramFailed(f"{type(error).__name__}: {error}") from error

        thread = OwnThread("penstock-program")
        running = asyncio.wrap_future(thread.submit(run))
        thread.end()
        answer = await running
        if not isinstance(answer, str):
            raise ProgramFailed(f"it returned {answer!r:.80}; expected a text, the answer")
        return answer


@dataclass(frozen=True)
class CommandProgram:
    """A command in a process of its own, which is killed with all that it has started.

    It reads the prompt from its standard input, and what it prints is the answer. The environment
    has `OPENAI_BASE_URL` and `OPENAI_API_KEY`, which the `openai` package reads by itself,
    `PENSTOCK_MESSAGES` (JSON) and `PENSTOCK_SEED`.
    """

    command: tuple[str, ...]  # with its arguments

    async def __call__(self, access: Access) -> str:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *supervised(self.command),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env={
                **os.environ,
                "OPENAI_BASE_URL": access.base_url,
                "OPENAI_API_KEY": access.api_key,
                "PENSTOCK_MESSAGES": json.dumps(list(access.messages)),
                "PENSTOCK_SEED": str(access.seed),
            },
        )
        try:
            return await self._answer(process, access)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()  # its supervisor kills it and ends
            try:  # to the end, or its pipes stay open
                await asyncio.wait_for(process.communicate(), _END_S)
            except TimeoutError:
                process.kill()

    async def _answer(self, process: asyncio.subprocess.Process, access: Access) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # it need not read
            process.stdin.write(access.prompt.encode())
            await process.stdin.drain()
        process.stdin.close()
        reads = [asyncio.create_task(_read(pipe)) for pipe in (process.stdout, process.stderr)]
        try:
            said, complained = await asyncio.gather(*reads)
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
        code = await process.wait()
        if code:
            why = complained.decode(errors="replace").strip()[-_SHOWN:]
            failure = ProgramKilled if was_killed(code) else ProgramFailed
            raise failure(f"it ended with code {code}: {why or 'it said nothing'}")
        return said.decode(errors="replace").strip()


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end; refuse one that is too long."""
    read = bytearray()
    while piece := await stream.read(1 << 16):
        read += piece
        if len(read) > _MOST_BYTES:
            raise ProgramFailed(f"it printed more than {_MOST_BYTES} bytes")
    return bytes(read)


@dataclass(frozen=True)
class ProgramHolder:
    task: Task
    tokenizer: Tokenizer
    renderer: TurnRenderer
    floor: Floor
    exchange: Exchange
    sampling: Sampling
    max_turns: int

    async def hold(self, begun: Sequence[Conversation]) -> list[Conversation]:
        endpoint = Endpoint()
        made = [self._sequences(one) for one in begun]
        room = asyncio.Semaphore(self.task.max_running)

        async def run(number: int, one: Conversation) -> None:
            async with room:  # the time limit begins with its turn to run
                try:
                    await self._run(one, made[number], endpoint, is_last=False)
                except ProgramKilled:  # the same is said to the same
                    self._release(made[number])
                    made[number] = self._sequences(one)
                    await self._run(one, made[number], endpoint, is_last=True)
            self._release(made[number])

        async with served(endpoint):
            running = {asyncio.create_task(run(*each)) for each in enumerate(begun)}
            await self.floor.serve(running, frees=True)
        rows = [row for sequences in made for row in sequences.rows()]
        if endpoint.refused:
            rows[0].counts["stray_requests"] = float(sum(endpoint.refused.values()))
        return rows

    def _sequences(self, one: Conversation) -> ProgramSequences:
        most = self.task.max_branches

        def begin(row: int) -> Conversation:
            return Conversation(row, one.problem, one.sample, [*one.tokens], [*one.messages])

        def spell(token: Tensor) -> tuple[str, ...]:
            return tuple(self.tokenizer.decode([each]) for each in token.tolist())

        numbers = range(one.row * most, (one.row + 1) * most)
        return ProgramSequences(
            begin, numbers, self.exchange, self.renderer, spell, self.sampling, self.max_turns
        )

    async def _run(
        self, one: Conversation, sequences: ProgramSequences, endpoint: Endpoint, *, is_last: bool
    ) -> None:
        ending, failure = "done", None
        earned: float | None = 0.0
        with endpoint.opened(one.row, sequences) as (url, key):
            seed = self.exchange.seed(one.problem, one.sample, -1)
            access = Access(url, key, one.messages, self.task.prompt_text(one.problem), seed)
            limit = asyncio.timeout(self.task.time_limit_s)
            try:
                with one_process():
                    program = self.task.program(one.problem)
                    async with limit:
                        answer = await program(access)
                    try:
                        earned = as_score(self.task.outcome(one.problem, answer))
                    except ValueError as error:
                        raise ProgramFailed(f"its answer earned {error}") from None
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

    def _release(self, sequences: ProgramSequences) -> None:
        for row in sequences.rows():
            self.floor.release(row.row)
