"""Programs that act by asking a policy, and how they are run.

A program is given an address and a key, as any client of an OpenAI-compatible server is, and asks
for as many turns as it likes. What it comes to is its answer, which is scored. It is somebody's
code: whatever it does ends its own conversation at most.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ...data.task import Message
from ...verifiers.child import was_killed
from ..tools.supervised import supervised

_MOST_BYTES = 1 << 20
"""Of what a command prints."""
_END_S = 30.0
"""For whoever supervises a command to kill what it has started."""
_SHOWN = 500
"""Characters of what a command complained of."""


class ProgramFailed(Exception):
    """What a program did wrong, in words."""


class ProgramKilled(ProgramFailed):
    """A program's process was killed, which may be no fault of its own."""


@dataclass(frozen=True)
class Access:
    """What a program needs to ask the policy.

    Attributes:
        base_url: Of the server, for this conversation.
        api_key: Of this conversation, until it ends.
        messages: The problem, as a conversation that ends with the user.
        prompt: What the user said last.
        seed: 63 bits: the same for the same run, step, problem and sample.
    """

    base_url: str
    api_key: str
    messages: Sequence[Message]
    prompt: str
    seed: int


class Program(Protocol):
    """What answers problems by asking the policy. It may be cancelled, and has then to end."""

    async def __call__(self, access: Access) -> str:
        """The answer to one problem.

        Raises:
            ProgramKilled: If its process was killed; then it is run once more, from the beginning.
            Exception: Of any other kind, if it fails.
        """
        ...


@runtime_checkable
class HasPrograms(Protocol):
    """A task whose problems a program answers.

    Attributes:
        deterministic: Whether what the program does is a function of the problem, the seed and the
            policy's turns alone.
        time_limit_s: Longest time that it may take for one problem.
        max_running: Programs that run at once; the others begin when one ends.
        max_branches: Most sequences of tokens of one conversation.
    """

    deterministic: bool
    time_limit_s: float
    max_running: int
    max_branches: int

    def program(self, problem: int) -> Program:
        """What answers a problem."""
        ...

    def outcome(self, problem: int, answer: str) -> float | None:
        """Score an answer; None if it cannot be scored."""
        ...


@dataclass(frozen=True)
class Function:
    """A function of Python, plain or a coroutine function, in a thread of its own.

    It is given those of its arguments that are fields of `Access`. A thread cannot be ended: one
    that takes too long is left alone, and the key that it has opens nothing any more.

    Attributes:
        function: What returns the answer.
        arguments: Names of what it is given.
    """

    function: Callable[..., Any]
    arguments: tuple[str, ...]

    async def __call__(self, access: Access) -> str:
        """See `Program`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        given = {name: getattr(access, name) for name in self.arguments}

        def finish(result: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result, failed = None, None
            try:
                result = self.function(**given)
                if inspect.iscoroutine(result):
                    result = asyncio.run(result)
            except BaseException as error:  # noqa: BLE001 - it is anybody's code
                failed = ProgramFailed(f"{type(error).__name__}: {error}")
            with suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(finish, result, failed)

        threading.Thread(target=run, name="penstock-program", daemon=True).start()
        answer = await done
        if not isinstance(answer, str):
            raise ProgramFailed(f"it returned {answer!r:.80}; expected a text, the answer")
        return answer


@dataclass(frozen=True)
class Command:
    """A command in a process of its own, which is killed with all that it has started.

    It reads the prompt from its standard input, and what it prints is the answer. The environment
    has `OPENAI_BASE_URL` and `OPENAI_API_KEY`, which the `openai` package reads by itself,
    `PENSTOCK_MESSAGES` (JSON) and `PENSTOCK_SEED`.

    Attributes:
        command: With its arguments.
    """

    command: tuple[str, ...]

    async def __call__(self, access: Access) -> str:
        """See `Program`."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *supervised(self.command),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=_variables(access),
        )
        try:
            return await self._answer(process, access)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()  # whoever supervises it kills it and ends
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


def _variables(access: Access) -> Mapping[str, str]:
    return {
        **os.environ,
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "PENSTOCK_MESSAGES": json.dumps(list(access.messages)),
        "PENSTOCK_SEED": str(access.seed),
    }


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end; refuse one that is too long."""
    read = bytearray()
    while piece := await stream.read(1 << 16):
        read += piece
        if len(read) > _MOST_BYTES:
            raise ProgramFailed(f"it printed more than {_MOST_BYTES} bytes")
    return bytes(read)
