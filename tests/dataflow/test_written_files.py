"""Files that are hashed as they are written."""

from __future__ import annotations

import hashlib
import resource
import threading
from pathlib import Path

import pytest
from penstock.dataflow.written_files import Background, WrittenFile, write_hashed


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    found = write_hashed(path, [b"one", memoryview(b"two" * 1000), b""])
    content = path.read_bytes()
    assert content == b"one" + b"two" * 1000
    assert found == WrittenFile(len(content), hashlib.sha256(content).hexdigest())


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
