"""The kinds of sandbox, strongest first, and how a process of each is started.

All but the last give up capabilities, leave only some system calls, and open only the files that
Landlock lets them, where the kernel has it. What they add to that:

| kind | in it |
|---|---|
| `bubblewrap` | namespaces of its own, made by the maintained tool `bwrap` |
| `namespaces` | the same ones, made by the process itself |
| `landlock` | nothing: it writes no file at all, and `stat` tells it what lies outside |
| `limits` | no confinement: your rights, bounded in time and memory |

Not covered: a bug of the kernel itself, and what heavy use of CPU and memory caches betrays.

The system calls that untrusted Python may make are a seccomp program for the kernel, a list of what
is allowed: CPython, its standard library and threads need these, and any other call, also one that
later kernels add, fails with "operation not permitted". Some are allowed with certain arguments
only. x86-64 and 64-bit ARM.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .confine import DEVICES, FOLDER

_CODE = Path(__file__).parent


@dataclass(frozen=True)
class SandboxKind:
    """One way to keep a program in."""

    name: str
    has_folder: bool  # whether it has a folder in memory to write to, and namespaces of its own

    @property
    def folder(self) -> str:
        """The folder that a program starts in, which is its home."""
        if self.has_folder:
            return FOLDER
        return tempfile.gettempdir() if self is LIMITS else "/"

    @property
    def environment(self) -> dict[str, str]:
        """All that a program sees of an environment."""
        return {"LANG": "C.UTF-8", "HOME": self.folder, "TMPDIR": self.folder}

    def missing(self) -> str | None:
        """Why there is no use in trying it here, if something that it needs is not there."""
        machine = os.uname().machine
        if self is LIMITS:
            return None
        if sys.platform != "linux" or machine not in ARCHITECTURES:
            return f"it works on Linux on x86-64 and 64-bit ARM, not on {sys.platform} on {machine}"
        if self is BUBBLEWRAP and shutil.which("bwrap") is None:
            return "there is no program bwrap on the PATH"
        return None

    def command(self, descriptor: int, *, python_environment: bool = False) -> list[str]:
        """The command of a process (`confine.py`) that is told on `descriptor` the rest.

        -I -S: neither the environment nor installed packages have a say. With `python_environment`
        variables such as `PYTHONHASHSEED` count.
        """
        folder = str(_CODE)
        script = f"import sys; sys.path.insert(0, {folder!r}); import confine; "
        script += f"confine.main({descriptor})"
        isolated = ["-s", "-P"] if python_environment else ["-I"]
        python = [os.path.realpath(sys.executable), *isolated, "-S", "-B", "-c", script]
        return [*_bubblewrap(folder, python[0]), *python] if self is BUBBLEWRAP else python

    def setup(self) -> dict[str, Any]:
        """The message to the process about its confinement."""
        made: dict[str, Any] = {"kind": self.name, "folder": self.folder}
        if self is not LIMITS:
            made["readable"] = [path for _, path in _readable()]
            made["places"] = [*_readable(), *((path, path) for path in DEVICES)]
            made["filter"] = program_for(os.uname().machine).hex()
            made["own_pid"] = OWN_PID
        return made


BUBBLEWRAP = SandboxKind("bubblewrap", has_folder=True)
NAMESPACES = SandboxKind("namespaces", has_folder=True)
LANDLOCK = SandboxKind("landlock", has_folder=False)
LIMITS = SandboxKind("limits", has_folder=False)
KINDS = (BUBBLEWRAP, NAMESPACES, LANDLOCK, LIMITS)  # strongest first


@lru_cache(maxsize=1)
def _readable() -> Sequence[tuple[str, str]]:
    """Places of Python's library and the system's libraries, and of what they look up.

    Pairs of the real path and the one it is known by; both may be asked for.
    """
    library = os.path.dirname(os.__file__)
    extensions = os.path.join(sys.base_exec_prefix, "lib")
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
    known = (extensions, library, *system, "/etc/ld.so.cache", "/etc/localtime")
    pairs: dict[str, str] = {}
    for path in known:
        real = os.path.realpath(path)
        if not os.path.exists(real):
            continue
        for one in (path, real):
            # Places within one that is seen already are seen with it.
            if not any(_within(one, seen) and _within(real, pairs[seen]) for seen in pairs):
                pairs[one] = real
    return [(real, path) for path, real in pairs.items()]


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _bubblewrap(code: str, python: str) -> list[str]:
    """`bwrap` with all its namespaces; the child adds the folder, with which it ends as well."""
    found = shutil.which("bwrap")
    assert found is not None, "missing() tells"
    shown = [*_readable(), (python, python), (code, code)]
    return [
        found,
        *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-net"),
        *("--unshare-cgroup-try", "--die-with-parent", "--as-pid-1"),
        *("--cap-add", "CAP_SYS_ADMIN"),  # to mount the folder; given up right after
        *(word for real, path in shown for word in ("--ro-bind", real, path)),
        *(word for path in DEVICES for word in ("--dev-bind", path, path)),
        *("--dir", FOLDER, "--remount-ro", "/", "--chdir", "/", "--"),
    ]


ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machines there is a list for, and what the kernel calls them."""

OWN_PID = 0x7EADBEEF
"""Stands in a program for the process's own id, which is known only once it runs."""

