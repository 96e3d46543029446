"""A tool that runs Python, with an interpreter for each conversation that keeps what was defined.

What a model wrote runs in the sandbox that programs are verified in: without network, files,
further processes, and beyond its limits. The interpreter is a persistent one; a piece that overruns
its time, fills its memory in a way that Python does not survive, or starts too many threads costs
the state of its own conversation, and the text says so. One that is killed from outside is replaced
by another, which runs all pieces again and has to say the same. Between two calls it is stopped.

The same code gives the same text as long as it asks for nothing else: hashes of texts are fixed,
and the module `random` begins with the conversation's seed. A model can ask for the time or random
bytes of the system, though, so whether the tool counts as deterministic is yours to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from ....dataflow.errors import ConfigError, WorkerError
from ....dataflow.options import FiniteFloat, Int, option_class
from ...verifiers.sandbox.interpreter import Interpreter
from ...verifiers.sandbox.kernel import Unconfined
from ...verifiers.sandbox.kinds import LANDLOCK, SandboxKind
from ...verifiers.sandbox.process import START_S, Limits
from ...verifiers.sandbox.sandbox import check_sandbox
from .function_child import cut
from .lines import Lines, NotSaid, ready
from .tool import TextFunction, Tool, ToolSession, ToolText

_LOG = logging.getLogger("penstock.tools")
_LOOK_S = 0.05  # between two looks at how many threads there are
_END_S = 0.5
"""Between an interpreter's closing its end and its own, so that how it ended can be told."""
_GONE = "the interpreter was ended, and all that it had defined is gone"
_DESCRIPTION = (
    "Run Python code and see what it prints and the value of its last expression. Names that are "
    "defined stay defined in later calls. There is the standard library, no network and no files."
)


@option_class
class PythonTools:
    """The tool `python(code)`."""

    name: str = "python"
    """What the model calls."""
    time_limit_s: Annotated[FiniteFloat, Gt(0), Le(86400)] = 5.0
    """Seconds one piece of code may take, from its turn on."""
    cpu_limit_s: Annotated[FiniteFloat, Gt(0), Le(86400)] = 60.0
    """Seconds of CPU time that all pieces of an interpreter may take."""
    memory_mb: Annotated[Int, Ge(64)] = 512
    """Address space of an interpreter, Python itself included."""
    num_processes: Annotated[Int, Ge(1), Le(256)] = 2
    """Pieces at once; there may be more interpreters, which are stopped."""
    max_bytes: Annotated[Int, Ge(1), Le(1 << 26)] = 16_384
    """Of a result, as UTF-8; of a longer one the beginning is told, and how much is missing."""
    minimum: str = LANDLOCK.name
    """The weakest kind of sandbox to run in."""
    deterministic: bool = False
    """Whether to count on code that asks for neither time nor the system's random bytes."""

    def build(self) -> Tool:
        if not self.name.isidentifier():
            raise ConfigError(f"name '{self.name}' is no name\n    use letters, digits and _")
        return PythonTool(self, check_sandbox(self.minimum))


