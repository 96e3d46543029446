"""A model's first weights, of which every process reads its own part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ...planner.resharding.box import Box
from ..training.checkpoint_files import FileTensors, TensorSource, WholeTensors
from .spec import ModelSpec

__all__ = ["model_source"]


class _Trunk:
    """A folder that holds a backbone without a head, whose names lack the model's own prefix."""

    _PREFIX = "model."

    def __init__(self, files: FileTensors) -> None:
        self._files = files

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """With the prefix."""
        return {self._PREFIX + name: shape for name, shape in self._files.shapes().items()}

    def read(self, name: str, box: Box) -> Tensor:
        """See `TensorSource.read`."""
        return self._files.read(name.removeprefix(self._PREFIX), box)


def model_source(spec: ModelSpec) -> TensorSource:
    """The weights that `spec.causal_lm` starts from, under the same names.

    Of a folder only what is asked for is read; random weights are drawn whole, as elsewhere.

    Raises:
        FileNotFoundError: If the folder has no safetensors files.
    """
    if spec.folder is None:
        return WholeTensors(dict(spec.causal_lm("cpu").named_parameters()))
    folder = Path(spec.folder)
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    files = FileTensors([folder / name for name in names], boxed=False)
    return files if any(name.startswith("model.") for name in files.shapes()) else _Trunk(files)
