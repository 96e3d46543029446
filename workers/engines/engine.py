"""The declaration of an engine, which is all that code outside the engine's folder knows of it.

An engine declares itself once, as an `EngineKind` in `declaration.py` of its folder, and is listed
in `registry.py`. Configuration, placement and planner ask that object: what it is called, which
workers it has, which layouts it runs and what they cost. A declaration does not import what the
engine computes with; the classes of its workers are named, and imported when they are needed.

To add an engine: a folder with its workers and a `declaration.py`, a line in `registry.py`, and an
option for the command line (`configs/engine/NAME.yaml`, `configs/rollout/NAME.yaml`). One that is
not part of this package needs no line: `engine.kind=module:ENGINE`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...dataflow.errors import ConfigError
from ...planner.cost.engine_model import EngineModel
from ...planner.cost.memory import Parts
from ...planner.inputs.calls import Call, CallKind
from ...planner.inputs.layout import Layout
from ...planner.inputs.model_shape import ModelShape

MICRO_BATCH_TOKENS = 4096
"""Tokens that a worker computes at once on a CPU, unless its options say otherwise."""


@dataclass(frozen=True)
class Requirement:
    """A package that an engine needs and this one does not depend on.

    Attributes:
        module: What is imported of it.
        package: What it is called where packages are installed from.
        install: What to install, as one gives it to pip.
        install_on_cpu: The same where there is no GPU, if it is something else.
    """

    module: str
    package: str
    install: str
    install_on_cpu: str = ""

    def install_on(self, device: str) -> str:
        """Packages to install for a kind of device, "cpu" or "cuda"."""
        return self.install_on_cpu or self.install if device == "cpu" else self.install


class MemorySaving(Protocol):
    """Memory that options of an engine's workers cost, where each process has whole models."""

    def transient(self, call: Call, num_ranks: int, options: Mapping[str, Any]) -> Parts:
        """Bytes that a call holds beyond what is always held.

        Args:
            call: What runs.
            num_ranks: Data-parallel ranks that share its rows.
            options: Fields of its worker's spec; what is not there is as the spec has it.
        """
        ...

    def for_training(self, options: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Changes of these options that need less and less memory to train and evaluate."""
        ...

    def for_generating(self, options: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The same to generate."""
        ...


def usual_options(layout: Layout) -> dict[str, Any]:
    """Fields of a `Recipe` that every engine here has, as a layout says."""
    # Of the calls of a role only training keeps activations: the layouts of others say nothing.
    chosen = {"activation_checkpointing": layout.checkpointing, "offload": layout.offload}
    return {name: True for name, value in chosen.items() if value}


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineKind:
    """An engine of language models.

    Example:
        >>> ENGINE = EngineKind(
        ...     planned=EngineModel(name="mine", why_not=why_not),
        ...     roles={"policy": "my_engine:MyPolicySpec"},
        ... )
    """

    planned: EngineModel
    """The planner's model of it: name, layouts it runs, memory."""
    roles: Mapping[str, str] = field(default_factory=dict[str, str])
    """Kind of worker ("policy", "value", "reward_model") -> the class of its spec, as
    "module:Class". None for an engine that trains and evaluates nothing."""
    rollout: str | None = None
    """The same for a policy that is only sampled from (`rollout=NAME`); None if there is none."""
    generates: bool = False
    """Whether a policy that it trains is sampled from in the same worker."""
    merges_adapters: bool = False
    """Whether it samples from weights of the model's precision with adapters merged in."""
    needs: Requirement | None = None
    """Packages that must be installed."""
    tried_on_gpus: bool = True
    """Whether it has ever run on a GPU; a run on one says so if not."""
    division: Callable[[Layout], tuple[int, int]] = lambda layout: (layout.tp, layout.pp)
    """Layout -> the processes that share one data-parallel rank's matrices, and its stages of
    layers: `tensor_parallel` and `pipeline_parallel` of the worker group that runs it."""
    options: Callable[[Layout], Mapping[str, Any]] = usual_options
    """Layout -> fields of the workers' spec that it decides; an engine whose workers lack those of
    `usual_options` refuses the layouts that need them."""
    saving: MemorySaving | None = None
    """Memory that these fields cost; None if the engine cannot say."""
    computes: Callable[[Any], str] = lambda model: "through transformers"
    """A language model without memory (`empty_model`) -> who computes its layers, for people."""

    @property
    def name(self) -> str:
        """Name in the configuration and in messages."""
        return self.planned.name

    @property
    def trains(self) -> bool:
        """Whether it can be `engine=`."""
        return bool(self.roles)

    def why_not(
        self, layout: Layout, kind: CallKind, shape: ModelShape | None = None
    ) -> str | None:
        """Why it cannot run a call in a layout, as a clause; None if it can."""
        return self.planned.why_not(layout, kind, shape)

    def spec(self, worker: str) -> Any:
        """The class of a worker's spec.

        Args:
            worker: A key of `roles`.

        Raises:
            ConfigError: If the engine's package is not installed.
        """
        return self._load(self.roles[worker], f"engine={self.name}")

    @property
    def rollout_spec(self) -> Any:
        """The class of the spec of a policy that only generates; raises as `spec`."""
        assert self.rollout is not None
        return self._load(self.rollout, f"rollout={self.name}")

    def _load(self, path: str, key: str) -> Any:
        if self.needs is not None and importlib.util.find_spec(self.needs.module) is None:
            on_cpu = self.needs.install_on_cpu
            raise ConfigError(
                f"{key} needs the package {self.needs.package}, which is not installed\n"
                f"    pip install '{self.needs.install}'"
                + (f"; on a machine without a GPU: pip install '{on_cpu}'" if on_cpu else "")
            )
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(module), name)


def why_not_as_usual(name: str, layout: Layout, kind: CallKind) -> str | None:
    """Why an engine that knows tensor, pipeline and data parallelism cannot run a layout."""
    if layout.cp > 1 or layout.ep > 1:
        return f"engine '{name}' has no cp and ep"
    if layout.offload and kind == "generate":
        return f"engine '{name}' keeps a model on the device that it generates with"
    return None
