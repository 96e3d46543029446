"""A megatron-core GPTModel for this process's part of a Hugging Face architecture.

Rotary positions, RMS norms, gated feed-forward or a mixture of them, grouped queries: see
`FAMILIES`. Dropout is off. Weights are left as they are allocated: they are loaded by `layout`'s
description.

Imported only after `cpu_shim.prepare_megatron`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ....dataflow.errors import ConfigError
from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.inputs.model_shape import ModelShape, shape_of
from ...models.heads import Head
from .declaration import check_family
from .experts import Experts, Mixture


def supported_shape(config: Any, dtype: str) -> ModelShape:
    """The sizes of a Hugging Face config, if this engine computes exactly what its model does.

    Raises:
        ConfigError: If it does not, naming the field.
    """
    kind = config.model_type
    check_family(kind)
    layers = getattr(config, "layer_types", None) or []
    wrong = {
        "hidden_act": config.hidden_act if config.hidden_act != "silu" else None,
        "mlp_bias": getattr(config, "mlp_bias", False) or None,
        "attention_bias": (getattr(config, "attention_bias", False) if kind != "qwen2" else False)
        or None,
        "sliding_window": config.sliding_window if kind in ("mistral", "mixtral") else None,
        "router_jitter_noise": getattr(config, "router_jitter_noise", 0.0) or None,
        "decoder_sparse_step": _other(config, "decoder_sparse_step", 1),
        "mlp_only_layers": getattr(config, "mlp_only_layers", None) or None,
        "layer_types": next((name for name in layers if name != "full_attention"), None),
    }
    for field, value in wrong.items():
        if value is not None:
            raise ConfigError(
                f"the Megatron engine cannot compute a {kind} model with {field}={value!r}; "
                "train it with engine=torch"
            )
    return shape_of(config.to_dict(), name=kind, dtype=dtype)


def _other(config: Any, field: str, usual: int) -> int | None:
    value: int = getattr(config, field, usual)
    return None if value == usual else value


class _RmsNorm(nn.Module):
    """RMS norm over the last dimension, as megatron-core builds its norms."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__()
        del unused
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        size = torch.empty(hidden_size, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _CausalAttention(nn.Module):
    """Causal attention over right-padded rows by torch's fused kernels.

    megatron-core's own local attention holds all scores in memory, repeats grouped keys, and builds
    its mask on a GPU.
    """

    def __init__(self, config: TransformerConfig, **unused: Any) -> None:
        super().__init__()
        del config, unused

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
    """Allocate this process's part of a model; its weights are not set.

    Args:
        config: A Hugging Face config for which `supported_shape` gave `shape`.
        shape: Sizes of the model.
        context: Says which part this process computes; see `join_groups`.
        head: A scalar one replaces the output layer by a plain linear map.
        sequence_parallel: Cut activations between tensor-parallel regions along the sequence.
        experts: The processes that divide a mixture's experts; None if each has all of them.
    """
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
        tensor, normalizes = context.tensor_parallel, _normalizes(config)
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


def _normalizes(config: Any) -> bool:
    """Whether the chances of a token's experts are scaled to add up to 1; Mixtral always does."""
    return bool(getattr(config, "norm_topk_prob", True))


def _rotary_frequencies(config: Any) -> Tensor:
    """As transformers computes them, so that its ways to stretch them hold here too."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"the Megatron engine cannot compute rotary positions of type '{kind}'; it has "
            "default, linear and llama3. Train this model with engine=torch"
        )
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
