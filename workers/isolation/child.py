"""The program of a child process: a script of the standard library alone, so that it starts fast.

`child.py LIFELINE` serves calls. It speaks JSON, one message a line. First comes a setup of
`{"nonce", "path"}` and either `{"factory", "arguments"}`, from which a verifier is made, or
`{"functions", "max_bytes"}`; then each line is a call, `{"nonce", "arguments"}`, of a function with
its `name`. Each is answered once, by `{"nonce", "value"}` or `{"nonce", "error": text}`. Nothing is
ever unpickled. Standard input is empty, and what is printed goes to standard error, or nowhere from
functions; the messages have descriptors of their own.

`child.py run COMMAND...` runs a command, which has the script's streams. It is to end when the
script is sent SIGTERM, which the kernel does when the process that started it dies.

The script forks first, and the child does the work, in its main thread. The parent only supervises:
whatever the child's processes start becomes its own child when they end (Linux calls that a
subreaper), also what has changed its session. When the child has ended, or the other end of a pipe
is written to or closed (its read end is LIFELINE) because its owner wants it so or has died, it
kills them until there are none left, and then ends as the child did. On other systems it kills the
child's process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import math
import os
import re
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from decimal import Decimal
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

DEATH_SIGNAL, SUBREAPER = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of Linux's prctl
USER_ERRORS = (Exception, SystemExit, GeneratorExit)
"""Exceptions of user code that count as its failure. KeyboardInterrupt and other exceptions of
that kind are left out where signals raise them too."""
_OURS = tuple(
    f"{Path(__file__).resolve().parents[2] / name}{os.sep}"
    for name in ("algorithms", "configs", "dataflow", "launch", "planner", "workers")
)
"""Folders of this package: frames in them say nothing to the author of a function that failed."""
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals that are sent to a process from outside. All others come of what it does itself."""
_HEAD, _TAIL = 1000, 3000
"""Characters of an error that are told. As JSON a character takes 12 bytes at most."""
_PART, _MOST_PARTS = re.compile(r"[\w.-]{1,64}"), 64  # names of a reward's parts, and their number


