"""A Ray of two nodes on this machine, with GPUs that are only counted, and where processes are."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.workers.executors.on_ray.backend import RayBackend
from penstock.workers.executors.on_ray.devices import RayDevices
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster

CALL_S = 120.0


@contextmanager
def ray_folder() -> Generator[str]:
    """Where a test's `Cluster` is to lie: its sockets need a short path.

    The cluster notes its address in Ray's own folder whatever folder it is given, and on a machine
    where no Ray has run yet nothing has made that one.
    """
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="two") as folder:
        yield folder


@contextmanager
def two_nodes(num_gpus: Sequence[int], num_cpus: int = 4, gpu: str = "") -> Generator[str]:
    """Such a Ray, joined; its address."""
    with ray_folder() as folder:
        cluster = Cluster()
        try:
            for number, gpus in enumerate(num_gpus):
                head: dict[str, Any] = (
                    {"temp_dir": folder, "include_dashboard": False} if not number else {}
                )
                named = {f"accelerator_type:{gpu}": 1.0} if gpu else {}
                labels = {"number": str(number)}
                cluster.add_node(
                    num_gpus=gpus, num_cpus=num_cpus, labels=labels, resources=named, **head
                )
            os.environ["RAY_ADDRESS"] = str(cluster.address)
            try:
                connect_ray()
                yield str(cluster.address)
            finally:
                del os.environ["RAY_ADDRESS"]
                shutdown_ray()
        finally:
            cluster.shutdown()


@dataclass(frozen=True)
class At:
    """Where a process is: the id of its node, and its GPUs' indices."""

    node: str
    gpus: tuple[int, ...]


class Where:
    """In place of a rank: says where it is."""

    def __init__(self, home: Any) -> None:
        del home

    def at(self) -> At:
        context = ray.get_runtime_context()
        return At(context.get_node_id(), tuple(map(int, context.get_accelerator_ids()["GPU"])))


def places(groups: Sequence[DeviceGroup], devices: RayDevices) -> Mapping[tuple[str, int], At]:
    """(Group, process) -> where it is, of all processes, started and ended here."""
    backend = RayBackend()
    started = {
        (group.name, process): backend.spawn(Where, (), group, process, devices)
        for group in groups
        for process in range(group.num_processes)
    }
    try:
        calls = [backend.call(process, "at", ())[0] for process in started.values()]
        return dict(zip(started, backend.get(calls, CALL_S), strict=True))
    finally:
        for process in started.values():
            backend.kill(process)
