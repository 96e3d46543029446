"""Checks that the fields of a Hugging Face config describe a model that can be computed.

transformers takes any key, and most values, and fails later or computes something else. What a
user writes is checked key by key; a folder's own config.json may have keys that others put there,
and only what it says wrongly is refused.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...dataflow.errors import ConfigError, nearest

_LARGEST: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 21,
    "moe_intermediate_size": 1 << 21,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 28,
    "num_local_experts": 1 << 14,
    "num_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
}
"""Sizes, and more than any model has: what is beyond is a slip of the finger. Of experts there may
be none; of all others there is at least 1."""

_FILE = "config.json"
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_COMMON_ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu")
"""Known without a look at the list of transformers, which takes seconds to import."""

_ALSO = (
    *("model_type", "torch_dtype", "tie_word_embeddings", "use_cache", "head_dim", "rope_theta"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "rope_scaling", "partial_rotary_factor"),
)
"""Keys that models read beside the fields that their config classes declare."""

_OF_THE_LOADER = re.compile(
    r"_.*|(attn|experts)_implementation|auto_map|(base_model_)?(ep|pp|tp)_plan|code_revision|"
    r"custom_pipelines|device_map|(distributed|fusion|kernel)_config|gradient_checkpointing|"
    r"loss_type|name_or_path|output_(attentions|hidden_states|router_logits)|pruned_heads|"
    r"(use_)?return_dict|sub_configs|torchscript|transformers_weights|trust_remote_code|use_kernels"
)
"""Keys that say how or by what code a model is loaded and computed, which no config may choose: an
attention of "org/kernel" would be fetched from the hub and run."""

_TYPE_FAULT = re.compile(r"Field '(\w+)' expected ([\w| ]+), got")
_TYPES = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text"}


class _Fields:
    """The fields as written, and what the class of a config has where nothing is written."""

    def __init__(self, given: Mapping[str, Any], kind: Any, folder: Path | None) -> None:
        self.given, self.kind, self.folder = given, kind, folder
        self.declared = {
            field.name: None if field.default is dataclasses.MISSING else field.default
            for field in dataclasses.fields(kind)
            if field.init
        }

    def written(self, name: str) -> str:
        """A field as it is written here: families have names of their own."""
        own = str(self.kind.attribute_map.get(name, name))
        return name if name in self.given else own

    def value(self, name: str) -> Any:
        key = self.written(name)
        return self.given.get(key, self.declared.get(key))

    def refusal(self, name: str, expected: str, fix: str = "") -> ConfigError:
        key = self.written(name)
        where, hint = _called(key, self.folder), f"\n    {fix}" if fix else ""
        return ConfigError(f"{where} is {self.value(name)!r}; expected {expected}{hint}")


def checked_config(given: Mapping[str, Any], folder: Path | None = None) -> Any:
    kind = _family(given, folder)
    if folder is None:
        _check_known(_Fields(given, kind, folder))
    fields = _Fields(_without_loader(given), kind, folder)
    _check_sizes(fields)
    _check_heads(fields)
    _check_numbers(fields)
    _check_activations(fields)
    config = _made(fields)
    _check_rotary(fields, config)
    return config


def _without_loader(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config and of its parts, without those of the loader."""
    return {
        key: _without_loader(cast("Mapping[str, Any]", value)) if isinstance(value, dict) else value
        for key, value in given.items()
        if not _OF_THE_LOADER.fullmatch(str(key))
    }


def _called(key: str, folder: Path | None) -> str:
    return f"'model.architecture.{key}'" if folder is None else f"'{folder / _FILE}': '{key}'"


def _family(given: Mapping[str, Any], folder: Path | None) -> Any:
    families: Any = transformers.CONFIG_MAPPING  # here, so that it is imported when it is needed
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        typo = nearest(kind, list(families)) if isinstance(kind, str) else ""
        raise ConfigError(
            f"{_called('model_type', folder)} is {kind!r}, which transformers does not know{typo}\n"
            "    give the model_type of a causal language model, such as qwen2 or llama; code of a "
            "folder's own is never run"
        )
    with _plain_docstrings():
        return families[kind]


