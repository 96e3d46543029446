"""What to do when the engine that samples and the one that trains disagree."""

from __future__ import annotations

import warnings

from ..configs.schema import AgreementConfig
from ..dataflow.engine import StepResult
from ..dataflow.errors import WorkerError
from ..workers.agreement import ROLLOUT_K3

__all__ = ["AgreementGuard"]


class AgreementGuard:
    """Looks at every step whose rollouts read the weights that were then trained.

    With rollouts that ran ahead the same numbers contain staleness, and nothing is judged.
    """

    def __init__(self, config: AgreementConfig) -> None:
        self._config = config
        self._warned = False

    def check(self, result: StepResult) -> None:
        """Warn once, or refuse to go on.

        Raises:
            WorkerError: If the divergence is above `agreement.stop_above`.
        """
        if any(lag for lag, _ in result.lag):
            return
        warn, stop = self._config.warn_above, self._config.stop_above
        for name, value in result.metrics.items():
            node, _, metric = name.rpartition("/")
            if metric != ROLLOUT_K3:
                continue
            said = (
                f"step {result.step}: '{node}' and what sampled for it disagree by {value:.3g} "
                "nats per token on the same weights"
            )
            if stop is not None and not value <= stop:
                raise WorkerError(
                    f"{said}; agreement.stop_above is {stop:g}\n    compare dtypes and kernels of "
                    "the two engines, or set a correction (algorithm.cfg.correction)"
                )
            if warn is not None and not value <= warn and not self._warned:
                self._warned = True
                warnings.warn(
                    f"{said}; agreement.warn_above is {warn:g}. Consider algorithm.cfg.correction",
                    stacklevel=2,
                )
