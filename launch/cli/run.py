"""`penstock run` and its options; `carry_out` carries a run out.

With `--supervise` a small parent starts a run again when its process dies. It imports neither torch
nor Ray, and does nothing but wait. The run's process says in which folder it is; from there
`penstock run resume=FOLDER` goes on, with the weights of a run that nothing has killed. The parent
starts it again if it was killed or ended with an unexpected error: not if it was refused,
interrupted or terminated, nor if the user's own code has failed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import Any

from ...dataflow.errors import ConfigError
from ...dataflow.runtime.executor import Recoveries, Recovery, WorkerLost
from ..run_dir.run_folder import RunFolder
from ..run_dir.step_logs import read_metrics
from ..run_dir.stop import environment_of, handled, say, what_was_told
from .hydra_app import given_overrides, hydra_app

DRY_RUN = "--dry-run"  # check everything, and start nothing
SHOW_ROWS = "--show-rows"  # print rows of the first step as tokens, and start nothing
SUPERVISE = "--supervise"  # start the run again when its process dies


def run_command(arguments: list[str]) -> int:
    # Imported in the functions: torch and all that follows it take seconds, and `--help` needs none
    # of it.
    if DRY_RUN in arguments or SHOW_ROWS in arguments:

        def check(composed: dict[str, Any]) -> None:
            from .carry_out import dry_run

            dry_run(composed, rows=SHOW_ROWS in arguments)

        options = (DRY_RUN, SHOW_ROWS, SUPERVISE)
        hydra_app("dry_run", [one for one in arguments if one not in options], check)
        return 0
    if SUPERVISE in arguments:
        return supervise_command([word for word in arguments if word != SUPERVISE])
    if any(word.startswith("sweep.") for word in arguments):
        from .sweep import sweep_command

        return sweep_command(arguments)

    def run(composed: dict[str, Any]) -> None:
        from .carry_out import run_composed

        run_composed(composed, given_overrides())

    hydra_app("run", arguments, run)
    return 0


# --- the parent of `--supervise`

_PROGRAM = (sys.executable, "-P", "-m", "penstock.launch.main")
_PASSED_ON = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
# Exit codes of runs that are over: done, refused, interrupted, terminated.
_ENDED = frozenset({0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM})
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.1  # how soon a signal ends a pause


def supervise_command(arguments: Sequence[str]) -> int:
    """Run the command; `arguments` are the words after `penstock run`, without `--supervise`."""
    several = [word for word in arguments if word in ("-m", "--multirun") or word[:6] == "sweep."]
    if several:
        raise ConfigError(
            f"{SUPERVISE} looks after one run, and {several[0]} makes several\n    leave one of "
            "them out"
        )
    child = _Child()
    # A file without a name, so that a killed parent leaves nothing behind.
    with TemporaryFile(buffering=0) as told, handled(_PASSED_ON, child.hear):
        return _looked_after(child, list(arguments), told.fileno())


class _Child:
    def __init__(self) -> None:
        self.asked: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or number
        if self._process is not None:
            self._process.send_signal(number)

    def run(self, words: Sequence[str], told: int) -> int:
        # Start the process and wait until it ends, which may take days.
        # In a process group of its own: what a terminal sends at Ctrl-C comes once, from here. A
        # second signal would end the run without its checkpoint.
        def end_with_parent() -> None:
            # When the supervisor is killed, the system has the run stop, with a checkpoint.
            if sys.platform == "linux":  # elsewhere the run goes on without it
                _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        self._process = subprocess.Popen(
            [*_PROGRAM, "run", *words],
            env={**os.environ, **environment_of(told)},
            process_group=0,
            pass_fds=(told,),
            preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has one thread
        )
        if self.asked is not None:  # while it was being started
            self._process.send_signal(self.asked)
        code = self._process.wait()
        self._process = None
        return code

    def pause(self, seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while self.asked is None and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _LOOK_S))
        return self.asked is not None


def _looked_after(child: _Child, words: list[str], file: int) -> int:
    recoveries = Recoveries(Recovery())
    while True:
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        code = child.run(words, file)
        told = what_was_told(file)
        if code < 0:
            may_go_on = -code not in _PASSED_ON  # else it was ended on purpose
        else:
            may_go_on = bool(told.get("may_go_on", code not in _ENDED))
        if child.asked is not None or not may_go_on:
            return code if code >= 0 else 128 - code
        run = RunFolder(Path(told["folder"])) if "folder" in told else None
        if run is not None and run.summary.exists():
            say(f"{_how(code)}, but the run had finished: {run.summary}")
            return 0
        if "recovery" in told:
            recoveries.recovery = Recovery(**told["recovery"])
        said = _how(code) if run is None else f"{_how(code)} after {_completed(run)} steps"
        try:
            pause_s = recoveries.pause_s(WorkerLost(said), _completed(run) if run else 0)
        except WorkerLost as spent:
            say(str(spent))
            return code if code >= 0 else 128 - code
        if run is not None and not any(word.startswith("resume=") for word in words):
            quoted = str(run.path).replace("'", "\\'")
            words = [f"resume='{quoted}'"]
        where = "it is started anew" if run is None else f"it goes on from its folder {run.path}"
        say(f"{said}; {where} (start {recoveries.number + 1}, after {pause_s:.1f} s)")
        if child.pause(pause_s):
            return 128 + (child.asked or 0)


def _how(code: int) -> str:
    if code >= 0:
        return f"the run's process ended with exit code {code}"
    known = {one.value: one.name for one in signal.Signals}
    return f"the run's process was killed by {known.get(-code, f'signal {-code}')}"


def _completed(run: RunFolder) -> int:
    folders = (*map(run.stage, run.stage_names), run)
    found = (read_metrics(folder.metrics) for folder in folders)
    return sum(lines[-1]["step"] + 1 for lines in found if lines)
