"""Low-rank adapters: a small trained difference to weights that stay as they are.

A linear map W of an adapted model computes `W x + (alpha / rank) B A x`, and only A and B are
trained (Hu et al. 2021, "LoRA: low-rank adaptation of large language models", section 4.1). The
modules and what is written of them are peft's. Adapters are float32 whatever the model is, so they
are their own master copy.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...dataflow.errors import ConfigError, nearest
from ...dataflow.options import FractionBelowOne, NonNegativeInt, PositiveFloat, option_class
from ...dataflow.runtime.call_context import current_step
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..training.flat_parameters import read_tensors, write_tensors
from ..training.weight_checks import take_tensors
from .architecture import quiet_transformers
from .hub import hub_name, packaged_name
from .model_folder import read_object

_NAME = "default"
"""Peft's name of a module's one adapter."""
_PEFT_PREFIX = "base_model.model."
_WEIGHTS, ADAPTER_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_ALPHA = 32.0
"""Alpha where neither a configuration nor a folder has one."""


@option_class
class LoraSpec:
    """Weights that get adapters, and the adapters' size and strength.

    Engines compute with what `resolved` returns; nothing else reads the folder's settings.
    """

    rank: NonNegativeInt = 0
    """Rows of A and columns of B; 0 takes the folder's, or trains the weights themselves."""
    alpha: PositiveFloat | None = None
    """Factor of B A x, times the rank; null for the folder's, or else 32."""
    target_modules: tuple[str, ...] = ()
    """Ends of the names of the linear maps that get one: `[q_proj, v_proj]`. Empty for the
    folder's, or else for all but the head."""
    use_rslora: bool | None = None
    """Whether alpha is divided by the square root of the rank (rsLoRA), not by the rank; null for
    the folder's, or else false."""
    rank_pattern: dict[str, int] = field(default_factory=dict[str, int])
    """Ends of names -> the rank there: `{q_proj: 8}`; empty for the folder's."""
    alpha_pattern: dict[str, float] = field(default_factory=dict[str, float])
    """Ends of names -> the alpha there: `{q_proj: 4}`; empty for the folder's."""
    dropout: FractionBelowOne = 0.0
    """Share of the numbers that go into an adapter which training leaves out. Which ones follows
    from the run's seed, the step and a token's text, so no result depends on micro-batches."""
    folder: str | None = None
    """An adapter to go on from, as a run or peft has saved it; null for a fresh one, which changes
    nothing at first."""

    def __post_init__(self) -> None:
        for key in ("rank_pattern", "alpha_pattern"):
            if not _SETTINGS[key].allows(getattr(self, key)):
                raise ValueError(f"lora.{key}: expected {_SETTINGS[key].expected}")
        given = [key for key in (*_SETTINGS, "dropout") if not _is_open(getattr(self, key))]
        # Runs recorded the default alpha of 32 without a rank when it was not left open.
        if given and not self and not (given == ["alpha"] and self.alpha == _ALPHA):
            raise ValueError(
                f"lora.{given[0]} is given, but lora.rank is 0, so there are no adapters; set "
                "lora.rank (16 is usual), or leave it out"
            )

    def __bool__(self) -> bool:
        return self.rank > 0 or self.folder is not None

    def resolved(self) -> LoraSpec:
        """Take what is left open from the adapter_config.json of the folder, or the defaults."""
        if not self:
            return self
        found = _saved_settings(self.folder) if self.folder else {}
        for key, saved in found.items():
            given = getattr(self, key)
            if not _is_open(given) and _comparable(given) != _comparable(saved):
                raise ConfigError(
                    f"'model.lora.{key}' is {json.dumps(given)}, but the adapter in "
                    f"'{self.folder}' was trained with {_SETTINGS[key].saved_as}="
                    f"{json.dumps(saved)} ({ADAPTER_SETTINGS})\n    leave model.lora.{key} out, "
                    "to go on with the folder's"
                )
        closed = {"alpha": self.alpha or _ALPHA, "use_rslora": bool(self.use_rslora)}
        return replace(self, **{**closed, **found})


