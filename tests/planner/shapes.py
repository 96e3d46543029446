"""Sizes of models that tests of the planner share."""

from __future__ import annotations

from typing import Any

from penstock.planner.inputs.model_shape import ModelShape


def model_of(
    name: str, hidden: int, layers: int, heads: int, key_heads: int, inner: int, **more: Any
) -> ModelShape:
    """A model of these sizes; `more` are further fields, by default those of LLaMA-2."""
    sizes: dict[str, Any] = {"head_dim": hidden // heads, "vocab_size": 32000, **more}
    return ModelShape(
        name=name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_key_heads=key_heads,
        intermediate_size=inner,
        **sizes,
    )


def llama(billions: int) -> ModelShape:
    sizes = {
        1: (2048, 16, 32, 8, 8192),
        7: (4096, 32, 32, 32, 11008),
        13: (5120, 40, 40, 40, 13824),
        70: (8192, 80, 64, 8, 28672),
    }
    return model_of(f"llama-{billions}b", *sizes[billions])


LLAMA_7B, LLAMA_70B = llama(7), llama(70)
