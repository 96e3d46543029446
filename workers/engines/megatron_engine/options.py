"""How a Megatron worker computes: what the specs of its roles have in common."""

from __future__ import annotations

from dataclasses import dataclass

from ....dataflow.option_checks import check_range
from ...training.optimizer import OptimizerSpec

__all__ = ["MegatronOptions"]


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """Options of every Megatron role. The parallel sizes are the worker group's."""

    optimizer: OptimizerSpec | None = None
    """None for a frozen model, such as a reference."""
    micro_batch_tokens: int = 4096
    """Tokens computed at once in evaluation and training, padding not counted."""
    sequence_parallel: bool = False
    """Cut activations between tensor-parallel regions along the sequence."""
    share_optimizer: bool = True
    """Share out the optimizer's state over data-parallel ranks (ZeRO stage 1)."""

    def __post_init__(self) -> None:
        check_range(self, "micro_batch_tokens", at_least=1)
