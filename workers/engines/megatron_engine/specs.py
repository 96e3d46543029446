"""Recipes for workers that the Megatron engine computes. They generate nothing: others do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from ....dataflow.errors import PlanError
from ....dataflow.options import PositiveInt, option_class
from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import ModelShape
from ....planner.resharding.sharding import Pattern, Sharding, Slice, StoredParam, shard
from ....planner.resharding.storage import concatenate, interleave_qkv
from ...models.file_weights import fill_first_weights, model_source
from ...models.spec import Head, HeadName, ModelSpec
from ...training.data_parallel import rank_group, worker_group
from ...training.network import LanguageNetwork
from ..divided_network import recompute_layers
from ..roles import PolicyRecipe, Recipe, RewardRecipe, ValueRecipe
from .declaration import supported_shape
from .groups import beside_experts, expert_ranks, join_groups

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
    """Return which process of a Megatron group stores what, and where in which tensor.

    - Query, key and value rows lie in `linear_qkv`, key-value head by key-value head: the queries
      that share it, its key, its value.
    - Gate then up rows lie in `linear_fc1`; experts lie as in the checkpoint's module.
    - A scalar head and its bias are whole on every tensor-parallel process of the last stage.
    """
    if layout.ep > 1 and not model.num_experts:
        raise PlanError(
            f"layout '{layout}' divides experts, and model '{model.name}' has none; take ep=1"
        )
    if model.num_key_heads % layout.tp:
        raise PlanError(
            f"tp={layout.tp} does not divide {model.num_key_heads} key heads, as the Megatron "
            f"engine needs (model '{model.name}'); take a tp that does"
        )
    whole = shard(model, layout, devices, head="vocabulary" if head == "lm_head" else "scalar")
    if head != "lm_head":
        whole = _scalar_head(whole, head)
    fused = interleave_qkv(whole, model.head_dim, "linear_qkv")
    fused = concatenate(fused, ("gate_proj", "up_proj"), "linear_fc1")
    params = tuple(replace(param, tensor=_renamed(param.tensor)) for param in fused.params)
    return replace(fused, params=params)


def _scalar_head(sharding: Sharding, head: HeadName) -> Sharding:
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


@option_class
class MegatronOptions:
    """Options of this engine's network, of any role, for the `FAMILIES` in `declaration`.

    The other parallel sizes are the worker group's.
    """

    sequence_parallel: bool = False
    """Cut activations between tensor-parallel regions along the sequence."""
    expert_parallel: PositiveInt = 1
    """Number of a model's processes (`executor.tensor_parallel`) which divide a mixture's
    experts and share out a call's rows; tensor parallelism divides by the rest."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, which computes the rest again."""
    share_optimizer: bool = True
    """Share out the optimizer's state over data-parallel ranks (ZeRO stage 1)."""

    def check_group(self, context: WorkerContext) -> None:
        assert isinstance(self, Recipe)
        beside = beside_experts(context, self.expert_parallel)
        experts, tensor = self.expert_parallel, beside.tensor_parallel
        layout = Layout(tp=tensor, pp=beside.pipeline_parallel, dp=experts, ep=experts)
        shape = supported_shape(self.model.config, self.model.dtype)
        megatron_sharding(shape, layout, range(layout.num_devices))

    def make_network(self, model: ModelSpec, context: WorkerContext, head: Head) -> LanguageNetwork:
        network = self.empty_network(model, context, head)
        fill_first_weights(network, model_source(model, head), head, model, context)
        return network

    def empty_network(
        self, model: ModelSpec, context: WorkerContext, head: Head
    ) -> LanguageNetwork:
        """The same with weights as they were allocated."""
        beside = join_groups(context, self.expert_parallel)  # before megatron-core is imported
        from .model import build_backbone
        from .network import MegatronNetwork

        shape = supported_shape(model.config, model.dtype)
        experts = self.expert_parallel
        tensor, stages = beside.tensor_parallel, beside.pipeline_parallel
        one = Layout(tp=tensor, pp=stages, dp=experts, ep=experts)
        layout = one.model_copy(update={"dp": beside.num_ranks})
        everyone = range(context.num_processes)
        ours = sorted(worker_group(context).processes(context.rank))
        # Before the backbone: megatron-core asserts what these explain.
        stored = megatron_sharding(shape, layout, everyone, head=head.name)
        rank_stored = megatron_sharding(shape, one, ours, head=head.name)
        backbone = build_backbone(
            model.config,
            shape,
            beside,
            head,
            sequence_parallel=self.sequence_parallel,
            experts=expert_ranks(torch.device(context.device)).group if experts > 1 else None,
        )
        if self.activation_checkpointing:
            recompute_layers(backbone.decoder.layers)
        return MegatronNetwork(
            backbone,
            beside,
            rank_group(context, torch.device(context.device)),
            stored,
            rank_stored,
            tied=shape.tied_embeddings and not head.is_scalar,
            share_optimizer=self.share_optimizer,
        )


@option_class
class MegatronPolicySpec(MegatronOptions, PolicyRecipe):
    """Recipe for a policy."""


@option_class
class MegatronValueSpec(MegatronOptions, ValueRecipe):
    """Recipe for a value model."""


@option_class
class MegatronRewardSpec(MegatronOptions, RewardRecipe):
    """Recipe for a reward model. A row without any masked token scores 0."""
