"""Hostile values that are resolved in this process: hundreds a second, without a command for each.

A value takes the place of one or two keys of a composed configuration, which is then validated and
resolved as a command does before it touches data, devices or models. Nothing but an error with a
message of ours may come of it, and what is accepted must stand in what would be written.
"""

from __future__ import annotations

import copy
import math
import random
import signal
import traceback
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from fuzz_case import LIMIT_S, UNKNOWN, differing
from fuzz_keys import ODD_TEXTS, run_base
from penstock.dataflow.errors import PenstockError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import dumped, resolve, run_config
from penstock.launch.run_dir.failures import in_our_words
from penstock.launch.stages.prepare import build_stages
from penstock.launch.stages.worker_specs import check_options

_VALUES: Sequence[Any] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 1000, 2**31, 2**53 + 1, 2**63, 10**12, 10**18, 10**40,
    -(10**20), math.nan, math.inf, -math.inf, -0.0, 0.5, 1.5, 1e-45, 1e-300, 1e38, 1e300, -1e300,
    [], [1], [None], ["a"], [[]], [0.5, 0.5], [1, 2, 3], {}, {"a": 1}, {"a": None}, {"a": {}},
    {"": 1}, {"a": [1]}, *ODD_TEXTS,
)  # fmt: skip

_SERIES = 500
"""Values for one algorithm before the next is composed."""


class ValueFuzzer:
    """Tries values for the keys of algorithms, in an order that a seed gives."""

    def __init__(self, seed: int, algorithms: Sequence[str]) -> None:
        self._chance = random.Random(f"{seed}/values")
        self._algorithms = algorithms
        self._composed: dict[str, dict[str, Any]] = {}
        self._num_tried, self._name = 0, ""

    def attempt(self) -> tuple[bool, str, tuple[str, str] | None]:
        """Try one.

        Returns:
            Whether it was accepted, what was tried, and the kind and cause of a fault.
        """
        if self._num_tried % _SERIES == 0:
            self._name = self._chance.choice(self._algorithms)
        self._num_tried += 1
        name = self._name
        base = run_base(name)
        if name not in self._composed:
            self._composed[name] = compose("run", [*base.words[1:]])
            self._composed[name].pop("resume")
        data = copy.deepcopy(self._composed[name])
        given: dict[str, Any] = {}
        for _ in range(self._chance.choice((1, 1, 2))):
            key = self._chance.choice(sorted(base.keys.keys() - {"resume"}))
            value = copy.deepcopy(self._chance.choice(_VALUES))
            if _put(data, key.split("."), value):
                given[key] = value
        what = f"algorithm={name} {given!r:.300}"
        try:
            with _limited():
                written = _resolved(data)
        except PenstockError:
            return False, what, None
        except Exception as error:  # noqa: BLE001 - what is looked for
            if UNKNOWN not in str(in_our_words(error, running=False)):
                return False, what, None
            at = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{at.filename.rpartition('penstock/')[2]}:{at.lineno}"
            return False, what, ("unforeseen", f"{where} {type(error).__name__}: {error!s:.80}")
        faults = differing(written, given) if len(given) == 1 else []
        return True, what, ("silent", faults[0]) if faults else None


def _put(data: Any, path: Sequence[str], value: Any) -> bool:
    """Set a value at a path; false where something else than a section is on the way."""
    for name in path[:-1]:
        if not isinstance(data, dict):
            return False
        if data.get(name) is None:
            data[name] = {}
        data = data[name]
    if not isinstance(data, dict):
        return False
    data[path[-1]] = value
    return True


def _resolved(data: Mapping[str, Any]) -> dict[str, Any]:
    config = run_config(data)
    run = resolve(config)
    for stage in build_stages(run).stages:
        check_options(stage, run)
    return dumped(run)


@contextmanager
def _limited() -> Generator[None]:
    """No longer than a command may take."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _too_long(signum: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"not resolved within {LIMIT_S:g} s")
