"""All weights of a model in one flat buffer, and how they are named, hashed and written.

The module's parameters become views of the buffer, with chosen neighbors (query, key and value
projections) adjacent, so that a fused weight is a view too and costs no copy at any weight
version. Gradients live in a second buffer of the same layout: clipping, reduction over ranks and
the optimizer each touch one tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ...dataflow.errors import ConfigError
from ...dataflow.files import NotAFile, check_regular
from .host_memory import copy_in
from .weight_checks import not_mapped
from .weight_gradients import set_total

_ALIGN = 16  # elements; keeps every parameter on a 64-byte boundary in float32
ADDED_AT_ONCE = 1 << 20
"""Elements of a gradient that are converted to float32 at once on a CPU."""


class FlatParameters:
    """Owner of a module's weights and gradients, of one dtype on one device.

    Parameters are re-pointed into the buffer; tied ones stay tied, and `fused` ones lie side by
    side, so that `fused_weight` has them stacked along dimension 0. Weights of an `empty` module
    come later; none are copied.
    """

    def __init__(
        self,
        module: nn.Module | Mapping[str, nn.Parameter],
        fused: Sequence[tuple[str, ...]] = (),
        *,
        empty: bool = False,
    ) -> None:
        named = module.named_parameters() if isinstance(module, nn.Module) else module
        parameters = dict(named)
        assert len({(p.dtype, p.device) for p in parameters.values()}) == 1, "one dtype, one device"
        self._parameters = parameters
        self._spans: dict[str, tuple[int, torch.Size]] = {}
        self._runs = _runs(parameters, fused)
        # The gradient buffer, f32[size], or None until `enable_gradients`
        self.grad: Tensor | None = None
        self._fused: dict[tuple[str, ...], tuple[nn.Parameter, int]] = {}
        self.borrowed: list[str] = []  # Names of parameters outside of the buffer
        # The buffer, [size]. Gaps between parameters are zero and stay zero.
        self.data = self._laid(self._runs, copied=not empty)

    def _laid(self, runs: Sequence[Sequence[str]], *, copied: bool) -> Tensor:
        """A buffer in which the parameters of runs lie from now on."""
        parameters = self._parameters
        size = sum(_aligned(sum(parameters[name].numel() for name in run)) for run in runs)
        first = next(iter(parameters.values()))
        make = torch.zeros if copied else torch.empty
        buffer = make(size, dtype=first.dtype, device=first.device)
        start = 0
        for run in runs:
            begin = start
            for name in run:
                parameter = parameters[name]
                self._spans[name] = (start, parameter.shape)
                view = self.view(buffer, name)
                if copied:
                    view.copy_(parameter.detach())
                # The object stays: the module, and what is tied to it, go on to use it.
                parameter.data = view
                start += parameter.numel()
            if len(run) > 1:
                self._stack(run, buffer[begin:start], begin)
            start = begin + _aligned(start - begin)
        return buffer

    def _stack(self, run: Sequence[str], data: Tensor, begin: int) -> None:
        stacked = data.view(-1, *self._parameters[run[0]].shape[1:])
        if tuple(run) in self._fused:
            self._fused[tuple(run)][0].data = stacked  # what computes with it goes on to use it
        else:
            self._fused[tuple(run)] = nn.Parameter(stacked), begin

    def borrow(self, tensors: Mapping[str, Tensor]) -> None:
        """Have parameters be tensors of others, where a whole run lies together; all else is empty.

        They are only read, and have no gradients.
        """
        lent = [run for run in self._runs if _adjoin([tensors.get(name) for name in run])]
        names = [name for run in lent for name in run]
        if self.borrowed == names and all(
            self._parameters[name].data_ptr() == tensors[name].data_ptr() for name in names
        ):
            return
        for run in lent:
            for name in run:
                self._parameters[name].data = tensors[name]
            if len(run) > 1:
                first = tensors[run[0]]
                size = sum(tensors[name].numel() for name in run)
                self._stack(run, first.as_strided((size,), (1,)), 0)
        self.borrowed = names
        self.data = self._laid([run for run in self._runs if run not in lent], copied=False)

    @property
    def place(self) -> int:
        """Another number if weights have come to lie elsewhere."""
        return hash(
            (self.data.data_ptr(), *(self._parameters[n].data_ptr() for n in self.borrowed))
        )

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """The part of a buffer of this layout that belongs to parameter `name`."""
        start, shape = self._spans[name]
        return buffer[start : start + shape.numel()].view(shape)

    def span(self, name: str) -> tuple[int, int]:
        start, shape = self._spans[name]
        return start, start + shape.numel()

    def parameter(self, name: str) -> nn.Parameter:
        return self._parameters[name]

    def fused_weight(self, names: tuple[str, ...]) -> nn.Parameter:
        """The stacked parameters `names` as one leaf tensor sharing their memory and gradient."""
        return self._fused[names][0]

    def freeze(self) -> None:
        """Have no leaf ask for a gradient."""
        for leaf in (*self._parameters.values(), *(leaf for leaf, _ in self._fused.values())):
            leaf.requires_grad_(False)

    def enable_gradients(self) -> Tensor:
        """Allocate the gradient buffer once, in float32, and zero it.

        Every leaf of float32 gets its view of it as its gradient. What backward passes give leaves
        of 16 bits is added to it at once and kept nowhere else; on a CUDA device the products that
        make it add it themselves (`weight_gradients.py`).
        """
        if self.grad is not None:
            return self.grad.zero_()
        self.grad = torch.zeros_like(self.data, dtype=torch.float32)
        leaves = [(self._parameters[name], start) for name, (start, _) in self._spans.items()]
        for leaf, begin in (*leaves, *self._fused.values()):
            own = self.grad[begin : begin + leaf.numel()].view(leaf.shape)
            if leaf.dtype == torch.float32:
                leaf.grad = own
            else:
                leaf.register_post_accumulate_grad_hook(partial(_hand_over, own))
            set_total(leaf, own)
        return self.grad

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights by others of the same names and shapes."""
        with torch.no_grad():
            copy_in((self.view(self.data, name), tensor) for name, tensor in tensors.items())


