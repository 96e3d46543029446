"""Read YAML files of users, with bounds on their size and on the number of values."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from ..dataflow.errors import ConfigError
from ..dataflow.files import check_regular, read_bytes

_MOST_BYTES = 250_000
_MOST_VALUES = 100_000
"""Most values in a file, aliases expanded: a short text can stand for billions of values."""
_PLAIN = ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "merge", "value")


def yaml_text(path: Path, most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of a YAML file that is safe to load.

    Raises:
        ConfigError: If it is too large, has too many values, contains itself, or has values that
            are not plain data.
        OSError: If it cannot be read.
        UnicodeDecodeError: If it is not UTF-8.
        yaml.YAMLError: If it is no YAML.
    """
    check_regular(path)
    if path.stat().st_size > most_bytes:
        raise ConfigError(
            f"'{path}' has {path.stat().st_size:,} bytes; a configuration has at most "
            f"{most_bytes:,}\n    leave data to the task: task.path=FILE"
        )
    text = read_bytes(path).decode()
    stream: Any = StringIO(text)
    stream.name = str(path)  # PyYAML's messages name it
    root = yaml.compose(stream, Loader=yaml.SafeLoader)
    if root is not None and _num_values(root, {}, path) > _MOST_VALUES:
        raise ConfigError(
            f"'{path}' has more than {_MOST_VALUES:,} values, each alias counted as the values it "
            "stands for\n    write the values that are meant without aliases"
        )
    return text


def load_yaml(path: Path, most_bytes: int = _MOST_BYTES) -> Any:
    """Parse a YAML file; raises as `yaml_text`."""
    return yaml.safe_load(yaml_text(path, most_bytes))


def _num_values(node: Any, known: dict[int, int], path: Path) -> int:
    """Count the values below a node, itself included; a node that occurs twice counts twice.

    A node that is being counted is in `known` as 0.
    """
    if id(node) in known:
        if not known[id(node)]:
            raise ConfigError(f"'{path}': a value contains itself; write it out")
        return known[id(node)]
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind not in _PLAIN:
        raise ConfigError(
            f"'{path}', line {node.start_mark.line + 1}: a value of the kind {kind}; expected "
            "texts, numbers, lists and mappings"
        )
    known[id(node)] = 0
    inner: list[Any] = node.value if isinstance(node.value, list) else []
    flat = [one for pair in inner for one in pair] if kind == "map" else inner
    known[id(node)] = 1 + sum(_num_values(one, known, path) for one in flat)
    return known[id(node)]