def _is_open(value: Any) -> bool:
    return value is not False and not value


def _comparable(value: Any) -> Any:
    return sorted(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


@dataclass(frozen=True)
class _Setting:
    """A setting of adapters that peft saves."""

    saved_as: str  # Its key in adapter_config.json
    expected: str  # Describes the values that are allowed, for messages
    allows: Callable[[Any], bool]  # Whether a value is allowed
    absent: Any = None  # What peft takes if the key is not there; None if it must be


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _LARGEST_RANK


def _is_alpha(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= _LARGEST_ALPHA


def _is_names(value: Any) -> bool:
    if value == "all-linear":
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)  # pyright: ignore[reportUnknownVariableType]


def _maps_names_to(allows: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, dict) and all(
            isinstance(key, str) and _PATTERN.fullmatch(key) and allows(one)
            for key, one in value.items()  # pyright: ignore[reportUnknownVariableType]
        )

    return check


_LARGEST_RANK, _LARGEST_ALPHA = 1 << 18, 1e9
_PATTERN = re.compile(r"\^?[\w.]+\$?")
"""Names, or their ends: peft takes any regular expression, of which some take forever to match."""

_SETTINGS: Mapping[str, _Setting] = {
    "rank": _Setting("r", f"an integer from 1 to {_LARGEST_RANK}", _is_rank),
    "alpha": _Setting("lora_alpha", "a number above 0", _is_alpha),
    "target_modules": _Setting("target_modules", "a list of names of linear maps", _is_names),
    "use_rslora": _Setting("use_rslora", "true or false", lambda v: isinstance(v, bool), False),
    "rank_pattern": _Setting(
        "rank_pattern",
        "ends of names with a rank for each, {q_proj: 8}",
        _maps_names_to(_is_rank),
        {},
    ),
    "alpha_pattern": _Setting(
        "alpha_pattern",
        "ends of names with an alpha for each, {q_proj: 4}",
        _maps_names_to(_is_alpha),
        {},
    ),
}
"""Fields of `LoraSpec` that are saved with an adapter."""

_TRANSPOSED = "fan_in_fan_out"
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others change W
    _TRANSPOSED: (True, False, None),  # right for some models, see `check_lora`
}
"""Keys of adapter_config.json -> values that are handled; all others are handled if they are empty,
false or null."""
_WITHOUT_EFFECT = re.compile(
    r"base_model_name_or_path|revision|inference_mode|task_type|auto_mapping|peft_version|"
    r"lora_dropout|megatron_core|qalora_group_size|ensure_weight_tying"
)
"""Keys of adapter_config.json whose value does not change what a saved adapter computes."""


def _saved_settings(folder: str) -> dict[str, Any]:
    file = Path(folder) / ADAPTER_SETTINGS
    if not file.exists():
        what = f"has no {ADAPTER_SETTINGS}, which says how its weights are used"
        raise ConfigError(
            f"'model.lora.folder': '{folder}' {what if Path(folder).is_dir() else 'is no folder'}\n"
            "    give a folder that a run (models/ROLE/adapter) or peft's save_pretrained wrote"
        )
    saved = read_object(file)
    found: dict[str, Any] = {}
    for name, setting in _SETTINGS.items():
        value = saved.pop(setting.saved_as, None)
        value = setting.absent if value is None else value
        if not setting.allows(value):
            what = f"'{setting.saved_as}' is {json.dumps(value)}"
            raise ConfigError(f"'{file}': {what}; expected {setting.expected}")
        found[name] = value
    targets = found["target_modules"]
    found["target_modules"] = () if targets == "all-linear" else tuple(targets)
    for key, value in {"peft_type": None, **saved}.items():
        allowed = _ALLOWED.get(key)
        if value not in allowed if allowed else value and not _WITHOUT_EFFECT.fullmatch(key):
            raise ConfigError(_not_done(file, key, value))
    return found


