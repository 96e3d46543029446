"""Whether this checkout is slower than another one: both run what a run was, in turns.

A shared machine's speed changes from minute to minute, so a time that was written down says little
later. Here a run of each checkout makes a pair, and the one that goes first changes from pair to
pair. Every run takes the same steps, so of each step the fastest run counts: whatever else the
machine does makes a step slower, never faster.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ....dataflow.errors import ConfigError, WorkerError
from ...run_dir.run_folder import RunRecord, list_runs
from ...runs.reference import Finding, Rule
from ...runs.series import History

STEP_TIME = "run/step_time_s"
"""What is compared, a metric of the steps: without a run's start, evaluations and files."""

_PYTHON = Path(".venv", "bin", "python")
_START_S = 120.0
"""For a process to begin and to end beside what the run itself takes."""

_TIMES_AS_LONG = 10
"""A run that takes longer than so often what it took then is given up."""


def raced(run: RunRecord, checkout: Path, num_pairs: int, rule: Rule) -> tuple[Finding, bool]:
    """Run a run again and again, in turns by another checkout and by this one.

    Args:
        run: A run that has finished; its configuration is what is run.
        checkout: The other source tree, which has been set up.
        num_pairs: Runs of each.
        rule: By how much this checkout's steps may take longer.

    Returns:
        The seconds per step of the other and of this checkout, each step's fastest, and whether
        this one is slower; and whether all runs came to the same weights.

    Raises:
        ConfigError: If the checkout has not been set up.
        WorkerError: If a run fails or takes too long.
    """
    python = checkout.absolute() / _PYTHON  # not resolved: the link is what names its packages
    if not python.exists():
        raise ConfigError(
            f"'checkout': '{checkout}' has no {_PYTHON}\n    set it up: make -C {checkout} setup"
        )
    pythons = (str(python), sys.executable)
    took_s: tuple[list[Sequence[float]], list[Sequence[float]]] = ([], [])
    weights: set[str] = set()
    for pair in range(num_pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            steps_s, sha256 = _run_again(run, pythons[side])
            took_s[side].append(steps_s)
            weights.add(sha256)
    # A run may end early, when it no longer improves; then the weights differ as well.
    num_steps = min(len(steps_s) for runs in took_s for steps_s in runs)
    before, now = (
        statistics.fmean(min(steps_s[step] for steps_s in runs) for step in range(num_steps))
        for runs in took_s
    )
    allowed = rule.tolerance * (before if rule.relative else 1.0)
    return Finding(STEP_TIME, before, now, allowed, now - before > allowed), len(weights) == 1


def _run_again(run: RunRecord, python: str) -> tuple[Sequence[float], str]:
    """Seconds of each step of one run, by the checkout of the interpreter, and its weights' hash.

    Its folder is gone afterwards.
    """
    took_s = (run.summary or {}).get("wall_time_s") or 0.0
    folder = run.folder.path.absolute()
    command = [python, "-m", "penstock.launch.main", "runs", "reproduce", str(folder)]
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        try:
            ran = subprocess.run(
                [*command, f"into={place}", f"runs={folder.parent}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMES_AS_LONG * took_s + _START_S,
            )
        except subprocess.TimeoutExpired as error:
            raise WorkerError(
                f"run '{run.folder.id}' was not at its end after {error.timeout:.0f} s when "
                f"{python} ran it again; it took {took_s:.0f} s then"
            ) from error
        records = [record for record in list_runs(Path(place)) if record.summary]
        if len(records) != 1:
            said = "\n    ".join(ran.stderr.splitlines()[-5:])
            raise WorkerError(
                f"run '{run.folder.id}' failed when {python} ran it again\n    {said}"
            )
        steps_s = History(records[0].folder.path).series(STEP_TIME).ys
        return steps_s, str((records[0].summary or {}).get("weights_sha256"))
