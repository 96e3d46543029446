"""The process that untrusted code runs in: a module of the standard library alone.

It is told on a descriptor what to run and where; results go, a JSON object a line, to a descriptor
of their own. It gives up all it does not need before the first untrusted line runs, for good and
for all threads, and needs no privileges and no container runtime:

- A seccomp filter leaves it the system calls of `kinds.py`, Landlock (Linux 5.13 or newer, where
  it is switched on) the files it is told of, resource limits bound the rest. Landlock does not hide
  what is not to be opened: `stat` still tells names and sizes.
- In namespaces of its own (where the kernel lets an ordinary user make them, Linux 5.12 or newer)
  it sees no other process, no network, no shared memory, and of the file system only what it is
  told, read-only, with one folder in memory to write to, bounded in bytes and in number. That
  folder and every process end with the first process of the namespace.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # each import that is left out makes every run faster
    from collections.abc import Sequence
    from typing import Any, TextIO

CONFINED = b"confined"
"""The message on a descriptor of its own before the first untrusted line runs, or else why not."""
FOLDER = "/penstock_folder"  # the one place that can be written to, in namespaces

_READ, _READ_DIR, _WRITE = 1 << 2, 1 << 3, 1 << 1
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_LINK, _REFER, _TRUNCATE = 1 << 12, 1 << 13, 1 << 14
_NO_NETWORK = 0b11
_SCOPED = 0b11  # Landlock: no abstract sockets of, and no signals to, processes outside
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

_NEW = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000 | 0x40000000
"""Namespaces: user, process ids, mounts, System V IPC, host name, network."""
_BIND, _RECURSIVE, _PRIVATE, _DETACH = 0x1000, 0x4000, 1 << 18, 2
_READ_ONLY, _NO_SUID, _NO_DEVICES = 1, 2, 4
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}


class Unconfined(Exception):
    """The kernel does not offer what is needed."""


def main(descriptor: int) -> None:
    """Confine this process, then run what the descriptor holds: `{"setup", "work"}`."""
    del sys.path[0]
    with os.fdopen(descriptor, encoding="utf-8") as file:
        given = json.load(file)
    setup, work = given["setup"], given["work"]
    results = os.fdopen(setup["results"], "w", encoding="utf-8")
    try:
        _confine(setup)
    except (Unconfined, OSError) as error:
        os.write(setup["verdict"], str(error).encode())
        os._exit(1)
    sys.modules.pop("confine")  # a program may have a module of this name
    os.write(setup["verdict"], CONFINED)
    os.close(setup["verdict"])
    del given, setup
    _run(work, results)


def _confine(setup: dict[str, Any]) -> None:
    """Take everything from this process but CPU, memory, its streams and perhaps one folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    kind, limits = setup["kind"], setup["limits"]
    # 1, 9: PR_SET_PDEATHSIG, SIGKILL.
    if kind != "bubblewrap" and sys.platform == "linux":  # bubblewrap sees to it by itself
        _check(libc.prctl(1, 9, 0, 0, 0), "ending with its parent")
    if kind == "namespaces":
        _enter_namespaces(libc, setup["places"])
    # The process that asked for this run may have ended before the kernel was asked to tell.
    poll = select.poll()
    poll.register(setup["lifeline"])
    if poll.poll(0):
        os._exit(1)
    os.close(setup["lifeline"])
    folder = None
    if kind in ("bubblewrap", "namespaces"):
        folder, size = FOLDER, limits["file_bytes"]
        # In memory, of so many bytes and a file for each 4096 of them.
        options = f"size={size},nr_inodes={max(size >> 12, 16)},mode=700".encode()
        flags = _NO_SUID | _NO_DEVICES
        _check(libc.mount(b"folder", folder.encode(), b"tmpfs", flags, options), "mounting a tmpfs")
    os.chdir(setup["folder"])
    _limit(**limits)
    if kind == "limits":
        return
    # What root may do beyond files of its own, and what programs could give again.
    # 38: PR_SET_NO_NEW_PRIVS, without which an ordinary user may set no filter.
    _check(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    # Version 3 of capset, of this process; the three sets, of 64 bits each, are empty.
    header = ctypes.create_string_buffer(struct.pack("II", 0x20080522, 0))
    nothing = ctypes.create_string_buffer(24)
    _check(libc.capset(header, nothing), "dropping capabilities")
    _restrict_files(libc, setup["readable"], folder, required=folder is None)
    own = setup["own_pid"].to_bytes(4, sys.byteorder)
    program = bytes.fromhex(setup["filter"])
    program = program.replace(own, os.getpid().to_bytes(4, sys.byteorder))
    buffer = ctypes.create_string_buffer(program)
    filter_ = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    # 22, 2: PR_SET_SECCOMP, SECCOMP_MODE_FILTER. Last, as what came before may be refused then.
    _check(libc.prctl(22, 2, ctypes.create_string_buffer(filter_), 0, 0), "seccomp")


def _check(result: int, what: str) -> int:
    """Return a C function's result; raise `Unconfined` if it failed."""
    if result < 0:
        raise Unconfined(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _limit(*, cpu_s: int, memory_bytes: int, file_bytes: int, open_files: int) -> None:
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


def _enter_namespaces(libc: ctypes.CDLL, places: Sequence[tuple[str, str]]) -> None:
    """Return in the first process of new namespaces, which ends with this one, as root of them.

    This process waits for it and ends with its exit code, or 128 plus the signal that ended it.
    Places are pairs of a real path and the path at which it is to be seen.
    """
    user, group = os.geteuid(), os.getegid()
    _check(libc.unshare(_NEW), "unshare")
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
    _check(libc.prctl(1, 9, 0, 0, 0), "ending with its parent")
    _see_only(libc, places)


def _see_only(libc: ctypes.CDLL, places: Sequence[tuple[str, str]]) -> None:
    """Replace the file system by an empty one that shows these places, read-only."""
    _check(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "private mounts")
    _check(libc.mount(b"root", b"/tmp", b"tmpfs", _NO_SUID, b"mode=755"), "mounting a tmpfs")
    os.mkdir("/tmp/old")
    number = _PIVOT_ROOT[os.uname().machine]
    _check(libc.syscall(number, b"/tmp", b"/tmp/old"), "pivot_root")
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
        _check(libc.mount(source, path.encode(), None, flags, None), f"showing {path}")
    _check(libc.umount2(b"/old", _DETACH), "leaving the old root")
    os.rmdir("/old")
    read_only = struct.pack("QQQQ", _READ_ONLY | _NO_SUID, 0, 0, 0)
    # -100, 0x8000: AT_FDCWD, AT_RECURSIVE. It changes all mounts below, which mount(2) does not.
    everything = libc.syscall(_MOUNT_SETATTR, -100, b"/", 0x8000, read_only, len(read_only))
    _check(everything, "read-only mounts")


def _restrict_files(
    libc: ctypes.CDLL, readable: Sequence[str], folder: str | None, *, required: bool
) -> None:
    """Landlock: read Python and libraries, write the folder if there is one, open nothing else.

    Raises:
        Unconfined: If the kernel has no Landlock and it is required.
    """
    # 444 to 446: landlock_create_ruleset, which here says its version, _add_rule, _restrict_self.
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        if required:
            raise Unconfined("the kernel has no Landlock, which keeps files apart")
        return
    # Rights that are not named are not restricted, and those that a kernel does not know refused.
    every = (1 << (13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16)) - 1
    size = 8 if version < 4 else 16 if version < 6 else 24
    attributes = struct.pack("QQQ", every, _NO_NETWORK if version >= 4 else 0, _SCOPED)[:size]
    rules = _check(libc.syscall(444, attributes, size, 0), "Landlock")
    reading = (_READ | _READ_DIR) & every
    for path in readable:
        _allow(libc, rules, path, reading if os.path.isdir(path) else reading & _READ)
    for path in DEVICES:
        _allow(libc, rules, path, _READ | (_WRITE if path == "/dev/null" else 0))
    if folder is not None:
        changing = _WRITE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_FILE | _MAKE_LINK
        _allow(libc, rules, folder, (reading | changing | _REFER | _TRUNCATE) & every)
    _check(libc.syscall(446, rules, 0), "Landlock")
    os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = struct.pack("=Qi", access, place)
        _check(libc.syscall(445, rules, 1, rule, 0), f"Landlock on {path}")
    finally:
        os.close(place)


def _run(work: dict[str, Any], results: TextIO) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(work["program"], "program.py", "exec"), namespace)
    for call in work["calls"]:
        _write(results, _called(namespace, call))
    for test in work["asserts"]:
        try:
            exec(compile(test, "test.py", "exec"), namespace)
            found: dict[str, Any] = {"value": True}
        except Exception as error:  # a failed assertion is a result
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        _write(results, {**found, "token": work["token"]})


def _called(namespace: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    try:
        function = namespace.get(call["function"])
        if function is None and "Solution" in namespace:
            function = getattr(namespace["Solution"](), call["function"], None)
        if function is None:
            return {"error": f"there is no function {call['function']}"}
        args, kwargs = call.get("args", ()), call.get("kwargs", {})
        if call.get("typed"):
            args = [untyped(arg) for arg in args]
            kwargs = {name: untyped(arg) for name, arg in kwargs.items()}
            return {"value": json.loads(json.dumps(typed(function(*args, **kwargs))))}
        return {"value": json.loads(json.dumps(function(*args, **kwargs), default=_plain))}
    except Exception as error:  # a wrong program is a result
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _plain(value: Any) -> Any:
    """Convert what JSON has no word for: sets to sorted lists, all else to its text."""
    return sorted(value) if isinstance(value, (set, frozenset)) else repr(value)


def typed(value: Any) -> Any:
    """A literal as JSON that keeps its type: lists and scalars as they are, the rest named.

    Sets and dicts are put into an order of their own. What is no literal is its text, which no
    literal becomes.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [typed(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [typed(one) for one in value]}
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(map(typed, value), key=json.dumps)}
    if isinstance(value, dict):
        pairs = [[typed(key), typed(one)] for key, one in value.items()]
        return {"dict": sorted(pairs, key=lambda pair: json.dumps(pair[0]))}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    return {"repr": repr(value)}


def untyped(value: Any) -> Any:
    """The reverse of `typed`, for literals."""
    if isinstance(value, list):
        return [untyped(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    ((kind, parts),) = value.items()
    return {"tuple": tuple, "set": set, "dict": dict}[kind](untyped(part) for part in parts)


def _write(results: TextIO, result: dict[str, Any]) -> None:
    results.write(json.dumps(result) + "\n")
    results.flush()
