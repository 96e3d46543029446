"""Layouts: the division of one model over the devices of a group, and which ways are legal."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, isqrt
from typing import Any, Literal

from ...dataflow.errors import PlanError
from .model_shape import AtLeastOne, ModelShape, PlanData


class Layout(PlanData):
    """Parallel sizes of one call of one model. Ranks are numbered tp fastest, then cp, dp, pp."""

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
    """States of a trained model that dp ranks share: 1 optimizer, 2 gradients, 3 weights."""
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


def pinned_layout(fields: Mapping[str, Any]) -> Layout:
    """The smallest layout with these fields, for looking at fields that are fixed one by one."""
    fields = dict(fields)
    if "ep" in fields:
        fields.setdefault("dp", fields["ep"])
    if "tp" not in fields:  # what it needs is not fixed, so it may be there
        fields.pop("sequence_parallel", None)
    return Layout.model_validate(fields)


def check_layout(
    layout: Layout, shape: ModelShape, *, node_size: int, tp_across_nodes: bool = False,
    where: str = "layout",
) -> None:  # fmt: skip
    """Refuse a layout that the model or the node cannot have."""
    problem = _problem(layout, shape, node_size, tp_across_nodes)
    if problem is not None:
        raise PlanError(f"{where}: {problem} (model '{shape.name}')")


def _problem(
    layout: Layout, shape: ModelShape, node_size: int, tp_across_nodes: bool
) -> str | None:
    tp, pp, ep = layout.tp, layout.pp, layout.ep
    if shape.num_heads % tp:
        return f"tp={tp} does not divide {shape.num_heads} heads"
    if shape.num_key_heads % tp and tp % shape.num_key_heads:
        return f"tp={tp} neither divides nor is a multiple of {shape.num_key_heads} key heads"
    if shape.intermediate_size % tp:
        return f"tp={tp} does not divide the feed-forward's {shape.intermediate_size}"
    if shape.shared_expert_size % tp:
        return f"tp={tp} does not divide the shared expert's {shape.shared_expert_size}"
    if shape.vocab_size % tp:
        return f"tp={tp} does not divide the vocabulary of {shape.vocab_size}"
    if shape.num_layers % pp:
        return f"pp={pp} does not divide {shape.num_layers} layers"
    if max(shape.num_experts, 1) % ep:
        return f"ep={ep} does not divide {shape.num_experts} experts"
    if layout.dp % ep:
        return f"ep={ep} does not divide dp={layout.dp}"
    if tp > node_size and not tp_across_nodes:
        return (
            f"tp={tp} is more than the {node_size} devices of a node; "
            "set plan.tp_across_nodes=true to allow it"
        )
    if layout.sequence_parallel and tp == 1:
        return "sequence_parallel needs tp above 1"
    return None


def legal_layouts(
    shape: ModelShape,
    num_devices: int,
    *,
    node_size: int,
    max_cp: int = 1,
    tp_across_nodes: bool = False,
) -> tuple[Layout, ...]:
    """All sizes (tp, pp, dp, cp, ep) that use exactly `num_devices`, least tp first.

    Neither ZeRO, checkpointing, offload nor micro-batch is chosen here, nor what an engine runs.
    """
    most_tp = num_devices if tp_across_nodes else min(num_devices, node_size)
    found: list[Layout] = []
    for tp in _divisors(gcd(num_devices, shape.num_heads)):
        if tp > most_tp:
            break
        for pp in _divisors(gcd(num_devices // tp, shape.num_layers)):
            for cp in _divisors(num_devices // tp // pp):
                if cp > max_cp:
                    break
                dp = num_devices // tp // pp // cp
                for ep in _divisors(gcd(dp, shape.num_experts)) if shape.num_experts else [1]:
                    layout = Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
                    if _problem(layout, shape, node_size, tp_across_nodes) is None:
                        found.append(layout)
    return tuple(found)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
