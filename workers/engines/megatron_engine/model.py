"""A megatron-core GPTModel for this process's part of a Hugging Face architecture.

Rotary positions, RMS norms, gated feed-forward or a mixture of them, grouped queries: see
`FAMILIES`. Dropout is off. Weights are left as they are allocated: they are loaded by `layout`'s
description.

A mixture is computed as transformers computes Mixtral, Qwen2-MoE and Qwen3-MoE: every token goes to
the experts that the router likes best, none is dropped, and the auxiliary loss that would balance
them is no part of any loss here. megatron-core's own layer makes CUDA streams, wants rows of one
width, or sequence parallelism beside tensor parallelism; ours needs none of that. Each process of
an expert group has rows of its own and every n-th run of experts. Tokens travel to their experts
and back by two all-to-alls of exactly what is needed. Tensor parallelism cuts every expert as it
cuts a feed-forward, and sums the outputs of all of them at once.

Imported only after `groups.prepare_megatron`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.inputs.model_shape import ModelShape
from ...models.spec import Head


@dataclass(frozen=True)
class Experts:
    """The part of a model's mixtures that a process has."""

    shape: ModelShape  # Sizes of the model
    normalizes: bool  # Whether the chances of a token's experts are scaled to add up to 1
    tensor: int  # Processes that cut every expert
    sequence: bool  # Whether activations between are cut along the sequence
    # The processes that divide the experts, in order; None if this one has all
    group: dist.ProcessGroup | None

    @property
    def num_groups(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def num_local(self) -> int:
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
        return _gated(tokens, self.linear_fc1.weight, self.down_proj.weight)


def _gated(tokens: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(tokens, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


class Mixture(nn.Module):
    """The feed-forward of a layer."""

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
        enter: Any = copy_to_tensor_model_parallel_region
        leave: Any = reduce_from_tensor_model_parallel_region
        if self._part.sequence:
            enter = gather_from_sequence_parallel_region
            leave = reduce_scatter_to_sequence_parallel_region
        whole: Tensor = enter(hidden)
        tokens = whole.reshape(-1, whole.shape[-1])
        mixed = self._chosen(tokens)
        if self.shared_expert is not None:
            share = torch.sigmoid(self.shared_expert_gate(tokens))
            mixed = mixed + share * self.shared_expert(tokens)
        return leave(mixed.view(whole.shape)), None

    def _chosen(self, tokens: Tensor) -> Tensor:
        """Weighted output of each token's experts, [n, hidden]; of this process's part of them."""
        chance = torch.softmax(F.linear(tokens, self.gate.weight), -1, dtype=torch.float32)
        chance, chosen = chance.topk(self._part.shape.experts_per_token)
        if self._part.normalizes:
            chance = chance / chance.sum(-1, keepdim=True)
        number = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)  # by expert
        counts = chosen.flatten().bincount(minlength=self._part.shape.num_experts)
        found = self._computed(tokens[order // number], counts)
        back = order.argsort()
        parts = found[back].view(len(tokens), number, -1)
        return (parts * chance[:, :, None]).sum(1).to(tokens.dtype)

    def _computed(self, sent: Tensor, counts: Tensor) -> Tensor:
        """Outputs of experts for tokens that lie expert by expert, `counts` i64[experts] each."""
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


class _RmsNorm(nn.Module):
    """RMS norm over the last dimension, as megatron-core builds its norms."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        size = torch.empty(hidden_size, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _CausalAttention(nn.Module):
    """Causal attention over right-padded rows by torch's fused kernels.

    megatron-core's own local attention holds all scores in memory, repeats grouped keys, and builds
    its mask on a GPU.
    """

    def __init__(self, config: TransformerConfig, **unused: Any) -> None:
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **unused: Any
    ) -> Tensor:
        """[s, b, heads, size] each, to [s, b, heads * size]."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class Backbone(GPTModel):
    """A GPTModel that ends in hidden states: the head is applied where something is read."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        return hidden_states


def build_backbone(
    config: Any,
    shape: ModelShape,
    context: WorkerContext,
    head: Head,
    *,
    sequence_parallel: bool,
    experts: dist.ProcessGroup | None = None,
) -> Backbone:
    """Allocate this process's part of a model; its weights are not set."""
    first, last = context.stage == 0, context.stage == context.pipeline_parallel - 1
    own = _config(config, shape, context, sequence_parallel)
    layer = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    norm: Any = _RmsNorm
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    attention: Any = parts.self_attention.submodules
    attention.core_attention = _CausalAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    if shape.num_experts:
        parts.mlp = IdentityOp  # until there is a layer to put another into
    layers = [layer] * (shape.num_layers // context.pipeline_parallel)
    scalar = head.is_scalar
    backbone = Backbone(
        own,
        cast(ModuleSpec, TransformerBlockSubmodules(layers, layer_norm=norm)),
        vocab_size=shape.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        # With several stages megatron-core would move the last stage's copy to a GPU to fill it;
        # here both ends are loaded from the same parameter and their gradients added by us.
        share_embeddings_and_output_weights=first and last and (scalar or shape.tied_embeddings),
        position_embedding_type="rope",
    )
    device = torch.device(context.device)
    made_on = None if device.type == "cpu" else device  # as megatron-core makes its own
    if shape.num_experts:
        normalizes = bool(getattr(config, "norm_topk_prob", True))  # Mixtral always does
        tensor = context.tensor_parallel
        part = Experts(shape, normalizes, tensor, own.sequence_parallel, experts)
        for layer in cast(Any, backbone.decoder).layers:
            layer.mlp = Mixture(part, dtype=own.params_dtype, device=made_on)
    frequencies: Any = backbone.rotary_pos_emb
    frequencies.inv_freq = _rotary_frequencies(config).to(device)
    ends: Any = backbone
    if last and scalar:
        ends.output_layer = nn.Linear(shape.hidden_size, 1, device=made_on, dtype=own.params_dtype)
    elif last:
        ends.output_layer.sequence_parallel = False  # it is given states that are whole already
    return backbone


def _rotary_frequencies(config: Any) -> Tensor:
    """As transformers computes them, so that its ways to stretch them hold here too."""
    with torch.device("cpu"):
        rotary: Any = LlamaRotaryEmbedding(config)  # the families share it
    return rotary.inv_freq.float().clone()


def _config(
    config: Any, shape: ModelShape, context: WorkerContext, sequence_parallel: bool
) -> TransformerConfig:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[shape.dtype]
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_key_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=context.tensor_parallel,
        pipeline_model_parallel_size=context.pipeline_parallel,
        sequence_parallel=sequence_parallel and context.tensor_parallel > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=torch.device(context.device).type == "cpu",
        perform_initialization=False,  # weights are loaded
        variable_seq_lengths=True,  # micro-batches are as wide as their longest row
        moe_token_dispatcher_type="alltoall",  # unused, but the default refuses the line above
        cuda_graph_scope=[],  # the default warns that it is deprecated
        calculate_per_token_loss=True,  # a loss is summed as it is given, never averaged
        deallocate_pipeline_outputs=True,
        # Fused kernels compile at first use; what they save is small beside matrix products.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
    )