@contextmanager
def _plain_docstrings() -> Generator[None]:
    """Import config classes with the docstrings that they were written with.

    transformers completes them by names of its models, and imports all that generates and trains
    for it: torch's compiler among it, which takes half of the time of `penstock graph`.
    """
    utils: Any = transformers.utils
    completes = utils.auto_docstring

    def unchanged(kind: Any = None, **_: Any) -> Any:
        return kind or unchanged  # also where it is called with options first

    utils.auto_docstring = unchanged
    try:
        yield
    finally:
        utils.auto_docstring = completes


def _check_known(fields: _Fields) -> None:
    common = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    known = {*fields.declared, *fields.kind.attribute_map, *_ALSO}
    unknown = [key for key in fields.given if key not in known]
    written = _written(fields.kind) if unknown else frozenset[str]()
    for key in unknown:
        if key not in written:
            raise ConfigError(
                f"there is no key {_called(key, fields.folder)}{nearest(key, sorted(known))}\n"
                f"    a {fields.given['model_type']} model has: "
                f"{', '.join(name for name in fields.declared if name not in common)}"
            )


def _written(kind: Any) -> frozenset[str]:
    """Keys that transformers writes beyond a config's fields, such as `_name_or_path`."""
    try:
        with quiet_transformers():
            return frozenset(kind().to_dict())
    except Exception:  # noqa: BLE001 - of many kinds: without its parts a family has no defaults
        return frozenset()


def _check_sizes(fields: _Fields) -> None:
    for name, largest in _LARGEST.items():
        size, least = fields.value(name), int("expert" not in name and "moe" not in name)
        if isinstance(size, int) and not isinstance(size, bool) and not least <= size <= largest:
            raise fields.refusal(name, f"an integer from {least} to {largest}")


