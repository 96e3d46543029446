"""Recipes for workers that the FSDP engine computes. They generate nothing: others do."""

from __future__ import annotations

from dataclasses import dataclass

from ....dataflow.option_checks import check_range
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.heads import Head
from ...models.spec import ModelSpec
from ..roles import PolicyRecipe, RewardRecipe, ValueRecipe
from .network import FsdpNetwork, make_network

__all__ = ["FsdpOptions", "FsdpPolicySpec", "FsdpRewardSpec", "FsdpValueSpec"]


@dataclass(frozen=True, kw_only=True)
class FsdpOptions:
    """How this engine makes the network of any role.

    Tensor parallelism is for Llama, Qwen2 and Qwen3.
    """

    shards: int | None = None
    """Of the processes that share a model (`executor.tensor_parallel`), how many divide its weights
    by rows and share out a call's rows; tensor parallelism divides by the rest. By default all."""

    def check_options(self) -> None:
        """See `Recipe.check_options`."""
        if self.shards is not None:
            check_range(self, "shards", at_least=1)

    def make_network(self, model: ModelSpec, context: WorkerContext, head: Head) -> FsdpNetwork:
        """See `Recipe.make_network`."""
        return make_network(model, context, head, self.shards)


@dataclass(frozen=True, kw_only=True)
class FsdpPolicySpec(FsdpOptions, PolicyRecipe):
    """Recipe for a policy."""


@dataclass(frozen=True, kw_only=True)
class FsdpValueSpec(FsdpOptions, ValueRecipe):
    """Recipe for a value model."""


@dataclass(frozen=True, kw_only=True)
class FsdpRewardSpec(FsdpOptions, RewardRecipe):
    """Recipe for a reward model. A row without any masked token scores 0."""
