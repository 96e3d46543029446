"""Running Python that a model wrote: in a sandbox, without network and within limits.

The strongest kind of sandbox that a trial shows to work here is used (see `kinds.py`); where that
is weaker than what was asked for, nothing runs.

Not covered: a bug of the kernel itself, and what heavy use of CPU and memory caches betrays.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ...dataflow.errors import ConfigError, WorkerError, nearest
from .confine import Unconfined
from .kinds import KINDS, LANDLOCK, LIMITS, SandboxKind
from .process import Limits, Ran, run_in


def run_python(
    program: str,
    *,
    stdin: str = "",
    calls: Sequence[Mapping[str, Any]] = (),
    asserts: Sequence[str] = (),
    limits: Limits | None = None,
    minimum: str = LANDLOCK.name,
) -> Ran:
    """Run a program, and after it calls of its functions and assertions.

    Args:
        program: Python source; it runs as `__main__` with the standard library.
        stdin: What it reads.
        calls: `{"function", "args", "kwargs"}` each; a function is looked for at the top of the
            program, then in a class `Solution`. What it returns must not be trusted to be true, but
            the program never sees what is expected. With `"typed": True` arguments and the value
            are as `confine.typed` makes them.
        asserts: Statements, run one by one among the program's names. A program can make them hold
            that do not: it shares a process with them. Calls and output leave it no such way.
        limits: The default ones if not given.
        minimum: The weakest kind of sandbox to run it in, a name of `kinds.KINDS`.

    Raises:
        ConfigError: If the machine has no sandbox as strong.
        WorkerError: If the sandbox, which worked before, cannot be made now, or a process is left.
    """
    kind = check_sandbox(minimum)
    try:
        return run_in(kind, program, stdin=stdin, calls=calls, asserts=asserts, limits=limits)
    except Unconfined as error:
        raise WorkerError(
            f"a sandbox of kind '{kind.name}', which a trial showed to work, cannot be made any "
            f"more: {error}\n    see whether memory, processes or user namespaces have run out"
        ) from error


def check_sandbox(minimum: str = LANDLOCK.name) -> SandboxKind:
    """The kind of sandbox that programs run in here.

    Raises:
        ConfigError: If `minimum` is no kind, or there is none as strong on this machine.
    """
    names = [kind.name for kind in KINDS]
    if minimum not in names:
        raise ConfigError(
            f"minimum={minimum} is no kind of sandbox{nearest(minimum, names)}\n"
            f"    use {', '.join(names)}"
        )
    kind = best_kind()
    if names.index(kind.name) > names.index(minimum):
        raise ConfigError(_refusal(minimum, dict(_why_not_stronger())))
    return kind


@lru_cache(maxsize=1)
def best_kind() -> SandboxKind:
    """The strongest kind that works here, found by trials once per process."""
    failed = [name for name, _ in _why_not_stronger()]
    return next(kind for kind in KINDS if kind.name not in failed)


@lru_cache(maxsize=1)
def announce_sandbox() -> None:
    """Say once per process which kind of sandbox programs run in."""
    print(f"penstock: sandbox: {best_kind().name}", file=sys.stderr, flush=True)


@lru_cache(maxsize=1)
def _why_not_stronger() -> Sequence[tuple[str, str]]:
    """The kinds stronger than the best that works, and why each of them does not."""
    failed: list[tuple[str, str]] = []
    for kind in KINDS:
        reason = why_not(kind)
        if reason is None:
            break
        failed.append((kind.name, reason))
    return failed


def _refusal(minimum: str, failed: Mapping[str, str]) -> str:
    reasons = "".join(f"    {name}: {reason}\n" for name, reason in failed.items())
    return (
        f"programs that a model wrote need a sandbox of kind '{minimum}' or stronger, which this "
        f"machine does not offer\n{reasons}    install bubblewrap, allow user namespaces, or run "
        "on a Linux with seccomp and Landlock (5.13 or newer); or accept less: "
        f"verifier_options.minimum={LIMITS.name} runs programs with your rights, bounded in time "
        "and memory only"
    )


_PROBE = """
import os, socket
def blocked(attempt, *args):
    try:
        attempt(*args)
    except OSError:
        return True
    return False
def network(): return blocked(socket.socket)
def files(): return blocked(open, '/etc/passwd')
def processes(): return blocked(lambda: os.fork() or os._exit(0))
def signals(): return blocked(os.kill, os.getppid(), 0)
"""


def why_not(kind: SandboxKind) -> str | None:
    """Try out that this kind confines programs here; None if it does, or else the reason."""
    if kind is LIMITS:
        return None
    names = ("network", "files", "processes", "signals")
    asked = [{"function": name} for name in names]
    try:
        ran = run_in(kind, _PROBE, calls=asked, limits=Limits(time_s=30))
    except Unconfined as error:
        return str(error)
    held = [name for name, r in zip(names, ran.results, strict=False) if r.get("value") is True]
    if len(held) < len(names):
        missing = ", ".join(name for name in names if name not in held)
        return f"a trial did not keep it from {missing} {ran.stderr[-200:]}".strip()
    return None
