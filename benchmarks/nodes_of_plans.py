"""Whether every rank of random plans is on its planned node, on a Ray of two nodes on this machine.

    python nodes_of_plans.py --json results/nodes_of_plans_cpu_DATE.json

The nodes have four cores and four GPUs each, which Ray only counts. Half of the plans are for GPUs:
each process says on which node it is and which GPU Ray gave it. Half are for CPUs: there the
processes of a group also meet and add up numbers over gloo, as those of a run do. Plans are random:
one to three groups of one to four ranks, with tensor parallelism of 1 or 2, on any devices, which
groups may share. What is checked of each:

- processes are on one node of Ray exactly if the plan has them on one node;
- processes have one GPU exactly if the plan gives them one device;
- what trains has the GPUs of a node in the order in which the plan numbers its devices.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from bench import parser, report
from penstock.dataflow.runtime.placement import ClusterNode, DeviceGroup
from penstock.workers.executors.on_ray.backend import RayBackend
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray
from penstock.workers.executors.rank_process import RankProcess
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster

__all__ = ["main"]

NODES, PER_NODE = 2, 4
DEADLINE_S = 180.0

At = tuple[str, int]
"""Ray's id of a node, and the index of a GPU there; -1 without one."""


class Rank(RankProcess):
    """A rank that says where it is, and adds up numbers with the others of its group."""

    def at(self) -> At:
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids()["GPU"]
        return context.get_node_id(), int(gpus[0]) if gpus else -1

    def total(self) -> float:
        number = torch.full((), 1.0 + dist.get_rank())
        dist.all_reduce(number)
        return float(number)


@contextmanager
def two_nodes() -> Generator[None]:
    """Such a Ray, joined."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="two") as folder:  # sockets: a short path
        # Ray notes its address in a folder that nothing has made on a fresh machine.
        Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
        cluster = Cluster()
        cluster.add_node(num_cpus=PER_NODE, num_gpus=PER_NODE, temp_dir=folder)
        for _ in range(NODES - 1):
            cluster.add_node(num_cpus=PER_NODE, num_gpus=PER_NODE)
        os.environ["RAY_ADDRESS"] = str(cluster.address)
        try:
            connect_ray()
            yield
        finally:
            shutdown_ray()
            cluster.shutdown()


def random_groups(seed: int, device: str) -> list[DeviceGroup]:
    """Groups of a random plan; the first trains."""
    chance = random.Random(seed)
    groups: list[DeviceGroup] = []
    for name in ("train", "rollout", "judges")[: chance.randint(1, 3)]:
        tensor = chance.choice((1, 2))
        ranks = chance.randint(1, 4 // tensor)
        devices = chance.sample(range(NODES * PER_NODE), tensor * ranks)
        nodes = tuple(ClusterNode(one // PER_NODE) for one in devices)
        groups.append(DeviceGroup(name, ranks, device, tensor, devices=tuple(devices), nodes=nodes))
    return groups


def measured(groups: Sequence[DeviceGroup]) -> tuple[dict[tuple[str, int], At], float]:
    """(Group, process) -> where it is; and seconds from reserving until all have answered."""
    backend, began_s = RayBackend(), time.monotonic()
    devices = backend.reserve(groups, DEADLINE_S, {"train"})
    found: dict[tuple[str, int], At] = {}
    started: list[Any] = []
    try:
        for group in groups:
            ranks = [
                backend.spawn(
                    Rank, (group, process, 1, DEADLINE_S, DEADLINE_S), group, process, devices
                )
                for process in range(group.num_processes)
            ]
            started += ranks
            calls = [backend.call(rank, "at", ())[0] for rank in ranks]
            for process, at in enumerate(backend.get(calls, DEADLINE_S)):
                found[group.name, process] = at
            if group.device == "cpu":
                _add_up(backend, ranks)
    finally:
        for rank in started:
            backend.kill(rank)
        for group in groups:
            devices.release(group.name)
    return found, time.monotonic() - began_s


def _add_up(backend: RayBackend, ranks: Sequence[Any]) -> None:
    """Have the processes of a group meet and add up numbers."""
    (address,) = backend.get(backend.call(ranks[0], "listen", ()), DEADLINE_S)
    joining = [backend.call(rank, "join", (address,))[0] for rank in ranks]
    backend.get(joining, DEADLINE_S)
    totals = backend.get([backend.call(rank, "total", ())[0] for rank in ranks], DEADLINE_S)
    assert totals == [sum(range(1, len(ranks) + 1))] * len(ranks), totals


def faults(groups: Sequence[DeviceGroup], found: dict[tuple[str, int], At]) -> list[str]:
    """What is not as planned."""
    planned = {
        (group.name, process): group.devices[process]
        for group in groups
        for process in range(group.num_processes)
    }
    wrong: list[str] = []
    for one, device in planned.items():
        for other, its in planned.items():
            same_node = found[one][0] == found[other][0]
            if same_node != (device // PER_NODE == its // PER_NODE):
                wrong.append(f"{one} and {other}: nodes")
            if groups[0].device == "cuda" and (found[one] == found[other]) != (device == its):
                wrong.append(f"{one} and {other}: GPUs")
            ordered = (found[one] < found[other]) == (device < its)
            on_gpus = groups[0].device == "cuda" and one[0] == other[0] == "train"
            if on_gpus and same_node and device != its and not ordered:
                wrong.append(f"{one} and {other}: order of GPUs")
    return wrong


def main() -> None:
    """Print a line for each plan, and how many of them are honored."""
    asked = parser(__doc__ or "")
    asked.add_argument("--plans", type=int, default=20)
    options = asked.parse_args()
    rows: list[dict[str, Any]] = []
    with two_nodes():
        for seed in range(options.plans):
            groups = random_groups(seed, "cuda" if seed % 2 else "cpu")
            found, taken_s = measured(groups)
            wrong = faults(groups, found)
            shape = ", ".join(
                f"{g.name} tp{g.tensor_parallel} on {list(g.devices)}" for g in groups
            )
            print(
                f"{seed:3} {groups[0].device:5}{taken_s:6.1f} s  {shape}  {wrong or 'as planned'}"
            )
            rows.append(
                {"seed": seed, "plan": shape, "seconds": round(taken_s, 2), "faults": wrong}
            )
    honored = sum(not row["faults"] for row in rows)
    print(f"{honored} of {len(rows)} plans have every rank on its planned node")
    report({"plans": len(rows), "honored": honored, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
