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

import logging
import signal
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from typing_extensions import override

from ....dataflow.errors import WorkerError
from ....dataflow.options import FiniteFloat, Int, option_class
from ...isolation.child import cut
from ...isolation.confine import Unconfined
from ...isolation.kinds import LANDLOCK, SandboxKind
from ...isolation.pool import END_S, LoopSemaphore, NotSaid
from ...isolation.sandbox import Interpreter, Limits, check_sandbox
from .tool import TextFunction, Tool, ToolSession, ToolText

_LOG = logging.getLogger("penstock.tools")
_GONE = "the interpreter was ended, and all that it had defined is gone"
_DESCRIPTION = (
    "Run Python code and see what it prints and the value of its last expression. Names that are "
    "defined stay defined in later calls. There is the standard library, no network and no files."
)


@option_class
class PythonTools:
    """The tool `python(code)`."""

    name: str = "python"
    """Name of the tool, as the model calls it."""
    time_limit_s: Annotated[FiniteFloat, Gt(0), Le(86400)] = 5.0
    """Seconds one piece of code may take, from its turn on."""
    cpu_limit_s: Annotated[FiniteFloat, Gt(0), Le(86400)] = 60.0
    """Seconds of CPU time that all pieces of an interpreter may take."""
    memory_mb: Annotated[Int, Ge(64)] = 512
    """Address space of an interpreter, Python itself included."""
    num_processes: Annotated[Int, Ge(1), Le(256)] = 2
    """Pieces at once; there may be more interpreters, which are stopped."""
    max_bytes: Annotated[Int, Ge(1), Le(1 << 26)] = 16_384
    """Largest result, as UTF-8; of a longer one the model gets the beginning and a count."""
    minimum: str = LANDLOCK.name
    """The weakest kind of sandbox to run in."""
    deterministic: bool = False
    """Whether to count on code that asks for neither time nor the system's random bytes."""

    def build(self) -> Tool:
        return PythonTool(self, check_sandbox(self.minimum))


class PythonTool(Tool):
    """Interpreters of conversations, and who of them may run."""

    def __init__(self, options: PythonTools, kind: SandboxKind) -> None:
        self.deterministic = options.deterministic
        self.options, self.kind = options, kind
        self.turns = LoopSemaphore(options.num_processes)
        self._sessions: weakref.WeakSet[_Session] = weakref.WeakSet()
        self.function = TextFunction(options.name, _DESCRIPTION, "code", "The code.")
        self.schemas = self.function.schemas

    @override
    def open(self, seed: int) -> ToolSession:
        """Begin a conversation; its interpreter starts with the first call."""
        session = _Session(self, seed)
        self._sessions.add(session)
        return session

    @override
    async def close(self) -> None:
        for session in tuple(self._sessions):
            await session.close()


class _Session(ToolSession):
    def __init__(self, tool: PythonTool, seed: int) -> None:
        self._tool, self._options, self._seed = tool, tool.options, seed
        self._running: Interpreter | None = None
        self._finalizer: Any = None
        self._done: list[tuple[str, ToolText]] = []

    @override
    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolText:
        code = self._tool.function.text(name, arguments)
        if isinstance(code, ToolText):
            return code
        async with self._tool.turns.here():
            try:
                interpreter = self._running or await self._start()
            except (NotSaid, Unconfined, OSError) as error:
                return ToolText(f"no interpreter can be started: {error}", error=True)
            try:
                result = await self._run(interpreter, code)
            except NotSaid as error:
                return await self._lost(interpreter, error, code)
            except BaseException:  # the caller was cancelled
                self._end()
                raise
            self._done.append((code, result))
            return result

    @override
    async def close(self) -> None:
        self._end()

    async def _start(self) -> Interpreter:
        options = self._options
        limits = Limits(time_s=options.cpu_limit_s, memory_mb=options.memory_mb)
        start = partial(Interpreter, self._tool.kind, self._seed, limits, options.max_bytes)
        interpreter = start()
        try:
            await interpreter.confined()
        except Unconfined:
            if not interpreter.process.was_killed:
                raise
            interpreter = start()
            await interpreter.confined()
        self._running = interpreter
        # Also at garbage collection and at exit.
        self._finalizer = weakref.finalize(self, interpreter.kill)
        return interpreter

    async def _run(self, interpreter: Interpreter, code: str) -> ToolText:
        answer = await interpreter.run(code, self._options.time_limit_s)
        failed = answer.error is not None
        text = answer.error if failed else answer.value
        return ToolText(cut(str(text), self._options.max_bytes + 100), error=failed)

    async def _lost(self, interpreter: Interpreter, error: NotSaid, code: str) -> ToolText:
        """Describe the loss of an interpreter in place of its answer."""
        exit_code = self._end(END_S if error.ended else 0.0)
        done, self._done = self._done, []
        if interpreter.process.was_killed:
            again = await self._again(done, code)
            if again is not None:
                return again
        if error.timed_out:
            text = f"the code took longer than {self._options.time_limit_s:g} s; {_GONE}"
            return ToolText(text, error=True, timed_out=True)
        if exit_code == -signal.SIGXCPU or interpreter.process.used_up:
            text = f"the code took more than {self._options.cpu_limit_s:g} s of CPU time; {_GONE}"
            return ToolText(text, error=True, timed_out=True)
        return ToolText(f"{error}; {_GONE}", error=True)

    async def _again(self, done: Sequence[tuple[str, ToolText]], code: str) -> ToolText | None:
        """A piece in another interpreter, which has done all that the killed one had."""
        try:
            interpreter = await self._start()
            for piece, text in done:
                if await self._run(interpreter, piece) != text:
                    raise NotSaid("it says something else")
            result = await self._run(interpreter, code)
        except (NotSaid, Unconfined, OSError):
            self._end()
            return None
        except BaseException:  # the caller was cancelled
            self._end()
            raise
        self._done = [*done, (code, result)]
        return result

    def _end(self, wait_s: float = 0.0) -> int | None:
        if self._running is None:
            return None
        interpreter, self._running = self._running, None
        self._finalizer.detach()
        try:
            return interpreter.kill(wait_s)
        except WorkerError as error:  # a tool raises nothing
            _LOG.warning("%s", error)
            return None
