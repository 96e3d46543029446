"""How an FSDP worker computes: what the specs of its roles have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ....dataflow.option_checks import check_range
from ...training.optimizer import OptimizerSpec

__all__ = ["FsdpOptions"]


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """Options of every FSDP role."""

    optimizer: OptimizerSpec | None = None
    """None for a frozen model, such as a reference."""
    micro_batch_tokens: int = 4096
    """Tokens a process computes at once in evaluation and training, padding not counted."""
    shards: int | None = None
    """Of the processes that share a model (`executor.tensor_parallel`), how many divide its weights
    by rows and share out a call's rows; tensor parallelism divides by the rest. By default all."""

    def __post_init__(self) -> None:
        check_range(self, "micro_batch_tokens", at_least=1)
        if self.shards is not None:
            check_range(self, "shards", at_least=1)