def _check_heads(fields: _Fields) -> None:
    width, heads, keys = map(
        fields.value, ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if not isinstance(heads, int) or not isinstance(width, int):
        return
    own_size = fields.value("head_dim") is not None or "attention_head_size" in fields.declared
    # Folders of some families have heads of a rounded size, which their tensors tell.
    if fields.folder is None and not own_size and width % heads:
        raise fields.refusal(
            "hidden_size",
            f"a multiple of {fields.written('num_attention_heads')}={heads}",
            f"change one of the two, as to {width - width % heads or heads}, or set head_dim",
        )
    if isinstance(keys, int) and (keys < 1 or heads % keys):  # false is 0, and an integer
        raise fields.refusal(
            "num_key_value_heads",
            f"a number that divides {fields.written('num_attention_heads')}={heads}",
        )
    experts = fields.value("num_local_experts") or fields.value("num_experts")
    chosen = fields.value("num_experts_per_tok")
    if isinstance(experts, int) and isinstance(chosen, int) and chosen > experts:
        raise fields.refusal("num_experts_per_tok", f"at most the {experts} experts there are")


def _check_numbers(fields: _Fields) -> None:
    for name, value in fields.given.items():
        if not isinstance(value, float | int) or isinstance(value, bool):
            continue
        if not math.isfinite(value):
            raise fields.refusal(name, "a finite number")
        if value <= 0 and (name.endswith(("_eps", "_epsilon")) or name == "rope_theta"):
            raise fields.refusal(name, "a number above 0")
        if value < 0 and name.endswith("_range"):
            raise fields.refusal(name, "a number of at least 0")
        if not 0 <= value <= 1 and name.endswith(("_dropout", "_pdrop")):
            raise fields.refusal(name, "a share from 0 to 1")


def _check_activations(fields: _Fields) -> None:
    for name in _ACTIVATIONS:
        value = fields.value(name)
        if not isinstance(value, str) or value in _COMMON_ACTIVATIONS:
            continue
        from transformers.activations import ACT2FN

        if value not in ACT2FN:
            raise fields.refusal(
                name,
                f"an activation that transformers has{nearest(value, list(ACT2FN))}",
                f"common ones are: {', '.join(_COMMON_ACTIVATIONS)}",
            )


def _made(fields: _Fields) -> Any:
    """The config object; transformers checks the types of what it declares."""
    kinds = copy.deepcopy(dict(fields.given))  # transformers writes to what it is given
    kind = kinds.pop("model_type")
    auto: Any = transformers.AutoConfig
    try:
        with quiet_transformers():
            if fields.folder is None:
                return auto.for_model(kind, **kinds)
            return fields.kind.from_dict(kinds)  # the file itself is not read a second time
    except Exception as error:  # of many kinds, its own among them
        fault = _TYPE_FAULT.search(str(error))
        if fault is not None:
            raise fields.refusal(fault[1], _TYPES.get(fault[2], fault[2])) from None
        raise ConfigError(
            f"{_called('model_type', fields.folder)} is {kind!r}, and transformers makes no config "
            f"of the fields beside it: {' '.join(str(error).split()):.300}"
        ) from None


def learn_padding(model: Any) -> None:
    """Let the token that pads be learned as any other, wherever it is a word of a text.

    transformers leaves its row of the embedding out of the gradient. Here the padding of rows is
    never read, so it has no gradient anyway, and some tokenizers pad with a token that texts have.
    """
    embedding = model.get_input_embeddings()
    if isinstance(embedding, torch.nn.Embedding):
        embedding.padding_idx = None


def attention_of(config: Any) -> str | None:
    """The attention that transformers computes a model with; None for torch's, where it has it.

    Torch's leaves out a cap on scores (Gemma 2), without a word.
    """
    return "eager" if getattr(config, "attn_logit_softcapping", None) else None


def empty_model(config: Any, folder: Path | None = None) -> Any:
    """The language model of a config, without memory for its weights."""
    auto: Any = transformers.AutoModelForCausalLM
    text = getattr(config, "text_config", None)
    if text is not None:
        raise ConfigError(
            f"{_called('model_type', folder)} is {config.model_type!r}, a model of more than text\n"
            f"    give its language model alone, saved with its text_config ({text.model_type})"
        )
    try:
        with quiet_transformers(), torch.device("meta"):  # as it is built later
            return auto.from_config(config, attn_implementation=attention_of(config))
    except Exception as error:  # of many kinds
        reason = str(error).split(".\n")[0].splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            f"{_called('model_type', folder)} is {config.model_type!r}, of which transformers "
            f"makes no causal language model: {reason:.200}"
        ) from None


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Hide progress bars, and the load report that a backbone without its head always gives."""
    logging: Any = transformers.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_rotary(fields: _Fields, config: Any) -> None:
    for rotary in _rotaries(getattr(config, "rope_parameters", None)):
        kind = rotary.get("rope_type", "default")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            raise fields.refusal(
                "rope_parameters" if "rope_parameters" in fields.given else "rope_scaling",
                f"a rope_type of default, {', '.join(ROPE_INIT_FUNCTIONS)}",
            )
        theta = rotary.get("rope_theta", 1.0)
        if not isinstance(theta, float | int) or not theta > 0 or not math.isfinite(theta):
            name = "rope_theta" if "rope_theta" in fields.given else "rope_parameters"
            raise fields.refusal(name, "a number above 0 as rope_theta")
        size = fields.value("head_dim")
        if size is None and fields.value("num_attention_heads"):
            size = config.hidden_size // config.num_attention_heads
        whole = rotary.get("partial_rotary_factor") in (None, 1, 1.0)
        if whole and isinstance(size, int) and size % 2:
            name = "head_dim" if "head_dim" in fields.given else "hidden_size"
            raise fields.refusal(
                name,
                f"a size that gives heads an even number of dimensions, not {size}",
                "rotary positions turn the dimensions of a head in pairs",
            )


def _rotaries(found: Any) -> Iterator[Mapping[str, Any]]:
    """The rotary positions of a config; some families have other ones for each kind of layer."""
    if not isinstance(found, Mapping):
        return
    parts: list[Any] = list(found.values())  # pyright: ignore[reportUnknownArgumentType]
    if parts and all(isinstance(part, Mapping) for part in parts):
        yield from parts
    else:
        yield found  # pyright: ignore[reportUnknownMemberType]
