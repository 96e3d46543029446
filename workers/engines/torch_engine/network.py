"""A language model in one process: outputs at chosen positions of some rows.

`LeanNetwork` serves the families of `backbone` through the packed forward pass; `PlainNetwork`
serves every other architecture through the Hugging Face forward on right-padded rows. Both read and
train the same module, whose weights lie in `flat`.

A role with adapters trains them alone. Its frozen weights are those of its model, so a reference
that is the model as it was needs no copy of its own: both share one `FrozenWeights`.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import torch.utils.deterministic as _memory
from torch import Tensor, nn

from ....algorithms.ops.distributions import entropy_of_logprobs
from ....dataflow.errors import ConfigError
from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.resharding.sharding import Sharding, unsharded
from ...models.lora import AdapterDropout, LoraSpec, merge, save_adapter
from ...models.spec import Head, ModelSpec
from ...training.flat_parameters import FlatParameters
from ...training.host_memory import on_host
from ...training.network import M, MicroBatches, Outputs, R, WholeNetwork
from ...training.token_logprob import known_words, token_logprob, top_words
from .backbone import LeanBackbone, fused_names, is_lean
from .packing import pack_rows

_MEMORY: Any = _memory

T = TypeVar("T")


class FrozenWeights:
    """A model with frozen weights."""

    def __init__(self, module: nn.Module, flat: FlatParameters) -> None:
        self.module = module
        self.flat = flat
        flat.freeze()

    def shared(self) -> nn.Module:
        """A model of the same weights, not of copies of them, to which modules may be added."""
        kept = [*self.module.parameters(), *self.module.buffers()]
        return copy.deepcopy(self.module, {id(tensor): tensor for tensor in kept})


_SHARED: weakref.WeakValueDictionary[str, FrozenWeights] = weakref.WeakValueDictionary()


def frozen_weights(model: ModelSpec, context: WorkerContext, head: Head) -> FrozenWeights:
    """A model's frozen weights; those of a language model are loaded once in a process."""
    key = f"{model!r} on {context.device}"
    found = None if head.is_scalar else _SHARED.get(key)
    if found is None:
        module = head.whole_model(model, context, context.device)
        found = FrozenWeights(module, FlatParameters(module, lean_names(module, head)))
        model.check_weights({"weights": found.flat.data}, context)
        if not head.is_scalar:
            _SHARED[key] = found
    return found


@dataclass(frozen=True)
class SplitWeights:
    """Places of the weights of a network that does not change the model's own."""

    frozen: FrozenWeights  # The model's own
    trained: FlatParameters  # Those that are trained, sent and saved: the same, or adapters
    lora: LoraSpec = LoraSpec()  # What the adapters were made by; without a rank if there are none


