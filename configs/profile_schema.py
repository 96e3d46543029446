"""What `penstock profile` is configured with."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ..workers.executors.registry import PARALLEL_EXECUTOR, check_executor
from .schema import Section

__all__ = ["ProfileConfig"]

AtLeastOne = Annotated[int, Field(ge=1)]


class ProfileConfig(Section):
    """What is measured, and where the result goes."""

    output: str = "runs/calibration.json"
    """The file to write; a run looks for `calibration.json` in the folder of its runs."""
    device: Literal["cpu", "cuda"] = "cpu"
    """`cpu`: each device of the plan is a share of the cores. `cuda`: each is a CUDA device."""
    num_ranks: AtLeastOne | None = None
    """Devices; by default one per CUDA device, or one per core up to eight."""
    num_threads: AtLeastOne | None = None
    """Torch threads of each rank; by default the cores are shared out."""
    dispatch: str = PARALLEL_EXECUTOR.name
    """The executor with which the cost of a call is measured."""
    widths: Annotated[list[AtLeastOne], Field(min_length=1)] | None = None
    """Hidden sizes of the models that are timed; by default 64 to 512, or 512 to 4096 on CUDA."""
    rows: AtLeastOne = 16
    """Rows of a timed training call; the others follow from it."""
    seconds: Annotated[float, Field(gt=0)] = 0.5
    """How long each thing is repeated, about; longer is steadier."""
    deadline_s: Annotated[float, Field(gt=0)] = 300.0
    """When to give up."""

    @field_validator("dispatch")
    @classmethod
    def _is_there(cls, value: str) -> str:
        return check_executor(value)
