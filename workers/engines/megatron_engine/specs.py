"""Recipes for workers that the Megatron engine computes. They generate nothing: others do."""

from __future__ import annotations

from dataclasses import dataclass

from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.inputs.layout import Layout
from ...models.first_weights import fill_first_weights, model_source
from ...models.heads import Head
from ...models.spec import ModelSpec
from ...training.data_parallel import worker_group
from ...training.network import LanguageNetwork
from ..roles import PolicyRecipe, RewardRecipe, ValueRecipe
from ..sharded.divided_network import recompute_layers
from .groups import join_groups
from .layout import megatron_sharding

__all__ = ["MegatronOptions", "MegatronPolicySpec", "MegatronRewardSpec", "MegatronValueSpec"]


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """How this engine makes the network of any role: Llama, Mistral, Qwen2 or Qwen3.

    The parallel sizes are the worker group's.
    """

    sequence_parallel: bool = False
    """Cut activations between tensor-parallel regions along the sequence."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, which computes the rest again."""
    share_optimizer: bool = True
    """Share out the optimizer's state over data-parallel ranks (ZeRO stage 1)."""

    def make_network(self, model: ModelSpec, context: WorkerContext, head: Head) -> LanguageNetwork:
        """See `Recipe.make_network`."""
        join_groups(context)  # before megatron-core is imported
        from .model import build_backbone, supported_shape
        from .network import MegatronNetwork

        shape = supported_shape(model.config, model.dtype)
        one = Layout(tp=context.tensor_parallel, pp=context.pipeline_parallel)
        layout = one.model_copy(update={"dp": context.num_ranks})
        everyone = range(context.num_processes)
        ours = sorted(worker_group(context).processes(context.rank))
        # Before the backbone: megatron-core asserts what these explain.
        stored = megatron_sharding(shape, layout, everyone, head=head.name)
        rank_stored = megatron_sharding(shape, one, ours, head=head.name)
        backbone = build_backbone(
            model.config, shape, context, head, sequence_parallel=self.sequence_parallel
        )
        if self.activation_checkpointing:
            recompute_layers(backbone.decoder.layers)
        network = MegatronNetwork(
            backbone,
            context,
            stored,
            rank_stored,
            tied=shape.tied_embeddings and not head.is_scalar,
            share_optimizer=self.share_optimizer,
        )
        fill_first_weights(network, model_source(model, head), head, model, context)
        return network


@dataclass(frozen=True, kw_only=True)
class MegatronPolicySpec(MegatronOptions, PolicyRecipe):
    """Recipe for a policy."""


@dataclass(frozen=True, kw_only=True)
class MegatronValueSpec(MegatronOptions, ValueRecipe):
    """Recipe for a value model."""


@dataclass(frozen=True, kw_only=True)
class MegatronRewardSpec(MegatronOptions, RewardRecipe):
    """Recipe for a reward model. A row without any masked token scores 0."""
