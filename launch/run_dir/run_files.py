"""Parse the files of a run's folder, which someone else may have made or damaged.

Each reader names the file and its fault in one `ConfigError`. Commands that show several runs
catch it and go on with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin

from ...dataflow.errors import ConfigError
from ...dataflow.regular_files import NotAFile, parse_json, read_bytes

_T = TypeVar("_T")

_MOST_LINES_BYTES = 4 << 30
"""Largest file with a line for each step."""

_KINDS: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
}


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file; None if there is no such file.

    Raises:
        ConfigError: If something else is there.
    """
    return parsed(path, parse_object)


def required_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file that must exist.

    Raises:
        ConfigError: If it does not exist, or holds something else.
    """
    found = read_object(path)
    if found is None:
        raise ConfigError(f"'{path}' is missing")
    return found


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the object of a JSON text.

    Raises:
        ValueError: If it is no object.
    """
    return typed(parse_json(content), dict[str, Any])


def parsed(path: Path, parse: Callable[[bytes], _T]) -> _T | None:
    """Return what a function makes of a file's content; None if there is no file.

    Args:
        path: The file.
        parse: Raises `ValueError`, or what follows from values of other kinds than it expects.

    Raises:
        ConfigError: If the file cannot be read, or the function raises one of these.
    """
    try:
        return parse(read_bytes(path))
    except FileNotFoundError:
        return None
    except (NotAFile, NotADirectoryError) as error:
        raise ConfigError(str(error)) from error
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        said = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"{path.name} cannot be read ({type(error).__name__}: {said!s:.300})\n    it is "
            f"'{path}'; bring it back as the run wrote it"
        ) from error


def typed(value: Any, kind: type[_T], name: str = "it") -> _T:
    """Return a value if it is of a JSON kind; whole numbers are numbers as well.

    Raises:
        ValueError: If it is of another kind.
    """
    plain: type[Any] = get_origin(kind) or kind
    fits = isinstance(value, (int, float) if plain is float else plain)
    if not fits or isinstance(value, bool):
        raise ValueError(f"{name} holds {value!r:.60}, expected {_KINDS[plain]}")
    return cast(_T, value)


def field(found: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    """Return a field of a kind; `optional_field` reads one that may be absent.

    Raises:
        ValueError: If it is of another kind, or absent.
    """
    if name not in found:
        raise ValueError(f"it has no '{name}'")
    return typed(found[name], kind, f"'{name}'")


def optional_field(found: Mapping[str, Any], name: str, kind: type[_T]) -> _T | None:
    """Return a field of a kind; None if it is absent or null.

    Raises:
        ValueError: If it is of another kind.
    """
    value = found.get(name)
    return None if value is None else typed(value, kind, f"'{name}'")


def read_lines(path: Path, *, complete: bool = True) -> list[str]:
    """Return the lines of a file; none if there is no file.

    Args:
        path: The file.
        complete: Whether to leave out a last line without a line end, which a kill cut short.

    Raises:
        ConfigError: If something else is there.
    """
    try:
        content = read_bytes(path, _MOST_LINES_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        said = str(error) if isinstance(error, NotAFile) else f"'{path}': {error.strerror}"
        raise ConfigError(said) from error
    lines = content.decode("utf-8", errors="replace").split("\n")
    return lines[:-1] if complete or not lines[-1] else lines
