"""Profile a call kernel by kernel, and the stage of `gpu.py` that prints the profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from gpu_case import Bench, Figure, batch_of
from gpu_compute import mfu, train_step
from torch.profiler import ProfilerActivity, profile

MOST_ROWS, MOST_NAME = 60, 200
LEAST_GAP_US = 20.0
KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "aten::mm", "aten::addmm"),
    "copies between host and device": ("memcpy htod", "memcpy dtoh", "memset"),
    "optimizer": ("adam", "multi_tensor"),
    "softmax and sums": ("softmax", "reduce", "logsumexp", "layer_norm", "rmsnorm", "rms_norm"),
    "gathers and writes by index": ("index", "gather", "scatter", "embedding", "sort", "scan"),
    "elementwise": ("elementwise", "copy", "fill", "cat", "triton"),
}
"""Kind -> parts of the names of its kernels, in small letters; the first kind that fits counts."""


@dataclass(frozen=True)
class Profile:
    """Kernels and busy time of a device during a call.

    Attributes:
        wall_s: Seconds of the call, with the profiler at work.
        busy_s: Seconds in which at least one kernel ran.
        longest_gaps_us: Longest gaps between two kernels, the longest first.
        num_gaps: Gaps of more than 20 us.
        kernels: Name -> number of calls, and their microseconds together.
    """

    wall_s: float
    busy_s: float
    longest_gaps_us: list[float]
    num_gaps: int
    kernels: dict[str, tuple[float, float]]

    def as_data(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "profiled_s": self.wall_s,
            "busy_s": self.busy_s,
            "gaps_over_20_us": self.num_gaps,
            "longest_gaps_us": self.longest_gaps_us,
            **tables(self.kernels),
        }


def tables(kernels: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Return calls and milliseconds by kind, and of the names that take longest."""
    kinds: dict[str, list[float]] = {}
    for name, (calls, us) in kernels.items():
        kind = kinds.setdefault(kind_of(name), [0.0, 0.0])
        kind[0], kind[1] = kind[0] + calls, kind[1] + us / 1e3
    slowest = sorted(kernels.items(), key=lambda one: -one[1][1])[:MOST_ROWS]
    return {
        "by_kind": {k: {"calls": c, "ms": ms} for k, (c, ms) in sorted(kinds.items())},
        "by_name": [
            {"calls": calls, "ms": us / 1e3, "name": name[:MOST_NAME]}
            for name, (calls, us) in slowest
        ],
    }


def kind_of(name: str) -> str:
    """Return what kind of work a kernel of this name does."""
    small = name.lower()
    found = (kind for kind, parts in KINDS.items() if any(part in small for part in parts))
    return next(found, "other")


def profiled(body: Callable[[], object], *, is_cuda: bool) -> Profile:
    """Run a call under the profiler; on a CPU torch's operations stand in for kernels."""
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as seen:
        began_s = time.perf_counter()
        body()
        if is_cuda:
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - began_s
    found: list[Any] = [
        one for one in seen.events() or [] if one.device_type.name == ("CUDA" if is_cuda else "CPU")
    ]
    kernels: dict[str, tuple[float, float]] = {}
    for one in found:
        calls, us = kernels.get(one.name, (0.0, 0.0))
        kernels[one.name] = calls + 1, us + one.time_range.elapsed_us()
    busy_us, end_us, gaps = 0.0, None, list[float]()
    for start, end in sorted((one.time_range.start, one.time_range.end) for one in found):
        if end_us is not None and start > end_us:
            gaps.append(start - end_us)
        begin = start if end_us is None else max(start, end_us)
        busy_us += max(0.0, end - begin)
        end_us = end if end_us is None else max(end, end_us)
    long = sorted((gap for gap in gaps if gap > LEAST_GAP_US), reverse=True)
    return Profile(wall_s, busy_us / 1e6, long[:10], len(long), kernels)


def kernels(bench: Bench) -> Iterator[Figure]:
    """A train call of each model: how long it takes, and which kernels take it."""
    sizes = bench.sizes
    for name in reversed(list(sizes.models)):  # the larger first, of which more is known
        policy, batch = bench.policy(name), batch_of(sizes, sizes.prompts)
        timed = mfu(bench, policy, name, f"train MFU, {name}", None)
        yield timed
        seen = profiled(lambda p=policy, b=batch: train_step(p, b, 2), is_cuda=sizes.is_cuda)
        seconds = timed.details["seconds"]
        yield Figure(
            name=f"share of a train call in which the device is busy, {name}",
            value=seen.busy_s / seconds,
            details={"seconds": seconds, "idle_s": seconds - seen.busy_s, **seen.as_data()},
        )
        yield Figure(
            name=f"kernels of a train call, {name}",
            value=float(sum(calls for calls, _ in seen.kernels.values())),
        )
        del policy
