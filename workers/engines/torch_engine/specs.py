"""Recipes for workers that the torch engine computes: each process has the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from ....dataflow.errors import ConfigError, PlanError
from ....dataflow.options import PositiveInt, option_class
from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.inputs.model_shape import adapter_params, shape_of
from ....planner.resharding.sharding import Sharding
from ...models.architecture import empty_model
from ...models.lora import LoraSpec, adapt
from ...models.spec import Head, ModelSpec
from ...models.tokenizer import TokenizerSpec
from ...rollout.generator_policy import GeneratorPolicy
from ...training.flat_parameters import FlatParameters
from ...training.host_memory import HostCopy, dropped, keep_few_kernels
from ...training.network import LanguageNetwork
from ..engine import MICRO_BATCH_TOKENS
from ..roles import PolicyRecipe, Recipe, RewardRecipe, ValueRecipe
from .declaration import tokens_alone
from .generator import TorchGenerator
from .network import (
    FrozenWeights,
    SplitWeights,
    TorchNetwork,
    frozen_weights,
    is_empty,
    lean_names,
    make_network,
    prepare_same_bits,
)
from .tensor_parallel import check_divides, part_of_module, tensor_parallel_network


def check_divided(
    model: ModelSpec, context: WorkerContext, *, trained: bool, lora: LoraSpec
) -> None:
    """Refuse a group whose ranks are several processes if they cannot share the model.

    Args:
        model: The model.
        context: Where the worker lives.
        trained: Whether it has an optimizer.
        lora: Its adapters, if it has any.

    Raises:
        ConfigError: If the engine divides no such model.
        PlanError: If the model's sizes are not divisible.
    """
    sharing = context.tensor_parallel * context.pipeline_parallel
    if sharing == 1:
        return
    if trained or lora or context.pipeline_parallel > 1:
        what = "trains" if trained else "has adapters on" if lora else "computes all layers of"
        raise ConfigError(
            f"'{context.role}' is on a group whose ranks are {sharing} processes each, and "
            f"the torch engine {what} a model whole in each process\n    leave "
            "executor.tensor_parallel and executor.pipeline_parallel of that group at 1, or set "
            "engine=fsdp or engine=megatron"
        )
    check_divides(model, context.tensor_parallel)


def check_generates(model: ModelSpec) -> None:
    """Refuse to sample from a model whose layers keep a state instead of keys and values."""
    try:
        whole = empty_model(model.config)
    except ConfigError:  # it is said with its key where models are looked at
        return
    if getattr(whole, "_is_stateful", False):
        raise ConfigError(
            f"the torch engine cannot generate with a '{model.kind}', whose layers "
            "keep a state instead of keys and values\n    set rollout=vllm"
        )


@dataclass(frozen=True, kw_only=True)
class TorchModel:
    """Options of this engine's network, of any role."""

    activation_checkpointing: bool = False
    """Keep only each layer's input while training, and compute the rest again: a third more work
    for a fraction of the memory."""
    deterministic: bool = False
    """Use kernels that give the same bits each time on a CUDA device, or refuse if there are none;
    on a CPU all do."""
    lora: LoraSpec = LoraSpec()
    """Adapters to train instead of the weights."""
    shares_weights: bool = False
    """Whether its frozen weights may be those that adapters of others stand on."""

    def check_group(self, context: WorkerContext) -> None:
        assert isinstance(self, Recipe)
        trained = self.optimizer_on(context) is not None
        check_divided(self.model, context, trained=trained, lora=self.lora)

    def tokens_at_once(self, context: WorkerContext, head: Head) -> int:
        """The plan's number, or else as if the model had the device for itself."""
        assert isinstance(self, Recipe)
        if self.micro_batch_tokens is not None or not context.device.startswith("cuda"):
            return Recipe.tokens_at_once(self, context, head)
        try:
            shape = shape_of(self.model.config.to_dict(), dtype=self.model.dtype)
        except PlanError:
            return MICRO_BATCH_TOKENS
        if self.lora:
            lora = self.lora.resolved()
            adapters = adapter_params(shape, lora.rank, lora.target_modules)
            shape = shape.model_copy(update={"adapter_params": adapters})
        return tokens_alone(
            shape,
            "scalar" if head.is_scalar else "vocabulary",
            trained=self.optimizer_on(context) is not None,
            checkpointing=self.activation_checkpointing,
            device_bytes=torch.cuda.get_device_properties(context.device).total_memory,
        )

    def make_network(self, model: ModelSpec, context: WorkerContext, head: Head) -> TorchNetwork:
        keep_few_kernels()
        if self.deterministic:
            prepare_same_bits()
        network: TorchNetwork
        if context.tensor_parallel > 1:
            network = tensor_parallel_network(model, context, head)
        else:
            network = self._network(model, context, head)
        network.same_bits = self.deterministic
        if self.activation_checkpointing:
            network.checkpoint_activations()
        return network

    def _network(self, model: ModelSpec, context: WorkerContext, head: Head) -> TorchNetwork:
        if not (self.lora or self.shares_weights):
            if is_empty(context, empty_model(model.config).base_model):
                return make_network(part_of_module(model, head, context), head, context)
            module = head.whole_model(model, context, context.device)
            return make_network(module, head, context)
        if self.lora and is_empty(context, empty_model(model.config).base_model):
            # It comes whenever the view wakes, so nothing else in the process may stand on it.
            whole = part_of_module(model, head, context)
            flat = FlatParameters(whole, lean_names(whole, head), empty=True)
            frozen = FrozenWeights(whole, flat)
        else:
            frozen = frozen_weights(model, context, head)
        module = frozen.shared()
        if not self.lora:
            return make_network(module, head, context, SplitWeights(frozen, frozen.flat))
        lora = self.lora.resolved()
        trained = adapt(module, lora, context.seed, but=head.name)
        if head.is_scalar:  # it is trained as well, in float32
            linear = head.first_weights(model, context).to(context.device)
            module.add_module(head.name, linear)
            trained |= {f"{head.name}.{part}": p for part, p in linear.named_parameters()}
        split = SplitWeights(frozen, FlatParameters(trained), lora)
        return make_network(module, head, context, split)


