"""A mixture of experts in place of a layer's feed-forward, its experts divided over processes.

As transformers computes Mixtral, Qwen2-MoE and Qwen3-MoE: every token goes to the experts that the
router likes best, none is dropped, and the auxiliary loss that would balance them is no part of
any loss here. megatron-core's own layer makes CUDA streams, wants rows of one width, or sequence
parallelism beside tensor parallelism; this one needs none of that.

Each process of an expert group has rows of its own and every n-th run of experts. Tokens travel to
their experts and back by two all-to-alls of exactly what is needed. Tensor parallelism cuts every
expert as it cuts a feed-forward, and sums the outputs of all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from ....planner.inputs.model_shape import ModelShape


@dataclass(frozen=True)
class Experts:
    """Which part of a model's mixtures a process has.

    Attributes:
        shape: Sizes of the model.
        normalizes: Whether the chances of a token's experts are scaled to add up to 1.
        tensor: Processes that cut every expert.
        sequence: Whether activations between are cut along the sequence.
        group: The processes that divide the experts, in order; None if this one has all.
    """

    shape: ModelShape
    normalizes: bool
    tensor: int
    sequence: bool
    group: dist.ProcessGroup | None

    @property
    def num_groups(self) -> int:
        """Processes that divide the experts."""
        return 1 if self.group is None else self.group.size()

    @property
    def num_local(self) -> int:
        """Experts of this process."""
        return self.shape.num_experts // self.num_groups


class _Router(nn.Module):
    def __init__(self, num_experts: int, hidden_size: int, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, **options))


class _LocalExperts(nn.Module):
    """Gated feed-forwards, each of its own tokens."""

    def __init__(self, number: int, hidden_size: int, inner: int, **options: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(number, 2 * inner, hidden_size, **options))
        self.down_proj = nn.Parameter(torch.empty(number, hidden_size, inner, **options))

    def forward(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """[n, hidden], expert by expert, to the same."""
        parts = zip(tokens.split(counts), self.gate_up_proj, self.down_proj, strict=True)
        return torch.cat([_gated(part, up, down) for part, up, down in parts])


class _SharedExpert(nn.Module):
    """The feed-forward of every token."""

    def __init__(self, hidden_size: int, inner: int, **options: Any) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(hidden_size, 2 * inner, bias=False, **options)
        self.down_proj = nn.Linear(inner, hidden_size, bias=False, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, hidden] to the same."""
        return _gated(tokens, self.linear_fc1.weight, self.down_proj.weight)


def _gated(tokens: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(tokens, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


class Mixture(nn.Module):
    """The feed-forward of a layer.

    Args:
        experts: What of it is here.
        dtype: Of the weights.
        device: Where they lie; None for torch's default device.
    """

    def __init__(
        self, experts: Experts, *, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        shape, tensor = experts.shape, experts.tensor
        self._part = experts
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        hidden, inner = shape.hidden_size, shape.intermediate_size // tensor
        self.gate = _Router(shape.num_experts, hidden, **options)
        self.experts = _LocalExperts(experts.num_local, hidden, inner, **options)
        self.shared_expert: _SharedExpert | None = None
        if shape.shared_expert_size:
            inner = shape.shared_expert_size // tensor
            self.shared_expert = _SharedExpert(hidden, inner, **options)
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False, **options)

    def forward(self, hidden: Tensor, padding_mask: None = None) -> tuple[Tensor, None]:
        """[s, b, hidden] to the same, and no bias; padding is computed as tokens are."""
        sequence = self._part.sequence
        enter = gather_from_sequence_parallel_region if sequence else _copied
        whole: Tensor = enter(hidden)
        tokens = whole.reshape(-1, whole.shape[-1])
        mixed = self._chosen(tokens)
        if self.shared_expert is not None:
            share = torch.sigmoid(self.shared_expert_gate(tokens))
            mixed = mixed + share * self.shared_expert(tokens)
        leave = reduce_scatter_to_sequence_parallel_region if sequence else _summed
        return leave(mixed.view(whole.shape)), None

    def _chosen(self, tokens: Tensor) -> Tensor:
        """What each token's experts say, weighted, [n, hidden]; of this process's part of them."""
        chance, chosen = self._route(tokens)
        number = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)  # by expert
        counts = chosen.flatten().bincount(minlength=self._part.shape.num_experts)
        found = self._computed(tokens[order // number], counts)
        back = order.argsort()
        parts = found[back].view(len(tokens), number, -1)
        return (parts * chance[:, :, None]).sum(1).to(tokens.dtype)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Chances f32[n, k] and experts i64[n, k] of tokens."""
        logits = F.linear(tokens, self.gate.weight)
        chance = torch.softmax(logits, -1, dtype=torch.float32)
        best, chosen = chance.topk(self._part.shape.experts_per_token)
        return (best / best.sum(-1, keepdim=True) if self._part.normalizes else best), chosen

    def _computed(self, sent: Tensor, counts: Tensor) -> Tensor:
        """What experts say of tokens that lie expert by expert, `counts` i64[experts] of each."""
        group = self._part.group
        if group is None:
            return self.experts(sent, counts.tolist())
        every = [torch.empty_like(counts) for _ in range(group.size())]
        dist.all_gather(every, counts, group)
        table = torch.stack(every).view(group.size(), group.size(), -1)
        to_me = table[:, group.rank()]  # [process, my experts]
        leave, come = table[group.rank()].sum(1).tolist(), to_me.sum(1).tolist()
        received = _exchange(sent, leave, come, group)
        mine = torch.arange(to_me.shape[1], device=sent.device).expand_as(to_me)
        order = mine.flatten().repeat_interleave(to_me.flatten()).argsort(stable=True)
        found = self.experts(received[order], to_me.sum(0).tolist())
        back = order.argsort()
        return _exchange(found[back], come, leave, group)


def _copied(hidden: Tensor) -> Tensor:
    return copy_to_tensor_model_parallel_region(hidden)


def _summed(mixed: Tensor) -> Tensor:
    return reduce_from_tensor_model_parallel_region(mixed)


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    result: Any = _Exchange.apply(rows, sent, received, group)
    return result


class _Exchange(torch.autograd.Function):
    """Rows to other processes, `sent` of them to each in order; gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    result = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result
