"""Shapes and calls shared by the tests of the memory model."""

from __future__ import annotations

from typing import Any

from penstock.planner.inputs.calls import Call, CallKind, Lengths
from penstock.planner.inputs.model_shape import ModelShape

from ..shapes import LLAMA_7B, model_of

TINY = model_of("tiny", 64, 2, 4, 2, 128, vocab_size=256, dtype="float32")
MIXTURE = model_of("mixture", 1024, 4, 16, 4, 512, num_experts=8, experts_per_token=2)


def make_call(kind: CallKind = "train", model: ModelShape = LLAMA_7B, **changes: Any) -> Call:
    """1024 rows of 1024 + 1024 tokens, one pass in 8 updates; `changes` are fields of `Call`."""
    fields: dict[str, Any] = {
        "name": f"actor.{kind}", "role": "actor", "kind": kind, "model": model,
        "head": "vocabulary", "trained": True, "num_sequences": 1024,
        "prompt": Lengths.constant(1024), "response": Lengths.constant(1024), "updates": 8,
    }  # fmt: skip
    return Call(**fields | changes)