@option_class
class TorchPolicySpec(TorchModel, PolicyRecipe):
    """Recipe for a policy that is evaluated, trained and sampled from in one process."""

    max_decode_rows: PositiveInt = 512
    """Responses sampled at once; a bound on the memory of the key-value cache."""
    tokenizer: TokenizerSpec | None = None
    """Only to look for `Sampling.stop`; prompts and responses are token ids."""

    @override
    def check_group(self, context: WorkerContext) -> None:
        super().check_group(context)
        if context.methods & {"generate", "converse"}:
            check_generates(self.model)

    def make_generator(self, network: LanguageNetwork) -> TorchGenerator:
        assert isinstance(network, TorchNetwork)
        return TorchGenerator(
            network, self.end_ids, self.max_decode_rows, self.tokenizer, self.num_words
        )


@option_class
class TorchValueSpec(TorchModel, ValueRecipe):
    """Recipe for a value model."""


@option_class
class TorchRewardModelSpec(TorchModel, RewardRecipe):
    """Recipe for a reward model. A row without any masked token scores 0."""


@option_class
class TorchGeneratorSpec:
    """Recipe for a policy that generates and does nothing else (`rollout=torch`)."""

    model: ModelSpec
    """Architecture and first weights."""
    end_ids: tuple[int, ...]
    """Tokens that end a response: a tokenizer's `end.ids`."""
    num_words: int | None = None
    """See `TorchPolicySpec`."""
    max_decode_rows: PositiveInt = 512
    """Responses sampled at once; a bound on the memory of the key-value cache."""
    lora: LoraSpec = LoraSpec()
    """Adapters, which alone are received."""
    tokenizer: TokenizerSpec | None = None
    """See `TorchPolicySpec`."""

    def check_group(self, context: WorkerContext) -> None:
        check_divided(self.model, context, trained=False, lora=self.lora)
        check_generates(self.model)

    def build(self, context: WorkerContext) -> TorchGeneratorPolicy:
        network = TorchModel(lora=self.lora).make_network(self.model, context, Head("lm_head"))
        self.model.check_weights(network.tensors(), context)
        return TorchGeneratorPolicy(
            context,
            TorchGenerator(
                network, self.end_ids, self.max_decode_rows, self.tokenizer, self.num_words
            ),
        )


class TorchGeneratorPolicy(GeneratorPolicy):
    """See `TorchGeneratorSpec`. Slices of weights may be written where they lie."""

    def __init__(self, context: WorkerContext, generator: TorchGenerator) -> None:
        super().__init__(context, generator)
        self._network = generator.network
        self._dropped: HostCopy | None = None

    @override
    def weights_layout(self) -> Sharding:
        return self._network.layout

    @override
    def frozen_weights(self) -> tuple[Sharding, dict[str, Tensor]] | None:
        return self._network.frozen_weights()

    @override
    def sleep_empty(self) -> bool:
        if not self.context.places:  # what has come from other processes is kept
            return False
        if self._dropped is None:
            _, frozen = self.frozen_weights() or (None, {})
            self._dropped = dropped([*self._network.held_tensors(), *frozen.values()])
            self._gave_back(self._dropped.num_bytes)
        return True

    @override
    def wake(self) -> None:
        kept, self._dropped = self._dropped, None
        if kept is not None:
            kept.restore()
        super().wake()

    def local_tensors(self) -> dict[str, Tensor]:
        return self._network.tensors()

    @override
    def borrow(self, tensors: Mapping[str, Tensor]) -> None:
        self._network.flat.borrow(tensors)

    def weights_changed(self) -> None:
        """See `ModelWorker.weights_changed`: nothing here is derived from them."""