class TorchNetwork(WholeNetwork):
    """Base of this engine's networks: a `LanguageNetwork` but for the forward pass."""

    engine = "the torch engine"
    num_words: int | None = None
    same_bits = False
    """Whether a CUDA device is to give the same bits each time."""
    _linear: Any

    def __init__(
        self,
        module: nn.Module,
        head: Head,
        context: WorkerContext,
        split: SplitWeights | None = None,
    ) -> None:
        if split is None:
            fused = lean_names(module, head)
            own = FlatParameters(module, fused, empty=is_empty(context, _parts(module, head)[0]))
        else:
            own = split.trained
        super().__init__(module, context, own)
        self._split = split
        self._is_scalar = head.is_scalar
        self._body, self._linear = _parts(module, head)
        self._dropout = AdapterDropout.of(module)

    def run(self, given: MicroBatches[M, R], *, backward: bool) -> None:
        with (
            _same_bits(self.same_bits and self.device.type == "cuda"),
            self._dropout.active(self.context, trains=backward),
        ):
            super().run(given, backward=backward)

    @property
    def vocab_size(self) -> int:
        """Words of a language model, those of all processes that divide it."""
        module: Any = self.module
        return module.config.vocab_size

    def frozen_weights(self) -> tuple[Sharding, dict[str, Tensor]] | None:
        if self._split is None or not self._split.lora:
            return None
        flat = self._split.frozen.flat
        tensors = {name: flat.parameter(name).detach() for name in flat.names}
        shapes = {name: tuple(one.shape) for name, one in tensors.items()}
        dtype = str(flat.data.dtype).removeprefix("torch.")
        return unsharded(shapes, range(self.context.num_processes), dtype=dtype), tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights by whole tensors of their names."""
        self.flat.load(tensors)

    def whole_module(self, first: Callable[[], nn.Module]) -> nn.Module | None:
        adapted = self._split is not None and self._split.lora
        return merge(copy.deepcopy(self.module)) if adapted else self.module

    def save_adapter(self, folder: Path, base: str | None) -> None:
        if self._split is not None and self._split.lora:
            save_adapter(folder, self.module, self._split.lora, self.tensors(), base)

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None = None) -> Outputs:
        if not bool(on_host(reads).any()):
            anchor = self.flat.parameter(self.flat.names[0]).reshape(-1)[0].float() * 0
            return Outputs(anchor.new_zeros(0, 1), anchor=anchor)
        return self._outputs(tokens, reads, shared)

    def checkpoint_activations(self) -> None:
        """Keep only each layer's input while training, from now on."""
        raise NotImplementedError

    def _outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None) -> Outputs:
        raise NotImplementedError

    def token_logprob(
        self, outputs: Outputs, target: Tensor, temperature: float, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        # `outputs` are the states before the head.
        return token_logprob(
            outputs.values,
            *known_words(self._linear, self.num_words),
            target,
            outputs.entry,
            temperature,
            needs_entropy=needs_entropy,
        )

    def top_words(
        self, outputs: Outputs, num_words: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        head = known_words(self._linear, self.num_words)
        logprob, words = top_words(outputs.values, *head, num_words, temperature)
        return outputs.spread(logprob), outputs.spread(words)


class LeanNetwork(TorchNetwork):
    """Packed forward pass of a supported backbone under a linear head."""

    shares_prompts = True
    is_first = True
    """Whether this is the first of the processes that divide the model."""

    def __init__(
        self,
        module: nn.Module,
        head: Head,
        context: WorkerContext,
        split: SplitWeights | None = None,
    ) -> None:
        super().__init__(module, head, context, split)
        weights = self.flat if split is None else split.frozen.flat
        self.backbone = LeanBackbone(self._body, weights, _PREFIX)
        if split is not None and split.lora:
            self.backbone.copy_adapters(split.trained)

    def _outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None) -> Outputs:
        pack = pack_rows(tokens, reads, shared, keys=self._dropout.keys_of(tokens))
        states = self.backbone.states(pack)
        return Outputs(self.head(states) if self._is_scalar else states, pack.entry)

    def checkpoint_activations(self) -> None:
        self.backbone.checkpointing = True

    def agreed(self, number: int) -> int:
        """The least of the numbers that the processes which divide the model come to."""
        return number

    def from_first(self, given: T) -> T:
        """Return what the first of the processes that divide the model gives."""
        return given

    def head(self, states: Tensor) -> Tensor:
        """The head's linear map, [U, D] -> [U, width]."""
        weight: Tensor = self._linear.weight
        return F.linear(states.to(weight.dtype), weight, self._linear.bias)


class PlainNetwork(TorchNetwork):
    """Hugging Face forward over right-padded rows."""

    sort_by_length = True

    def __init__(
        self,
        module: nn.Module,
        head: Head,
        context: WorkerContext,
        split: SplitWeights | None = None,
    ) -> None:
        super().__init__(module, head, context, split)
        ends = head.is_scalar or _ends_in(module, self._body, self._linear)
        self._makes_logits = not ends
        self._again: list[nn.Module] = []

    def _outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None) -> Outputs:
        used = reads.any(1)
        width = int((reads * torch.arange(1, reads.shape[1] + 1, device=reads.device)).max())
        rows = tokens[used, :width]
        mask = (rows >= 0).long()
        self._dropout.keys = self._dropout.keys_of(rows)
        # Layers compute activations again while they, without what is in them, train. What is in
        # them stays in evaluation mode, so there is no dropout; and generation needs their
        # caches, which they keep in evaluation mode alone.
        for layer in self._again:
            layer.training = torch.is_grad_enabled()
        called: Any = self.module if self._makes_logits else self._body
        try:
            out = called(input_ids=rows.clamp(min=0), attention_mask=mask, use_cache=False)
        finally:
            for layer in self._again:
                layer.training = False
        picked = reads[used, :width]
        if self._makes_logits:
            return Outputs(out.logits[picked])
        states = out.last_hidden_state[picked]
        if self._is_scalar:
            states = self._linear(states.to(self._linear.weight.dtype))
        return Outputs(states)

    def checkpoint_activations(self) -> None:
        from transformers.modeling_layers import GradientCheckpointingLayer

        module: Any = self.module
        if not module.supports_gradient_checkpointing:
            raise ConfigError(
                f"a '{module.config.model_type}' model cannot compute activations again\n"
                "    leave activation_checkpointing out"
            )
        module.gradient_checkpointing_enable({"use_reentrant": False})
        self._again = [m for m in module.modules() if isinstance(m, GradientCheckpointingLayer)]

    def token_logprob(
        self, outputs: Outputs, target: Tensor, temperature: float, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        # `outputs` are logits where the model scales them.
        if not self._makes_logits:
            return super().token_logprob(outputs, target, temperature, needs_entropy=needs_entropy)
        logits = outputs.values[:, : self.num_words]
        every = torch.log_softmax(logits.float() / temperature, dim=-1)
        logprob = every.gather(1, target.view(len(target), -1)).view(target.shape)
        return logprob, entropy_of_logprobs(every) if needs_entropy else None

    def top_words(
        self, outputs: Outputs, num_words: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        if not self._makes_logits:
            return super().top_words(outputs, num_words, temperature)
        logits = outputs.values[:, : self.num_words]
        best = torch.log_softmax(logits.float() / temperature, dim=-1).topk(num_words)
        return best.values, best.indices


def _ends_in(module: Any, backbone: Any, linear: Any) -> bool:
    """Whether a language model's logits are its head's linear map of the backbone's states."""
    # Some families scale or cap them; which ones is found by trying, bit for bit.
    tokens = torch.arange(4, device=linear.weight.device)[None] % linear.weight.shape[0]
    seen: list[Tensor] = []

    def note(called: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        seen.extend((given[0], made))

    hook = linear.register_forward_hook(note)
    try:
        with torch.no_grad():
            logits = module(input_ids=tokens, use_cache=False).logits
            states = backbone(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    return len(seen) == 2 and torch.equal(seen[0], states) and torch.equal(seen[1], logits)


def prepare_same_bits() -> None:
    # cuBLAS reads it at a process's first matrix product; one that is set already stays.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def _same_bits(on: bool) -> Generator[None]:
    """Run only operations that give the same bits each time; others raise, by name.

    Without it two runs of a step differ by rounding on a CUDA device: the gradient of attention's
    queries is added up in whatever order blocks end, and so are sums by index. The rest of what
    this engine does to train or evaluate is ordered.
    """
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = _MEMORY.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    _MEMORY.fill_uninitialized_memory = False  # nothing reads what was not written
    try:
        yield
    finally:
        _MEMORY.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


def make_network(
    module: nn.Module, head: Head, context: WorkerContext, split: SplitWeights | None = None
) -> TorchNetwork:
    kind = LeanNetwork if is_lean(_parts(module, head)[0]) else PlainNetwork
    return kind(module, head, context, split)


def is_empty(context: WorkerContext, backbone: nn.Module) -> bool:
    """Whether a model is built without its first weights: all come from the processes around it."""
    return bool(context.places) and is_lean(backbone)


def lean_names(module: nn.Module, head: Head) -> list[tuple[str, ...]]:
    backbone = _parts(module, head)[0]
    return fused_names(backbone, _PREFIX) if is_lean(backbone) else []


_PREFIX = "model."  # of a backbone's parameters, in a language model and under a scalar head


def _parts(module: nn.Module, head: Head) -> tuple[nn.Module, nn.Module]:
    """The part that maps tokens to hidden states, and the linear head on it."""
    whole: Any = module
    if head.is_scalar:
        return whole.model, whole.get_submodule(head.name)
    return whole.base_model, whole.get_output_embeddings()
