"""Whole parameters on their way into an engine that takes all of them at once.

Between the first and the last parameter of a version the engine holds neither the old weights nor
the new ones as far as anyone can rely on, so `check` refuses until the last is in use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...planner.resharding.box import whole
from .version_tracker import HeldWeights, WeightsError

Load = Callable[[Mapping[str, Tensor], int], None]
"""Puts all parameters of a version to use."""


class ReceivedWeights:
    """Collects a version's parameters, has them loaded when all are there, and keeps account.

    What the engine was built with counts as version 0.

    Args:
        role: Whose weights, for messages.
        shapes: Of all parameters, by Hugging Face name.
        device: The process, for messages.
        load: Called once per version.
    """

    def __init__(
        self, role: str, shapes: Mapping[str, torch.Size], device: int, load: Load
    ) -> None:
        self._role = role
        self._shapes = shapes
        self._load = load
        self._device = device
        self._held = self._nothing()
        self._held.wrote_all(0)
        self._arrived: dict[str, Tensor] = {}
        self.expected = 0

    def expect(self, version: int) -> None:
        """Accept only this version from now on; what has arrived of another is dropped."""
        if version != self.expected:
            self._arrived.clear()
            self.expected = version

    def drop(self) -> None:
        """The engine has given up what it held; the expected version is to come again."""
        self._held = self._nothing()

    def check(self) -> None:
        """Refuse weights that are partial or not of the expected version.

        Raises:
            WeightsError: Names the parameter.
        """
        self._held.check(self.expected)

    def check_fits(self, tensors: Mapping[str, Tensor]) -> None:
        """Require exactly the parameters of the model.

        Raises:
            ValueError: If names or shapes differ.
        """
        missing = sorted(self._shapes.keys() - tensors.keys())
        unknown = sorted(tensors.keys() - self._shapes.keys())
        if missing or unknown:
            raise ValueError(
                f"weights do not fit: missing {missing or 'none'}, unknown {unknown or 'none'}; "
                "they must come from a model of the same architecture"
            )
        for name, tensor in tensors.items():
            if tensor.shape != self._shapes[name]:
                raise ValueError(
                    f"weight '{name}': expected shape {list(self._shapes[name])}, "
                    f"got {list(tensor.shape)}"
                )

    def receive(
        self,
        tensors: Mapping[str, Tensor],
        version: int,
        checksums: Mapping[str, int] | None = None,
    ) -> None:
        """Take some or all parameters of a version. See `GeneratorPolicy.receive`."""
        if version < self.expected:
            raise WeightsError(
                f"'{self._role}' was given parameter '{next(iter(tensors))}' of version {version}, "
                f"and expects version {self.expected} or newer; send the current weights"
            )
        self.expect(version)
        wrong = ""
        for name, tensor in tensors.items():
            wrong = self._take(name, tensor, version, checksums) or wrong
        if len(self._arrived) == len(self._shapes):
            self._use(version)
        if wrong:
            raise WeightsError(wrong)

    def _problem(self, name: str, tensor: Tensor) -> str:
        shape = self._shapes.get(name)
        where = f"'{self._role}' was given parameter '{name}'"
        if shape is None:
            return f"{where}, which its model does not have"
        if tensor.shape != shape:
            return f"{where} with shape {list(tensor.shape)}; expected {list(shape)}"
        return ""

    def _take(
        self, name: str, tensor: Tensor, version: int, checksums: Mapping[str, int] | None
    ) -> str:
        """Keep a parameter if it is right; else say what is wrong with it."""
        if name in self._shapes:
            self._held.writing(name, whole(self._shapes[name]), version)
            self._arrived.pop(name, None)
        wrong = self._problem(name, tensor)
        if wrong:
            return wrong
        if checksums is not None and name not in checksums:
            return f"'{self._role}' was given parameter '{name}' without a checksum; send one"
        if checksums is not None and parameter_checksum(name, tensor, version) != checksums[name]:
            return (
                f"'{self._role}' was given parameter '{name}' as version {version}, and it does "
                "not have the checksum that its sender made of that: it was damaged, swapped with "
                "another, or is of another version. Send it again"
            )
        self._held.wrote(name, whole(tensor.shape), version)
        self._arrived[name] = tensor
        return ""

    def _use(self, version: int) -> None:
        """Have all loaded; should that fail, none counts as held."""
        tensors, self._arrived = self._arrived, {}
        try:
            self._load(tensors, version)
        except BaseException:
            self._held = self._nothing()
            raise

    def _nothing(self) -> HeldWeights:
        return HeldWeights({n: s.numel() for n, s in self._shapes.items()}, self._device)


def parameter_checksum(name: str, tensor: Tensor, version: int) -> int:
    """64 bits over a parameter's name, its version, its dtype and its bytes."""
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{name}\0{version}\0{data.dtype}\0".encode(), digest_size=8)
    digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little")