def supervised(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command to start instead of a command, so that nothing of it is left."""
    return (sys.executable, "-I", "-S", str(Path(__file__).resolve()), "run", *command)


def _main(words: list[str]) -> None:
    if words[0] == "run":
        _run(words[1:])
    else:
        calls, replies = os.dup(0), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        _go_below(int(words[0]), (calls, replies))
        _serve(calls, replies)


def _run(command: list[str]) -> NoReturn:
    lifeline, end = os.pipe()
    signal.signal(signal.SIGTERM, lambda number, frame: os.write(end, b"x"))
    prctl(DEATH_SIGNAL, signal.SIGTERM)
    _go_below(lifeline, (0, 1))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(127)


def _go_below(lifeline: int, streams: tuple[int, int]) -> None:
    """Fork and return in the child; this process supervises it, and ends as it does.

    The child alone is to hold the streams, so that their ends tell.
    """
    prctl(SUBREAPER, 1)
    supervisor = os.getpid()
    child = os.fork()
    if child:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in streams:
            os.dup2(nowhere, stream)
        _supervise(child, lifeline)
    os.close(lifeline)
    os.setsid()  # signals to its group are not for the supervisor
    prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != supervisor:  # it died before the kernel was told
        os._exit(1)


def prctl(option: int, value: int) -> None:
    """Ask Linux for something; other systems have no such call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _supervise(child: int, lifeline: int) -> NoReturn:
    """Wait for the child, end whatever it has started, and end in the same way."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has written one if it may

    def end_with_owner() -> None:
        os.read(lifeline, 1)
        _kill_children(child)

    threading.Thread(target=end_with_owner, daemon=True).start()
    status = None
    with contextlib.suppress(ChildProcessError):  # there is no process left: the proof
        while True:
            process, how = os.wait()
            status = how if process == child else status
            if status is not None:
                _kill_children(child)
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def was_killed(exit_code: int | None) -> bool:
    """Whether a process was killed from outside, which is no fault of what it was doing.

    Its pool starts another and has it do the same again, once: what kills itself, or is
    killed because memory runs out, looks alike, and would go on for ever.
    """
    if exit_code is None:
        return False
    # Of a shell it is 128 more than the signal.
    return (128 - exit_code if exit_code > 128 else exit_code) in {-s for s in _FROM_OUTSIDE}


def _kill_children(child: int) -> None:
    """Kill the processes right below this one; those below them take their place, to be found next.

    To look for all that are below takes longer than one that only starts another one and ends.
    """
    listed = Path(f"/proc/self/task/{os.getpid()}/children")  # Linux has it, nearly always
    kill, found = (os.kill, listed.read_text().split()) if listed.exists() else (os.killpg, [child])
    for process in found:
        with contextlib.suppress(OSError):  # it has ended
            kill(int(process), signal.SIGKILL)


def _serve(calls: int, replies: int) -> None:
    with contextlib.suppress(OSError):  # only Linux has it
        # If memory runs out, this process is the one to go, not the trainer.
        Path("/proc/self/oom_score_adj").write_text("1000")
    process = os.getpid()

    def reply(call: dict[str, Any], answer: dict[str, Any]) -> None:
        if os.getpid() != process:  # user code has forked, and returned on both sides
            os._exit(0)
        left = memoryview(json.dumps({"nonce": call["nonce"], **answer}).encode() + b"\n")
        while left:
            left = left[os.write(replies, left) :]

    with os.fdopen(calls, "rb") as lines:
        setup = json.loads(lines.readline())
        sys.path[:] = setup["path"]
        answers = _functions if "functions" in setup else _verifier
        ready, answer_to = answers(setup)
        reply(setup, ready)
        while "error" not in ready and (line := lines.readline()):
            call = json.loads(line)
            reply(call, answer_to(call))


Answers = tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]
"""Whether what is to be called was made, and what answers a call of it."""


def _verifier(setup: dict[str, Any]) -> Answers:
    made: list[Callable[..., Any]] = []

    def make() -> None:
        module, _, name = setup["factory"].partition(":")
        made.append(getattr(import_module(module), name)(**setup["arguments"]))

    def answer(call: dict[str, Any]) -> dict[str, Any]:
        answers = getattr(made[0], "answers", None)  # of several responses, each with its own
        if answers is None:
            return verdict(made[0], call["arguments"], caught=BaseException)
        return {"value": answers(*call["arguments"])}

    return verdict(make, (), caught=BaseException), answer


def _functions(setup: dict[str, Any]) -> Answers:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    found: dict[str, Callable[..., Any]] = {}
    max_bytes = setup["max_bytes"]

    def find() -> None:
        made: dict[str, Any] = {}  # objects of classes, which are this process's own
        for name, place in setup["functions"].items():
            module, _, attribute = place.partition(":")
            owner, _, method = attribute.rpartition(".")
            if owner and owner not in made:
                made[owner] = getattr(import_module(module), owner)()
            found[name] = getattr(made[owner] if owner else import_module(module), method)

    ready = text_of(find, {}, max_bytes, caught=BaseException)
    return ready, lambda call: text_of(
        found[call["name"]], call["arguments"], max_bytes, caught=BaseException
    )


def text_of(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    max_bytes: int,
    *,
    caught: type[BaseException] | tuple[type[BaseException], ...] = USER_ERRORS,
) -> dict[str, Any]:
    """Call a user's function, which may return or raise anything, for the text of its result.

    A text stays as it is, what JSON has words for becomes JSON, all else as Python shows it: as
    `{"value": text}` or, of what is `caught`, `{"error": text}`, cut.
    """
    try:
        value = function(**arguments)
        if isinstance(value, str):
            return {"value": cut("".join(value), max_bytes)}  # not what a derived class makes of it
        try:
            text = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = repr(value)
        return {"value": cut(text, max_bytes)}
    except caught as error:
        try:
            said = str(error)[:_HEAD]
        except BaseException:  # user code again
            said = ""
        text = f"{type(error).__name__}: {said}" if said else type(error).__name__
        return {"error": cut(text, max_bytes)}


def cut(text: str, max_bytes: int) -> str:
    """The beginning of a text that takes so many bytes, with a note of how much is missing.

    Half of a surrogate pair, which cannot be encoded, becomes a question mark.
    """
    kept = text[:max_bytes].encode(errors="replace")[:max_bytes].decode(errors="ignore")
    missing = len(text) - len(kept)
    return f"{kept}... ({missing} more characters)" if missing else kept


def as_reward(value: Any) -> float | None | dict[str, float | None]:
    """Read what a reward returned: as `as_score`, or a mapping of named parts that are read so."""
    if not isinstance(value, Mapping):
        return as_score(value)
    wrong = [name for name in value if not (isinstance(name, str) and _PART.fullmatch(name))]
    if wrong or len(value) > _MOST_PARTS:
        raise ValueError(
            f"{value!r:.200}, whose parts need names of letters, digits, '_', '-' and '.', "
            f"and are at most {_MOST_PARTS}"
        )
    return {name: as_score(part) for name, part in value.items()} or None


def as_rewards(number: int, value: Any) -> list[dict[str, Any]]:
    """Read what a reward returned for several responses: each as `reading` has it.

    Raises:
        ValueError: If it is no sequence of so many.
    """
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__len__"):
        raise ValueError(f"{value!r:.200}, not a list with a reward for each response")
    if len(value) != number:
        raise ValueError(f"{len(value)} rewards for {number} responses")
    return [reading(as_reward, one) for one in value]


def reading(read: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    """Return `{"value": read(value)}`, or `{"error": text}` if that refuses what user code gave."""
    try:
        return {"value": read(value)}
    except ValueError as error:
        return {"error": f"the verifier returned {error}\n"}


def verdict(
    verify: Callable[..., Any],
    arguments: Any,
    *,
    caught: type[BaseException] | tuple[type[BaseException], ...] = USER_ERRORS,
    read: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Call user code, which may return or raise anything, for a score as `as_score` has it.

    It comes as `{"value": score}` or, of what is `caught`, as `failure` has it.
    """
    try:
        return reading(read or as_score, verify(*arguments))
    except caught as error:
        return failure(error)


def failure(error: BaseException) -> dict[str, Any]:
    """Return `{"error": text}`, of some 4,000 characters at most."""
    try:
        text = _described(error)
    except Exception as other:  # user code again: it describes its error
        text = f"{type(error).__name__}, which cannot be shown: {type(other).__name__}\n"
    left_out = len(text) - _HEAD - _TAIL
    if left_out > 0:
        text = f"{text[:_HEAD]}... {left_out} characters ...{text[-_TAIL:]}"
    return {"error": text}


def as_score(value: Any) -> float | None:
    """Read what user code returned as a score; None where it says that there is none.

    Every reward, judge and environment is read by this. A number is a Python or numpy number, a
    truth value, or an array or tensor without dimensions. None and nan mean "cannot say".

    Raises:
        ValueError: If it is anything else, or infinite; the message says what came.
    """
    given = value
    if value is not None and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, (Real, Decimal)):
        if inspect.iscoroutine(value):
            value.close()  # else Python warns that nothing has awaited it
            raise ValueError(
                "a coroutine, not a number; write `async def` where it is to be awaited"
            )
        raise ValueError(f"{given!r:.200}, not a finite number")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if math.isinf(score):
        raise ValueError(f"{given!r:.200}, not a finite number")
    return None if math.isnan(score) else score


def _described(error: BaseException) -> str:
    """`file:line` and source of each frame that is the user's, and what was raised."""
    lines: list[str] = []
    for frame in traceback.extract_tb(error.__traceback__):
        # Resolved: an installed package may be links to its files.
        if (
            not os.path.realpath(frame.filename).startswith(_OURS)
            and "<frozen " not in frame.filename
        ):
            lines.append(f"{frame.filename}:{frame.lineno}\n    {frame.line}\n")
    return "".join([*lines, *traceback.format_exception_only(error)])


if __name__ == "__main__":
    _main(sys.argv[1:])
