"""Weights of perceptrons: in folders, read again if they fit what is made now, and inherited.

Weight inheritance is one worker taking the weights of another in the same process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ....dataflow.errors import ConfigError
from ....dataflow.graph.role import Worker
from ...training.flat_parameters import read_tensors, write_tensors
from ...training.model_worker import ModelWorker
from ...training.weight_checks import take_tensors
from .perceptron import PerceptronSpec

_MODEL_TYPE = "model_type"
_SEED = "init_seed"
"""Says nothing about weights that were trained since."""


def save_network(
    folder: Path, network: nn.Module, model_type: str, spec: PerceptronSpec, more: Mapping[str, Any]
) -> None:
    """Write `config.json` and `model.safetensors` of a network made of perceptrons."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", network.state_dict())
    config = {"model_type": model_type, **asdict(spec), **more}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_network(
    folder: str | Path,
    network: nn.Module,
    model_type: str,
    spec: PerceptronSpec,
    more: Mapping[str, Any],
) -> None:
    """Give a network the weights of a folder; the arguments are those of `save_network`."""
    folder = Path(folder)
    found = _configuration(folder, model_type)
    wanted: dict[str, Any] = json.loads(json.dumps({**asdict(spec), **more}))
    # A field that a folder does not know was not there yet, and so at its default.
    found = {**json.loads(json.dumps(asdict(PerceptronSpec()))), **found}
    if "memory" in found:  # as folders called it before
        found["recurrent_units"] = found.pop("memory")
    differing = [
        f"{key}: {_shown(found.get(key))}, and here {_shown(value)}"
        for key, value in wanted.items()
        if key != _SEED and found.get(key) != value
    ]
    if differing:
        raise ConfigError(
            f"the network in '{folder}' was made for something else:\n    "
            + "\n    ".join(differing)
            + "\n    use the task that it was trained on, and model.architecture as in its "
            "config.json"
        )
    file, owner = folder / "model.safetensors", "the network that the config.json beside it says"
    take_tensors(file, owner, read_tensors(file), network.state_dict())


def _configuration(folder: Path, model_type: str) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        found: Any = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(
            f"'{folder}' has no config.json to read ({error.strerror})\n"
            "    give the folder of one role below a run's models/, as models/actor"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{file}' is not JSON: {error}") from error
    kind = found.get(_MODEL_TYPE) if isinstance(found, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if kind != model_type:
        raise ConfigError(
            f"'{folder}' holds a model of type {kind!r}, and '{model_type}' is needed\n"
            "    give a folder that such a role of another run left below its models/"
        )
    return found


def _shown(value: object) -> str:
    return json.dumps(value)


def inherit_weights(
    worker: ModelWorker,
    other: Worker,
    *,
    mutation: float = 0.0,
    random: np.random.Generator | None = None,
) -> None:
    """Take another worker's weights, each times `1 + mutation * noise`."""
    taken = dict(other.export_weights())
    if mutation and random is not None:
        for name, weight in taken.items():
            noise = torch.from_numpy(random.standard_normal(tuple(weight.shape)))
            taken[name] = (weight * (1 + mutation * noise)).to(weight.dtype)
    worker.load_weights(taken)
