"""How the Megatron engine stores a model, in terms of the checkpoint's parameters.

The one description serves loading, exporting, saving and resharding, so that what is sent between
engines is what the weights were loaded by. The engine's tensors carry megatron-core's names with
two differences, which make a name mean one parameter wherever it lies: layers are counted over the
whole model, not from the stage's first, and the head of a model with tied embeddings is called as
the embedding, of which the last stage has a copy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ....dataflow.errors import PlanError
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import ModelShape
from ....planner.resharding.sharding import Pattern, Sharding, Slice, StoredParam, shard
from ....planner.resharding.storage import concatenate, interleave_qkv
from ...models.heads import HeadName

_RENAMED = (
    (r"model\.embed_tokens\.", "embedding.word_embeddings."),
    (r"model\.norm\.", "decoder.final_layernorm."),
    (r"(lm_head|value_head|score)\.", "output_layer."),
    (r"model\.layers\.", "decoder.layers."),
)
_RENAMED_IN_LAYER = (
    (".self_attn.o_proj.", ".self_attention.linear_proj."),
    (".self_attn.q_norm.", ".self_attention.q_layernorm."),
    (".self_attn.k_norm.", ".self_attention.k_layernorm."),
    (".self_attn.", ".self_attention."),
    (".mlp.down_proj.", ".mlp.linear_fc2."),
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
)


def megatron_sharding(
    model: ModelShape, layout: Layout, devices: Sequence[int], *, head: HeadName = "lm_head"
) -> Sharding:
    """Which process of a Megatron group stores what, and where in which tensor.

    - Query, key and value rows lie in `linear_qkv`, key-value head by key-value head: the queries
      that share it, its key, its value.
    - Gate then up rows lie in `linear_fc1`; experts lie as in the checkpoint's module.
    - A scalar head and its bias are whole on every tensor-parallel process of the last stage.

    Args:
        model: Sizes and dtype.
        layout: Only tp, pp, dp and ep may be above 1; optimizer states may be cut, weights may not.
        devices: One per process, in the order of `WorkerContext.process`.
        head: What the model ends in.

    Raises:
        PlanError: If the engine cannot hold the model in this layout.
    """
    _check(model, layout)
    whole = shard(model, layout, devices, head="vocabulary" if head == "lm_head" else "scalar")
    if head != "lm_head":
        whole = _scalar_head(whole, head)
    fused = interleave_qkv(whole, model.head_dim, "linear_qkv")
    fused = concatenate(fused, ("gate_proj", "up_proj"), "linear_fc1")
    params = tuple(replace(param, tensor=_renamed(param.tensor)) for param in fused.params)
    return replace(fused, params=params)


def _check(model: ModelShape, layout: Layout) -> None:
    if layout.cp > 1 or layout.zero == 3:
        raise PlanError(
            f"layout '{layout}': the Megatron engine knows tp, pp, dp, ep and zero up to 2"
        )
    if layout.ep > 1 and not model.num_experts:
        raise PlanError(
            f"layout '{layout}' divides experts, and model '{model.name}' has none; take ep=1"
        )
    if model.num_key_heads % layout.tp:
        raise PlanError(
            f"tp={layout.tp} does not divide {model.num_key_heads} key heads, as the Megatron "
            f"engine needs (model '{model.name}'); take a tp that does"
        )


def _scalar_head(sharding: Sharding, head: HeadName) -> Sharding:
    """The scalar head under the name its worker's checkpoints use, and its bias."""
    (weight,) = (param for param in sharding.params if param.name == "score.weight")
    held = sharding.patterns[weight.pattern]
    pattern: Pattern = tuple(Slice(piece.device, ((0, 1),), (0,)) for piece in held)
    rest = tuple(param for param in sharding.params if param is not weight)
    renamed = replace(weight, name=f"{head}.weight", tensor=f"{head}.weight")
    bias = StoredParam(f"{head}.bias", (1,), len(sharding.patterns), f"{head}.bias", (0,))
    return replace(sharding, params=(*rest, renamed, bias), patterns=(*sharding.patterns, pattern))


def _renamed(tensor: str) -> str:
    for old, new in _RENAMED:
        tensor = re.sub(f"^{old}", new, tensor)
    for old, new in _RENAMED_IN_LAYER:
        tensor = tensor.replace(old, new)
    return tensor
