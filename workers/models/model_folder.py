"""Checks of a model folder before anything is built from it.

Only headers are read here, of every file, in milliseconds: the weights themselves are looked at
where they have been loaded. transformers fills what a folder lacks with random numbers, and ignores
what it has too much; here both are refused.

A folder may also be the mean of others, a soup: Wortsman et al., "Model Soups", 2022; as a
reference policy: Chegini et al., "SALSA", 2024.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from torch import Tensor

from ...dataflow.errors import ConfigError
from ...dataflow.files import check_folder_files, read_json
from ..training.flat_parameters import read_tensors, write_tensors
from ..training.weight_checks import not_mapped, refuse_faults, some
from .architecture import checked_config, empty_model, quiet_transformers

_ADAPTER = "adapter_config.json"
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EXPERTS = ".experts."
_CLASSIFIER = "ForSequenceClassification"
_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = {"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}


@dataclass(frozen=True)
class _Saved:
    """A tensor as its file's header says it."""

    shape: tuple[int, ...]
    dtype: str
    file: str


def read_object(file: Path) -> dict[str, Any]:
    try:
        found: Any = read_json(file)
    except OSError as error:
        raise ConfigError(f"'{file}' cannot be read: {error.strerror}") from error
    except ValueError as error:  # no JSON, or bytes that are no UTF-8
        raise ConfigError(f"'{file}' is not JSON: {error}\n    {_AGAIN}") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"'{file}' holds {type(found).__name__}; expected an object, {{...}}\n    {_AGAIN}"
        )
    return found  # pyright: ignore[reportUnknownVariableType]


_AGAIN = "copy the folder again, or give one that save_pretrained wrote"


def folder_config(folder: Path) -> Any:
    file = folder / _CONFIG
    check_folder_files(folder)  # transformers reads further files of the folder
    if not file.is_file():
        raise ConfigError(
            f"model folder '{folder}' has no config.json\n    give a local folder written by "
            "save_pretrained"
        )
    found = read_object(file)
    for key in ("quantization_config", "compression_config"):
        if found.get(key) is not None:
            raise ConfigError(
                f"model folder '{folder}' holds quantized weights ({key} in config.json), which "
                "cannot be trained\n    give the model as it was before, in 16 or 32 bits"
            )
    if (folder / _ADAPTER).exists():  # transformers would load what that file names instead
        raise ConfigError(
            f"model folder '{folder}' holds an adapter beside the model ({_ADAPTER})\n    move "
            "the adapter's files out of it; to go on from it, give their folder as "
            "model.lora.folder"
        )
    config = checked_config(found, folder)
    if any(str(name).endswith(_CLASSIFIER) for name in found.get("architectures") or ()):
        config.score_skips = config.get_text_config().pad_token_id
    return config


def weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.is_file():
        if (folder / _ONE).is_file():
            return [folder / _ONE]
        others = sorted(
            file.name for pattern in ("*.bin", "*.pt*") for file in folder.glob(pattern)
        )
        what = f"; {others[0]} is a pickle, which is never read" if others else ""
        raise ConfigError(
            f"model folder '{folder}' has no weights: expected {_ONE} or {_INDEX}{what}\n"
            "    give a folder that save_pretrained wrote"
        )
    names = sorted(set(_weight_map(index).values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ConfigError(
            f"model folder '{folder}' lacks {len(absent)} of the {len(names)} files that its "
            f"{_INDEX} names: {some(absent)}\n    {_AGAIN}"
        )
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    found = read_object(index).get("weight_map")
    entries: dict[Any, Any] = found if isinstance(found, dict) else {}
    names = [*entries.values()]
    plain = all(isinstance(name, str) and Path(name).name == name for name in names)
    if not entries or not plain:
        raise ConfigError(
            f"'{index}' has no usable weight_map; expected tensor names and, for each, the name of "
            f"a file beside it\n    {_AGAIN}"
        )
    return entries


def _headers(folder: Path) -> dict[str, _Saved]:
    saved: dict[str, _Saved] = {}
    for file in weight_files(folder):
        try:
            with safetensors.safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - no mapping, it has only this method
                    part = opened.get_slice(name)
                    if name in saved:
                        raise ConfigError(
                            f"'{name}' stands in two files of '{folder}': {saved[name].file} and "
                            f"{file.name}\n    {_AGAIN}"
                        )
                    saved[name] = _Saved(tuple(part.get_shape()), part.get_dtype(), file.name)
        except (MemoryError, RuntimeError) as error:
            raise not_mapped(file, error) from None
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(
                f"'{file}' is no whole safetensors file: {error}\n    {_AGAIN}"
            ) from None
    index = folder / _INDEX
    if index.is_file():
        listed = _weight_map(index)
        wrong = [name for name in listed if name not in saved or saved[name].file != listed[name]]
        wrong += [name for name in saved if name not in listed]
        if wrong:
            raise ConfigError(
                f"the files of '{folder}' do not hold what {_INDEX} says: {some(wrong)}\n"
                f"    {_AGAIN}"
            )
    return saved


def check_tensors(folder: Path, *, scalar_head: bool) -> None:
    """Require that a folder has every weight of a model, and nothing else.

    What a scalar head needs beyond the backbone is its own; a language model's head that lies there
    is left alone then. Tied weights stand in a file once or twice, and what old checkpoints keep
    of their buffers is ignored by name.
    """
    config = folder_config(folder)
    if not scalar_head:
        _check_generation(folder)
    saved = _headers(folder)
    model = empty_model(config, folder)
    if scalar_head:
        scoring = {*_head_names(folder, saved, model).values()}
        saved = {name: one for name, one in saved.items() if name not in scoring}
    kind, prefix = type(model), f"{model.base_model_prefix}."
    head = frozenset(n for n, _ in model.named_parameters() if not n.startswith(prefix))
    ignored: Iterable[str] = kind._keys_to_ignore_on_load_unexpected or ()  # the class's own
    integers = [
        f"{name} {_INTEGERS.get(one.dtype, one.dtype)}"
        for name, one in saved.items()
        if one.dtype not in _FLOATS and not any(re.search(pattern, name) for pattern in ignored)
    ]
    faults = {"of a type that is no floating point": integers}
    # Experts are merged when they are loaded, which is dear: what is said of them is said then.
    rest = {name: one for name, one in saved.items() if _EXPERTS not in name}
    faults |= _misfits(folder, kind, config, rest, head if scalar_head else frozenset[str]())
    refuse_faults(folder, owner_words(config), faults)


def saved_head(folder: Path, words: Sequence[int] = ()) -> dict[str, Tensor]:
    """Return "weight" [labels, width] and "bias" [labels] of a scalar head in a folder's files.

    It is the one linear layer beside the language model's own tensors, under whatever name: `score`
    of transformers, or as other libraries call it; {} if there is none. With `words` it is their
    rows of the language model's own head.
    """
    config = folder_config(folder)
    saved, model = _headers(folder), empty_model(config, folder)
    names = _word_head(folder, saved, model) if words else _head_names(folder, saved, model)
    found: dict[str, Tensor] = {}
    for part, name in names.items():
        with safetensors.safe_open(folder / saved[name].file, "pt") as opened:
            rows = opened.get_slice(name)
            found[part] = torch.cat([rows[w : w + 1] for w in words]) if words else rows[:]
    if found:
        found.setdefault("bias", torch.zeros(len(found["weight"])))
    return found


def _head_names(folder: Path, saved: Mapping[str, _Saved], model: Any) -> dict[str, str]:
    """Return the part of a head -> its name in the files, found by its shape [labels, width]."""
    prefix = f"{model.base_model_prefix}."
    whole = [name for name, _ in model.named_parameters()]
    own = {name.split(".")[0] for n in whole for name in (n, n.removeprefix(prefix))}
    width = model.config.get_text_config().hidden_size
    fitting = [
        name
        for name, one in saved.items()
        if name.split(".")[0] not in own and len(one.shape) == 2 and one.shape[1] == width
    ]
    if len(fitting) > 1:
        shapes = "; ".join(f"{name} {list(saved[name].shape)}" for name in fitting)
        raise ConfigError(
            f"model folder '{folder}' has {len(fitting)} layers beside the language model, and "
            f"which of them scores is not known: {shapes}\n    give a model with one linear head, "
            "or a copy of the folder with that one alone"
        )
    if not fitting:
        return {}
    bias = f"{fitting[0].removesuffix('weight')}bias"
    return {"weight": fitting[0], **({"bias": bias} if bias in saved else {})}


def _word_head(folder: Path, saved: Mapping[str, _Saved], model: Any) -> dict[str, str]:
    linear, prefix = model.get_output_embeddings(), f"{model.base_model_prefix}."
    changed = [n for n in _SCALES if getattr(model.config, n, None) not in (None, 1, 1.0)]
    alike = [n for n, p in model.named_parameters(remove_duplicate=False) if p is linear.weight]
    found = [n for name in alike for n in (name, name.removeprefix(prefix)) if n in saved]
    if changed or linear.bias is not None or not found:
        why = f"its logits have {', '.join(changed) or 'a bias'}" if found else "it has no head"
        raise ConfigError(
            f"words of the model in '{folder}' cannot be read as scores: {why}\n    give another "
            "process reward model"
        )
    return {"weight": found[0]}


def owner_words(config: Any) -> str:
    return f"the '{config.model_type}' model that its config.json describes"


def _misfits(
    folder: Path, kind: Any, config: Any, saved: Mapping[str, _Saved], free: frozenset[str]
) -> dict[str, list[str]]:
    """Faults that transformers would report, found by loading tensors without memory."""
    nothing = torch.zeros(())
    tensors: dict[str, Tensor] = {name: nothing.expand(one.shape) for name, one in saved.items()}
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            _, info = kind.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # to hear of all of them
            )
    except Exception as error:  # of many kinds
        raise ConfigError(
            f"transformers cannot load the tensors in '{folder}': "
            f"{' '.join(str(error).split()):.300}\n    {_AGAIN}"
        ) from None
    faults = load_faults(info)
    missing = [name for name in faults["missing"] if name not in free and _EXPERTS not in name]
    return {**faults, "missing": missing}


def load_faults(info: Mapping[str, Any]) -> dict[str, list[str]]:
    return {
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "of another shape": [
            f"{name} {list(there)}, expected {list(wanted)}"
            for name, there, wanted in sorted(info["mismatched_keys"])
        ],
    }


def generation_config(folder: Path) -> dict[str, Any]:
    file = folder / _GENERATION
    return read_object(file) if file.exists() else {}


def _check_generation(folder: Path) -> None:
    """Transformers reads this file with the model, and refuses to write it back if it is wrong."""
    file, found = folder / _GENERATION, generation_config(folder)
    try:
        with quiet_transformers():
            transformers.GenerationConfig.from_dict(found).validate(strict=True)
    except Exception as error:  # TypeErrors of comparisons among them
        text = " ".join(str(error).split("If you're using")[0].split())
        raise ConfigError(
            f"'{file}' cannot be saved with the trained model: {text}\n"
            "    correct it, or remove the file: a run reads only the ends of responses from it"
        ) from None


def weight_mean(
    models: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
) -> dict[str, Tensor]:
    """The mean of several models' weights, tensor by tensor, added up in double precision.

    Tensors have the first model's dtypes; those that are not floating are the first model's.
    """
    if not models or len(models) != len(shares) or sum(shares) == 0:
        raise ValueError(f"expected a share for each of {len(models)} models, got {list(shares)}")
    for model in models[1:]:
        wrong = {name for name in models[0].keys() ^ model.keys()} or {
            name for name, tensor in model.items() if tensor.shape != models[0][name].shape
        }
        if wrong:
            raise ValueError(f"the models differ in '{min(wrong)}': only equal ones have a mean")
    total = sum(shares)
    mean: dict[str, Tensor] = {}
    for name, first in models[0].items():
        if not first.is_floating_point():
            mean[name] = first.clone()
            continue
        added = torch.zeros_like(first, dtype=torch.float64)
        for model, share in zip(models, shares, strict=True):
            added += model[name].double() * (share / total)
        mean[name] = added.to(first.dtype)
    return mean


def mean_folder(folders: Mapping[str, float], home: Path) -> Path:
    """Write the mean of some model folders, unless that has been done before.

    Configuration and tokenizer are the first folder's. Tied weights stand in a file once and are
    averaged once; what is computed from the configuration is in no file and is not averaged.
    """
    digest = hashlib.sha256()  # of the shares and the bytes of the weights
    for folder, share in folders.items():
        digest.update(f"{share!r} ".encode())
        for file in sorted(Path(folder).glob("*.safetensors")):
            digest.update(f"{file.name} ".encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    place = home / f"mean-{digest.hexdigest()[:16]}"
    if place.is_dir():
        return place
    sources = [Path(folder) for folder in folders]
    draft = place.with_name(f"{place.name}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(sources[0], draft, ignore=shutil.ignore_patterns("*.safetensors"))
    files = sorted(file.name for file in sources[0].glob("*.safetensors"))
    for name in files:
        missing = [folder for folder in sources if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"'{missing[0]}' has no {name}, which '{sources[0]}' has\n    only models that are "
                "saved alike have a mean"
            )
        try:
            mean = weight_mean(
                [read_tensors(folder / name) for folder in sources], list(folders.values())
            )
        except ValueError as error:
            raise ConfigError(f"{', '.join(map(str, sources))}: {error}") from error
        write_tensors(draft / name, mean)
    return draft.rename(place)
