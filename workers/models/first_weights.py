"""A model's first weights, of which every process of those that share it reads its own part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ...dataflow.runtime.worker_protocol import WorkerContext
from ...planner.resharding.sharding import Box
from ..training.checkpoint_files import FileTensors, TensorSource, WholeTensorSource, fill_weights
from ..training.network import Network
from .experts import FusedExperts
from .heads import Head
from .model_folder import weight_files
from .spec import ModelSpec


class _Backbone:
    """A folder that holds a backbone without a head, whose names lack the model's own prefix."""

    _PREFIX = "model."

    def __init__(self, files: TensorSource) -> None:
        self._files = files

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The name with the prefix."""
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
    """Give a process's part its first weights."""
    if not head.is_scalar:
        fill_weights(network, source, exact=False)
        return
    fill_weights(network, source, exact=False, but=head.name)
    linear = head.first_weights(model, context)
    added = {f"{head.name}.{part}": value for part, value in linear.named_parameters()}
    fill_weights(network, WholeTensorSource(added), exact=False, only=head.name)
