"""What a process takes from itself before it runs untrusted code; standard library only.

Needs no privileges and no container runtime: a seccomp filter leaves it the system calls of
`syscalls.py`, Landlock (Linux 5.13 or newer, where it is switched on) the files it is told of,
resource limits bound the rest. Everything holds for good and for all threads.

Landlock does not hide what is not to be opened: `stat` still tells names and sizes. Only a mount
namespace does that; see `namespaces.py`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # each import that is left out makes every run faster
    from collections.abc import Sequence


class Unconfined(Exception):
    """The kernel does not offer what is needed."""


_READ, _READ_DIR, _WRITE = 1 << 2, 1 << 3, 1 << 1
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_LINK, _REFER, _TRUNCATE = 1 << 12, 1 << 13, 1 << 14
_NO_NETWORK = 0b11
_SCOPED = 0b11
"""Landlock: no abstract sockets of, and no signals to, processes outside."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def limit(*, cpu_s: int, memory_bytes: int, file_bytes: int, open_files: int) -> None:
    """Bound this process by the system's resource limits, for good."""
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))


def end_with_parent(libc: ctypes.CDLL) -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        call(libc.prctl(1, 9, 0, 0, 0), "ending with its parent")


def end_if_alone(lifeline: int) -> None:
    """End if whoever asked for this run ended before the kernel was asked to tell.

    Args:
        lifeline: Reading end of a pipe whose other end it holds; it is closed.
    """
    poll = select.poll()
    poll.register(lifeline)
    if poll.poll(0):
        os._exit(1)
    os.close(lifeline)


def call(result: int, what: str) -> int:
    """A C function's result.

    Raises:
        Unconfined: If it failed.
    """
    if result < 0:
        raise Unconfined(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """Give up what root may do beyond files of its own, and what programs could give again."""
    call(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    header = ctypes.create_string_buffer(struct.pack("II", 0x20080522, 0))
    nothing = ctypes.create_string_buffer(24)
    call(libc.capset(header, nothing), "dropping capabilities")


def filter_calls(libc: ctypes.CDLL, program: bytes) -> None:
    """Install a seccomp program, for all threads that there will be."""
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    call(libc.prctl(22, 2, ctypes.create_string_buffer(header), 0, 0), "seccomp")


def restrict_files(
    libc: ctypes.CDLL, readable: Sequence[str], folder: str | None, *, required: bool
) -> None:
    """Landlock: read Python and libraries, write the folder if there is one, open nothing else.

    Raises:
        Unconfined: If the kernel has no Landlock and it is required.
    """
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        if required:
            raise Unconfined("the kernel has no Landlock, which keeps files apart")
        return
    every = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("QQQ", every, _NO_NETWORK if version >= 4 else 0, _SCOPED)[:size]
    rules = call(libc.syscall(444, attributes, size, 0), "Landlock")
    reading = (_READ | _READ_DIR) & every
    for path in readable:
        _allow(libc, rules, path, reading if os.path.isdir(path) else reading & _READ)
    for path in _DEVICES:
        _allow(libc, rules, path, _READ | (_WRITE if path == "/dev/null" else 0))
    if folder is not None:
        changing = _WRITE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _MAKE_LINK
        _allow(libc, rules, folder, (reading | changing | _REFER | _TRUNCATE) & every)
    call(libc.syscall(446, rules, 0), "Landlock")
    os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = struct.pack("=Qi", access, place)
        call(libc.syscall(445, rules, 1, rule, 0), f"Landlock on {path}")
    finally:
        os.close(place)