def _hand_over(total: Tensor, leaf: Tensor) -> None:
    if leaf.grad is None:  # what made it has added it
        return
    found, leaf.grad = leaf.grad, None
    if total.device.type != "cpu":
        total.add_(found)
        return
    # In parts: on a CPU an addition of two dtypes first converts all of what it is given.
    for own, part in zip(
        total.view(-1).split(ADDED_AT_ONCE), found.reshape(-1).split(ADDED_AT_ONCE), strict=True
    ):
        own.add_(part)


def _runs(parameters: Mapping[str, Tensor], fused: Iterable[tuple[str, ...]]) -> list[list[str]]:
    """Parameter names in buffer order, neighbors together."""
    together = {name: names for names in fused for name in names}
    runs: list[list[str]] = []
    placed: set[str] = set()
    for name in parameters:
        if name not in placed:
            runs.append(list(together.get(name, (name,))))
            placed.update(runs[-1])
    return runs


def _adjoin(tensors: Sequence[Tensor | None]) -> bool:
    """Whether these are tensors that lie one behind the other."""
    given = [one for one in tensors if one is not None and one.is_contiguous()]
    return len(given) == len(tensors) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        for a, b in pairwise(given)
    )


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGN) * _ALIGN


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Hash over names, dtypes, shapes and bytes in sorted name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, path, metadata={"format": "pt"})


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        check_regular(path)  # a FIFO would be waited for
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"'{path}' does not exist; expected a safetensors file there") from None
    except NotAFile:
        raise
    except (MemoryError, RuntimeError) as error:
        raise not_mapped(path, error) from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ConfigError(
            f"'{path}' is no whole safetensors file: {error}\n    copy it again"
        ) from None
