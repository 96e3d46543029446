"""Rows of a JSONL or Parquet file: validated one by one, kept as a Hugging Face dataset of text.

Loading a JSONL file with `datasets` alone fails as a whole on one malformed line, so lines are
parsed here and only good rows are handed over. Nothing is downloaded, executed or unpickled.
"""

from __future__ import annotations

import glob
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from ...dataflow.errors import ConfigError, closest
from .messages import NotMessages, check_messages, last_user_text
from .row_report import DataReport

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Columns", "read_rows"]

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_MOST_CHARACTERS = 1 << 20
"""Of a text, far above what any model reads; tokenizing a longer one takes minutes."""
_MOST_BYTES = 16 << 20
"""Of a line."""
_MOST_PASSED_BYTES = 1 << 30
"""Of a line that is passed over because it is too long."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which field of a row plays which part; a part without a field is not read."""

    prompt: str = "prompt"
    tools: str | None = None
    answer: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    chosen_score: str | None = None
    rejected_score: str | None = None
    id: str | None = None

    @property
    def parts(self) -> dict[str, str]:
        """Part -> field, of the parts that are read."""
        return {part: field for part, field in vars(self).items() if field is not None}


class _BadRow(Exception):
    """Why a row cannot be used: reason and detail."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(reason, detail)


def read_rows(path: str | Path, columns: Columns, report: DataReport) -> Dataset:
    """Read a file; bad rows go to `report`, good rows to the result.

    Every part that `columns` names must be there on every row: text, and not blank. Answers
    and ids may be numbers, scores must be; they become text. Prompts may be conversations, and
    tools may be missing. Blank lines of a JSONL file are skipped.

    Returns:
        A dataset in memory with text columns for the parts read, and "where": "train.jsonl:17", or
        "train.parquet row 17"; both count from 1. "messages" and "tools" are JSON, empty where the
        prompt is a text; of a conversation, "prompt" is what the user said last.

    Raises:
        ConfigError: If the file is missing, unreadable, or of a kind that is not known.
    """
    _set_offline()
    from datasets import Dataset

    path = Path(path)
    _check_file(path)
    source = _json_lines(path) if path.suffix in _JSON_SUFFIXES else _parquet_rows(path)
    kept: list[dict[str, str]] = []
    ids: dict[str, str] = {}
    for where, row in source:
        try:
            good = _validated(row, columns)
            if "id" in good:
                _check_id(good["id"], where, ids)
        except _BadRow as bad:
            report.reject(where, bad.reason, bad.detail)
            continue
        kept.append({**good, "where": where})
    report.keep(len(kept))
    names = list(dict.fromkeys([*columns.parts, "messages", "tools", "where"]))
    return Dataset.from_dict({name: [row[name] for row in kept] for name in names})


def _set_offline() -> None:
    # Read by the libraries when they are first imported. A local file needs no network, and a run
    # must not come to depend on one.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


def _check_file(path: Path) -> None:
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        found = closest(path.name, beside)
        hint = f"; did you mean '{path.parent / found}'?" if found else ""
        raise ConfigError(
            f"there is no file '{path}'{hint}\n"
            "    give a JSONL or Parquet file, from the folder the run is started in"
        )
    if not path.is_file():
        raise ConfigError(f"'{path}' is not a file\n    give a JSONL or Parquet file")
    if path.suffix not in _JSON_SUFFIXES + _PARQUET_SUFFIXES:
        raise ConfigError(
            f"'{path}': the ending '{path.suffix}' says neither JSONL nor Parquet\n"
            f"    files end in {', '.join(_JSON_SUFFIXES + _PARQUET_SUFFIXES)}"
        )


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as file:
            for number in count(1):
                line = file.readline(_MOST_BYTES + 1)
                if not line:
                    return
                if len(line) > _MOST_BYTES:
                    length = len(line) + _passed_over(file, line, f"{path}:{number}")
                    yield f"{path}:{number}", _BadRow("too long", f"{length} bytes")
                    continue
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield f"{path}:{number}", _parsed(line)
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}") from error


def _passed_over(file: BinaryIO, begun: bytes, where: str) -> int:
    """Read to the end of a line that has begun, and count the bytes.

    Raises:
        ConfigError: If it does not end: then it is no line, but a file of another kind.
    """
    length, piece = 0, begun
    while piece and not piece.endswith(b"\n"):
        if length + len(begun) > _MOST_PASSED_BYTES:
            raise ConfigError(
                f"'{where}': the line has more than {_MOST_PASSED_BYTES >> 20} MiB\n"
                "    give a file with one JSON object a line"
            )
        piece = file.readline(_MOST_BYTES)
        length += len(piece)
    return length


def _parsed(line: bytes) -> Any:
    """The line's value, or the reason why it has none; a generator cannot raise and go on."""
    try:
        return json.loads(
            line.decode().rstrip("\r\n"),
            object_pairs_hook=_of_pairs,
            parse_constant=_no_number,
        )
    except _BadRow as bad:
        return bad
    except UnicodeDecodeError as error:
        return _BadRow("malformed JSON", f"byte {error.start + 1} of the line is not UTF-8")
    except json.JSONDecodeError as error:
        return _BadRow("malformed JSON", f"{error.msg} at column {error.colno}")
    except (RecursionError, ValueError):
        return _BadRow("malformed JSON", "nested too deeply, or a number with too many digits")


