"""`penstock.run`: what the command `run` does, in this process, with a handle of what comes out."""

from __future__ import annotations

import threading
from typing import Any

from ...dataflow.errors import ConfigError
from ..cli.hydra_app import given_overrides, hydra_app
from ..cli.run import run_composed
from ..run_dir.run_folder import RunFolder
from .handle import RunHandle
from .live_curve import LiveCurve, in_notebook
from .words import as_words


def run(*words: str, **keys: Any) -> RunHandle:
    """Train as an algorithm, a model and a task say, or go on with a run; comes back at its end.

    It composes and runs what `penstock run` would with the same words. With the default executor
    everything happens in this thread: `breakpoint()` works in a step, an op or a worker, and both
    may be defined in the notebook or the script that calls. In Jupyter the curve is shown while
    the run goes on. Interrupting the kernel stops the run in good order, with a checkpoint.

    Args:
        *words: As on the command line: "algorithm=ppo", "algorithm.num_steps=20".
        **keys: Keys whose values Python has: `seed=1`, `algorithm={"step": my_step}`.

    Returns:
        The run.

    Raises:
        ConfigError: If a key is wrong, or it is not called from the main thread.
        FlowError: If the step is no valid graph.
        PlanError: If it fits nowhere.
        WorkerError: If code of a step fails while it runs; the original error is its cause.
        KeyboardInterrupt: If it was interrupted, once its checkpoint is written.

    Example:
        >>> run = penstock.run("algorithm=grpo", "task=chain_sum", seed=1)
        >>> run.metrics["reward.score/reward/mean"].plot()
    """
    _check_thread()
    made: list[RunFolder] = []
    shown = LiveCurve() if in_notebook() else None

    def carried_out(composed: dict[str, Any]) -> None:
        made.append(run_composed(composed, given_overrides(), shown))

    hydra_app("run", as_words("run", words, keys), carried_out)
    return RunHandle(made[0])


def _check_thread() -> None:
    """Refuse a thread in which a run could not be interrupted in good order."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "penstock.run was called in a thread of its own, and a run is interrupted by signals, "
            "which reach the main thread alone\n    call it there, or start `penstock run` as a "
            "process"
        )
