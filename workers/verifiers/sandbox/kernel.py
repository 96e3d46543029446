"""What the Linux kernel takes from a process that runs untrusted code; standard library only.

Needs no privileges, no namespaces and no container runtime: a seccomp filter forbids system calls,
Landlock forbids files, resource limits bound the rest. Everything holds for good and for all
threads. x86-64 and 64-bit ARM; Landlock is in Linux since 5.13 and must be switched on.

Forbidden: sockets, new processes and programs, signals to others, looking into other processes,
changing owners, modes and times of files, namespaces and mounts, shared memory that outlives the
process, io_uring (which goes around filters), raising limits. Readable: Python and the system's
libraries. Writable: the one folder that is given.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable

__all__ = ["Unconfined", "confine", "end_with_parent", "limit"]


class Unconfined(Exception):
    """The kernel does not offer what is needed."""


_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Numbers of system calls on x86-64 and on 64-bit ARM; 0 where there is none. From 424 on all
# architectures count alike.
_DENIED: dict[str, tuple[int, int]] = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242),
    "bind": (49, 200), "listen": (50, 201), "fork": (57, 0), "vfork": (58, 0),
    "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setsid": (112, 157),
    "setpgid": (109, 154), "chmod": (90, 0), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, 0), "fchown": (93, 55), "lchown": (94, 0), "fchownat": (260, 54),
    "utime": (132, 0), "utimes": (235, 0), "futimesat": (261, 0), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45),
    "mknod": (133, 0), "mknodat": (259, 33), "chroot": (161, 51), "pivot_root": (155, 41),
    "mount": (165, 40), "umount2": (166, 39), "unshare": (272, 97), "setns": (308, 268),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279), "setrlimit": (160, 164), "setpriority": (141, 140),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setaffinity": (203, 122), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "quotactl": (179, 60), "iopl": (172, 0), "ioperm": (173, 0),
}  # fmt: skip
_DENIED_EVERYWHERE = (*range(424, 435), 438, 440, 442, 443, 448, 452, 463, 466)
_CLONE, _CLONE3, _KILL, _TGKILL, _PRLIMIT = (56, 220), 435, (62, 129), (234, 131), (302, 261)
_CLONE_THREAD = 0x10000
_EPERM, _ENOSYS = 1, 38
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16

_READ, _READ_DIR, _WRITE, _EXECUTE = 1 << 2, 1 << 3, 1 << 1, 1
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_SCOPED = 0b11
"""Landlock: no abstract sockets of, and no signals to, processes outside."""

_Instruction = tuple[int, int, int, int]


def confine(folder: str) -> None:
    """Take everything from this process but CPU, memory, standard streams and one folder.

    Raises:
        Unconfined: If the kernel or the machine does not offer it; some of it may hold then.
    """
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _ARCH:
        raise Unconfined(f"it works on Linux on x86-64 and 64-bit ARM, not on {machine}")
    libc = ctypes.CDLL(None, use_errno=True)
    _call(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _drop_capabilities(libc)
    _restrict_files(libc, folder)
    program = b"".join(struct.pack("HBBI", *i) for i in _filter(machine, os.getpid()))
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    _call(libc.prctl(22, 2, ctypes.create_string_buffer(header), 0, 0), "seccomp")


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


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, 9, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os._exit(1)


def _call(result: int, what: str) -> int:
    if result < 0:
        raise Unconfined(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Nothing for most users; without it root could do what the file rules do not cover."""
    header = ctypes.create_string_buffer(struct.pack("II", 0x20080522, 0))
    nothing = ctypes.create_string_buffer(24)
    _call(libc.capset(header, nothing), "dropping capabilities")


def _filter(machine: str, pid: int) -> list[_Instruction]:
    """The seccomp program: what a system call's number and arguments lead to."""
    column = list(_ARCH).index(machine)
    deny = (_RETURN, 0, 0, _ERRNO | _EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCH[machine]),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000),  # the 32-bit way of calling a 64-bit kernel
        deny,
        (_EQUAL, 0, 1, _CLONE3),  # its flags cannot be seen; without it, libraries use clone
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    numbers = [*(numbers[column] for numbers in _DENIED.values()), *_DENIED_EVERYWHERE]
    for number in numbers:
        if number:
            program += [(_EQUAL, 0, 1, number), deny]
    # Threads, but no processes.
    program += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENT),
        (_ANY_BIT, 0, 1, _CLONE_THREAD),
        allow,
        deny,
    ]
    # Signals to itself, as abort() sends them.
    for number in (_KILL[column], _TGKILL[column]):
        own = [(_LOAD, 0, 0, _ARGUMENT), (_EQUAL, 0, 1, pid), allow, deny]
        program += [(_EQUAL, 0, len(own), number), *own]
    # Limits may be read: no new ones are given, which is a null pointer.
    program += [
        (_EQUAL, 0, 6, _PRLIMIT[column]),
        (_LOAD, 0, 0, _ARGUMENT + 16),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, _ARGUMENT + 20),
        (_EQUAL, 0, 1, 0),
        allow,
        deny,
    ]
    return [*program, allow]


def _restrict_files(libc: ctypes.CDLL, folder: str) -> None:
    """Landlock: read Python and libraries, write the folder, see nothing else."""
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        raise Unconfined("the kernel has no Landlock, which keeps files apart")
    every = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("QQQ", every, 0b11 if version >= 4 else 0, _SCOPED)[:size]
    rules = _call(libc.syscall(444, attributes, size, 0), "Landlock")
    reading = (_READ | _READ_DIR) & every
    for path in _readable():
        _allow(libc, rules, path, reading if os.path.isdir(path) else reading & _READ)
    for path in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"):
        _allow(libc, rules, path, _READ | (_WRITE if path == "/dev/null" else 0))
    inside = _READ | _READ_DIR | _WRITE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE
    _allow(libc, rules, folder, (inside | _REFER | _TRUNCATE) & every)
    _call(libc.syscall(446, rules, 0), "Landlock")
    os.close(rules)


def _readable() -> Iterable[str]:
    """Where Python's library and the system's libraries are, and what they look up."""
    library = os.path.dirname(os.__file__)
    extensions = os.path.join(sys.base_exec_prefix, "lib")
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
    return dict.fromkeys((library, extensions, *system, "/etc/ld.so.cache", "/etc/localtime"))


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = struct.pack("=Qi", access, place)
        _call(libc.syscall(445, rules, 1, rule, 0), f"Landlock on {path}")
    finally:
        os.close(place)
