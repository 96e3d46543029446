"""What an engine knows about the weights it holds: of which version, and whether they are whole.

An engine that receives weights slice by slice keeps one `HeldWeights` and asks it before it
generates. A parameter of which anything was overwritten is partial until all of it has arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...dataflow.errors import WorkerError
from ...planner.resharding.box import Box, intersection, volume
from ...planner.resharding.sharding import Sharding


class WeightsError(WorkerError):
    """Weights that are missing, damaged or of another version; names the parameter."""


@dataclass
class _Arrived:
    """A parameter's version and which boxes of it are there."""

    version: int | None = None
    boxes: set[Box] = field(default_factory=set[Box])


class HeldWeights:
    """Versions of the parameters of one device.

    Args:
        needed: Logical parameter -> elements of it that the device must hold.
        device: The device, for messages.
    """

    def __init__(self, needed: Mapping[str, int], device: int) -> None:
        self._needed = {name: count for name, count in needed.items() if count}
        self._device = device
        self._arrived = {name: _Arrived() for name in self._needed}

    @staticmethod
    def of(sharding: Sharding, device: int) -> HeldWeights:
        """For a device that is to hold its part of a sharding."""
        needed = defaultdict[str, int](int)
        for param in sharding.params:
            for piece in sharding.patterns[param.pattern]:
                if piece.device == device:
                    needed[param.name] += volume(piece.box)
        return HeldWeights(needed, device)

    def writing(self, name: str, box: Box, version: int) -> None:
        """Note that a box of a parameter is about to be overwritten.

        What the parameter held of other versions is void, and so is what overlaps the box, even if
        it was of this version: it is not known what will lie there until `wrote` says it.

        Raises:
            WeightsError: If the device needs nothing of this parameter.
        """
        if name not in self._needed:
            raise WeightsError(
                f"device {self._device} needs nothing of parameter '{name}', and was given some of "
                "it; the transfer plan must end in the engine's own sharding"
            )
        found = self._arrived[name]
        if found.version != version:
            self._arrived[name] = _Arrived(version)
        elif found.boxes:
            found.boxes = {other for other in found.boxes if intersection(other, box) is None}

    def wrote(self, name: str, box: Box, version: int) -> None:
        """Note that a box of a parameter is in place. The same box counts once."""
        self.writing(name, box, version)
        self._arrived[name].boxes.add(box)

    def check(self, version: int) -> None:
        """Refuse to go on unless every parameter is whole and of this version.

        Raises:
            WeightsError: Names the first parameter that is partial or of another version.
        """
        for name, count in self._needed.items():
            found = self._arrived[name]
            there = self._elements(name)
            if found.version == version and there == count:
                continue
            if found.version is None:
                what = "was never received"
            elif there < count:
                what = f"has only {there} of its {count} elements of version {found.version}"
            else:
                what = f"is of version {found.version}"
            raise WeightsError(
                f"cannot use the weights on device {self._device}: parameter '{name}' {what}; "
                f"version {version} is expected. Transfer version {version} to it, whole"
            )

    def _elements(self, name: str) -> int:
        return sum(volume(box) for box in self._arrived[name].boxes)
