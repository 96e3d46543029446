"""Workers of one's own: what a factory asks the run for, by the names of its parameters.

`worker=module:factory` names a function or a class that returns a worker or its spec. Its options
are its arguments; of the arguments in `GIVEN` the run fills in those that are not options, with
what workers of ours get. A parameter that is annotated with another type is the factory's own.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from ...configs.references import load_object
from ...configs.schema import RoleConfig
from ...dataflow.errors import ConfigError
from ...workers.data.task import TaskSpec
from ...workers.models.spec import ModelSpec
from ...workers.models.tokenizer import TokenizerSpec
from ...workers.training.logprob_mismatch import MismatchLimits
from ...workers.training.optimizer import OptimizerSpec

GIVEN: Mapping[str, Any] = {
    "model": ModelSpec,
    "optimizer": OptimizerSpec,
    "tokenizer": TokenizerSpec,
    "end_ids": tuple[int, ...],
    "mismatch": MismatchLimits,
    "task": TaskSpec,
    "task_fingerprint": str,
}
"""Parameter -> its type."""

_NEEDED_BY = {
    "start": "model",
    "start_mean": "model",
    "init_offset": "model",
    "optimizer": "optimizer",
    "frozen": "optimizer",
}
"""Key of a role -> the parameter by which it reaches a worker."""


def is_own(worker: str | None) -> bool:
    """Return whether a worker is named as `module:factory`."""
    return ":" in (worker or "")


def asked_for(worker: str, given: RoleConfig, at: str) -> frozenset[str]:
    """Names of `GIVEN` that a factory takes and its options leave to the run.

    Args:
        worker: `module:factory`.
        given: The role's section.
        at: The key of the role, for messages.

    Raises:
        ConfigError: If the factory cannot be loaded.
    """
    factory = load_object(worker, f"{at}.worker")
    hints = _hints(factory)
    names = _parameters(factory) & GIVEN.keys() - given.options.keys()
    return frozenset(name for name in names if _is_for(hints.get(name, Any), GIVEN[name]))


def check_takes(worker: str, given: RoleConfig, asked: frozenset[str], at: str) -> None:
    """Refuse a factory that cannot be called, and keys of a role that would not reach its worker.

    Raises:
        ConfigError: Naming the key and the parameter that is missing.
    """
    _check_call(worker, given, asked, at)
    for key, needed in _NEEDED_BY.items():
        if getattr(given, key) and needed not in asked:
            kind = GIVEN[needed].__name__
            raise ConfigError(
                f"'{at}.{key}' is set, but '{worker}' does not ask for it\n"
                f"    give it a parameter '{needed}' ({kind}), or leave the key out"
            )


def _check_call(worker: str, given: RoleConfig, asked: frozenset[str], at: str) -> None:
    """Refuse a factory that cannot be called so, before anything else of the run is done."""
    factory = load_object(worker, f"{at}.worker")
    try:
        inspect.signature(factory).bind(**dict.fromkeys((*asked, *given.options)))
    except TypeError as error:
        raise ConfigError(
            f"'{at}.worker': '{worker}' cannot be called: {error}\n"
            f"    its arguments are '{at}.options' and what the run gives: {', '.join(GIVEN)}"
        ) from error
    except ValueError:  # something of C without a signature: calling it will tell
        return


def _parameters(factory: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # something of C, or no function at all: calling it will tell
        return set()


def _hints(factory: Any) -> dict[str, Any]:
    """Annotations of a factory's parameters; none if they name what cannot be found."""
    try:
        return typing.get_type_hints(factory.__init__ if isinstance(factory, type) else factory)
    except Exception:  # an annotation may be any expression
        return {}


def _is_for(annotation: Any, kind: Any) -> bool:
    """Return whether a parameter of that annotation is meant for something of a kind."""
    if annotation is Any or kind is TaskSpec:  # whose members are many
        return True
    return kind in (annotation, *typing.get_args(annotation))