def _not_done(file: Path, key: str, value: Any) -> str:
    return (
        f"'{file}': '{key}' is {json.dumps(value)}, and such adapters are not trained here\n"
        "    merge the adapter into its model with peft (merge_and_unload), save that, and give "
        "it as model=PATH"
    )


def check_lora(spec: LoraSpec, module: nn.Module, *, but: str = "lm_head") -> None:
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "lora.rank needs the package peft, which is not installed\n    pip install peft"
        )
    heads = _heads(module, but)
    maps: dict[str, Any] = {
        name: part
        for name, part in module.named_modules()
        if (isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D") and name not in heads
    }
    for target in spec.target_modules:
        if not any(_ends_in(name, target) for name in maps):
            raise ConfigError(_no_target(target, list(maps), heads))
    adapted = {
        name: tuple(part.weight.shape)
        for name, part in maps.items()
        if not spec.target_modules or any(_ends_in(name, end) for end in spec.target_modules)
    }
    if spec.folder is None:  # peft ignores a folder's patterns that fit nothing
        for key in (*spec.rank_pattern, *spec.alpha_pattern):
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in adapted):
                raise ConfigError(_no_target(key, list(adapted), heads, "patterns"))
    elif read_object(Path(spec.folder) / ADAPTER_SETTINGS).get(_TRANSPOSED) and any(
        isinstance(maps[name], nn.Linear) for name in adapted
    ):
        raise ConfigError(_not_done(Path(spec.folder) / ADAPTER_SETTINGS, _TRANSPOSED, value=True))
    largest = max(adapted.values(), key=min)
    rank = max([spec.rank, *spec.rank_pattern.values()])
    if rank > min(largest):
        raise ConfigError(
            f"'model.lora.rank' is {rank}, but no adapted map of the model has a higher rank than "
            f"{min(largest)} ([{', '.join(map(str, largest))}])\n    lower it; 16 is usual"
        )


def _heads(module: nn.Module, but: str) -> set[str]:
    """Return the names of a model's heads: families name the language model's head differently."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    return {but, *(name for name, part in module.named_modules() if part is head)}


def _ends_in(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _no_target(
    target: str, names: Sequence[str], heads: Set[str], key: str = "target_modules"
) -> str:
    if target in heads:
        return (
            f"lora.{key}: '{target}' is the model's head, which gets no adapter\n    leave it out"
        )
    ends = {name.rpartition(".")[2] for name in names}
    if "." in target and target.rpartition(".")[2] in ends:
        return (
            f"lora.{key}: no linear map of the model has a name that ends in '{target}'\n"
            f"    names are such as {names[-1]}"
        )
    return (
        f"lora.{key}: no linear map of the model is called '{target}'{nearest(target, ends)}\n"
        f"    it has: {', '.join(sorted(ends))}"
    )


def adapt(module: nn.Module, spec: LoraSpec, seed: int, *, but: str) -> dict[str, nn.Parameter]:
    """Put adapters with their first weights into a model, in place; its own stop learning."""
    found = insert_adapters(module, spec, but=but)
    shapes = {name: tuple(parameter.shape) for name, parameter in found.items()}
    for name, value in first_adapters(spec, seed, shapes).items():
        found[name].data = value.to(found[name].device)
    return found


def insert_adapters(module: nn.Module, spec: LoraSpec, *, but: str) -> dict[str, nn.Parameter]:
    """`adapt` without first weights, for a model that may have no memory yet."""
    check_lora(spec, module, but=but)
    from peft import LoraConfig, inject_adapter_in_model

    settings: dict[str, Any] = {_SETTINGS[key].saved_as: getattr(spec, key) for key in _SETTINGS}
    settings["target_modules"] = list(spec.target_modules) or "all-linear"
    config = LoraConfig(**settings, exclude_modules=sorted(_heads(module, but)))
    with (
        torch.random.fork_rng(devices=[]),
        quiet_transformers(),
        _linear_maps_alone(),
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):  # peft says that it sets `fan_in_fan_out` as the kind of linear map needs it
        inject_adapter_in_model(config, module)
    if spec.dropout:
        state = AdapterDropout(spec.dropout)
        for name, part in adapted_linears(module):
            part.lora_dropout[_NAME] = _Dropped(state, name)
    named = {checkpoint_name(full): p for full, p in module.named_parameters()}
    return {name: p for name, p in named.items() if is_adapter(name)}


@contextmanager
def _linear_maps_alone() -> Generator[None]:
    """Keep peft from adapting a mixture's experts, whose parameters it takes for linear maps."""
    from peft.utils import transformers_weight_conversion

    peft: Any = transformers_weight_conversion
    converts = peft.convert_peft_config_for_transformers
    peft.convert_peft_config_for_transformers = lambda *_, **__: None  # pyright: ignore[reportUnknownLambdaType]
    try:
        yield
    finally:
        peft.convert_peft_config_for_transformers = converts


