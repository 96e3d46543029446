"""Runs `penstock` commands in forked children of one process that has imported everything.

A line of JSON asks for one command and is answered by one: exit code, what was printed, how long it
took, and which processes it left. A fresh interpreter spends seconds on importing torch; a forked
child spends none, which is what makes hundreds of commands affordable.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from typing import Any, NoReturn

import psutil

_HEAVY = (
    "hydra",
    "penstock.launch.cli.graph",
    "penstock.launch.cli.plan",
    "penstock.launch.cli.carry_out",
    "penstock.launch.inputs.run",
    "penstock.launch.placement.plan_request",
    "penstock.launch.profile.profile",
    "penstock.launch.stages.prepare",
    "penstock.launch.stages.report",
    "penstock.launch.stages.run_stage",
    "penstock.planner.plan.planner",
    "penstock.algorithms",
    "penstock.workers.data.row_sources",
    "penstock.workers.data.reasoning_task",
    "penstock.workers.rollout.generator_policy",
    "torch.utils.tensorboard",
    "transformers.models.qwen2.modeling_qwen2",
)


def serve() -> list[str]:
    """Answer requests until the input closes; returns the command's words, in the forked child."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps("ready"), file=answers, flush=True)
    while line := sys.stdin.buffer.raw.readline():  # type: ignore[attr-defined]
        asked = json.loads(line)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            started_s = time.monotonic()
            pid = os.fork()
            if pid == 0:
                _become(asked["folder"], out.fileno(), err.fileno())
                return list(asked["words"])
            answer = _finished(pid, started_s, asked["limit_s"])
            for name, file in (("out", out), ("err", err)):
                file.seek(0)
                answer[name] = file.read(1 << 20).decode(errors="replace")
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)


def _become(folder: str, out: int, err: int) -> None:
    """Be a process of a session of its own, as a shell would start it in that folder."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    os.chdir(folder)
    sys.path[:] = [place for place in sys.path if place != ""]


def _finished(pid: int, started_s: float, limit_s: float) -> dict[str, Any]:
    """Wait for the child; one that takes too long is ended with all that it started."""
    code, peak_bytes = None, 0
    while time.monotonic() < started_s + limit_s:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            peak_bytes = 1024 * used.ru_maxrss
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.005)
    seconds = time.monotonic() - started_s
    left = _session(pid)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            process.send_signal(signal.SIGKILL)
    if code is None:
        peak_bytes = 1024 * os.wait4(pid, 0)[2].ru_maxrss
    others = [process.pid for process in left if process.pid != pid]
    return {"code": code, "seconds": seconds, "left": others, "peak_bytes": peak_bytes}


def _session(leader: int) -> list[psutil.Process]:
    """The living processes of a session."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def _code(words: list[str]) -> int:
    """The exit code that the interpreter would have."""
    from penstock.launch.main import main

    sys.argv = ["penstock", *words]
    try:
        return _script(words[1]) if words[0] == "@script" else main(words)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _script(code: str) -> int:
    """Run Python code; what Penstock refuses in it ends as it ends a command."""
    from penstock.dataflow.errors import PenstockError

    try:
        exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    return 0


def _end(code: int) -> NoReturn:
    """End as the interpreter does, but without taking apart all that was imported."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - no public way
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] - no public way
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _warm_up() -> None:
    """Fill what is cached per process: grammars of Hydra, schemas of pydantic."""
    from penstock.launch.main import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for words in (["graph"], ["plan"], ["run", "seed=-1"], ["profile", "seed=-1"]):
            main(words)


if __name__ == "__main__":
    for name in _HEAVY:
        importlib.import_module(name)
    _warm_up()
    gc.collect()
    gc.freeze()  # else the first collection in each child would copy all that was imported
    _end(_code(serve()))
