"""A policy that generates and does nothing else, over an engine that samples tokens.

The policy knows roles, random streams, versions of weights and the `Rollout` table; the engine
knows a model. Another engine of the same role trains it and publishes its weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from ...algorithms.roles.language import Policy
from ...dataflow.errors import ConfigError
from ...dataflow.graph.role import Metric, Role, add_metrics
from ...dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec
from ...planner.resharding.sharding import Sharding, unsharded
from ..weight_sync.packets import WeightsError, check_names
from .generate_calls import Generates
from .generation_engine import GenerationEngine

_ROLLOUT = frozenset({"generate", "converse"})


def _refused(what: str, method: str) -> Any:
    """Return a method that says that only a training engine has it, for a node of that name."""

    def refuse(self: GeneratorPolicy, *given: Any, **named: Any) -> NoReturn:
        role = self.context.role
        raise RuntimeError(
            f"'{role}' runs in {self.engine.name} here, which generates and cannot "
            f"{what}; place '{role}.{method}' on a group with a training engine"
        )

    return refuse


class GeneratorPolicy(Generates, Policy):
    """A policy whose weights another engine trains.

    In a group of several processes each runs the calls it is given; `receive` and `load_weights`
    are given whole tensors in all of them. What the engine was built with counts as version 0.
    """

    def __init__(self, context: WorkerContext, engine: GenerationEngine) -> None:
        self.context = context
        self.engine = engine
        self.takes_weights = engine.takes_weights
        self.metrics: dict[str, Metric] = {}
        self._has_weights, self._version = True, 0

    def generating(self) -> GenerationEngine:
        if not self._has_weights:
            raise WeightsError(
                f"'{self.context.role}' has no weights in {self.engine.name}: they were given up "
                "with its device, or could not be loaded\n    send it all weights again"
            )
        return self.engine

    logprob = _refused("evaluate log-probabilities", "logprob")
    top_words = _refused("evaluate log-probabilities", "top_words")
    train = _refused("train", "train")
    follow = _refused("follow another policy", "follow")
    export_weights = _refused("give its weights back", "train")
    save_state = _refused("save a state", "train")
    load_state = _refused("restore a state", "train")

    # --- weights

    def weights_layout(self) -> Sharding:
        """Whole parameters by Hugging Face name in every process, as `receive` takes them.

        Devices are numbered as the group's processes. An engine cuts and fuses by itself.
        """
        shapes = {name: tuple(shape) for name, shape in self.engine.shapes.items()}
        return unsharded(shapes, range(self.context.num_processes), dtype=self.engine.dtype)

    def receive(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights; until the engine has loaded them, generating is refused."""
        check_names(self.engine.shapes, {name: part.shape for name, part in tensors.items()})
        self._has_weights = False
        self.engine.load(tensors, version)
        self._has_weights, self._version = True, version

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights by those of the next version, as `receive` does."""
        self.receive(weights, self._version + 1)

    # --- sharing the device

    def sleep(self) -> None:
        """Give device memory to others until `wake`.

        The next call reports the metrics `slept_bytes`, which were free meanwhile in all processes
        that report, and `wake_s`.
        """
        self._gave_back(self.engine.sleep())

    def sleep_empty(self) -> bool:
        """Sleep without weights; until they have come again, no call is served."""
        if not self.engine.drops_weights:
            return False
        self._gave_back(self.engine.sleep_empty())
        self._has_weights = False
        return True

    def _gave_back(self, num_bytes: int) -> None:
        if num_bytes:
            add_metrics(self.metrics, {"slept_bytes": Metric.sum(float(num_bytes))})

    def wake(self) -> None:
        since_s = time.perf_counter()
        self.engine.wake()
        if "slept_bytes" in self.metrics:
            self.metrics["wake_s"] = Metric(time.perf_counter() - since_s, 1.0, "max")

    def close(self) -> None:
        self.engine.close()


@dataclass(frozen=True, kw_only=True)
class SplitPolicySpec:
    """Recipe for a policy that one engine trains and another samples from.

    What a process runs follows from what its group is asked for.
    """

    train: WorkerSpec  # trains it and computes log-probabilities
    rollout: WorkerSpec  # generates; its weights are published by the other

    def build(self, context: WorkerContext) -> Role:
        return self._engine(context).build(context)

    def check_group(self, context: WorkerContext) -> None:
        check: Callable[[WorkerContext], None] | None
        if (check := getattr(self._engine(context), "check_group", None)) is not None:
            check(context)

    def _engine(self, context: WorkerContext) -> WorkerSpec:
        if not context.methods & _ROLLOUT:
            return self.train
        if context.methods - _ROLLOUT:
            others = ", ".join(sorted(context.methods - _ROLLOUT))
            raise ConfigError(
                f"role '{context.role}' is to generate on the group that does its {others}, but "
                "generates with another engine\n    give generation a group of its own: "
                f"executor.nodes.{context.role}.generate=rollout, or set rollout=same"
            )
        return self.rollout
