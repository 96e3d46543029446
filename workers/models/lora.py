"""Low-rank adapters: a small trained difference to weights that stay as they are.

A linear map W of an adapted model computes `W x + (alpha / rank) B A x`, and only A and B are
trained (Hu et al. 2021, "LoRA: low-rank adaptation of large language models", section 4.1). The
modules and what is written of them are peft's. Adapters are float32 whatever the model is, so they
are their own master copy.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...dataflow.errors import ConfigError, nearest
from ...dataflow.option_checks import check_range
from ..training.flat_parameters import read_tensors, write_tensors
from ..training.weight_checks import take_tensors
from .architecture import quiet_transformers

_NAME = "default"
"""What peft calls the one adapter that a module has."""
_PEFT_PREFIX = "base_model.model."
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """Which weights get adapters, and how large."""

    rank: int = 0
    """Rows of A and columns of B; 0 trains the weights themselves."""
    alpha: float = 32.0
    """What B A x is scaled by, times the rank."""
    target_modules: tuple[str, ...] = ()
    """Ends of the names of the linear maps that get one: `[q_proj, v_proj]`. Empty for all but the
    head."""
    folder: str | None = None
    """An adapter to go on from, as a run or peft has saved it; null for a fresh one, which changes
    nothing at first."""

    def __post_init__(self) -> None:
        check_range(self, "rank", at_least=0)
        check_range(self, "alpha", above=0)
        others = [key for key in ("target_modules", "folder") if getattr(self, key)]
        if others and not self.rank:
            raise ValueError(
                f"lora.{others[0]} is given, but lora.rank is 0, so there are no adapters; set "
                "lora.rank (16 is usual), or leave it out"
            )

    def __bool__(self) -> bool:
        return self.rank > 0


def check_lora(spec: LoraSpec, module: nn.Module) -> None:
    """Require that adapters can be made.

    Args:
        spec: With a rank.
        module: The model, which may be on the meta device.

    Raises:
        ConfigError: If peft is missing, a target is no linear map of the model, or the folder's
            adapter is another one.
    """
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "lora.rank needs the package peft, which is not installed\n    pip install peft"
        )
    linears = {
        name.rpartition(".")[2]
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    }
    for target in spec.target_modules:
        if target.rpartition(".")[2] not in linears:
            raise ConfigError(
                f"lora.target_modules: no linear map of the model is called '{target}'"
                f"{nearest(target, linears)}\n    it has: {', '.join(sorted(linears))}"
            )


def adapt(module: nn.Module, spec: LoraSpec, seed: int, *, but: str) -> dict[str, nn.Parameter]:
    """Put adapters with their first weights into a model, in place; its own stop learning.

    Args:
        module: The model.
        spec: With a rank.
        seed: The run's.
        but: Name of the head, which gets none.

    Returns:
        The adapters' parameters in float32, by name: "model.layers.0.mlp.up_proj.lora_A.weight".

    Raises:
        ConfigError: As `insert_adapters` and `first_adapters`.
    """
    found = insert_adapters(module, spec, but=but)
    shapes = {name: tuple(parameter.shape) for name, parameter in found.items()}
    for name, value in first_adapters(spec, seed, shapes).items():
        found[name].data = value.to(found[name].device)
    return found


def insert_adapters(module: nn.Module, spec: LoraSpec, *, but: str) -> dict[str, nn.Parameter]:
    """`adapt` without first weights, for a model that may have no memory yet.

    Raises:
        ConfigError: As `check_lora`.
    """
    check_lora(spec, module)
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType] - peft divides it alone
        target_modules=list(spec.target_modules) or "all-linear",
        exclude_modules=[but],
    )
    with (
        torch.random.fork_rng(devices=[]),
        quiet_transformers(),
        warnings.catch_warnings(action="ignore", category=UserWarning),
    ):  # peft says that it sets `fan_in_fan_out` as the kind of linear map needs it
        inject_adapter_in_model(config, module)
    named = {checkpoint_name(full): p for full, p in module.named_parameters()}
    return {name: p for name, p in named.items() if is_adapter(name)}


def checkpoint_name(name: str) -> str:
    """What checkpoints call a parameter of an adapted model."""
    return name.replace(f".{_NAME}.", ".").replace(".base_layer.", ".")


def is_adapter(name: str) -> bool:
    """Whether a checkpoint's parameter is an adapter's."""
    return ".lora_" in name


def first_adapters(
    spec: LoraSpec, seed: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Adapters' first weights on the CPU, in float32: the folder's, or fresh ones.

    Args:
        spec: With a rank.
        seed: The run's.
        shapes: Of each adapter's parameter, by name: A [rank, in] or B [out, rank].

    Raises:
        ConfigError: If the folder's adapter is another one.
    """
    if spec.folder is None:
        return {name: _fresh(name, shape, seed) for name, shape in shapes.items()}
    made = {name: torch.empty(shape) for name, shape in shapes.items()}
    file = Path(spec.folder) / _WEIGHTS
    saved = {name.removeprefix(_PEFT_PREFIX): value for name, value in read_tensors(file).items()}
    take_tensors(file, f"an adapter of rank {spec.rank}", saved, made)
    return made


