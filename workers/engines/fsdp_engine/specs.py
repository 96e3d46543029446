"""Recipes for workers that the FSDP engine computes. They generate nothing: others do."""

from __future__ import annotations

from torch import nn

from ....dataflow.options import PositiveInt, option_class
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.file_weights import fill_first_weights, model_source
from ...models.lora import LoraSpec, first_adapters, is_adapter
from ...models.spec import Head, ModelSpec
from ...training.checkpoint_files import TensorSource, WholeTensorSource, fill_weights
from ..roles import PolicyRecipe, Recipe, RewardRecipe, ValueRecipe
from .declaration import DIVIDED_FAMILIES
from .mesh import check_division, join_mesh
from .model import FsdpModel, build_model, check_divided
from .network import FsdpNetwork


@option_class
class FsdpOptions:
    """Options of this engine's network, of any role.

    Tensor parallelism is for Llama, Qwen2 and Qwen3.
    """

    shards: PositiveInt | None = None
    """Number of a model's processes (`executor.tensor_parallel`) which divide its weights
    by rows and share out a call's rows; tensor parallelism divides by the rest. By default all."""
    context_parallel: PositiveInt = 1
    """Shards that share every row, each computing a part of its tokens; divides `shards`. For
    Llama, Qwen2 and Qwen3."""
    reshard_after_forward: bool = True
    """Whether a layer's gathered weights are given up after its forward pass and gathered again
    going backward (ZeRO stage 3), or kept until the call ends (stage 2)."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, which computes the rest again."""
    lora: LoraSpec = LoraSpec()
    """Adapters to train instead of the weights."""

    def check_group(self, context: WorkerContext) -> None:
        assert isinstance(self, Recipe)
        size = context.tensor_parallel
        shards = self.shards or size
        check_division(context, shards, self.context_parallel)
        check_divided(
            self.model,
            self.lora,
            self.model.config.model_type in DIVIDED_FAMILIES,
            shards=shards,
            tensor=size // shards,
            cut=self.context_parallel > 1,
        )

    def make_network(self, model: ModelSpec, context: WorkerContext, head: Head) -> FsdpNetwork:
        mesh = join_mesh(context, self.shards, self.context_parallel)
        lora = self.lora.resolved()
        module = build_model(model, mesh, head, lora, again=self.activation_checkpointing)
        if not self.reshard_after_forward:
            module.keep_gathered()
        network = FsdpNetwork(module, mesh, context, model, head, lora)
        source = _source(model, module, head)
        if network.frozen is None:
            fill_first_weights(network, source, head, model, context)
        else:
            fill_weights(network.frozen, source, exact=False)
            model.check_weights(network.frozen.tensors(), context)
            params = network.layout.params
            shapes = {param.name: param.shape for param in params if is_adapter(param.name)}
            trained = first_adapters(lora, context.seed, shapes)
            if head.is_scalar:
                linear = head.first_weights(model, context)
                trained |= {f"{head.name}.{part}": p for part, p in linear.named_parameters()}
            fill_weights(network, WholeTensorSource(trained))
        return network


def _source(spec: ModelSpec, model: FsdpModel, head: Head) -> TensorSource:
    """The source of weights; of families whose files are known only what a process needs."""
    if model.known:
        return model_source(spec, head)
    if not head.is_scalar:
        return WholeTensorSource(dict(spec.causal_lm("cpu").named_parameters()))
    backbone: nn.Module = spec.backbone("cpu")
    return WholeTensorSource(
        {f"model.{name}": value for name, value in backbone.named_parameters()}
    )


@option_class
class FsdpPolicySpec(FsdpOptions, PolicyRecipe):
    """Recipe for a policy."""


@option_class
class FsdpValueSpec(FsdpOptions, ValueRecipe):
    """Recipe for a value model."""


@option_class
class FsdpRewardSpec(FsdpOptions, RewardRecipe):
    """Recipe for a reward model. A row without any masked token scores 0."""
