"""Context parallelism: several processes share every row, and each computes a part of its tokens.

Of n processes, process i has chunks i and 2n - 1 - i of a row cut into 2n. A chunk attends to
itself and to all before it, so all have equally much to attend to (Llama Team, "The Llama 3 Herd of
Models", 2024, section 3.3.2). Everything but attention is computed token by token. Attention
gathers the keys and values of the whole row, once in each layer; their gradients are added up and
go back to the process that each is from.

Logits stay where they are computed. Log-probabilities, values and scores are gathered, and then
every process has them for whole rows and computes the loss of these alone, as tensor-parallel
processes do: nothing that comes after the model knows that rows were cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from ...training.network import Outputs

ATTENTION = "penstock_context_parallel"
"""What transformers knows `attend` by."""


@dataclass(frozen=True)
class ContextGroup:
    """The processes that share rows.

    Attributes:
        rank: This process.
        size: How many they are.
        group: torch.distributed's group of them.
    """

    rank: int
    size: int
    group: dist.ProcessGroup

    @property
    def chunks(self) -> tuple[int, int]:
        """Which chunks of every row this process computes."""
        return self.rank, 2 * self.size - 1 - self.rank

    def cut(self, tokens: Tensor, reads: Tensor) -> CutRows:
        """This process's part of some rows.

        Args:
            tokens: i64[rows, T].
            reads: bool[rows, T].
        """
        width = tokens.shape[1]
        chunk = -(-width // (2 * self.size))
        place = torch.arange(chunk, device=tokens.device)
        position = torch.cat([number * chunk + place for number in self.chunks])
        # Beyond the rows' end the last token stands again: nothing reads what follows from it.
        taken = position.clamp(max=width - 1)
        own = reads[:, taken] & (position < width)
        number = (reads.flatten().cumsum(0).view(reads.shape) - 1)[:, taken][own]
        return CutRows(tokens[:, taken], own, position[None], number, int(reads.sum()), self)


@dataclass(frozen=True)
class CutRows:
    """A process's part of some rows: two chunks of C tokens of each.

    Attributes:
        tokens: i64[rows, 2C].
        reads: bool[rows, 2C].
        position: i64[1, 2C]; where these tokens stand in their rows.
        number: i64[n]; which of the whole rows' reads, row by row, each of these reads is.
        num_reads: Of the whole rows.
        context: The processes that have the others.
    """

    tokens: Tensor
    reads: Tensor
    position: Tensor
    number: Tensor
    num_reads: int
    context: ContextGroup

    def whole(self, found: Tensor) -> Tensor:
        """What was found at these reads, [n, ...], at all of the whole rows', [num_reads, ...].

        Every process gets the same, and computes the gradient of its own, as if it alone went
        backward through the result.
        """
        made: Tensor = _Whole.apply(found, self)  # type: ignore[assignment]
        return made


@dataclass(frozen=True, kw_only=True)
class CutOutputs(Outputs):
    """Outputs at the reads of this process alone.

    Attributes:
        rows: Which those are.
    """

    rows: CutRows


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    context: ContextGroup,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this process's chunks over whole rows, as transformers asks for it.

    Args:
        module: The attention layer.
        query: [rows, H, 2C, E], with their positions in them.
        key: [rows, K, 2C, E], K dividing H; likewise.
        value: [rows, K, 2C, E].
        attention_mask: None; what follows a token does not change its output, so right padding
            needs none.
        scaling: Multiplies the scores.
        context: The processes that share the rows.
        others: What other implementations look at.

    Returns:
        [rows, 2C, H, E], and no weights.
    """
    both: Tensor = _WholeRows.apply(torch.stack([key, value]), context)  # type: ignore[assignment]
    chunk = query.shape[2] // 2
    mixed: list[Tensor] = []
    for part, number in zip(query.split(chunk, dim=2), context.chunks, strict=True):
        end = (number + 1) * chunk
        keys, values = both[:, :, :, :end]
        mixed.append(
            F.scaled_dot_product_attention(
                part,
                keys,
                values,
                attn_mask=_looks_at(chunk, end, query.device),
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        )
    return torch.cat(mixed, dim=2).transpose(1, 2), None


def _looks_at(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """Which of a row's first keys the last of their queries look at, bool[queries, keys]."""
    if device.type == "cuda":  # says the same to kernels that need no mask, and share key heads
        return causal_lower_right(num_queries, num_keys)
    every = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return every.tril(num_keys - num_queries)


class _Whole(torch.autograd.Function):
    """See `CutRows.whole`."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, rows: CutRows) -> Tensor:
        ctx.number = rows.number
        whole = found.new_zeros(rows.num_reads, *found.shape[1:])
        whole[rows.number] = found
        dist.all_reduce(whole, group=rows.context.group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][ctx.number], None


class _WholeRows(torch.autograd.Function):
    """Every process's two chunks, [..., 2C, E], as whole rows in order, [..., 2nC, E]."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        parts = [torch.empty_like(own) for _ in range(context.size)]
        dist.all_gather(parts, own, group=context.group)
        halves = [part.chunk(2, dim=-2) for part in parts]
        return torch.cat([*(a for a, _ in halves), *(b for _, b in reversed(halves))], dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        context: ContextGroup = ctx.context
        chunks = grads[0].chunk(2 * context.size, dim=-2)
        pairs = zip(chunks[: context.size], chunks[: -context.size - 1 : -1], strict=True)
        parts = [torch.cat(pair, dim=-2) for pair in pairs]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=context.group)
        return own, None
