"""Shapes and calls shared by the tests of the memory model."""

from __future__ import annotations

from typing import Any

from penstock.planner.inputs.calls import Call, CallKind, Lengths
from penstock.planner.inputs.model_shape import ModelShape

LLAMA_7B = ModelShape(
    name="llama-2-7b", hidden_size=4096, num_layers=32, num_heads=32, num_key_heads=32,
    head_dim=128, intermediate_size=11008, vocab_size=32000,
)  # fmt: skip
LLAMA_70B = ModelShape(
    name="llama-2-70b", hidden_size=8192, num_layers=80, num_heads=64, num_key_heads=8,
    head_dim=128, intermediate_size=28672, vocab_size=32000,
)  # fmt: skip
TINY = ModelShape(
    name="tiny", hidden_size=64, num_layers=2, num_heads=4, num_key_heads=2, head_dim=16,
    intermediate_size=128, vocab_size=256, dtype="float32",
)  # fmt: skip
MIXTURE = ModelShape(
    name="mixture", hidden_size=1024, num_layers=4, num_heads=16, num_key_heads=4, head_dim=64,
    intermediate_size=512, vocab_size=32000, num_experts=8, experts_per_token=2,
)  # fmt: skip


def make_call(kind: CallKind = "train", model: ModelShape = LLAMA_7B, **changes: Any) -> Call:
    """1024 rows of 1024 + 1024 tokens, one pass in 8 updates; `changes` are fields of `Call`."""
    fields: dict[str, Any] = {
        "name": f"actor.{kind}", "role": "actor", "kind": kind, "model": model,
        "head": "vocabulary", "trained": True, "num_sequences": 1024,
        "prompt": Lengths.constant(1024), "response": Lengths.constant(1024), "updates": 8,
    }  # fmt: skip
    return Call(**fields | changes)
