"""Whether this checkout is slower than another one: both run what a run was, in turns.

A shared machine's speed changes from minute to minute, so a time that was written down says little
later. Here a run of each checkout makes a pair, the one that goes first changes from pair to pair,
and the pairs' differences are what is looked at.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from ....dataflow.errors import ConfigError, WorkerError
from ...run_dir.run_folder import RunRecord, list_runs
from ...runs.figures import Figures
from ...runs.reference import Finding, Rule, no_worse
from ...runs.values import flat_values

__all__ = ["STEP_TIME", "raced"]

STEP_TIME = "step_time_s"
"""What is compared: the median over a run's steps, without its start, evaluations and files."""

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
        The seconds per step of the other and of this checkout, and whether this one is slower; and
        whether all runs came to the same weights.

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
    took_s: tuple[list[float], list[float]] = ([], [])
    weights: set[object] = set()
    for pair in range(num_pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            figures = _run_again(run, pythons[side])
            took_s[side].append(figures.number(STEP_TIME))
            weights.add(figures.of("weights_sha256"))
    return no_worse(STEP_TIME, rule, *took_s, paired=True), len(weights) == 1


def _run_again(run: RunRecord, python: str) -> Figures:
    """One run, by the checkout to which the interpreter belongs; its folder is gone afterwards."""
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
        return Figures((records[0], flat_values(records[0])))
