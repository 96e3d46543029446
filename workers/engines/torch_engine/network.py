"""A language model in one process: outputs at chosen positions of some rows.

`LeanNetwork` serves Llama, Qwen2 and Qwen3 through the packed forward pass; `PlainNetwork` serves
every other architecture through the Hugging Face forward on right-padded rows. Both read and train
the same module, whose weights lie in `flat`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.heads import Head
from ...training.flat_parameters import FlatParameters
from ...training.network import Outputs
from ...training.whole_network import WholeNetwork
from .backbone import LeanBackbone, fused_names, is_lean
from .packing import pack_rows

__all__ = ["LeanNetwork", "PlainNetwork", "TorchNetwork", "make_network"]


class TorchNetwork(WholeNetwork):
    """What both have in common: a `LanguageNetwork` but for the forward pass."""

    engine = "the torch engine"

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None = None) -> Outputs:
        """See `LanguageNetwork.outputs`."""
        if not bool(reads.any()):
            anchor = self.flat.parameter(self.flat.names[0]).reshape(-1)[0].float() * 0
            return Outputs(anchor.new_zeros(0, 1), anchor=anchor)
        return self._outputs(tokens, reads, shared)

    def _outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None) -> Outputs:
        """The same if there is something to read."""
        raise NotImplementedError

    def token_logprob(
        self, outputs: Outputs, target: Tensor, temperature: float, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """See `LanguageNetwork.token_logprob`."""
        every = torch.log_softmax(outputs.values.float() / temperature, dim=-1)
        entry = outputs.entry
        if entry is None:
            entry = torch.arange(len(target), device=target.device)
        logprob = every[entry, target]
        if not needs_entropy:
            return logprob, None
        return logprob, -(every.exp() * every).sum(-1)[entry]


class LeanNetwork(TorchNetwork):
    """Packed forward pass of a supported backbone under a linear head."""

    def __init__(self, module: nn.Module, head: Head, context: WorkerContext) -> None:
        backbone, linear = _parts(module, head)
        flat = FlatParameters(module, fused_names(backbone, _PREFIX))
        super().__init__(module, context, flat)
        self.backbone = LeanBackbone(backbone, flat, _PREFIX)
        self._linear: Any = linear

    def _outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None) -> Outputs:
        pack = pack_rows(tokens, reads, shared)
        return Outputs(self.head(self.backbone.states(pack)), pack.entry)

    def head(self, states: Tensor) -> Tensor:
        """The head's linear map, [U, D] -> [U, width]."""
        return F.linear(states, self._linear.weight, self._linear.bias)


class PlainNetwork(TorchNetwork):
    """Hugging Face forward over right-padded rows."""

    sort_by_length = True

    def __init__(self, module: nn.Module, head: Head, context: WorkerContext) -> None:
        super().__init__(module, context)
        backbone, linear = _parts(module, head)
        self._backbone: Any = backbone if head.is_scalar else module
        self._linear = linear if head.is_scalar else None

    def _outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None) -> Outputs:
        del shared
        used = reads.any(1)
        width = int((reads * torch.arange(1, reads.shape[1] + 1, device=reads.device)).max())
        rows = tokens[used, :width]
        mask = (rows >= 0).long()
        out = self._backbone(input_ids=rows.clamp(min=0), attention_mask=mask, use_cache=False)
        picked = reads[used, :width]
        if self._linear is None:
            return Outputs(out.logits[picked])
        return Outputs(self._linear(out.last_hidden_state[picked]))


def make_network(module: nn.Module, head: Head, context: WorkerContext) -> TorchNetwork:
    """The best network for a whole model, as `Head.whole_model` makes one."""
    kind = LeanNetwork if is_lean(_parts(module, head)[0]) else PlainNetwork
    return kind(module, head, context)


_PREFIX = "model."  # of a backbone's parameters, in a language model and under a scalar head


def _parts(module: nn.Module, head: Head) -> tuple[nn.Module, nn.Module]:
    """The part that maps tokens to hidden states, and the linear head on it."""
    whole: Any = module
    if head.is_scalar:
        return whole.model, whole.get_submodule(head.name)
    return whole.base_model, whole.get_output_embeddings()