class PythonTool(Tool):
    """Interpreters of conversations, and who of them may run."""

    def __init__(self, options: PythonTools, kind: SandboxKind) -> None:
        self.deterministic = options.deterministic
        self._options, self._kind = options, kind
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Semaphore(options.num_processes)
        self._sessions: weakref.WeakSet[_Session] = weakref.WeakSet()
        self.function = TextFunction(options.name, _DESCRIPTION, "code", "The code.")
        self.schemas = self.function.schemas

    @override
    def open(self, seed: int) -> ToolSession:
        """Begin a conversation; its interpreter starts with the first call."""
        session = _Session(self, self._options, self._kind, seed)
        self._sessions.add(session)
        return session

    @override
    async def close(self) -> None:
        for session in tuple(self._sessions):
            await session.close()

    def turn(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a semaphore belongs to the loop that waits for it
            self._loop = loop
            self._turns = asyncio.Semaphore(self._options.num_processes)
        return self._turns


class _Session(ToolSession):
    """The interpreter of one conversation."""

    def __init__(
        self, tool: PythonTool, options: PythonTools, kind: SandboxKind, seed: int
    ) -> None:
        self._tool, self._options, self._kind, self._seed = tool, options, kind, seed
        self._running: tuple[Interpreter, Lines] | None = None
        self._finalizer: Any = None
        self._done: list[tuple[str, ToolText]] = []

    @override
    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        code = self._tool.function.text(name, arguments)
        if isinstance(code, ToolText):
            return code
        async with self._tool.turn():
            try:
                interpreter, lines = self._running or await self._start()
            except (NotSaid, Unconfined, OSError) as error:
                return ToolText(f"no interpreter can be started: {error}", error=True)
            try:
                result = await self._ask(interpreter, lines, code)
            except NotSaid as error:
                return await self._lost(interpreter, error, code)
            except BaseException:  # whoever waits for the call has given up
                self._end()
                raise
            interpreter.pause()
            self._done.append((code, result))
            return result

    @override
    async def close(self) -> None:
        self._end()

    async def _start(self) -> tuple[Interpreter, Lines]:
        options = self._options
        limits = Limits(time_s=options.cpu_limit_s, memory_mb=options.memory_mb)
        interpreter = Interpreter(self._kind, self._seed, limits)
        try:
            await _confined(interpreter)
        except Unconfined:
            if not interpreter.was_killed:
                raise
            interpreter = Interpreter(self._kind, self._seed, limits)
            await _confined(interpreter)
        most = 12 * options.max_bytes + 1000
        self._running = (interpreter, Lines(interpreter.writing, interpreter.reading, most))
        # Also at garbage collection and at exit.
        self._finalizer = weakref.finalize(self, interpreter.kill)
        return self._running

    async def _ask(self, interpreter: Interpreter, lines: Lines, code: str) -> ToolText:
        nonce, most = secrets.token_hex(8), self._options.max_bytes
        if not lines.quiet:
            raise NotSaid("it ended or spoke between two calls", ended=True)
        interpreter.resume()
        message = {"nonce": nonce, "code": code, "most_chars": most}
        asked = asyncio.ensure_future(lines.ask(message, self._options.time_limit_s))
        try:
            while not (await asyncio.wait({asked}, timeout=_LOOK_S))[0]:
                if interpreter.crowded:
                    raise NotSaid("it started too many threads")
            answer = asked.result()
        finally:
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError, NotSaid):
                await asked
        text = answer.get("text")
        if not isinstance(text, str):
            raise NotSaid("what it said is no answer")
        return ToolText(cut(text, most + 100), error=answer.get("error") is not False)

    async def _lost(self, interpreter: Interpreter, error: NotSaid, code: str) -> ToolText:
        """Describe the loss of an interpreter in place of its answer."""
        exit_code = self._end(_END_S if error.ended else 0.0)
        done, self._done = self._done, []
        if interpreter.was_killed:
            again = await self._again(done, code)
            if again is not None:
                return again
        if error.timed_out:
            text = f"the code took longer than {self._options.time_limit_s:g} s; {_GONE}"
            return ToolText(text, error=True, timed_out=True)
        if exit_code == -signal.SIGXCPU or interpreter.used_up:
            text = f"the code took more than {self._options.cpu_limit_s:g} s of CPU time; {_GONE}"
            return ToolText(text, error=True, timed_out=True)
        return ToolText(f"{error}; {_GONE}", error=True)

    async def _again(self, done: Sequence[tuple[str, ToolText]], code: str) -> ToolText | None:
        """A piece in another interpreter, which has done all that the killed one had."""
        told: list[tuple[str, ToolText]] = []
        try:
            interpreter, lines = await self._start()
            for piece, text in (*done, (code, None)):
                told.append((piece, await self._ask(interpreter, lines, piece)))
                if text is not None and told[-1][1] != text:
                    raise NotSaid("it says something else")
        except (NotSaid, Unconfined, OSError):
            self._end()
            return None
        except BaseException:  # whoever waits for the call has given up
            self._end()
            raise
        interpreter.pause()
        self._done = told
        return told[-1][1]

    def _end(self, wait_s: float = 0.0) -> int | None:
        if self._running is None:
            return None
        interpreter, _ = self._running
        self._running = None
        self._finalizer.detach()
        try:
            return interpreter.kill(wait_s)
        except WorkerError as error:  # a tool raises nothing
            _LOG.warning("%s", error)
            return None


async def _confined(interpreter: Interpreter) -> None:
    try:
        deadline = asyncio.get_running_loop().time() + START_S
        await ready(interpreter.verdict, deadline)
        interpreter.check_confined()
    except Unconfined:
        interpreter.kill(_END_S)
        raise
    except BaseException:
        interpreter.kill()
        raise
