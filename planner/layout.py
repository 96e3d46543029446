"""How one model is spread over the devices of a group, and which ways are legal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..dataflow.errors import PlanError
from .shapes import ModelShape

__all__ = ["Engine", "Layout", "check_layout", "legal_layouts"]

AtLeastOne = Annotated[int, Field(ge=1)]

Engine = Literal["any", "torch", "megatron", "vllm"]
"""Which engine a layout must suit: torch here is data-parallel only; vllm generates only."""


class Layout(BaseModel):
    """Parallel sizes of one call of one model. Ranks are numbered tp fastest, then cp, dp, pp."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tp: AtLeastOne = 1
    """Tensor parallel: ranks that share every matrix."""
    pp: AtLeastOne = 1
    """Pipeline parallel: ranks that share the layers."""
    dp: AtLeastOne = 1
    """Data parallel: ranks that share the rows."""
    cp: AtLeastOne = 1
    """Context parallel: ranks that share every sequence."""
    ep: AtLeastOne = 1
    """Expert parallel: dp ranks that share the experts; divides dp."""
    zero: Literal[0, 1, 2, 3] = 0
    """Which of a trained model's states dp ranks share: 1 optimizer, 2 gradients, 3 weights."""
    sequence_parallel: bool = False
    """Whether activations between tensor-parallel regions are cut along the sequence."""
    checkpointing: bool = False
    """Whether a layer's activations are computed again in the backward pass."""
    offload: bool = False
    """Whether the model waits in host memory while none of its calls runs."""
    micro_batch: AtLeastOne = 1
    """Sequences that one rank computes at once in forward and train calls."""

    @property
    def num_devices(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.dp * self.cp

    def __str__(self) -> str:
        sizes = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "dp", "cp", "ep")
                 if getattr(self, name) > 1]  # fmt: skip
        marks = [f"zero{self.zero}"] if self.zero else []
        marks += ["sp"] if self.sequence_parallel else []
        marks += ["recompute"] if self.checkpointing else []
        marks += ["offload"] if self.offload else []
        marks += [f"mb{self.micro_batch}"] if self.micro_batch > 1 else []
        return " ".join([*(sizes or ["1 device"]), *marks])


def check_layout(
    layout: Layout, shape: ModelShape, *, node_size: int, tp_across_nodes: bool = False,
    where: str = "layout",
) -> None:  # fmt: skip
    """Refuse a layout that the model or the node cannot have.

    Args:
        layout: What to check.
        shape: The model.
        node_size: Devices that share a node.
        tp_across_nodes: Allow tensor parallelism over the network.
        where: Begins the message.

    Raises:
        PlanError: Saying which size must divide what.
    """
    problems = [
        (shape.num_heads % layout.tp, f"tp={layout.tp} does not divide {shape.num_heads} heads"),
        (
            shape.num_key_heads % layout.tp and layout.tp % shape.num_key_heads,
            f"tp={layout.tp} neither divides nor is a multiple of {shape.num_key_heads} key heads",
        ),
        (shape.intermediate_size % layout.tp,
         f"tp={layout.tp} does not divide the feed-forward's {shape.intermediate_size}"),
        (shape.vocab_size % layout.tp,
         f"tp={layout.tp} does not divide the vocabulary of {shape.vocab_size}"),
        (shape.num_layers % layout.pp,
         f"pp={layout.pp} does not divide {shape.num_layers} layers"),
        (max(shape.num_experts, 1) % layout.ep,
         f"ep={layout.ep} does not divide {shape.num_experts} experts"),
        (layout.dp % layout.ep, f"ep={layout.ep} does not divide dp={layout.dp}"),
        (layout.tp > node_size and not tp_across_nodes,
         f"tp={layout.tp} is more than the {node_size} devices of a node; "
         "set tp_across_nodes to allow it"),
        (layout.sequence_parallel and layout.tp == 1, "sequence_parallel needs tp above 1"),
    ]  # fmt: skip
    for wrong, text in problems:
        if wrong:
            raise PlanError(f"{where}: {text} (model '{shape.name}')")


def legal_layouts(
    shape: ModelShape,
    num_devices: int,
    *,
    node_size: int,
    engine: Engine = "any",
    max_cp: int = 1,
    tp_across_nodes: bool = False,
) -> Iterator[Layout]:
    """All sizes (tp, pp, dp, cp, ep) that use exactly `num_devices`, largest dp first.

    Neither ZeRO, checkpointing, offload nor micro-batch is chosen here.
    """
    only_dp = engine == "torch"
    for tp in [1] if only_dp else _divisors(num_devices):
        for pp in [1] if only_dp else _divisors(num_devices // tp):
            for cp in _divisors(num_devices // tp // pp):
                if cp > max_cp or (only_dp and cp > 1):
                    continue
                dp = num_devices // tp // pp // cp
                for ep in _divisors(dp) if shape.num_experts else [1]:
                    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
                    try:
                        check_layout(
                            layout, shape, node_size=node_size, tp_across_nodes=tp_across_nodes
                        )
                    except PlanError:
                        continue
                    yield layout


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
