"""A word to the user when the engine that samples and the one that trains disagree.

Refusing to train is the trainer's: it must happen before the weights are changed.
"""

from __future__ import annotations

import warnings

from ...configs.schema import MismatchConfig
from ...dataflow.runtime.engine import StepResult
from ...workers.training.logprob_mismatch import ROLLOUT_K3

__all__ = ["MismatchGuard"]


class MismatchGuard:
    """Looks at every step whose rollouts read the weights that were then trained.

    With rollouts that ran ahead the same numbers contain staleness, and nothing is judged.
    """

    def __init__(self, config: MismatchConfig) -> None:
        self._limit = config.warn_above
        self._warned = False

    def check(self, result: StepResult) -> None:
        """Warn, once in a run, if the divergence is above `mismatch.warn_above`."""
        if self._limit is None or self._warned or any(lag for lag, _ in result.lag):
            return
        for name, value in result.metrics.items():
            node, _, metric = name.rpartition("/")
            if metric == ROLLOUT_K3 and not value <= self._limit:
                self._warned = True
                warnings.warn(
                    f"step {result.step}: '{node}' and what sampled for it disagree by "
                    f"{value:.3g} nats per token on the same weights; mismatch.warn_above is "
                    f"{self._limit:g}. Consider algorithm.cfg.correction",
                    stacklevel=2,
                )
                return