def _fresh(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """B is zero, and A sampled as peft does, from the seed and its name alone.

    So roles that start from one model start alike, whichever processes hold them.
    """
    made = torch.zeros(*shape)
    if ".lora_B." in name:
        return made
    digest = hashlib.blake2b(f"{seed}\x1f{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return nn.init.kaiming_uniform_(made, a=math.sqrt(5), generator=generator)


def adapted_linears(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and peft module of each adapted linear map."""
    for name, part in module.named_modules():
        if hasattr(part, "lora_A") and hasattr(part, "base_layer"):
            yield name, part


def merged(module: nn.Module) -> nn.Module:
    """A copy of an adapted model in which adapters are added to the weights, and gone."""
    return merge(copy.deepcopy(module))


def merge(module: nn.Module) -> nn.Module:
    """Add an adapted model's adapters to its weights, in place; they are gone then."""
    for name, part in list(adapted_linears(module)):
        base = part.base_layer
        base.weight.data = _merged_weight(part)
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, base)
    return module


@torch.no_grad()
def _merged_weight(part: Any) -> Tensor:
    """An adapted linear map's weight with its adapter, added up in float32."""
    weight: Tensor = part.base_layer.weight
    return (weight.float() + part.get_delta_weight(_NAME).float()).to(weight.dtype)


class AdaptedModel:
    """A model that is given adapters again and again, for an engine that wants them merged.

    Args:
        module: The model; it is kept, adapted.
        spec: With a rank.
        seed: The run's.
        but: Name of the head, which gets none.
    """

    def __init__(self, module: nn.Module, spec: LoraSpec, seed: int, *, but: str) -> None:
        self._module = module
        self._adapters = adapt(module, spec, seed, but=but)

    @property
    def adapters(self) -> dict[str, Tensor]:
        """Their weights as they were given last, by name."""
        return {name: parameter.detach() for name, parameter in self._adapters.items()}

    def merged_with(self, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All weights by the checkpoint's names, with these adapters merged into them."""
        for name, held in self.adapters.items():
            held.copy_(adapters[name])
        whole = {
            checkpoint_name(name): parameter.detach()
            for name, parameter in self._module.named_parameters()
            if not is_adapter(name)
        }
        for name, part in adapted_linears(self._module):
            whole[f"{name}.weight"] = _merged_weight(part)
        return whole


def save_adapter(
    folder: Path, module: nn.Module, spec: LoraSpec, parameters: Mapping[str, Tensor]
) -> None:
    """Write adapters as peft writes them: `PeftModel.from_pretrained(base, folder)` reads them.

    Args:
        folder: Made if it is not there.
        module: The adapted model.
        spec: What they were made by.
        parameters: As `adapt` gave them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.rpartition(".")[2] for name, _ in adapted_linears(module)})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": getattr(getattr(module, "config", None), "_name_or_path", None),
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(spec.target_modules) or targets,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(folder / _WEIGHTS, {_PEFT_PREFIX + name: p for name, p in parameters.items()})
