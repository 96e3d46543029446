"""The ranks of `penstock profile` as processes of this machine, which meet in a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ...dataflow.errors import WorkerError
from ...dataflow.runtime.worker_protocol import CLOSE_S
from .rank import RankRequest, RankResult, answer_file


def too_late(rank: int, deadline_s: float) -> WorkerError:
    """What is said of a rank that does not end, wherever it is."""
    return WorkerError(
        f"rank {rank} of the profile did not end within {deadline_s:g} s; "
        "give it longer: deadline_s=..."
    )


def local_ranks(requests: Sequence[RankRequest]) -> list[RankResult]:
    """What every rank found, measuring all at once.

    Raises:
        WorkerError: If one fails or does not end in time; none is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-profile-") as name:
        _run(requests, name)
        answers = [answer_file(Path(name), request.rank) for request in requests]
        return [RankResult.model_validate_json(answer.read_text()) for answer in answers]


def _run(requests: Sequence[RankRequest], folder: str) -> None:
    """Start a process for every request and wait for all; none is left behind."""
    deadline_s = requests[0].deadline_s
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "penstock.launch.profile.rank", folder],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(request.num_threads)},
        )
        for request in requests
    ]
    try:
        for process, request in zip(processes, requests, strict=True):
            assert process.stdin is not None
            process.stdin.write(request.model_dump_json())
            process.stdin.close()
            process.stdin = None
        until_s = time.monotonic() + deadline_s
        for rank, process in enumerate(processes):
            try:
                _, said = process.communicate(timeout=max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise too_late(rank, deadline_s) from None
            if process.returncode:
                last = said.strip().rpartition("\n")[2]
                message = f"rank {rank} of the profile failed: {last}"
                raise WorkerError(message) from RuntimeError(said)  # which --debug shows
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for rank, process in enumerate(processes):
            _reap(rank, process)


def _reap(rank: int, process: subprocess.Popen[str]) -> None:
    """Wait for a process that has ended or was killed, and close its pipes."""
    try:
        # Not communicate: what it started may hold its pipes open for ever.
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(
            f"rank {rank} of the profile, process {process.pid}, is still there {CLOSE_S:g} s "
            "after it was killed"
        ) from error
    finally:
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                pipe.close()
