"""A Hugging Face model divided over a mesh: tensor parallelism by name, then FSDP2 by layer.

The module is made without memory for its weights, divided, and only then given storage for its own
part, which the worker fills. Its forward is Hugging Face's own.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.modules import module as nn_module

from ....dataflow.errors import ConfigError, PlanError
from ...models.architecture import attention_of, learn_padding
from ...models.lora import LoraSpec, insert_adapters
from ...models.spec import Head, HeadedModel, ModelSpec
from ...training.host_memory import masked
from ..divided_network import recompute_layers, undivided
from ..torch_engine.backbone import is_lean
from .declaration import DIVIDED_FAMILIES
from .mesh import ATTENTION, FsdpMesh, attend


class FsdpModel(nn.Module):
    """Token ids to head outputs at chosen positions, in one forward.

    FSDP2 has a layer's weights whole only inside its forward. Those of the head, which belongs to
    no layer, it keeps whole from the forward until the backward pass is over, or `reshard_all`. So
    of a vocabulary that is not divided the logits are computed where they are needed, some at
    a time.
    """

    def __init__(self, module: nn.Module, backbone: nn.Module, head: nn.Module | None) -> None:
        super().__init__()
        self.module = module
        # Whether the family is one whose parts may be computed apart
        self.known = is_lean(backbone)
        self.divided = False  # Whether outputs are this process's part of the vocabulary
        self.apart = False  # Whether the forward ends before the head, which is computed outside
        # Whether whole weights are kept from the first micro-batch of a call on
        self.keeps_gathered = False
        self._parts: tuple[Any, Any] = (backbone, head)  # a tuple: they are registered in `module`

    @property
    def parts(self) -> list[FSDPModule]:
        """Modules that are gathered at once: each layer, and the rest."""
        return [part for part in self.modules() if isinstance(part, FSDPModule)]

    def keep_gathered(self) -> None:
        self.keeps_gathered = True
        for part in self.parts:
            part.set_reshard_after_forward(False)
            part.set_reshard_after_backward(False)

    def reshard_all(self) -> None:
        for part in self.parts:
            part.reshard()

    def forward(self, tokens: Tensor, reads: Tensor, **placed: Any) -> tuple[Tensor, Tensor]:
        """Outputs after the tokens at `reads`.

        Shapes: `tokens` i64[rows, T], right padded with -1; `reads` bool[rows, T]. What follows a
        token does not change its output, so padding needs no mask. Returns f[n, width], this
        process's part of the vocabulary, or [n, 1], or the states before a head that is computed
        outside; and a zero that depends on every weight. Without it the weights of a head of which
        nothing is read would have no gradient here, and processes would add up different lists of
        gradients.
        """
        backbone, head = self._parts
        rows = tokens.clamp(min=0)
        if head is None:
            whole: Any = self.module
            picked = masked(whole(input_ids=rows, use_cache=False).logits, reads)
            return picked, picked.sum().float() * 0
        states = backbone(input_ids=rows, use_cache=False, **placed).last_hidden_state
        first = states.reshape(-1)[0].float() * 0
        picked = masked(states, reads).to(head.weight.dtype)
        if self.apart:
            # What is read has a gradient of the head without it, which is as large as the head.
            if not len(picked):
                first = first + head.weight.reshape(-1)[0].float() * 0
            return picked, first
        picked = head(picked)
        if self.divided:
            picked = picked.clone()  # FSDP2 warns of outputs that are views, as a local part is
        return picked, first + picked.sum().float() * 0

    @property
    def head(self) -> nn.Linear:
        """The head that is computed outside, after a forward and before the next."""
        last = self._parts[1]
        assert self.apart
        return last


def build_model(
    spec: ModelSpec, mesh: FsdpMesh, head: Head, lora: LoraSpec, *, again: bool = False
) -> FsdpModel:
    model = _skeleton(spec, head, lora, cut=mesh.context is not None)
    tensor = 1 if mesh.tensor is None else mesh.tensor_size
    check_divided(
        spec,
        lora,
        model.known,
        shards=mesh.shards.num_ranks,
        tensor=tensor,
        cut=mesh.context is not None,
    )
    if mesh.tensor is not None:
        _divide_products(model, mesh)
    model.apart = model.known and not head.is_scalar and mesh.tensor is None
    if again:
        recompute_layers(_layers(model))
    _divide_rows(model, mesh)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    device = mesh.shards.device
    model.to_empty(device=device)  # buffers too, so they are put back
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return model


def _skeleton(spec: ModelSpec, head: Head, lora: LoraSpec, *, cut: bool) -> FsdpModel:
    """The whole module in evaluation mode, with parameters on the meta device."""
    auto: Any = transformers.AutoModelForCausalLM
    if cut:
        transformers.AttentionInterface.register(ATTENTION, attend)
    with _no_storage():
        config, dtype = spec.config, getattr(torch, spec.dtype)
        attention = ATTENTION if cut else attention_of(config)
        module: Any = auto.from_config(config, dtype=dtype, attn_implementation=attention)
        learn_padding(module)
        backbone = module.base_model
        last = module.get_output_embeddings() if is_lean(backbone) else None
        if head.is_scalar:
            last = nn.Linear(config.hidden_size, 1, dtype=torch.float32 if lora else dtype)
            module = HeadedModel(backbone, head.name, last)
        if lora:
            insert_adapters(module, lora, but=head.name)
            if head.is_scalar:
                module.get_submodule(head.name).requires_grad_()  # it is trained as well
    return FsdpModel(module.eval(), backbone, last)


@contextmanager
def _no_storage() -> Generator[None]:
    """Parameters that are registered inside have shape and dtype and no memory; buffers have."""

    def hook(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    register: Any = nn_module.register_module_parameter_registration_hook
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def check_divided(
    spec: ModelSpec, lora: LoraSpec, known: bool, *, shards: int, tensor: int, cut: bool
) -> None:
    """Refuse a model that cannot be divided as asked, without building anything of it."""
    config = spec.config
    names = ("num_local_experts", "num_experts")
    experts = next((found for name in names if (found := getattr(config, name, 0))), 0)
    if 0 < experts < shards:  # a row of their weights is an expert: others would hold nothing
        raise ConfigError(
            f"engine=fsdp divides the {experts} experts of this '{config.model_type}' among at "
            f"most as many processes, and {shards} share its model\n    have fewer processes share "
            "it: set executor.tensor_parallel, or a plan's dp under zero=2 and 3"
        )
    if cut and not known:
        raise ConfigError(
            f"engine=fsdp has context parallelism for {', '.join(DIVIDED_FAMILIES)}, where every "
            f"layer attends to whole rows, not for this '{config.model_type}'\n    leave "
            "engine.options.context_parallel out"
        )
    if tensor == 1:
        return
    if lora:
        raise ConfigError(
            "engine=fsdp does not divide the matrix products of adapters (model.lora.rank="
            f"{lora.rank})\n    leave engine.options.shards out, so that all processes that "
            "share the model divide it by rows"
        )
    if not known:
        raise ConfigError(
            f"engine=fsdp has tensor parallelism for llama, qwen2 and qwen3, not for "
            f"'{config.model_type}'; leave engine.options.shards out, so that all processes that "
            "share the model divide it by rows"
        )
    if (what := undivided(config, tensor)) is not None:
        raise PlanError(
            f"tensor parallelism {tensor} does not divide the {what} of this "
            f"'{config.model_type}'; take more shards"
        )


def _divide_products(model: FsdpModel, mesh: FsdpMesh) -> None:
    backbone: Any = model._parts[0]  # pyright: ignore[reportPrivateUsage]
    module: Any = model.module
    layer: dict[str, ParallelStyle] = {
        **{f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")},
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    tensor = mesh.mesh["tensor"]
    for block in backbone.layers:
        parallelize_module(block, tensor, layer)
    table = backbone.embed_tokens.weight
    parallelize_module(
        backbone, tensor, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    )
    head = getattr(module, "lm_head", None)
    if head is not None:
        model.divided = True
        tied = head.weight is table
        parallelize_module(module, tensor, {"lm_head": ColwiseParallel(output_layouts=Shard(-1))})
        if tied:
            head.weight = backbone.embed_tokens.weight


def _layers(model: FsdpModel) -> list[nn.Module]:
    """The modules that transformers says are never split: the layers of the backbone."""
    backbone: Any = model._parts[0]  # pyright: ignore[reportPrivateUsage]
    names: set[str] = set(getattr(backbone, "_no_split_modules", None) or ())
    return [part for part in backbone.modules() if type(part).__name__ in names]


def _divide_rows(model: FsdpModel, mesh: FsdpMesh) -> None:
    options: dict[str, Any] = {
        "mesh": mesh.mesh["shard"],
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    }
    for layer in _layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for part in model.parts:
        # Losses are divided already, and gloo knows no mean.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