# Numbers on x86-64 and on 64-bit ARM; 0 where there is none. The most frequent come first: the
# kernel goes through them one by one.
_ALLOWED: dict[str, tuple[int, int]] = {
    "read": (0, 63), "write": (1, 64), "futex": (202, 98), "mmap": (9, 222), "munmap": (11, 215),
    "brk": (12, 214), "fstat": (5, 80), "newfstatat": (262, 79), "openat": (257, 56),
    "close": (3, 57), "lseek": (8, 62), "getdents64": (217, 61), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115), "mprotect": (10, 226), "mremap": (25, 216),
    "madvise": (28, 233), "stat": (4, 0), "lstat": (6, 0), "open": (2, 0), "statx": (332, 291),
    # Files. What they may open, make and remove is decided by mounts and by Landlock.
    "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "access": (21, 0), "faccessat": (269, 48), "faccessat2": (439, 439), "getdents": (78, 0),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "rename": (82, 0),
    "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, 0), "mkdirat": (258, 34),
    "rmdir": (84, 0), "creat": (85, 0), "link": (86, 0), "linkat": (265, 37), "unlink": (87, 0),
    "unlinkat": (263, 35), "symlink": (88, 0), "symlinkat": (266, 36), "readlink": (89, 0),
    "readlinkat": (267, 78), "umask": (95, 166), "fsync": (74, 82), "fdatasync": (75, 83),
    "ftruncate": (77, 46), "fstatfs": (138, 44), "sendfile": (40, 71), "msync": (26, 227),
    "dup": (32, 23), "dup2": (33, 0), "dup3": (292, 24), "pipe": (22, 0), "pipe2": (293, 59),
    "close_range": (436, 436),
    # Waiting, time and signals to itself.
    "poll": (7, 0), "ppoll": (271, 73), "select": (23, 0), "pselect6": (270, 72),
    "epoll_create": (213, 0), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, 0), "epoll_pwait": (281, 22), "nanosleep": (35, 101),
    "restart_syscall": (219, 128), "clock_getres": (229, 114), "gettimeofday": (96, 169),
    "time": (201, 0), "times": (100, 153), "getitimer": (36, 102), "setitimer": (38, 103),
    "alarm": (37, 0), "pause": (34, 0), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    # Itself and the machine.
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, 0),
    "getpgid": (121, 155), "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getrlimit": (97, 163),
    "getrusage": (98, 165), "getpriority": (140, 141), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "getcpu": (309, 168), "uname": (63, 160),
    "sysinfo": (99, 179), "getrandom": (318, 278), "set_robust_list": (273, 99),
    "set_tid_address": (218, 96), "rseq": (334, 293),
    "exit": (60, 93), "exit_group": (231, 94),
    # A pair of connected sockets, with which event loops wake themselves.
    "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204),
    "getpeername": (52, 205), "getsockopt": (55, 209),
}  # fmt: skip

_CLONE3 = 435
_THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
"""Flags of glibc and musl for a thread: one that shares everything, descriptors included."""
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""Duplicates, flags and locks of files; no owner or signal (F_SETOWN, F_SETSIG), lease or notice
of changes, no size of pipes."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_PRCTL = (2, 3, 15, 16, 21, 39)
"""Reading the signal of the parent's death, dumpability, seccomp and no_new_privs; a name."""
_UNIX, _STREAM, _TYPE_FLAGS = 1, 1, (0, 0x80000, 0x800, 0x80800)

_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

_Instruction = tuple[int, int, int, int]
_ALLOWING: _Instruction = (_RETURN, 0, 0, _ALLOW)
_DENYING: _Instruction = (_RETURN, 0, 0, _ERRNO | _EPERM)

# Calls of which the words that stand at these places of the arguments (0, 1, 2... the low half of
# each argument, 0.5 the high half of the first...) must each be one of these values.
_Words = Sequence[tuple[float, Sequence[int]]]
_ARGUMENTS_OF: dict[str, tuple[tuple[int, int], _Words]] = {
    "clone": ((56, 220), [(0, _THREAD_FLAGS)]),
    "fcntl": ((72, 25), [(1, _FCNTL)]),
    "ioctl": ((16, 29), [(1, _IOCTL)]),
    "prctl": ((157, 167), [(0, _PRCTL)]),
    # Signals to itself, as abort() sends them.
    "kill": ((62, 129), [(0, (OWN_PID,))]),
    "tgkill": ((234, 131), [(0, (OWN_PID,))]),
    # Limits may be read: no new ones are given, which is a null pointer.
    "prlimit64": ((302, 261), [(2, (0,)), (2.5, (0,))]),
    # Connected pairs that cannot send elsewhere: no datagrams, and no address to send to.
    "socketpair": ((53, 199), [(0, (_UNIX,)), (1, tuple(_STREAM | f for f in _TYPE_FLAGS))]),
    "sendto": ((44, 206), [(4, (0,)), (4.5, (0,))]),
}


def program_for(machine: str) -> bytes:
    """The filter of a machine of `ARCHITECTURES`; `OWN_PID` is still to be replaced in it."""
    column = list(ARCHITECTURES).index(machine)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000),  # the 32-bit way of calling a 64-bit kernel
        _DENYING,
        (_EQUAL, 0, 1, _CLONE3),  # its flags cannot be seen; without it, libraries use clone
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    for name, numbers in _ALLOWED.items():
        if numbers[column] or name == "read":  # which is 0 on x86-64
            program += [(_EQUAL, 0, 1, numbers[column]), _ALLOWING]
    for numbers, words in _ARGUMENTS_OF.values():
        checks: list[_Instruction] = []
        for place, values in words:  # go on if an argument's word is one of the values, else deny
            checks.append((_LOAD, 0, 0, _ARGUMENTS + int(8 * place)))
            checks += [(_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
            checks.append(_DENYING)
        program += [(_EQUAL, 0, len(checks) + 1, numbers[column]), *checks, _ALLOWING]
    return b"".join(struct.pack("HBBI", *one) for one in [*program, _DENYING])
