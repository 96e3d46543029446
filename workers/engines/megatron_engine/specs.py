"""Recipes for workers that the Megatron engine computes. They generate nothing: others do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....dataflow.option_checks import check_range
from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import shape_of
from ...models.first_weights import fill_first_weights, model_source
from ...models.heads import Head
from ...models.spec import ModelSpec
from ...training.data_parallel import rank_group, worker_group
from ...training.network import LanguageNetwork
from ..roles import PolicyRecipe, Recipe, RewardRecipe, ValueRecipe
from ..sharded.divided_network import recompute_layers
from .declaration import check_family
from .groups import beside_experts, expert_ranks, join_groups
from .layout import megatron_sharding


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """How this engine makes the network of any role, of the `FAMILIES` in `declaration`.

    The other parallel sizes are the worker group's.
    """

    sequence_parallel: bool = False
    """Cut activations between tensor-parallel regions along the sequence."""
    expert_parallel: int = 1
    """How many of the processes that share a model (`executor.tensor_parallel`) divide a mixture's
    experts and share out a call's rows; tensor parallelism divides by the rest."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, which computes the rest again."""
    share_optimizer: bool = True
    """Share out the optimizer's state over data-parallel ranks (ZeRO stage 1)."""

    def check_options(self) -> None:
        """See `Recipe.check_options`."""
        check_range(self, "expert_parallel", at_least=1)

    def check_group(self, context: WorkerContext) -> None:
        """See `Recipe.check_group`."""
        assert isinstance(self, Recipe)
        beside, kind = beside_experts(context, self.expert_parallel), self.model.config.model_type
        experts, tensor = self.expert_parallel, beside.tensor_parallel
        layout = Layout(tp=tensor, pp=beside.pipeline_parallel, dp=experts, ep=experts)
        check_family(kind)
        shape = shape_of(self.model.config.to_dict(), name=kind, dtype=self.model.dtype)
        megatron_sharding(shape, layout, range(layout.num_devices))

    def make_network(self, model: ModelSpec, context: WorkerContext, head: Head) -> LanguageNetwork:
        """See `Recipe.make_network`."""
        network = self.empty_network(model, context, head)
        fill_first_weights(network, model_source(model, head), head, model, context)
        return network

    def empty_network(
        self, model: ModelSpec, context: WorkerContext, head: Head
    ) -> LanguageNetwork:
        """The same with weights as they were allocated."""
        beside = join_groups(context, self.expert_parallel)  # before megatron-core is imported
        from .model import build_backbone, supported_shape
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


@dataclass(frozen=True, kw_only=True)
class MegatronPolicySpec(MegatronOptions, PolicyRecipe):
    """Recipe for a policy."""


@dataclass(frozen=True, kw_only=True)
class MegatronValueSpec(MegatronOptions, ValueRecipe):
    """Recipe for a value model."""


@dataclass(frozen=True, kw_only=True)
class MegatronRewardSpec(MegatronOptions, RewardRecipe):
    """Recipe for a reward model. A row without any masked token scores 0."""
