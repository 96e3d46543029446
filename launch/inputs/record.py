"""The algorithms of a run as graphs: each section's step function, recorded with its config.

A step function is named `module:function`; its config class is found from the annotation of its
parameter `cfg`, and everything is validated against it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...algorithms.reference import with_reference
from ...algorithms.roles.language import Policy, Sampling
from ...configs.references import load_object
from ...configs.schema import AlgorithmConfig, RoleConfig
from ...configs.validate import check_finite, validated
from ...dataflow.errors import ConfigError, FlowError, PenstockError, line_of, one_process
from ...dataflow.graph.check import hints_of
from ...dataflow.graph.graph import Graph, NodeKind
from ...dataflow.graph.role import Role
from ...dataflow.graph.tracer import build
from ...dataflow.runtime.call_context import DeadlineExceeded, deadline
from ...dataflow.runtime.placement import Placement

_RECORD_DEADLINE_S = 8.0  # longest recording of a step function; ours take milliseconds
_LATER: Any = None  # a field that is filled in when the stage is placed


@dataclass(frozen=True)
class Stage:
    name: str  # "sft", or the main algorithm's own graph name
    at: str  # the key under which it is configured
    config: AlgorithmConfig  # its section
    graph: Graph  # its recorded step
    seed: int  # of its data and random numbers
    cfg: Any = None  # its section's options, as its step function takes them
    # role -> its section with `worker` and `start` filled in. `start` is "model", the name of an
    # earlier stage, a folder, or None for a worker without weights, or with random ones of its own
    # seed; it is the first of `start_mean` if there is one.
    roles: Mapping[str, RoleConfig] = field(default_factory=dict[str, RoleConfig])
    placement: Placement = _LATER  # where its nodes run
    # role -> group -> fields of its worker's spec that the plan decides there
    planned_options: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(
        default_factory=dict[str, Mapping[str, Mapping[str, Any]]]
    )

    @property
    def sampling(self) -> Sampling | None:
        """Sampling of the first node that samples responses; None if none does."""
        rollouts = (node for node in self.graph.nodes if node.kind is NodeKind.ROLLOUT)
        given = (value for node in rollouts for value in node.constants.values())
        return next((value for value in given if isinstance(value, Sampling)), None)

    @property
    def changed_roles(self) -> set[str]:
        """Roles whose weights change: by a loss, or as they follow another role's."""
        following = {n.role for n in self.graph.nodes if n.leader is not None and n.role}
        return following | set(self.graph.learning_roles)

    @property
    def policy(self) -> str | None:
        return self.trained(Policy)

    def worker(self, role: str) -> str:
        """The worker of a role: a name, or `module:factory`."""
        return self.roles[role].worker or ""

    def starts(self, role: str) -> Mapping[str, float]:
        """Sources of a role's weights -> the share of each in their mean; {} for none."""
        section = self.roles[role]
        return section.start_mean or ({section.start: 1.0} if section.start else {})

    def trained(self, contract: type[Role]) -> str | None:
        """The role of that contract that learns; the first of several, None if there is none."""
        for role, kind in self.graph.roles.items():
            if role in self.graph.learning_roles and issubclass(kind, contract):
                return role
        return None


def recorded(algorithm: AlgorithmConfig, seed: int) -> tuple[Stage, ...]:
    """The section's algorithms, those that are trained before in order, the main one last."""
    stages: list[Stage] = []
    for name, section in {"": algorithm, **algorithm.before}.items():
        at = f"algorithm.before.{name}" if name else "algorithm"
        if name and section.before:
            raise ConfigError(
                f"'{at}.before' is set, but stages cannot be nested\n"
                "    list all stages under algorithm.before, in order"
            )
        step = load_step(section.step, f"{at}.step")
        constants = step_cfg(step, section.cfg, f"{at}.cfg")
        graph = _record(with_reference(step, section.reference), constants)
        own = seed if section.seed is None else section.seed
        stages.append(Stage(name or graph.name, at, section, graph, own, constants.get("cfg")))
    return (*stages[1:], stages[0])


def _record(step: Callable[..., Any], constants: Mapping[str, Any]) -> Graph:
    name = step.__name__.removesuffix("_step") or step.__name__
    try:
        with one_process(), deadline(_RECORD_DEADLINE_S):
            return build(step, name=name, **constants)
    except PenstockError:
        raise
    except DeadlineExceeded as error:
        raise FlowError(
            f"recording '{step.__name__}' takes longer than {_RECORD_DEADLINE_S:g} s",
            where=line_of(error),
            fix="a step is recorded once, without data: leave to an op what computes, and loop "
            "over numbers that are known",
        ) from error
    except (Exception, SystemExit, GeneratorExit) as error:
        raise FlowError(
            f"recording '{step.__name__}' raised {type(error).__name__}: {error}",
            where=line_of(error),
            fix="a step is recorded once, with stand-ins for its columns; --debug shows how it "
            "came about",
        ) from error


def load_step(reference: str, at: str) -> Callable[..., Any]:
    step = load_object(reference, at)
    is_plain = not (inspect.iscoroutinefunction(step) or inspect.isgeneratorfunction(step))
    if not (inspect.isfunction(step) and is_plain):
        kind = type(step).__name__ if is_plain else "coroutine or a generator"
        raise ConfigError(
            f"'{at}': '{reference}' is a {kind}\n"
            "    give a step function whose parameters are annotated with roles and tables"
        )
    return step


def step_cfg(step: Callable[..., Any], data: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The constants `build` needs: `{"cfg": ...}`, or nothing for a step without a `cfg`."""
    if "cfg" not in inspect.signature(step).parameters:
        if data:
            raise ConfigError(
                f"'{at}' has keys ({', '.join(data)}), but '{step.__name__}' takes no 'cfg'\n"
                "    add a parameter 'cfg' annotated with a dataclass, or leave the keys out"
            )
        return {}
    kind = hints_of(step).get("cfg")
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ConfigError(
            f"'{at}': the parameter 'cfg' of '{step.__name__}' is annotated with {kind!r}\n"
            "    annotate it with a frozen dataclass whose fields are the algorithm's options"
        )
    check_finite(data, at)
    try:
        hints_of(kind)
    except FlowError as error:  # a name of its annotations cannot be found
        raise ConfigError(f"'{at}': {error.what}\n    {error.fix}") from error
    return {"cfg": validated(kind, data, at)}
