"""Files: what is opened, read and written, and what a disk refuses."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import random
import resource
import socket
import threading
import tracemalloc
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import pytest
from penstock.dataflow import files
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.files import (
    Background,
    NotAFile,
    WrittenFile,
    check_folder_files,
    check_regular,
    created,
    open_regular,
    opened,
    opened_to_append,
    parse_json,
    read_bytes,
    read_json,
    write_hashed,
)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is short
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


OTHERS = {
    "a FIFO": fifo,
    "a socket": unix_socket,
    "a folder": Path.mkdir,
    "a device": link_to("/dev/zero"),
    "a queue or state file of the kernel": link_to("/proc/kmsg"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("use", [read_bytes, read_json, opened, check_regular])
def test_what_is_no_file_is_refused(
    tmp_path: Path, kind: str, use: Callable[[Path], object]
) -> None:
    path = tmp_path / "it.json"
    OTHERS[kind](path)
    with pytest.raises(NotAFile) as caught:
        use(path)
    assert str(caught.value) == (
        f"'{path}': it is {kind} where a file belongs\n    remove it, or put a file in its place"
    )
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, OSError)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a folder", "a device"])
def test_nothing_but_files_is_written_to(tmp_path: Path, kind: str) -> None:
    OTHERS[kind](tmp_path / "it")
    with pytest.raises(NotAFile):
        opened_to_append(tmp_path / "it")


def test_a_link_is_read_through_and_never_written_through(tmp_path: Path) -> None:
    precious, link = tmp_path / "precious", tmp_path / "link"
    precious.write_text("[1]")
    link.symlink_to(precious)
    assert read_json(link) == [1]
    check_regular(link)
    with pytest.raises(NotAFile, match="it is a link where a file belongs"):
        opened_to_append(link)
    with pytest.raises(NotAFile, match="it is a link where a file belongs"):
        open_regular(link, os.O_RDWR | os.O_CREAT, links=False)
    with created(link) as file:
        file.write(b"new")
    assert (precious.read_text(), link.read_text(), link.is_symlink()) == ("[1]", "new", False)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotAFile):
        opened_to_append(dangling)
    assert not (tmp_path / "elsewhere").exists()


def test_appending_keeps_earlier_content(tmp_path: Path) -> None:
    for word in (b"one", b"two"):
        with opened_to_append(tmp_path / "it") as file:
            file.write(word)
    assert read_bytes(tmp_path / "it") == b"onetwo"


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 50 << 30)
    with pytest.raises(OSError, match="It has 53687091200 bytes, and at most 268435456 are read"):
        read_bytes(tmp_path / "hole")


def test_the_files_of_a_folder_may_be_links_to_files(tmp_path: Path) -> None:
    blobs, model = tmp_path / "blobs", tmp_path / "model"
    blobs.mkdir()
    (blobs / "a").write_text("{}")
    model.mkdir()
    (model / "config.json").symlink_to(blobs / "a")
    (model / "folder").symlink_to(blobs)
    (model / "nowhere").symlink_to(blobs / "b")
    check_folder_files(model)
    check_folder_files(tmp_path / "none")
    os.mkfifo(model / "special_tokens_map.json")
    with pytest.raises(NotAFile, match=r"special_tokens_map.json': it is a FIFO"):
        check_folder_files(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("NaN", "NaN is no finite number"),
        ("[Infinity]", "Infinity is no finite number"),
        ('{"a": 1e999}', "1e999 is no finite number"),
        ("1" * 5000, "a number of 5000 digits"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("[" * 500 + "]" * 500, "nested too deeply"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested too deeply"),
        (b"\xff\xfe\xfa", "decode"),
    ],
)
def test_what_is_no_plain_json_is_a_value_error(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@pytest.mark.parametrize("value", ["null", "5", "-1.5", '"a"', '{"a": [1, {"b": null}]}', "[]"])
def test_other_json_is_what_python_makes_of_it(value: str) -> None:

    assert parse_json(value) == json.loads(value)


def test_a_bound_is_not_allocated(tmp_path: Path) -> None:
    """A reader of metrics allows 4 GiB, more than many machines let a process have."""
    (tmp_path / "it").write_bytes(b"few")
    tracemalloc.start()
    try:
        assert read_bytes(tmp_path / "it", 4 << 30) == b"few"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


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
    monkeypatch.setattr(files, "_AT_ONCE", 8192)
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
    monkeypatch.setattr(files, "_AT_ONCE", 8192)
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
