"""Files that are hashed as they are written."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import random
import resource
import threading
from io import FileIO
from pathlib import Path

import pytest
from penstock.dataflow import written_files
from penstock.dataflow.written_files import Background, WrittenFile, write_hashed


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    found = write_hashed(path, [b"one", memoryview(b"two" * 1000), b""])
    content = path.read_bytes()
    assert content == b"one" + b"two" * 1000
    assert found == WrittenFile(len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 8193, 3 * 8192, 3 * 8192 + 5])
def test_a_large_one_is_written_past_the_cache(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_files, "_AT_ONCE", 8192)
    asked: list[int] = []
    change = fcntl.fcntl

    def noted(file: FileIO, command: int, flags: int = 0) -> int:
        asked.extend([flags & os.O_DIRECT] if command == fcntl.F_SETFL else [])
        return change(file, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", noted)
    content = random.Random(size).randbytes(size)
    parts = [content[:7], content[7:5000], content[5000:]]
    found = write_hashed(tmp_path / "a", parts)
    assert any(asked) == (size >= 8192), "a small one is written as ever"
    assert (tmp_path / "a").read_bytes() == content
    assert found == WrittenFile(size, hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("when", ["at once", "when written to"])
def test_or_through_it_where_the_file_system_cannot(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What begins amid a page is refused as by a file system that refuses all."""
    monkeypatch.setattr(written_files, "_AT_ONCE", 8192)
    if when == "at once":
        monkeypatch.setattr(fcntl, "fcntl", refuse)
    else:
        monkeypatch.setattr(mmap, "mmap", amid_a_page)
    content = random.Random(0).randbytes(20_000)
    write_hashed(tmp_path / "a", [content])
    assert (tmp_path / "a").read_bytes() == content


def amid_a_page(number: int, size: int) -> memoryview:
    del number
    return memoryview(bytearray(size + 1))[1:]


def refuse(file: object, command: int, flags: int = 0) -> int:
    if command == fcntl.F_SETFL:
        raise OSError(errno.EINVAL, "not here")
    return flags


def test_a_disk_that_takes_a_part_of_it_is_named(tmp_path: Path) -> None:
    path, before = tmp_path / "a", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write_hashed(path, [bytes(60), bytes(60)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.filename == str(path)


def test_its_end_is_waited_for_with_a_deadline() -> None:
    gate = threading.Event()
    one = Background(lambda: gate.wait(60.0), "gate")
    assert not one.wait(0.01)
    gate.set()
    assert one.wait(60.0)
    assert one.result() is True


def test_what_it_raises_is_raised_again() -> None:
    def fail() -> None:
        raise KeyError("x")

    one = Background(fail, "fail")
    assert one.wait(60.0)
    with pytest.raises(KeyError, match="x"):
        one.result()
