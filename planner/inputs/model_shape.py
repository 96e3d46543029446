"""The shape of a transformer: what its memory and time follow from.

Read from the fields of a Hugging Face config, so a model that can be trained can be planned for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...dataflow.errors import PlanError

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

# what a role's model ends in: logits over the vocabulary, or one number (value, score)
Head = Literal["vocabulary", "scalar"]

AtLeastOne = Annotated[int, Field(ge=1)]

_GATED = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"}
_QKV_BIAS = {"qwen2", "qwen2_moe"}
_QK_NORM = {"qwen3", "qwen3_moe"}


class ModelShape(BaseModel, frozen=True):
    """Sizes of a decoder-only transformer with gated feed-forward and RMS norms."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str
    """What tables call it."""
    hidden_size: AtLeastOne
    """Width of the residual stream."""
    num_layers: AtLeastOne
    """Decoder layers."""
    num_heads: AtLeastOne
    """Query heads."""
    num_key_heads: AtLeastOne
    """Key-value heads."""
    head_dim: AtLeastOne
    """Width of one head."""
    intermediate_size: AtLeastOne
    """Width of the feed-forward; of one expert, in a mixture."""
    vocab_size: AtLeastOne
    """Tokens, as the embedding has them."""
    tied_embeddings: bool = False
    """Whether the head is the embedding."""
    qkv_bias: bool = False
    """Whether query, key and value projections have biases."""
    qk_norm: bool = False
    """Whether every head's query and key are normalized."""
    num_experts: int = Field(default=0, ge=0)
    """Experts per layer; 0 for a dense model."""
    experts_per_token: int = Field(default=0, ge=0)
    """Experts that compute each token."""
    shared_expert_size: int = Field(default=0, ge=0)
    """Width of the expert, with a gate of its own, that computes every token beside the chosen
    ones; 0 if there is none."""
    dtype: str = "bfloat16"
    """Data type of weights and activations."""
    family: str = ""
    """The Hugging Face `model_type` it was read from; "" for one written down by hand."""
    adapter_params: int = Field(default=0, ge=0)
    """Weights of the adapters (LoRA), in float32, that are trained instead of these; 0 if these
    are."""

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def attention_params(self) -> int:
        qkv = (self.num_heads + 2 * self.num_key_heads) * self.head_dim
        out = self.num_heads * self.head_dim * self.hidden_size
        extra = (qkv if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        return self.hidden_size * qkv + out + extra

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def shared_expert_params(self) -> int:
        gate = 1 if self.shared_expert_size else 0
        return self.hidden_size * (3 * self.shared_expert_size + gate)

    @property
    def _everyones_params(self) -> int:
        router = self.hidden_size * self.num_experts
        return self.attention_params + self.shared_expert_params + router + 2 * self.hidden_size

    @property
    def layer_params(self) -> int:
        return self._everyones_params + self.expert_params * max(self.num_experts, 1)

    @property
    def active_layer_params(self) -> int:
        return self._everyones_params + self.expert_params * max(self.experts_per_token, 1)

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.hidden_size

    def head_params(self, head: Head) -> int:
        if head == "scalar":
            return self.hidden_size
        return 0 if self.tied_embeddings else self.embedding_params

    def num_params(self, head: Head = "vocabulary") -> int:
        layers = self.num_layers * self.layer_params + self.hidden_size
        return self.embedding_params + layers + self.head_params(head)

    def sent_bytes(self, head: Head = "vocabulary") -> int:
        if self.adapter_params:
            return self.adapter_params * DTYPE_BYTES["float32"]
        return self.num_params(head) * self.dtype_bytes

    def active_params(self, head: Head = "vocabulary") -> int:
        out = self.hidden_size if head == "scalar" else self.embedding_params
        return self.num_layers * self.active_layer_params + out

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_key_heads * self.head_dim * self.dtype_bytes


def shape_of(
    architecture: Mapping[str, Any], *, name: str = "", vocab_size: int | None = None,
    dtype: str = "bfloat16",
) -> ModelShape:  # fmt: skip
    """The shape that a Hugging Face config describes."""
    kind = str(architecture.get("model_type", ""))
    if kind not in _GATED:
        raise PlanError(
            f"cannot plan for model_type '{kind}'; known are {', '.join(sorted(_GATED))}"
        )
    if dtype not in DTYPE_BYTES:
        raise PlanError(f"dtype is '{dtype}'; expected one of {', '.join(DTYPE_BYTES)}")
    fields = dict(architecture)
    if vocab_size is not None:
        fields.setdefault("vocab_size", vocab_size)

    def size(key: str, default: int | None = None) -> int:
        value = fields.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or value < 1:
            raise PlanError(f"model '{name or kind}': {key} is {value!r}; expected an int above 0")
        return value

    heads = size("num_attention_heads")
    experts = int(fields.get("num_local_experts") or fields.get("num_experts") or 0)
    width = "moe_intermediate_size" if fields.get("moe_intermediate_size") else "intermediate_size"
    return ModelShape(
        name=name or kind,
        hidden_size=size("hidden_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=heads,
        num_key_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", size("hidden_size") // heads),
        intermediate_size=size(width),
        vocab_size=size("vocab_size"),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=bool(fields.get("attention_bias", fields.get("qkv_bias", kind in _QKV_BIAS))),
        qk_norm=kind in _QK_NORM,
        num_experts=experts,
        experts_per_token=size("num_experts_per_tok") if experts else 0,
        shared_expert_size=int(fields.get("shared_expert_intermediate_size") or 0),
        dtype=dtype,
        family=kind,
    )
