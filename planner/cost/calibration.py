"""A measured machine: its devices and links as a cluster, and what our engine gets out of them.

`penstock profile` writes this file, the planner reads it. The cluster holds peaks, measured with
large products and long copies while all ranks work; the constants say which share of them real
calls reach, and are those with which the model of time comes closest to the calls that were timed.
The calls are kept beside them, so that anybody can see how close that is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...dataflow.errors import PlanError
from ...dataflow.files import read_bytes
from ..inputs.cluster import ClusterSpec
from ..inputs.model_shape import ModelShape
from .constants import Constants

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class MeasuredCall(BaseModel):
    """A call that was timed, and what the model of time says of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    """What was called, on how many rows of how many tokens."""
    width: Annotated[int, Field(ge=1)]
    """Hidden size of the model."""
    dtype: str
    """Of its weights."""
    measured_s: Seconds
    """Median over repeats, of the slowest rank."""
    predicted_s: Seconds
    """Predicted with the constants of this calibration."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0


class DtypeConstants(BaseModel):
    """What the engine gets out of a device with models in one dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    constants: Constants
    """With the efficiency of products at the middle width."""
    matmul_efficiency: Mapping[Annotated[int, Field(ge=1)], Share] = Field(min_length=1)
    """Hidden size -> share of the peak that a model of that width reaches. Small products reach
    less, and what is no product at all weighs more beside them."""

    def at(self, width: int) -> Constants:
        """The constants for a model of any width.

        Between two measured widths the efficiency is interpolated over the logarithm of the width;
        beyond them it is that of the nearest.
        """
        return self.constants.replaced(matmul_efficiency=self._efficiency(width))

    def _efficiency(self, width: int) -> float:
        known = sorted(self.matmul_efficiency.items())
        if width <= known[0][0]:
            return known[0][1]
        for (low, at_low), (high, at_high) in pairwise(known):
            if width <= high:
                way = math.log(width / low) / math.log(high / low)
                return at_low + way * (at_high - at_low)
        return known[-1][1]


class Calibration(BaseModel):
    """One machine, as the planner sees it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    cluster: ClusterSpec
    """The devices: each is what one rank has."""
    constants: Constants
    """Constants of the model of time, for a step of which no model is known."""
    dtypes: Mapping[str, DtypeConstants] = Field(default_factory=dict[str, DtypeConstants])
    """By the dtype of the models that were timed; where there are none, `constants` hold for every
    model."""
    num_threads: Annotated[int, Field(ge=1)]
    """Torch threads of one rank while it was measured."""
    executor: str
    """What `call_s` was measured with."""
    machine: str
    """What it ran on, for people."""
    date: str
    """Date of the measurement, as YYYY-MM-DD."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and what stands in for it."""
    calls: tuple[MeasuredCall, ...] = ()
    """What the constants were found from."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.cluster.node_groups[0].device.is_cpu else "cuda"

    @property
    def error(self) -> float:
        return sum(abs(call.error) for call in self.calls) / max(len(self.calls), 1)

    def notes_for(self, models: Iterable[ModelShape | None]) -> tuple[str, ...]:
        # A share of the peak is that of one dtype: what is no product takes as long in the others.
        largest = _largest(models)
        if largest is None or not self.dtypes or largest.dtype in self.dtypes:
            return ()
        return (
            f"the calibration is of models in {' and '.join(self.dtypes)}, and "
            f"'{largest.name}' is in {largest.dtype}; measure such models too: `penstock profile "
            f"dtypes=[{','.join((*self.dtypes, largest.dtype))}]`",
        )

    def constants_for(self, models: Iterable[ModelShape | None]) -> Constants:
        largest = _largest(models)
        if largest is None or not self.dtypes:
            return self.constants
        found = self.dtypes.get(largest.dtype) or next(iter(self.dtypes.values()))
        return found.at(largest.hidden_size)

    @staticmethod
    def read(file: Path) -> Calibration:
        try:
            return Calibration.model_validate_json(read_bytes(file).decode())
        except FileNotFoundError:
            raise PlanError(
                f"calibration file {file} does not exist; `penstock profile output={file}` writes "
                "one"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"calibration file {file} cannot be read: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "the file"
            raise PlanError(
                f"calibration file {file}: {key}: {first['msg']} (got {first['input']!r:.80}); "
                f"`penstock profile output={file}` writes a new one"
            ) from None


def _largest(models: Iterable[ModelShape | None]) -> ModelShape | None:
    shapes = [shape for shape in models if shape is not None]
    return max(shapes, key=ModelShape.num_params, default=None)