def _of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise _BadRow("malformed JSON", f"the key '{key:.80}' stands twice in an object")
        row[key] = value
    return row


def _no_number(name: str) -> NoReturn:
    raise _BadRow("malformed JSON", f"{name} is no number of JSON's")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    with tempfile.TemporaryDirectory() as cache:
        try:
            rows = load_dataset(
                "parquet",
                data_files=glob.escape(str(path.resolve())),
                split="train",
                streaming=True,
                cache_dir=cache,
            )
            for number, row in enumerate(rows, start=1):
                yield f"{path} row {number}", row
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"'{path}' cannot be read as Parquet: {error}\n    write the file again"
            ) from error


def _validated(row: Any, columns: Columns) -> dict[str, str]:
    if isinstance(row, _BadRow):
        raise row
    if not isinstance(row, Mapping):
        raise _BadRow("not an object", f"a row is an object with named fields, got {_kind(row)}")
    good = {"messages": "", "tools": ""}
    for part, field in columns.parts.items():
        if part == "tools":
            good["tools"] = _tools(row.get(field), field)
        elif part == "prompt" and isinstance(row.get(field), list):
            good["messages"], good["prompt"] = _conversation(row[field], field)
        else:
            good[part] = _text(row, part, field)
    if "chosen" in good and good["chosen"] == good.get("rejected"):
        raise _BadRow(
            "equal pair", f"'{columns.chosen}' and '{columns.rejected}' are the same text"
        )
    return good


def _text(row: Mapping[str, Any], part: str, field: str) -> str:
    if field not in row:
        has = ", ".join(map(str, row)) or "nothing"
        raise _BadRow(f"missing field '{field}'", f"it has {has}")
    value = row[field]
    if value is None:
        raise _BadRow(f"missing field '{field}'", "it is null")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, float) and not math.isfinite(value):
        raise _BadRow(f"wrong type of '{field}'", f"expected a finite number, got {value}")
    if part.endswith("_score") and not (is_number and abs(value) <= sys.float_info.max):
        raise _BadRow(f"wrong type of '{field}'", f"expected a number, got {_kind(value)}")
    if is_number and (part in ("answer", "id") or part.endswith("_score")):
        value = json.dumps(value)
    if not isinstance(value, str):
        expected = "text or a list of messages" if part == "prompt" else "text"
        raise _BadRow(f"wrong type of '{field}'", f"expected {expected}, got {_kind(value)}")
    return _whole(value, part, field)


def _whole(value: str, part: str, field: str) -> str:
    """The text, if it can be written, read and encoded."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _BadRow(
            f"broken Unicode in '{field}'", f"half a surrogate pair at character {error.start + 1}"
        ) from None
    if len(value) > _MOST_CHARACTERS:
        raise _BadRow(f"too long {part}", f"'{field}' has {len(value)} characters")
    if not value.strip():
        raise _BadRow(f"empty {part}", f"'{field}' is {value!r:.40}")
    return value


def _conversation(value: list[Any], field: str) -> tuple[str, str]:
    """The messages as JSON, and what the user said last."""
    try:
        messages = check_messages(value)
    except NotMessages as error:
        raise _BadRow(f"no conversation in '{field}'", str(error)) from None
    if messages[-1]["role"] == "assistant":
        raise _BadRow(
            f"no prompt in '{field}'", "the last message is the assistant's, not one to answer"
        )
    return _json(messages, field), _whole(last_user_text(messages), "prompt", field)


def _tools(value: Any, field: str) -> str:
    """The tools as JSON; a text is JSON already, as some data sets have it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _BadRow(f"wrong type of '{field}'", f"text that is no JSON: {error}") from None
    if value is None or value == []:
        return ""
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise _BadRow(f"wrong type of '{field}'", f"expected a list of objects, got {_kind(value)}")
    return _json(value, field)


def _json(value: Any, field: str) -> str:
    return _whole(json.dumps(value, ensure_ascii=False), "prompt", field)


def _check_id(identity: str, where: str, seen: dict[str, str]) -> None:
    if identity in seen:
        raise _BadRow("duplicate id", f"'{identity}' first stands at {seen[identity]}")
    seen[identity] = where


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}
    return kinds.get(type(value), "an object" if isinstance(value, dict) else type(value).__name__)
