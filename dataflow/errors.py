"""The errors a user can meet. Each says where, what was expected, what came, and how to fix it.

`ConfigError` is about what was typed, `FlowError` about the definition of a step (before any device
is touched), `PlanError` about a placement that cannot work, `WorkerError` about code that failed
while running a node, `StateError` about the engine itself.
"""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

_OUR_FOLDER = Path(__file__).resolve().parent
_OUR_PACKAGE = _OUR_FOLDER.parent


class PenstockError(Exception):
    """Base of every error we raise on purpose; its text is complete without a traceback."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Other processes raise them too; by default the class would be called with the text alone.
        return _rebuilt, (type(self), str(self), self.__dict__)


class ConfigError(PenstockError):
    """A configuration, a command line or an input file that cannot be used."""


class PlanError(PenstockError):
    """A placement that cannot run the graph; names the constraint that fails."""


class InfeasibleError(PlanError):
    """No placement fits: what was asked for makes sense, but there is no room or no way for it."""


@dataclass(frozen=True)
class Where:
    """A place in the user's source: file, line, and the line's text."""

    file: str
    line: int
    source: str

    @property
    def short(self) -> str:
        """`file.py:12`, without folders; a notebook's cell has no name of its own."""
        name = "cell" if _is_cell(self.file) else Path(self.file).name
        return f"{name}:{self.line}"

    def __str__(self) -> str:
        return f"{self.short}\n    {self.source}" if self.source else self.short


def caller() -> Where:
    """The innermost frame outside this package's recording code: the user's line."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage] - no public way
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return Where("<unknown>", 0, "")
    code = frame.f_code
    line = frame.f_lineno
    return Where(code.co_filename, line, linecache.getline(code.co_filename, line).strip())


def raised_at(error: BaseException) -> Where:
    """The place where a caught error was raised: its innermost frame, or what does not parse."""
    if isinstance(error, SyntaxError) and error.filename:
        return Where(error.filename, error.lineno or 0, (error.text or "").strip())
    return _where(_frames(error)[-1])


@contextmanager
def one_process() -> Generator[None]:
    """Around code of the user's, or on a function that calls it: a forked copy ends here.

    Two processes would go on with the run, and both write to its folder.
    """
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            os._exit(1)


@contextmanager
def no_exit(kind: type[PenstockError] | None = None) -> Generator[None]:
    """Around code of the user's: it neither ends the run by `sys.exit` nor doubles it by a fork."""
    try:
        with one_process():
            yield
    except (SystemExit, GeneratorExit) as error:
        where = line_of(error)
        raise (kind or WorkerError)(
            f"{type(error).__name__}({error}) was raised, and what a run calls cannot end it\n"
            f"{where.file}:{where.line}\n    {where.source}\n"
            "    raise an error that says what is wrong, or return"
        ) from error


def line_of(error: BaseException) -> Where:
    """The innermost line of the user's own code, or else where the error was raised."""
    return users_line(error) or raised_at(error)


def users_line(error: BaseException) -> Where | None:
    """The innermost line of the user's own code, if the exception came through any."""
    return next((_where(one) for one in reversed(_frames(error)) if not is_library(one[0])), None)


def _frames(error: BaseException) -> list[tuple[str, int]]:
    frames = traceback.walk_tb(error.__traceback__)
    return [(frame.f_code.co_filename, line) for frame, line in frames]


def _where(frame: tuple[str, int]) -> Where:
    file, line = frame
    is_file = file.startswith("<") or _is_file(file) or _is_cell(file)
    return Where(file, line, linecache.getline(file, line).strip() if is_file else "")


def _is_file(name: str) -> bool:
    try:
        return name.endswith(".py") and Path(name).is_file() and os.access(name, os.R_OK)
    except OSError:  # in a folder that may not be looked into
        return False


def _is_cell(name: str) -> bool:
    known = name in linecache.cache and not os.path.exists(name)
    return known and (not name.startswith("<") or name.startswith("<ipython-input"))


@cache
def is_library(filename: str) -> bool:
    """True if a file is ours, Python's or an installed package's, rather than the user's own.

    What is no file, such as what `python -c` runs, is taken for a library too, but for the cells of
    a notebook.
    """
    if not _is_file(filename):
        return not _is_cell(filename)
    path = Path(filename).resolve()
    scripts, libraries = _library_folders()
    return path.parent == scripts or not libraries.isdisjoint((path, *path.parents))


@cache
def _library_folders() -> tuple[Path, frozenset[Path]]:
    paths = sysconfig.get_paths()
    installed = (paths["stdlib"], paths["purelib"], paths["platlib"], site.getusersitepackages())
    names = ("algorithms", "configs", "dataflow", "launch", "planner", "workers", "__init__.py")
    libraries = (
        *(Path(folder).resolve() for folder in installed),
        *(_OUR_PACKAGE / n for n in names),
    )
    return Path(paths["scripts"]).resolve(), frozenset(libraries)


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one is meant for, or None if none is near."""
    return next(iter(get_close_matches(name, list(known), n=1)), None)


def nearest(name: str, known: Iterable[str], at: str = "") -> str:
    """`; did you mean 'at.x'?` for a misspelt name, or nothing if no known one is near."""
    found = closest(name, known)
    if found is None:
        return ""
    return f"; did you mean '{at}.{found}'?" if at else f"; did you mean '{found}'?"


def _is_ours(filename: str) -> bool:
    return filename == "<string>" or Path(filename).resolve().is_relative_to(_OUR_FOLDER)


class FlowError(PenstockError):
    """A step that does not make a valid graph.

    It says which node and input are concerned, what was expected and what came; which line produced
    the offending column (`origin`), and what to write instead (`fix`).
    """

    def __init__(
        self, what: str, *, where: Where | None = None, origin: str | None = None, fix: str
    ) -> None:
        self.what = what
        self.where = where or caller()  # the line of the step function
        self.origin = origin
        self.fix = fix
        parts = [str(self.where), what]
        if origin:
            parts.append(f"    {origin}")
        parts.append(f"    {fix}")
        super().__init__("\n".join(parts))


NOT_STARTED = (ConfigError, FlowError, PlanError)
"""A refusal before training: what was asked for cannot be run."""


class WorkerError(PenstockError):
    """A node failed while running. The user's own traceback follows the message, untouched."""

    def __init__(self, message: str, story: tuple[str, ...] = ()) -> None:
        self.story = story
        super().__init__(_with_story(message, story))


class StateError(PenstockError):
    """The engine met an event that cannot happen; carries the story of the node concerned."""

    def __init__(self, message: str, story: tuple[str, ...] = ()) -> None:
        self.story = story
        super().__init__(_with_story(message, story))


def _rebuilt(kind: type[PenstockError], text: str, fields: dict[str, Any]) -> PenstockError:
    error = kind.__new__(kind)
    error.args = (text,)
    error.__dict__.update(fields)
    return error


def _with_story(message: str, story: tuple[str, ...]) -> str:
    told = ["what happened before:", *(f"    {line}" for line in story)] if story else []
    return "\n".join([message, *told])