class AdapterDropout:
    """The tokens that a model's adapters compute while it trains; none are known in evaluation.

    A token's key is a hash of its text: of the tokens of its row up to it. So equal texts of a step
    leave out the same numbers, wherever they are computed, and computing them again does too.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self.keys: Tensor | None = None  # i64, of the tokens that are computed next
        self._seed: int | None = None

    @staticmethod
    def of(module: nn.Module) -> AdapterDropout:
        """The one of an adapted model, or one without effect."""
        parts = (part.state for part in module.modules() if isinstance(part, _Dropped))
        return next(parts, AdapterDropout())

    @contextmanager
    def active(self, context: WorkerContext, *, trains: bool) -> Generator[None]:
        """Leave numbers out in here, if it trains."""
        if self.share and trains:
            self._seed = _hashed(f"{context.seed}\x1f{context.role}\x1f{current_step()}")
        try:
            yield
        finally:
            self._seed = self.keys = None

    def keys_of(self, tokens: Tensor) -> Tensor | None:
        """Keys of tokens, i64[rows, T] of the same; None if nothing is left out."""
        if self._seed is None:
            return None
        place = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return _mixed(tokens * _ODD + place * (self._seed | 1)).cumsum(1)


class _Dropped(nn.Module):
    """Dropout of the input of one map's adapter."""

    def __init__(self, state: AdapterDropout, name: str) -> None:
        super().__init__()
        self.state = state
        self._salt = _hashed(name)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, f[..., D], with a share of its numbers 0 and the others scaled up.

        Which are 0 follows from each token's entry in `keys`, not from the batch that it is in.
        """
        if self.state.keys is None:
            return x
        column = torch.arange(x.shape[-1], device=x.device) * _ODD + self._salt
        number = _mixed(self.state.keys.reshape(*x.shape[:-1], 1) + column)
        kept = (number & _LARGEST_HASH) >= int(self.state.share * (_LARGEST_HASH + 1))
        return x * kept / (1 - self.state.share)


_ODD = -0x61C8864680B583EB
_LARGEST_HASH = (1 << 31) - 1


def _mixed(x: Tensor) -> Tensor:
    """A hash of each number, i64; Stafford's "Better bit mixing", 2011, variant 13."""
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def checkpoint_name(name: str) -> str:
    return name.replace(f".{_NAME}.", ".").replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def first_adapters(
    spec: LoraSpec, seed: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Adapters' first weights on the CPU, in float32: the folder's, or fresh ones."""
    if spec.folder is None:
        return {name: _fresh(name, shape, seed) for name, shape in shapes.items()}
    made = {name: torch.empty(shape) for name, shape in shapes.items()}
    file = Path(spec.folder) / _WEIGHTS
    saved = {name.removeprefix(_PEFT_PREFIX): value for name, value in read_tensors(file).items()}
    take_tensors(file, f"an adapter of rank {spec.rank}", saved, made)
    return made


def _fresh(name: str, shape: Sequence[int], seed: int) -> Tensor:
    # B is zero, and A sampled as peft does, from the seed and its name alone: so roles that start
    # from one model start alike, whichever processes hold them.
    made = torch.zeros(*shape)
    if ".lora_B." in name:
        return made
    generator = torch.Generator().manual_seed(_hashed(f"{seed}\x1f{name}"))
    return nn.init.kaiming_uniform_(made, a=math.sqrt(5), generator=generator)


def adapted_linears(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        if hasattr(part, "lora_A") and hasattr(part, "base_layer"):
            yield name, part


def merge(module: nn.Module) -> nn.Module:
    """Add an adapted model's adapters to its weights, in place; they are gone then.

    All weights are float32 afterwards: bfloat16 has no room for most of what an adapter adds.
    """
    module.float()
    for name, part in list(adapted_linears(module)):
        base = part.base_layer
        base.weight.data = _merged_weight(part)
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, base)
    return module


@torch.no_grad()
def _merged_weight(part: Any, device: torch.device | None = None) -> Tensor:
    """An adapted linear map's weight with its adapter, added up in float32 on a device."""
    weight: Tensor = part.base_layer.weight.to(device)
    down, up = (held[_NAME].weight.to(device).float() for held in (part.lora_A, part.lora_B))
    added = (up @ down) * part.scaling[_NAME]
    return (weight.float() + (added.t() if part.fan_in_fan_out else added)).to(weight.dtype)


class _MergedWeights(Mapping[str, Tensor]):
    """All weights of an adapted model by the checkpoint's names, each merged when it is read."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        named = ((checkpoint_name(name), p.detach()) for name, p in module.named_parameters())
        self._plain = {name: tensor for name, tensor in named if not is_adapter(name)}
        self._parts = {f"{name}.weight": part for name, part in adapted_linears(module)}

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts.get(name)
        return self._plain[name] if part is None else _merged_weight(part, self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)


class AdaptedModel:
    """A model that is given adapters again and again, for an engine that wants them merged.

    It lies in host memory; a matrix is merged on the engine's device, which has room for some.
    """

    def __init__(
        self, module: nn.Module, spec: LoraSpec, seed: int, device: str, *, but: str
    ) -> None:
        self._module, self._device = module, torch.device(device)
        self._adapters = adapt(module, spec.resolved(), seed, but=but)

    @property
    def adapters(self) -> dict[str, Tensor]:
        """Their weights as they were given last, by name."""
        return {name: parameter.detach() for name, parameter in self._adapters.items()}

    def merged_with(self, adapters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """All weights by the checkpoint's names, with these adapters merged into them."""
        for name, held in self.adapters.items():
            held.copy_(adapters[name])
        return _MergedWeights(self._module, self._device)


def save_adapter(
    folder: Path,
    module: nn.Module,
    spec: LoraSpec,
    parameters: Mapping[str, Tensor],
    base: str | None,
) -> None:
    """Write adapters as peft writes them: `PeftModel.from_pretrained(base, folder)` reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.rpartition(".")[2] for name, _ in adapted_linears(module)})
    name, revision = (hub_name(base) or (packaged_name(base), None)) if base else (None, None)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name or base,
        "revision": revision,
        "lora_dropout": spec.dropout,
        "bias": "none",
        **{setting.saved_as: getattr(spec, key) for key, setting in _SETTINGS.items()},
        "target_modules": list(spec.target_modules) or targets,
    }
    (folder / ADAPTER_SETTINGS).write_text(json.dumps(config, indent=2) + "\n")
    adapters = {name: value for name, value in parameters.items() if is_adapter(name)}
    write_tensors(folder / _WEIGHTS, {_PEFT_PREFIX + name: p for name, p in adapters.items()})
