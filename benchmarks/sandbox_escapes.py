"""What hostile programs come to in each kind of sandbox, and what a row costs in time.

Each attempt of `sandbox_attempts.py` runs in each kind that this machine has. It is out if it says
so, if the host was changed, or if it went on beyond its limit; and nothing of it may be left: no
process, file, shared memory, mount or descriptor. With `--before`, a checkout of another commit,
rows of both take turns.
"""

from __future__ import annotations

import ctypes
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from bench import machine, parser, report, spread, table
from penstock.workers.isolation.kinds import KINDS, SandboxKind
from penstock.workers.isolation.sandbox import Limits, Ran, run_in, why_not
from sandbox_attempts import FLOODS, HIDDEN, QUICK, Flood, program_of

QUICK_S, FLOOD_S, GRACE_S = 10.0, 1.0, 1.5
ROWS_A_TURN = 20


@dataclass(frozen=True)
class Host:
    """What is outside: a file, a server, and a way to see what has changed."""

    secret: Path
    port: int

    def state(self) -> dict[str, Any]:
        """What must be the same after an attempt as before."""
        mounts = Path("/proc/self/mountinfo").read_text().count("\n")
        shared = {path: Path(path).read_text() for path in map("/proc/sysvipc/{}".format, _IPC)}
        return {
            # Orphans become children of this process.
            "processes": sorted(p.pid for p in psutil.Process().children(recursive=True)),
            "files": sorted(map(str, self.secret.parent.rglob("*"))),
            "shared files": sorted(os.listdir("/dev/shm")),
            "shared memory": shared,
            "mounts": mounts,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "temporary": sorted(name for name in os.listdir("/tmp") if "escape" in name),
            "secret": (self.secret.read_text(), self.secret.stat().st_mode),
        }


_IPC = ("shm", "sem", "msg")


def attempts(kind: SandboxKind) -> Iterator[tuple[str, Flood]]:
    """Name and what is tried in a kind of sandbox: what it promises to hold."""
    for programs in QUICK.values():
        for name, code in programs.items():
            yield name, Flood(code, timed_out=False)
    if kind.has_folder:
        for name, code in HIDDEN.items():
            yield name, Flood(code, timed_out=False)
    for name, flood in FLOODS.items():
        if kind.has_folder or not flood.needs_folder:
            yield name, flood


def judged(kind: SandboxKind, attempt: Flood, host: Host) -> tuple[str, str]:
    """How an attempt got out and what it left; empty where it did not."""
    before = host.state()
    program = program_of(
        attempt.program, secret=str(host.secret), port=host.port, parent=os.getpid()
    )
    time_s = QUICK_S if attempt.timed_out is False else FLOOD_S
    start_s = time.monotonic()
    ran = run_in(
        kind,
        program,
        calls=[{"function": "absent"}],
        asserts=["assert False"],
        limits=Limits(time_s=time_s),
    )
    spent_s = time.monotonic() - start_s
    after = host.state()
    left = ", ".join(f"{name}: {after[name]}" for name in before if before[name] != after[name])
    return _out(ran, attempt, spent_s - time_s), left


def _out(ran: Ran, attempt: Flood, over_s: float) -> str:
    if any(line.split(" ")[0] == "OUT" for line in ran.stdout.splitlines()):
        return ran.stdout[:200]
    if over_s > GRACE_S:
        return f"{over_s:.1f} s beyond its limit"
    if attempt.timed_out is not None and attempt.timed_out != ran.timed_out:
        return f"timed out: {ran.timed_out}; {ran.stderr[-200:]}"
    # What a call returns is the program's to say; that an assertion holds is not.
    if any("value" in result for result in ran.results[1:]):
        return f"forged: {ran.results[1:]!r:.200}"
    return ""


def tried(kind: SandboxKind, host: Host) -> dict[str, Any]:
    """All attempts in one kind of sandbox."""
    out: dict[str, str] = {}
    left: dict[str, str] = {}
    count = 0
    for name, attempt in attempts(kind):
        count += 1
        escaped, remains = judged(kind, attempt, host)
        if escaped:
            out[name] = escaped
        if remains:
            left[name] = remains
    return {"tried": count, "out": len(out), "left": len(left), "what": {**out, **left}}


_ROWS = """
import time
from penstock.workers.isolation.{module} import {function}
run = lambda: {call}
assert run().stdout == "1\\n"
start = time.perf_counter()
for _ in range({rows}):
    assert run().stdout == "1\\n"
print((time.perf_counter() - start) / {rows} * 1e3)
"""


def row_ms(root: Path, kind: str | None) -> float:
    """Milliseconds of a row in a fresh process on a checkout; no kind: as of before kinds."""
    if kind is None:
        code = ("sandbox", "run_python", "run_python('print(1)')")
    else:
        call = f"run_in(kinds.{kind.upper()}, 'print(1)')"
        code = ("sandbox", "run_in", call)
    source = _ROWS.format(module=code[0], function=code[1], call=code[2], rows=ROWS_A_TURN)
    if kind is not None:
        source = f"from penstock.workers.isolation import kinds\n{source}"
    ran = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": str(root.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(ran.stdout)


def times(before: Path | None, kinds: list[str], rounds: int) -> dict[str, Any]:
    """Milliseconds per row, in turns, and how they compare."""
    here = Path(__file__).parents[1]
    sides: dict[str, tuple[Path, str | None]] = {kind: (here, kind) for kind in kinds}
    if before is not None:
        sides = {"before": (before, None), **sides}
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (root, kind) in sides.items():
            measured[name].append(row_ms(root, kind))
    found: dict[str, Any] = {name: spread(values) for name, values in measured.items()}
    if before is not None:
        base = statistics.median(measured["before"])
        for kind in kinds:
            found[kind]["times_before"] = statistics.median(measured[kind]) / base
    return found


def main() -> None:
    """Try everything, measure, and print what came of it."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--before", type=Path, help="a checkout named penstock to compare with")
    options.add_argument("--rounds", type=int, default=9)
    args = options.parse_args()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans become children of this process
    os.environ["SECRET_KEY"] = "very-secret"
    usable = {kind: why_not(kind) for kind in KINDS[:-1]}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as top, socket.create_server(("127.0.0.1", 0)) as server:
        secret = Path(top, "secret")
        tempfile.tempdir = top  # where folders of a row would be seen
        secret.write_text("EXPECTED" + "-VALUE")
        host = Host(secret, server.getsockname()[1])
        for kind in [kind for kind, reason in usable.items() if reason is None]:
            found[kind.name] = tried(kind, host)
    millis = times(args.before, [*found], args.rounds)
    none: dict[str, Any] = {"tried": "", "out": "", "left": ""}
    rows = [
        [name, one["tried"], one["out"], one["left"], f"{ms['median']:.1f}"]
        for name, ms in millis.items()
        for one in [found.get(name, none)]
    ]
    print(table(["kind", "tried", "out", "left", "ms per row"], rows))
    for name, one in found.items():
        for attempt, what in one["what"].items():
            print(f"{name}: {attempt}: {what}")
    report(_result(found, {k.name: why for k, why in usable.items() if why}, millis), args.json)


def _result(
    found: Mapping[str, Mapping[str, Any]], missing: Mapping[str, str], millis: Mapping[str, Any]
) -> dict[str, Any]:
    total = {key: sum(one[key] for one in found.values()) for key in ("tried", "out", "left")}
    return {
        "machine": machine(),
        "user": os.getuid(),
        "kernel": os.uname().release,
        **total,
        "kinds": found,
        "not_available": missing,
        "ms_per_row": millis,
    }


if __name__ == "__main__":
    main()
