"""A model folder whose weights are the mean of several others: a soup.

Wortsman et al., "Model Soups", 2022; as a reference policy: Chegini et al., "SALSA", 2024.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...dataflow.errors import ConfigError
from ..training.flat_parameters import read_tensors, write_tensors


def weight_mean(
    models: Sequence[Mapping[str, Tensor]], shares: Sequence[float]
) -> dict[str, Tensor]:
    """The mean of several models' weights, tensor by tensor, added up in double precision.

    Args:
        models: Weights by name; names and shapes must agree. Tied weights stand there once.
        shares: How much of each model, divided by their sum.

    Returns:
        Tensors of the first model's dtypes; those that are not floating are the first model's.

    Raises:
        ValueError: If there is no model, names or shapes differ, or the shares add up to nothing.
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

    Args:
        folders: Model folder -> how much of it, divided by their sum.
        home: The mean is a folder in here, named after what it is made of.

    Returns:
        The folder, which is complete.

    Raises:
        ConfigError: If the folders do not hold the same tensors.
    """
    place = home / f"mean-{_made_of(folders)}"
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


def _made_of(folders: Mapping[str, float]) -> str:
    """Identifies folders, shares, and the bytes of the weights."""
    digest = hashlib.sha256()
    for folder, share in folders.items():
        digest.update(f"{share!r} ".encode())
        for file in sorted(Path(folder).glob("*.safetensors")):
            digest.update(f"{file.name} ".encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]
