"""Ways to damage a file or folder, each a function of the folder that it lies in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path], object]

BAD: dict[str, bytes] = {
    "not UTF-8": b"\xff\xfe\x80" * 20,
    "empty": b"",
    "null": b"null",
    "a list": b"[1,2]",
    "a number": b"3",
    "deep": b"[" * 100_000,
}
"""What is no file of ours."""


def write(name: str, content: bytes) -> Damage:
    """Put other bytes there."""

    def damage(top: Path) -> None:
        _remove(top / name)
        (top / name).write_bytes(content)

    return damage


def remove(name: str) -> Damage:
    """Take it away."""
    return lambda top: _remove(top / name)


def folder(name: str) -> Damage:
    """Put a folder in its place."""

    def damage(top: Path) -> None:
        _remove(top / name)
        (top / name).mkdir()

    return damage


def cut(name: str, after: bytes = b"") -> Damage:
    """Keep its first half, or what ends with `after`: halves of a file with paths in it differ."""

    def damage(top: Path) -> None:
        content = (top / name).read_bytes()
        size = content.index(after) + len(after) if after else len(content) // 2
        (top / name).write_bytes(content[:size])

    return damage


def flip(name: str) -> Damage:
    """Turn the bits of the byte in its middle."""

    def damage(top: Path) -> None:
        content = bytearray((top / name).read_bytes())
        content[len(content) // 2] ^= 0xFF
        (top / name).write_bytes(bytes(content))

    return damage


def change(name: str, **keys: Any) -> Damage:
    """Set keys of a JSON file."""

    def damage(top: Path) -> None:
        content = json.loads((top / name).read_bytes())
        (top / name).write_text(json.dumps({**content, **keys}))

    return damage


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
