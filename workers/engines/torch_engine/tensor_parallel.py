"""Tensor parallelism of the torch engine, for calls that do not train: evaluation and generation.

Each process of a rank holds the rows or columns of every matrix that its heads, feed-forward units
and words need (Shoeybi et al. 2019, "Megatron-LM", section 3), as the model of a smaller config
under the same names. What attention and the feed-forward give is added up over the processes;
logits are computed for each process's own words. Where a token is sampled they are gathered, so
that every process samples the same token, from the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from typing_extensions import override

from ....dataflow.errors import ConfigError, PlanError
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.architecture import empty_model, learn_padding
from ...models.file_weights import fill_first_weights, model_source
from ...models.spec import Head, HeadedModel, ModelSpec
from ...training.checkpoint_files import WholeTensorSource, fill_weights
from ...training.network import Outputs
from ..divided_network import (
    check_order,
    divided_sharding,
    gathered_module,
    join_processes,
    known_logits,
    tensor_cut,
    undivided,
    vocabulary_logprob,
    vocabulary_top,
)
from .backbone import is_lean
from .network import LeanNetwork

T = TypeVar("T")

_LOGITS_AT_ONCE = 1 << 26
"""Logits of this process that exist at once where whole rows of them are looked at."""


def check_divides(model: ModelSpec, tensor: int) -> None:
    """Refuse a model that tensor parallelism does not divide, from its config alone.

    Raises:
        ConfigError: If it is not decoded by this engine's own code.
        PlanError: If a size is not divisible.
    """
    config = model.config
    if not is_lean(empty_model(config).base_model):
        raise ConfigError(
            "engine=torch divides the matrices of models that it computes itself (Llama, Mistral, "
            "Qwen2, Qwen3 and SmolLM3 with full attention), not of this "
            f"'{config.model_type}'\n    leave "
            "tensor_parallel of its group at 1"
        )
    if (what := undivided(config, tensor)) is not None:
        raise PlanError(
            f"tensor_parallel={tensor} does not divide the {what} of this '{config.model_type}'\n"
            "    take a number that does"
        )


class TensorParallelNetwork(LeanNetwork):
    """A `LeanNetwork` of one process's heads, feed-forward units and words; it does not train."""

    is_divided = True

    def __init__(
        self, model: ModelSpec, head: Head, context: WorkerContext, group: dist.ProcessGroup
    ) -> None:
        module = part_of_module(model, head, context)
        super().__init__(module, head, context)
        self.vocabulary_group = group
        self.backbone.group = group
        self.is_first = context.tensor_rank == 0
        tensor, first = context.tensor_parallel, context.rank * context.tensor_parallel
        shapes = {
            param.name: tuple(
                size * tensor if dim == tensor_cut(param.name) else size
                for dim, size in enumerate(param.shape)
            )
            for param in self.layout.params
        }
        sizes: dict[str, Any] = {"tensor": tensor, "dtype": model.dtype}
        self.layout = divided_sharding(shapes, replicas=context.num_ranks, **sizes)
        self.rank_layout = divided_sharding(shapes, first=first, **sizes)

    @property
    @override
    def vocab_size(self) -> int:
        return super().vocab_size * self.vocabulary_group.size()

    @override
    def agreed(self, number: int) -> int:
        least = torch.tensor(number, device=self.device)
        dist.all_reduce(least, dist.ReduceOp.MIN, self.vocabulary_group)
        return int(least)

    @override
    def from_first(self, given: T) -> T:
        found = [given]
        dist.broadcast_object_list(
            found, group=self.vocabulary_group, group_src=0, device=self.device
        )
        return found[0]

    @override
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        fill_weights(self, WholeTensorSource(tensors))

    @override
    def whole_module(self, first: Callable[[], nn.Module]) -> nn.Module | None:
        return gathered_module(self, first)

    @override
    def head(self, states: Tensor) -> Tensor:
        """The logits of all words, [U, V], or a scalar head's [U, 1]; the same everywhere."""
        own = super().head(states)
        if self._is_scalar:
            return own
        parts = [torch.empty_like(own) for _ in range(self.vocabulary_group.size())]
        dist.all_gather(parts, own, self.vocabulary_group)
        return torch.cat(parts, 1)

    @override
    def token_logprob(
        self, outputs: Outputs, target: Tensor, temperature: float, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprob = target.new_empty(target.shape, dtype=torch.float32)
        entropy = logprob.new_empty(len(target))
        for rows, logits in self._logits(outputs, len(target)):
            logprob[rows], entropy[rows] = vocabulary_logprob(
                logits, target[rows], temperature, self.vocabulary_group
            )
        return logprob, entropy if needs_entropy else None

    @override
    def top_words(
        self, outputs: Outputs, num_words: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        count = len(outputs.values if outputs.entry is None else outputs.entry)
        found = [
            vocabulary_top(logits.float() / temperature, num_words, self.vocabulary_group)
            for _, logits in self._logits(outputs, count)
        ]
        logprob, words = zip(*found, strict=True)
        return torch.cat(logprob), torch.cat(words)

    def _logits(self, outputs: Outputs, count: int) -> Iterator[tuple[slice, Tensor]]:
        """This process's logits of the tokens asked for, some at a time, with their places."""
        weight: Tensor = self._linear.weight
        for rows in torch.arange(count).split(max(1, _LOGITS_AT_ONCE // len(weight))):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            states = outputs.values[part if outputs.entry is None else outputs.entry[part]]
            logits = F.linear(states.to(weight.dtype), weight, self._linear.bias)
            yield part, known_logits(logits, self.num_words, self.vocabulary_group)


def tensor_parallel_network(
    model: ModelSpec, context: WorkerContext, head: Head
) -> TensorParallelNetwork:
    """This process's part of a model with its first weights; all of the group must ask."""
    check_divides(model, context.tensor_parallel)
    join_processes(context)
    group = _tensor_groups(context.tensor_parallel, context.num_ranks, context.places)[context.rank]
    network = TensorParallelNetwork(model, head, context, group)
    if not context.places:
        fill_first_weights(network, model_source(model, head), head, model, context)
    return network


@lru_cache
def _tensor_groups(tensor: int, data: int, places: tuple[int, ...]) -> list[Any]:
    """The processes of each data-parallel rank; made once per process."""
    every = places or tuple(range(tensor * data))
    groups = [every[tensor * rank : tensor * (rank + 1)] for rank in range(data)]
    for group in groups:
        check_order(group)
    return [dist.new_group(list(group)) for group in groups]


def part_of_module(model: ModelSpec, head: Head, context: WorkerContext) -> nn.Module:
    """The module of a process's part, its weights not yet written, in evaluation mode."""
    config, tensor = copy.deepcopy(model.config), context.tensor_parallel
    config.head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    config.pad_token_id = None  # it may be another process's word
    for size in ("vocab_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(config, size, getattr(config, size) // tensor)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        whole = auto.from_config(
            config, dtype=getattr(torch, model.dtype), attn_implementation="sdpa"
        )
        learn_padding(whole)
        backbone = whole.base_model
        module = whole
        if head.is_scalar:
            linear = nn.Linear(config.hidden_size, 1, dtype=whole.dtype)
            module = HeadedModel(backbone, head.name, linear)
    module.to_empty(device=context.device)
    if not head.is_scalar:
        whole.tie_weights()
    rotary: Any = type(backbone.rotary_emb)
    backbone.rotary_emb = rotary(config=config).to(context.device)
    return module.eval()
