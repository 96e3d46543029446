"""Penstock: RL and RLHF algorithms as dataflow graphs, driven by one controller.

From Python: `penstock.run` trains, `penstock.open_run` opens a run that is there, `penstock.plan`
plans a cluster. They are loaded when first asked for; importing the package costs nothing.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.launch.from_python.handle import RunHandle, open_run
    from penstock.launch.from_python.plan import Planned, plan
    from penstock.launch.from_python.run import run

__version__ = "0.1.0"

__all__ = ["Planned", "RunHandle", "__version__", "open_run", "plan", "run"]

_HOMES = {
    "Planned": "plan",
    "RunHandle": "handle",
    "open_run": "handle",
    "plan": "plan",
    "run": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from .launch.openmp import spin_briefly

    spin_briefly()  # before torch is imported, which the next line does
    with warnings.catch_warnings():
        # A library says so in every notebook without ipywidgets, of which nothing here makes use.
        warnings.filterwarnings("ignore", "IProgress not found")
        value = getattr(import_module(f".launch.from_python.{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
