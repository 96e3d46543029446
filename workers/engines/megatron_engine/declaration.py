"""The Megatron engine as configuration, placement and planner know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....dataflow.errors import ConfigError
from ....planner.cost.engine_model import EngineModel
from ....planner.inputs.calls import CallKind
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import ModelShape, shape_of
from ..engine import EngineKind, Requirement, usual_options, why_not_as_usual

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""The `model_type`s that it computes."""

_NAME = "megatron"


def supported_shape(config: Any, dtype: str) -> ModelShape:
    """The sizes of a Hugging Face config, if this engine computes exactly what its model does."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"the Megatron engine has no model_type '{kind}'; it has {', '.join(FAMILIES)}. "
            "Train this model with engine=torch"
        )
    layers = getattr(config, "layer_types", None) or []
    computed: dict[str, tuple[Any, Any]] = {  # field -> what it is, and what it must be
        "hidden_act": (config.hidden_act, "silu"),
        "mlp_bias": (getattr(config, "mlp_bias", None) or None, None),
        "attention_bias": (kind != "qwen2" and bool(getattr(config, "attention_bias", 0)), False),
        "sliding_window": (config.sliding_window if kind in ("mistral", "mixtral") else None, None),
        "router_jitter_noise": (getattr(config, "router_jitter_noise", None) or None, None),
        "decoder_sparse_step": (getattr(config, "decoder_sparse_step", 1), 1),
        "mlp_only_layers": (getattr(config, "mlp_only_layers", None) or None, None),
        "layer_types": (next((name for name in layers if name != "full_attention"), None), None),
    }
    for field, (value, expected) in computed.items():
        if value != expected:
            raise ConfigError(
                f"the Megatron engine cannot compute a {kind} model with {field}={value!r}; "
                "train it with engine=torch"
            )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"the Megatron engine cannot compute rotary positions of type '{rope}'; it has "
            "default, linear and llama3. Train this model with engine=torch"
        )
    return shape_of(config.to_dict(), name=kind, dtype=dtype)


def _why_not(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    if kind == "generate":
        return "Megatron does not generate here"
    if layout.zero > 1:
        return "Megatron shares no more than the optimizer's state"
    if shape is not None:
        if shape.family and shape.family not in FAMILIES:
            return f"Megatron computes {', '.join(FAMILIES)} here, not '{shape.family}'"
        if shape.num_key_heads % layout.tp:
            return f"Megatron cannot divide {shape.num_key_heads} key heads by tp={layout.tp}"
        if layout.ep > 1 and not shape.num_experts:
            return f"{shape.name} has no experts to divide by ep={layout.ep}"
    if layout.cp > 1:
        return "Megatron's own attention has no context parallelism without Transformer Engine"
    return why_not_as_usual(_NAME, layout.model_copy(update={"ep": 1}), kind)


def _options(layout: Layout) -> Mapping[str, Any]:
    own = {
        "sequence_parallel": layout.sequence_parallel,
        "expert_parallel": layout.ep if layout.ep > 1 else None,
    }
    return usual_options(layout) | {name: value for name, value in own.items() if value}


MEGATRON = EngineKind(
    planned=EngineModel(
        name=_NAME,
        why_not=_why_not,
        zero_stages=(1,),
        reads_responses=True,
        draws_minibatches=True,
        views=True,
    ),
    roles={
        "policy": "penstock.workers.engines.megatron_engine.specs:MegatronPolicySpec",
        "value": "penstock.workers.engines.megatron_engine.specs:MegatronValueSpec",
        "reward_model": "penstock.workers.engines.megatron_engine.specs:MegatronRewardSpec",
    },
    needs=Requirement("megatron", "megatron-core", "penstock-rl[megatron]"),
    # Those that divide experts share a model as those that divide its matrices do.
    division=lambda layout: (layout.tp * layout.ep, layout.pp),
    options=_options,
    computes=lambda model: "by Megatron",
)
