"""Recipes for workers that the Megatron engine computes. They generate nothing: others do."""

from __future__ import annotations

from dataclasses import dataclass

from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.heads import Head
from ...models.spec import ModelSpec
from ...training.network import LanguageNetwork
from ..roles import PolicyRecipe, RewardRecipe, ValueRecipe
from .groups import join_groups

__all__ = ["MegatronOptions", "MegatronPolicySpec", "MegatronRewardSpec", "MegatronValueSpec"]


@dataclass(frozen=True, kw_only=True)
class MegatronOptions:
    """How this engine makes the network of any role: Llama, Qwen2 or Qwen3.

    The parallel sizes are the worker group's.
    """

    sequence_parallel: bool = False
    """Cut activations between tensor-parallel regions along the sequence."""
    share_optimizer: bool = True
    """Share out the optimizer's state over data-parallel ranks (ZeRO stage 1)."""

    def make_network(self, model: ModelSpec, context: WorkerContext, head: Head) -> LanguageNetwork:
        """See `Recipe.make_network`."""
        join_groups(context)  # before megatron-core is imported
        from .network import make_network

        return make_network(
            model,
            context,
            head,
            sequence_parallel=self.sequence_parallel,
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
