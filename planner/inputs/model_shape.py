"""The shape of a transformer: what its memory and time follow from.

Read from the fields of a Hugging Face config, so a model that can be trained can be planned for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...dataflow.errors import PlanError

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

# what a role's model ends in: logits over the vocabulary, or one number (value, score)
Head = Literal["vocabulary", "scalar"]

AtLeastOne = Annotated[int, Field(ge=1)]

_GATED = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3"}
_QKV_BIAS = {"qwen2", "qwen2_moe"}
_QK_NORM = {"qwen3", "qwen3_moe"}


class PlanData(BaseModel):
    """A part of a plan, or of what it is made from: frozen, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelShape(BaseModel, frozen=True):
    """Sizes of a decoder-only transformer with gated feed-forward and RMS norms."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str
    """Name in tables."""
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
    def _everyones_params(self) -> int:
        gate = 1 if self.shared_expert_size else 0
        shared = 3 * self.shared_expert_size + gate
        # The shared expert, the router, and two norms.
        return self.attention_params + self.hidden_size * (shared + self.num_experts + 2)

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

    def sent_bytes(self, head: Head = "vocabulary", *, frozen: bool = False) -> int:
        """Bytes of the weights that are trained, or with those that adapters stand on."""
        adapters = self.adapter_params * DTYPE_BYTES["float32"]
        return adapters + (
            self.num_params(head) * self.dtype_bytes if frozen or not adapters else 0
        )

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


# Names and shapes of logical parameters are those of a Hugging Face module, whatever an engine
# stores. Beside each stands how parallelism may cut it, so that `sharding.py` needs no list of
# names. All experts of a layer are one parameter, as in the module; in a checkpoint's files each
# has matrices of its own.

# which pipeline stages hold it: its layer's, the first, the last, or the first and the last
Place = Literal["layer", "first", "last", "ends"]


@dataclass(frozen=True, slots=True)
class LogicalParam:
    name: str  # the module's name for it
    shape: tuple[int, ...]  # as in the module: a projection is [outputs, inputs]
    # the dimension that tensor parallelism cuts; None if every rank has all of it
    cut_dim: int | None = None
    num_units: int = 1  # equal parts along `cut_dim` that are never cut: heads, or single rows
    place: Place = "layer"  # which pipeline stages hold it
    layer: int = 0  # its layer, if `place` is "layer"
    by_expert: bool = False  # whether its first dimension is a mixture's experts
    # equal blocks along `cut_dim` of `num_units` each that are cut alike, so that a rank has a part
    # of each: gate and up projections in one matrix
    num_blocks: int = 1


def logical_params(model: ModelShape, head: Head = "vocabulary") -> tuple[LogicalParam, ...]:
    """All parameters of a model, embedding first, head last.

    Their sizes add up to `model.num_params(head)`.
    A tied head is the embedding and is not listed; the embedding is then at both ends of the
    pipeline.
    """
    hidden, vocab = model.hidden_size, model.vocab_size
    shares = head == "vocabulary" and model.tied_embeddings
    table = (vocab, hidden)
    params = [
        LogicalParam("model.embed_tokens.weight", table, 0, vocab, "ends" if shares else "first")
    ]
    for layer in range(model.num_layers):
        params += _layer(model, layer)
    params.append(LogicalParam("model.norm.weight", (hidden,), place="last"))
    if head == "scalar":
        params.append(LogicalParam("score.weight", (1, hidden), place="last"))
    elif not shares:
        params.append(LogicalParam("lm_head.weight", table, 0, vocab, "last"))
    return tuple(params)


def adapter_params(model: ModelShape, rank: int, targets: Sequence[str] = ()) -> int:
    """Weights of low-rank adapters: A [rank, in] and B [out, rank] of each linear map.

    Not counted: a mixture's experts and router, which are no linear maps in transformers.
    """
    maps = [
        p
        for p in logical_params(model)
        if p.place == "layer" and len(p.shape) == 2 and not p.name.endswith(".mlp.gate.weight")
    ]
    ends = tuple(f".{target}.weight" for target in targets)
    return sum(rank * sum(p.shape) for p in maps if not targets or f".{p.name}".endswith(ends))


def _layer(model: ModelShape, layer: int) -> Iterator[LogicalParam]:
    prefix, hidden = f"model.layers.{layer}", model.hidden_size
    yield LogicalParam(f"{prefix}.input_layernorm.weight", (hidden,), layer=layer)
    heads = {"q": model.num_heads, "k": model.num_key_heads, "v": model.num_key_heads}
    for letter, num_heads in heads.items():
        name, width = f"{prefix}.self_attn.{letter}_proj", num_heads * model.head_dim
        yield LogicalParam(f"{name}.weight", (width, hidden), 0, num_heads, layer=layer)
        if model.qkv_bias:
            yield LogicalParam(f"{name}.bias", (width,), 0, num_heads, layer=layer)
    for letter in "qk" if model.qk_norm else "":
        name = f"{prefix}.self_attn.{letter}_norm.weight"
        yield LogicalParam(name, (model.head_dim,), layer=layer)
    shape = (hidden, model.num_heads * model.head_dim)
    yield LogicalParam(f"{prefix}.self_attn.o_proj.weight", shape, 1, model.num_heads, layer=layer)
    yield LogicalParam(f"{prefix}.post_attention_layernorm.weight", (hidden,), layer=layer)
    if not model.num_experts:
        yield from _feed_forward(f"{prefix}.mlp", hidden, model.intermediate_size, layer)
        return
    yield from _mixture(model, f"{prefix}.mlp", layer)


def _mixture(model: ModelShape, prefix: str, layer: int) -> Iterator[LogicalParam]:
    number, hidden, inner = model.num_experts, model.hidden_size, model.intermediate_size
    yield LogicalParam(f"{prefix}.gate.weight", (number, hidden), layer=layer)
    fused, experts = (number, 2 * inner, hidden), f"{prefix}.experts"
    yield LogicalParam(
        f"{experts}.gate_up_proj", fused, 1, inner, layer=layer, by_expert=True, num_blocks=2
    )
    shape = (number, hidden, inner)
    yield LogicalParam(f"{experts}.down_proj", shape, 2, inner, layer=layer, by_expert=True)
    if model.shared_expert_size:
        shared = f"{prefix}.shared_expert"
        yield from _feed_forward(shared, hidden, model.shared_expert_size, layer)
        yield LogicalParam(f"{shared}_gate.weight", (1, hidden), layer=layer)


def _feed_forward(prefix: str, hidden: int, inner: int, layer: int) -> Iterator[LogicalParam]:
    for name, shape, dim in (
        ("gate_proj", (inner, hidden), 0),
        ("up_proj", (inner, hidden), 0),
        ("down_proj", (hidden, inner), 1),
    ):
        yield LogicalParam(f"{prefix}.{name}.weight", shape, dim, inner, layer=layer)
