"""What `penstock doctor` finds on this machine: memory, limits, CUDA devices and what links them.

What torch does not say, `nvidia-smi` is asked, where there is one; nothing is started on a device.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil

_SMI_S = 20.0
"""How long `nvidia-smi` may take; a second on an idle machine."""

_STORE_SHARE, _STORE_MOST = 0.3, 200e9
"""Ray's object store is this share of the machine's memory, and at most so many bytes."""

_FEW_FILES = 8192
"""With fewer open files a run of many processes can fail; a process of Ray needs hundreds."""


def machine_report() -> dict[str, Any]:
    """Name -> what was found."""
    import torch

    from ..placement.machine import machine_name, num_cores

    memory = psutil.virtual_memory()
    return {
        "processor": machine_name(),
        "cores": f"{num_cores()} of {os.cpu_count()} may be used",
        "memory": f"{gib(memory.available)} of {gib(memory.total)} free",
        "shared memory": _shared_memory(memory.total, Path("/dev/shm")),
        "open files": _open_files(),
        "Ray": _ray(),
        "CUDA of torch": _cuda_of_torch(),
        "NVIDIA driver": _driver(),
        "CUDA devices": _devices(),
        "CUDA links": _links(torch.cuda.device_count()),
    }


def gib(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / 2**30:.1f} GiB"


def room(folder: Path) -> str:
    """Of the disk that a folder is on, or will be."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(there)
    return f"{gib(usage.free)} of {gib(usage.total)} free"


def _shared_memory(memory_bytes: int, shared: Path) -> str:
    """How much there is, and whether Ray's object store fits."""
    if not shared.exists():
        return f"there is no {shared}: executor=ray keeps what processes exchange on the disk"
    store = min(_STORE_SHARE * memory_bytes, _STORE_MOST)
    if shutil.disk_usage(shared).total >= store:
        return f"{room(shared)}; Ray's object store takes up to {gib(store)}"
    return (
        f"{room(shared)}: too little for Ray's object store of {gib(store)}, which is on the disk "
        "then; start the container with a larger --shm-size"
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
    """Whether a Ray of anybody runs here."""
    found = [process.pid for process in psutil.process_iter() if _is_raylet(process)]
    if not found:
        return "none runs here; executor=ray starts one and ends it"
    if os.environ.get("RAY_ADDRESS"):
        return f"runs here (process {found[0]}); runs join the one of RAY_ADDRESS"
    return (
        f"runs here (process {found[0]}); runs join it with RAY_ADDRESS=auto, else start their own"
    )


def _is_raylet(process: psutil.Process) -> bool:
    try:
        return process.name() == "raylet"
    except psutil.Error:
        return False  # it has ended


# --- CUDA


def _cuda_of_torch() -> str:
    import torch

    if torch.version.cuda is None:
        return "none: a build for CPUs"
    cudnn: Any = torch.backends.cudnn
    version = cudnn.version()
    return torch.version.cuda + (f", cuDNN {version}" if version else "")


def _smi(*words: str) -> list[str] | str:
    """The lines that `nvidia-smi` prints, or why there are none."""
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


def _driver() -> str:
    found = _smi("--query-gpu=driver_version", "--format=csv,noheader")
    if isinstance(found, str):
        return found
    return ", ".join(dict.fromkeys(line.strip() for line in found)) or "none"


def _devices() -> list[str]:
    """Number, name, memory and compute capability of each."""
    import torch

    found: list[str] = []
    for i in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(i)
        found.append(f"{i}: {one.name}, {gib(one.total_memory)}, sm_{one.major}{one.minor}")
    return found


def _links(num_devices: int) -> list[str]:
    """What links which devices, in words of `nvidia-smi topo`: NV18 is NVLink, SYS the slowest."""
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
