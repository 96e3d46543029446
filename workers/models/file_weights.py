"""A model's weights as its files have them, of which every process reads its own part at first.

transformers' modules hold the experts of a layer as `mlp.experts.gate_up_proj` [experts, gate rows
then up rows, inputs] and `mlp.experts.down_proj` [experts, outputs, inner], and those are the
names that engines exchange. The files that it writes and reads have each expert's matrices apart,
Qwen's as `mlp.experts.3.gate_proj.weight`, Mixtral's as `block_sparse_moe.experts.3.w1.weight`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...dataflow.errors import ConfigError
from ...dataflow.runtime.worker_protocol import WorkerContext
from ...planner.resharding.sharding import Box
from ..training.checkpoint_files import FileTensors, TensorSource, WholeTensorSource, fill_weights
from ..training.network import Network
from .model_folder import weight_files
from .spec import Head, ModelSpec

_MATRIX = re.compile(r"(.*\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")
_PLACES: Mapping[str, tuple[str, int]] = {
    "gate_proj": ("gate_up_proj", 0),
    "w1": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "w3": ("gate_up_proj", 1),
    "down_proj": ("down_proj", 0),
    "w2": ("down_proj", 0),
}
"""A matrix's name in files -> the module's parameter, and which of its blocks of rows it is."""


_FUSED = re.compile(r"(.*)\.mlp\.(?:(gate)\.weight|experts\.(gate_up_proj|down_proj))")


def as_in_files(tensors: Mapping[str, Tensor], model_type: str) -> Iterator[tuple[str, Tensor]]:
    """A module's tensors as its files have them: views of each expert's matrices."""
    if model_type == "gpt_oss":  # its files have them fused as well
        yield from tensors.items()
        return
    mixtral = model_type == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in tensors.items():
        found = _FUSED.fullmatch(name)
        if found is None:
            yield name, tensor
        elif found[2]:
            yield f"{found[1]}.{block}.gate.weight", tensor
        else:
            words = (gate, up) if found[3] == "gate_up_proj" else (down,)
            for expert, matrices in enumerate(tensor):
                for word, matrix in zip(words, matrices.chunk(len(words)), strict=True):
                    yield f"{found[1]}.{block}.experts.{expert}.{word}.weight", matrix


def _module_name(name: str) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.")


class FusedExperts:
    """A `TensorSource` of files under the module's names; others' names are left as they are."""

    def __init__(self, files: TensorSource) -> None:
        self._files = files
        self._plain: dict[str, str] = {}
        matrices: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
        for name in files.shapes():
            found = _MATRIX.fullmatch(name)
            if found is None or found[3] not in _PLACES:
                self._plain[_module_name(name)] = name
                continue
            word, block = _PLACES[found[3]]
            matrices[f"{_module_name(found[1])}.{word}"][int(found[2]), block] = name
        self._fused = {name: _rows_of(name, held) for name, held in matrices.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        given = self._files.shapes()
        found = {name: given[file] for name, file in self._plain.items()}
        for name, experts in self._fused.items():
            rows = sum(given[file][0] for file in experts[0])
            found[name] = (len(experts), rows, given[experts[0][0]][1])
        return found

    def read(self, name: str, box: Box) -> Tensor:
        if name in self._plain:
            return self._files.read(self._plain[name], box)
        (first, stop), rows, columns = box
        experts = self._fused[name][first:stop]
        return torch.stack([self._expert(files, rows, columns) for files in experts])

    def _expert(self, files: list[str], rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """Some rows and columns of one expert's matrices, which lie one below the other."""
        parts: list[Tensor] = []
        above = 0
        for file in files:
            height = self._files.shapes()[file][0]
            begin, end = max(rows[0] - above, 0), min(rows[1] - above, height)
            if begin < end:
                parts.append(self._files.read(file, ((begin, end), columns)))
            above += height
        return torch.cat(parts)


def _rows_of(name: str, held: Mapping[tuple[int, int], str]) -> list[list[str]]:
    """Names of each expert's matrices in the files, top to bottom."""
    number = 1 + max(expert for expert, _ in held)
    blocks = range(2 if name.endswith("gate_up_proj") else 1)
    for expert in range(number):
        if any((expert, block) not in held for block in blocks):
            raise ConfigError(
                f"the model's files lack a matrix of expert {expert} of '{name}'\n"
                "    save the whole model again with save_pretrained"
            )
    return [[held[expert, block] for block in blocks] for expert in range(number)]


class _Backbone:
    """A folder that holds a backbone without a head, whose names lack the model's own prefix."""

    _PREFIX = "model."

    def __init__(self, files: TensorSource) -> None:
        self._files = files

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {self._PREFIX + name: shape for name, shape in self._files.shapes().items()}

    def read(self, name: str, box: Box) -> Tensor:
        return self._files.read(name.removeprefix(self._PREFIX), box)


def model_source(spec: ModelSpec, head: Head) -> TensorSource:
    """The weights that `spec.causal_lm` starts from, under the same names.

    Of a folder only what is asked for is read; random weights are sampled whole, as elsewhere.
    """
    if spec.folder is None:
        return WholeTensorSource(dict(spec.causal_lm("cpu").named_parameters()))
    spec.check(scalar_head=head.is_scalar)
    files = FusedExperts(FileTensors(weight_files(Path(spec.folder)), boxed=False))
    return files if any(name.startswith("model.") for name in files.shapes()) else _Backbone(files)


def fill_first_weights(
    network: Network, source: TensorSource, head: Head, model: ModelSpec, context: WorkerContext
) -> None:
    if not head.is_scalar:
        fill_weights(network, source, exact=False)
        return
    fill_weights(network, source, exact=False, but=head.name)
    linear = head.first_weights(model, context)
    added = {f"{head.name}.{part}": value for part, value in linear.named_parameters()}
    fill_weights(network, WholeTensorSource(added), exact=False, only=head.name)
