"""A model as its workers see it: outputs at chosen positions of some rows.

`LeanNetwork` serves Llama, Qwen2 and Qwen3 through the packed forward pass; `PlainNetwork` serves
every other architecture through the Hugging Face forward on right-padded rows. Both read and train
the same module, whose weights lie in `flat`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...training.flat_parameters import FlatParameters
from .backbone import LeanBackbone, fused_names, is_lean
from .packing import pack_rows

__all__ = ["LeanNetwork", "Network", "PlainNetwork", "make_network"]


class Network(Protocol):
    """Outputs (logits, values or scores before any reduction) of a model with flat weights."""

    flat: FlatParameters

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Head outputs after the tokens at `reads`.

        Args:
            tokens: i64[rows, T], right padded with -1.
            reads: bool[rows, T].
            shared: i64[rows]; prompt lengths. Equal prompts of consecutive rows may be computed
                once.

        Returns:
            Outputs [U, width] at the distinct positions, and for each True of `reads`, row by row,
            its index among them, i64[n].
        """
        ...


class LeanNetwork:
    """Packed forward pass of a supported backbone under a linear head."""

    def __init__(
        self, backbone: nn.Module, flat: FlatParameters, prefix: str, head: nn.Module
    ) -> None:
        self.flat = flat
        self.backbone = LeanBackbone(backbone, flat, prefix)
        self._head: Any = head

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """See `Network.outputs`."""
        pack = pack_rows(tokens, reads, shared)
        return self.head(self.backbone.states(pack)), pack.entry

    def head(self, states: Tensor) -> Tensor:
        """The head's linear map, [U, D] -> [U, width]."""
        return F.linear(states, self._head.weight, self._head.bias)


class PlainNetwork:
    """Hugging Face forward over right-padded rows.

    Args:
        module: A causal language model, or a `ValueNetwork` or `ScoreNetwork`.
        flat: Its weights.
        head: None if `module` returns logits; else applied to the last hidden states of
            `module.model`.
    """

    def __init__(self, module: nn.Module, flat: FlatParameters, head: nn.Module | None) -> None:
        self.flat = flat
        self.module: Any = module
        self._head = head

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """See `Network.outputs`; `shared` is not used."""
        del shared
        used = reads.any(1)
        width = int((reads * torch.arange(1, reads.shape[1] + 1, device=reads.device)).max())
        rows = tokens[used, :width]
        mask = (rows >= 0).long()
        backbone = self.module if self._head is None else self.module.model
        out = backbone(input_ids=rows.clamp(min=0), attention_mask=mask, use_cache=False)
        picked = (out.logits if self._head is None else out.last_hidden_state)[reads[used, :width]]
        outputs = picked if self._head is None else self._head(picked)
        return outputs, torch.arange(len(outputs), device=outputs.device)


def make_network(module: nn.Module, backbone: nn.Module, head: nn.Module | None) -> Network:
    """The best network for a module.

    Args:
        module: The whole model; its weights move into one flat buffer.
        backbone: The part that maps tokens to hidden states.
        head: A linear head inside `module`, or None for a language model's own.
    """
    if not is_lean(backbone):
        return PlainNetwork(module, FlatParameters(module), head)
    prefix = next(name for name, part in module.named_modules() if part is backbone) + "."
    flat = FlatParameters(module, fused_names(backbone, prefix))
    whole: Any = module
    return LeanNetwork(
        backbone, flat, prefix, whole.get_output_embeddings() if head is None else head
    )
