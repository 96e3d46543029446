"""What the comparisons of `parity.py` share: the packages, random inputs, and distances."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

logging.disable(logging.WARNING)

PACKAGES = ("verl", "openrlhf", "trl", "rlax", "torchrl")


def without_init(package: str, *subpackages: str) -> None:
    """Make a package's modules importable without its `__init__` files, which want GPUs."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed here; run benchmarks/parity.py")
    folder = Path(spec.submodule_search_locations[0])
    for name in ("", *subpackages):
        empty = types.ModuleType(f"{package}.{name}".rstrip("."))
        empty.__path__ = [str(folder / name)]
        sys.modules[empty.__name__] = empty


without_init("openrlhf", "models")
verl: Any = importlib.import_module("verl.trainer.ppo.core_algos")
verl_torch: Any = importlib.import_module("verl.utils.torch_functional")
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
openrlhf_loss: Any = importlib.import_module("openrlhf.models.loss")
openrlhf_kl: Any = importlib.import_module("openrlhf.models.utils")
del sys.modules["deepspeed"]  # transformers looks for the real one


ACTOR: Any = importlib.import_module("verl.workers.config").ActorConfig(
    strategy="fsdp",
    rollout_n=3,
    ppo_micro_batch_size_per_gpu=1,
    clip_ratio=0.2,
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
)


class Draw:
    """Random columns of six rows in groups of three."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.rows, self.width = 6, 9
        lengths = torch.randint(2, self.width + 1, (self.rows,), generator=self._random)
        self.mask = torch.arange(self.width) < lengths[:, None]
        self.group = torch.tensor([0, 1, 0, 1, 1, 0])
        self.score = self.normal(self.rows)
        behavior = -self.normal(self.rows, self.width).abs()
        self.behavior_logprob = behavior * self.mask
        self.logprob = (behavior + 0.3 * self.normal(self.rows, self.width)) * self.mask
        self.ref_logprob = (behavior + 0.3 * self.normal(self.rows, self.width)) * self.mask
        self.advantage = self.normal(self.rows, self.width) * self.mask
        self.value = self.normal(self.rows, self.width) * self.mask
        self.old_value = self.normal(self.rows, self.width) * self.mask
        self.value_target = self.normal(self.rows, self.width) * self.mask

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers, in double precision."""
        return torch.randn(*shape, generator=self._random, dtype=torch.float64)

    @property
    def floats(self) -> Tensor:
        """The mask as numbers."""
        return self.mask.double()

    @property
    def paid_last(self) -> Tensor:
        """The score on each row's last token."""
        last = self.mask.sum(1) - 1
        return torch.zeros(self.mask.shape, dtype=torch.float64).scatter(
            1, last[:, None], self.score[:, None]
        )


Compare = Callable[[Draw], tuple[Any, Any]]


class Case(NamedTuple):
    """One comparison; `compare` returns ours and theirs."""

    what: str
    theirs: str
    ours: str
    compare: Compare


CASES: list[Case] = []


def case(what: str, theirs: str, our_name: str) -> Callable[[Compare], Compare]:
    """Add a comparison to the list."""

    def add(compare: Compare) -> Compare:
        CASES.append(Case(what, theirs, our_name, compare))
        return compare

    return add


def with_gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """A loss and its gradient in one tensor."""
    at = at.clone().requires_grad_()
    value = loss(at)
    (gradient,) = torch.autograd.grad(value, at)
    return torch.cat([value.detach().reshape(1), gradient.flatten()])


def on_masked(column: Tensor, draw: Draw) -> Tensor:
    """Zero elsewhere: what stands on padding differs between packages and means nothing."""
    return torch.where(draw.mask, column, 0)


@dataclass
class Difference:
    """The largest seen."""

    value: float = 0.0

    def see(self, mine: Any, other: Any) -> None:
        """Compare two results element by element."""
        a = torch.as_tensor(np.asarray(mine), dtype=torch.float64)
        b = torch.as_tensor(np.asarray(other), dtype=torch.float64)
        if a.shape != b.shape:
            raise SystemExit(f"shapes differ: {list(a.shape)} and {list(b.shape)}")
        scale = max(1.0, float(b.abs().max()))
        self.value = max(self.value, float((a - b).abs().max()) / scale)
