"""The GPUs of this machine as the planner sees them: known by their names, sized as they say.

What a GPU computes and how its links are is what the option of `cluster=` with its name says; its
memory is what it reports itself. A form whose figures differ (PCIe, NVL, a part under MIG) is
another device, and a name that no option has is never guessed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...planner.formatting import bytes_text
from ...planner.inputs.cluster import ClusterSpec
from .cluster_inputs import presets

_FORM = frozenset(["nvidia", "geforce", "sxm", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"])
"""Words of a device's name that change none of its preset's figures."""


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as it reports itself.

    Attributes:
        name: As its driver calls it: "NVIDIA H100 80GB HBM3".
        memory_bytes: All of its memory.
    """

    name: str
    memory_bytes: int


def gpus_here() -> list[Gpu]:
    """The CUDA devices that this process sees; none without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Gpu(one.name, one.total_memory) for one in found]


def preset_of(name: str, options: Iterable[str]) -> str | None:
    """Which option of `cluster=` describes a device, if one does.

    Args:
        name: As its driver calls it.
        options: Names of options.

    Example:
        >>> preset_of("NVIDIA A100-SXM4-80GB", ["a100-80g", "h100"])
        'a100-80g'
        >>> preset_of("NVIDIA H100 PCIe", ["a100-80g", "h100"])
    """
    words = _words(name) - _FORM
    for option in options:
        own = _words(option)
        # What is left may say how much memory it has, which it reports itself.
        if own <= words and all(re.fullmatch(r"\d+g", word) for word in words - own):
            return option
    return None


def _words(name: str) -> set[str]:
    """Lower-case words of a name; "80GB" is "80g"."""
    found = re.findall(r"[a-z0-9.]+", name.lower())
    return {re.sub(r"^(\d+)gb$", r"\1g", word) for word in found}


def as_cluster(
    gpus: Iterable[Gpu], known: Mapping[str, ClusterSpec] | None = None
) -> ClusterSpec | None:
    """One node of such devices; None if one is of no option, or they are of several kinds.

    Args:
        gpus: The devices, at least one.
        known: Option of `cluster=` -> what it describes; those there are by default.
    """
    known = presets() if known is None else known
    several = list(gpus)
    options = {preset_of(gpu.name, known) for gpu in several}
    (option, *others) = options
    if option is None or others:
        return None
    node = known[option].node_groups[0]
    # A plan is for equal devices, so the smallest counts.
    memory_bytes = min(gpu.memory_bytes for gpu in several)
    device = node.device.model_copy(update={"memory_bytes": memory_bytes})
    own = node.model_copy(
        update={"num_nodes": 1, "devices_per_node": len(several), "device": device}
    )
    between = known[option].between  # never used: there is one node
    return ClusterSpec(name="this machine", node_groups=(own,), between=between)


def said_of(gpus: Iterable[Gpu]) -> str:
    """The devices for people.

    Example:
        >>> said_of([Gpu("NVIDIA H200", 150 * 10**9)] * 8)
        '8 x NVIDIA H200 (140 GiB)'
    """
    counted = Counter(f"{gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in gpus)
    return " and ".join(f"{number} x {text}" for text, number in counted.items())
