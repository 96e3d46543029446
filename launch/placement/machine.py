"""The machine this process runs on: its cores, its memory, its name, and what is taken of it.

A device of a plan for a CPU is what one rank has: some cores and its share of the memory.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

from ...configs.plan_schema import ClusterConfig
from ...configs.references import option_file
from ...configs.validate import validated
from ...planner.inputs.cluster import ClusterSpec, NodeGroup
from .cluster_inputs import cluster_spec

_MOST_RANKS = 8
"""More ranks than this are not started unless they are asked for; each takes memory of its own."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def has_fast_bfloat16(device: str) -> bool:
    """Whether a device computes products of bfloat16 itself, several times faster than float32's.

    Others compute them in float32 and round, which is slower than float32.
    """
    import torch

    if device.startswith("cuda"):
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    # torch says it of AMD's and Intel's processors nowhere else.
    has_it: Any = torch.cpu
    return bool(has_it._is_avx512_bf16_supported() or has_it._is_amx_tile_supported())


def default_ranks(device: str) -> int:
    """Ranks of this machine: one per CUDA device, or one per core up to eight."""
    if device == "cuda":
        import torch

        return torch.cuda.device_count()
    return most_ranks(num_cores())


def most_ranks(cores: int) -> int:
    """Ranks of a machine with so many cores: one per core up to eight."""
    return min(cores, _MOST_RANKS)


def threads_of(num_ranks: int) -> int:
    """Torch threads of each rank, if the cores are shared out evenly."""
    return max(1, num_cores() // num_ranks)


def machine_name(device: str = "cpu") -> str:
    """What ran: the processor or the CUDA device, for people."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def cpu_node(preset: NodeGroup, cores: int, memory_bytes: int) -> NodeGroup:
    """A node whose cores and memory are shared out evenly, from what `cluster=cpu` says of one."""
    ranks = most_ranks(cores)
    threads = cores // ranks
    device = preset.device.model_copy(
        update={
            "memory_bytes": memory_bytes // ranks,
            "flops_per_s": {k: threads * rate for k, rate in preset.device.flops_per_s.items()},
        }
    )
    return preset.model_copy(update={"num_nodes": 1, "devices_per_node": ranks, "device": device})


def analytic_cpus() -> ClusterSpec:
    """This machine's cores as `cluster=cpu` or `cpu-bf16` describes them: nothing is measured."""
    option = "cpu-bf16" if has_fast_bfloat16("cpu") else "cpu"
    preset = cluster_spec(validated(ClusterConfig, option_file("cluster", option), "cluster"))
    own = cpu_node(preset.node_groups[0], num_cores(), psutil.virtual_memory().total)
    return preset.model_copy(update={"name": "this machine", "node_groups": (own,)})
