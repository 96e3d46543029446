"""The files of a run's folder: written as a whole or not at all, and parsed with clear faults.

A file is complete or absent, even if the process or the machine stops at any moment. Readers take
files that someone else may have made or damaged: each names the file and its fault in one
`ConfigError`, and commands that show several runs catch it and go on with the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin

from ...dataflow.errors import ConfigError
from ...dataflow.files import (
    NotAFile,
    created,
    open_regular,
    opened,
    parse_json,
    read_bytes,
    writing,
)


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, survive a power cut."""
    is_folder = path.is_dir()
    descriptor = os.open(path, os.O_DIRECTORY) if is_folder else open_regular(path, links=False)
    try:
        with writing(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append(path: Path, descriptor: int, content: bytes) -> None:
    """Append all of the content or nothing; a full disk may take the beginning of it alone."""
    size_bytes = os.fstat(descriptor).st_size
    with writing(path):
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, size_bytes)
            raise


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: a reader sees all of the old or all of the new."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with writing(path), created(draft) as file:
            append(path, file.fileno(), text.encode())
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        raise
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


TERMINAL = "-"  # in place of a file's name


def output_file(key: str, given: Any) -> str | None:
    """The file's name, if one can be written there: a search should not end in a refusal."""
    if given is None or given == TERMINAL and key == "json":
        return given
    other = isinstance(given, str) and Path(given).is_fifo() and not given.startswith("/dev/")
    if not isinstance(given, str) or not given or Path(given).is_dir() or other:
        raise ConfigError(f"'{key}': expected the name of a file, got {given!r}")
    if not Path(given).absolute().parent.is_dir():
        raise ConfigError(f"'{key}': '{given}' cannot be written: there is no such folder")
    return given


def write_output(key: str, file: str, text: str) -> None:
    if file == TERMINAL:
        print(text, end="")
        return
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise unwritable(key, file, error) from error


def unwritable(key: str, file: str | Path, error: OSError) -> ConfigError:
    return ConfigError(f"'{key}': '{file}' cannot be written: {error.strerror}")


_T = TypeVar("_T")

_MOST_LINES_BYTES = 4 << 30  # largest file with a line for each step

_KINDS: Mapping[type, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    dict: "an object",
    list: "a list",
}


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file; None if there is no such file."""
    return parsed(path, parse_object)


def required_object(path: Path) -> dict[str, Any]:
    found = read_object(path)
    if found is None:
        raise ConfigError(f"'{path}' is missing")
    return found


def parse_object(content: bytes) -> dict[str, Any]:
    return typed(parse_json(content), dict[str, Any])


def parsed(path: Path, parse: Callable[[bytes], _T]) -> _T | None:
    """Return a file's content as a function reads it; None if there is no file.

    The function raises `ValueError`, or what follows from values of other kinds than it expects.
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
    """Return a value if it is of a JSON kind; whole numbers are numbers as well."""
    plain: type[Any] = get_origin(kind) or kind
    fits = isinstance(value, (int, float) if plain is float else plain)
    if not fits or isinstance(value, bool):
        raise ValueError(f"{name} holds {value!r:.60}, expected {_KINDS[plain]}")
    return cast(_T, value)


def json_field(found: Mapping[str, Any], name: str, kind: type[_T]) -> _T:
    if name not in found:
        raise ValueError(f"it has no '{name}'")
    return typed(found[name], kind, f"'{name}'")


def optional_field(found: Mapping[str, Any], name: str, kind: type[_T]) -> _T | None:
    value = found.get(name)
    return None if value is None else typed(value, kind, f"'{name}'")


def read_lines(path: Path, *, complete: bool = True) -> list[str]:
    """Return the lines of a file, without a last one that a kill cut short if `complete`."""
    try:
        content = read_bytes(path, _MOST_LINES_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        said = str(error) if isinstance(error, NotAFile) else f"'{path}': {error.strerror}"
        raise ConfigError(said) from error
    lines = content.decode("utf-8", errors="replace").split("\n")
    return lines[:-1] if complete or not lines[-1] else lines


def finite_or_none(value: float) -> float | None:
    """Return the value as JSON can hold it: None for NaN and the infinities."""
    return value if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: keys are texts, and NaN and the infinities are None."""
    if isinstance(value, float):
        return finite_or_none(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(list[Any], value)]
    return value


def flat(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return nested sections as one mapping, `section.key` -> value; "" adds nothing to a key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(cast(Mapping[str, Any], value), f"{at}{key}." if key else at)
        else:
            found[f"{at}{key}"] = value
    return found


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], at: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two configurations differ, with both values; None is no value."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys((*before, *after)):
        one, other = before.get(key), after.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            sections = cast(Mapping[str, Any], one), cast(Mapping[str, Any], other)
            found |= differences(*sections, f"{at}{key}.")
        elif one != other:
            found[f"{at}{key}"] = (one, other)
    return found
