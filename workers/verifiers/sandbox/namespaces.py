"""Namespaces of its own for a process that is to run untrusted code; standard library only.

It sees no other process, no network, no shared memory, and of the file system only what it is told,
read-only, with one folder in memory to write to, bounded in bytes and in number. That folder and
every process end with the first process of the namespace. Needs no privileges where the kernel lets
an ordinary user make namespaces (Linux 5.12 or newer).
"""

from __future__ import annotations

import ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Check = Callable[[int, str], int]

FOLDER = "/penstock_folder"
"""The one place that can be written to."""

_NEW = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000 | 0x40000000
"""Namespaces: user, process ids, mounts, System V IPC, host name, network."""
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x1000, 0x4000, 1 << 18, 2
_READ_ONLY, _NO_SUID, _NO_DEVICES = 1, 2, 4
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}


def enter(libc: ctypes.CDLL, places: Sequence[tuple[str, str]], check: Check) -> None:
    """Return in the first process of new namespaces, which ends with this one, as root of them.

    This process waits for it and ends with its exit code, or 128 plus the signal that ended it.

    Args:
        libc: The C library.
        places: What is to be seen, and at which path: (real path, path).
        check: `kernel.call`.

    Raises:
        Unconfined: If the kernel refuses.
    """
    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(_NEW), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    check(libc.prctl(1, 9, 0, 0, 0), "ending with its parent")
    _see_only(libc, places, check)


def _see_only(libc: ctypes.CDLL, places: Sequence[tuple[str, str]], check: Check) -> None:
    """Replace the file system by an empty one that shows these places, read-only."""
    check(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "private mounts")
    check(libc.mount(b"root", b"/tmp", b"tmpfs", _NO_SUID, b"mode=755"), "mounting a tmpfs")
    os.mkdir("/tmp/old")
    number = _PIVOT_ROOT[os.uname().machine]
    check(libc.syscall(number, b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    os.mkdir(FOLDER)
    for real, path in places:
        if os.path.isdir(f"/old{real}"):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        source = f"/old{real}".encode()
        flags = _BIND | _RECURSIVE
        check(libc.mount(source, path.encode(), None, flags, None), f"showing {path}")
    check(libc.umount2(b"/old", _DETACH), "leaving the old root")
    os.rmdir("/old")
    read_only = struct.pack("QQQQ", _READ_ONLY | _NO_SUID, 0, 0, 0)
    everything = libc.syscall(_MOUNT_SETATTR, -100, b"/", 0x8000, read_only, len(read_only))
    check(everything, "read-only mounts")


def bounded_folder(libc: ctypes.CDLL, num_bytes: int, check: Check) -> None:
    """Put a folder in memory at `FOLDER`, of so many bytes and a file for each 4096 of them."""
    options = f"size={num_bytes},nr_inodes={max(num_bytes >> 12, 16)},mode=700".encode()
    flags = _NO_SUID | _NO_DEVICES
    check(libc.mount(b"folder", FOLDER.encode(), b"tmpfs", flags, options), "mounting a tmpfs")
