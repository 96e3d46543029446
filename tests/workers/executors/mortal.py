"""Workers that kill their own process at some of their calls."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.worker_protocol import WorkerContext


@dataclass(frozen=True)
class MortalSpec:
    """The worker kills its process at some of its calls of a method, each once in all.

    Calls are numbered over all processes, by marks in a folder; of rollouts only those of a group
    that does not train are counted.
    """

    spec: Any
    folder: str
    method: str
    fatal: tuple[int, ...]
    replica: int = 0
    rollout_s: float = 0.0

    def build(self, context: WorkerContext) -> Role:
        worker: Any = self.spec.build(context)
        if self.rollout_s and "generate" in context.methods:
            worker.generate = _slow(worker.generate, self.rollout_s)
        apart = self.method == "train" or "train" not in context.methods
        if self.method in context.methods and apart and context.replica == self.replica:
            call, mark = getattr(worker, self.method), Path(self.folder)

            def mortal(*args: Any, **kwargs: Any) -> Any:
                count = len(list(mark.glob(f"{self.method}-*")))
                (mark / f"{self.method}-{count}").touch()
                if count in self.fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            setattr(worker, self.method, mortal)
        return worker


def _slow(call: Callable[..., Any], more_s: float) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(more_s)
        return call(*args, **kwargs)

    return slow
