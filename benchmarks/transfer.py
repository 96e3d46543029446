"""The weight channel that runs use by default: through Ray's object store.

Two Ray actors hold a model as a trainer does, two others receive it as a generator does, all four
on this machine. Repeat by repeat one version moves between the same four processes: both senders
pack and publish, both receivers obtain, check and write. The time is the controller's, from the
first call to the end of the last, so it has all that publishing a version costs a run.

Trainers store query, key and value interleaved, generators store them fused, as do gate and up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from bench import parser, report, spread, table
from penstock.dataflow.graph.role import Worker
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.resharding.sharding import Sharding, shard
from penstock.planner.resharding.storage import concatenate, interleave_qkv
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray
from penstock.workers.executors.process_backend import Process, ProcessBackend, ProcessHome
from penstock.workers.weight_sync.channel import CHANNELS, ChannelEnd, Offer, Transport
from penstock.workers.weight_sync.packets import SliceTraffic
from torch import Tensor

DEADLINE_S = 300.0
MEASURED: Sequence[Transport] = ("object_store",)
"""The channels that carry what lies in host memory."""
SENDERS, RECEIVERS = DeviceGroup("train", num_ranks=2), DeviceGroup("rollout", num_ranks=2)


def model(name: str, hidden: int, layers: int, inner: int, vocabulary: int) -> ModelShape:
    """A Qwen3-like shape with four key-value heads."""
    return ModelShape(
        name=name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        num_key_heads=4,
        head_dim=64,
        intermediate_size=inner,
        vocab_size=vocabulary,
        qk_norm=True,
    )


SIZES = (
    model("25M", 512, 6, 1408, 8000),
    model("100M", 768, 12, 2048, 16000),
    model("300M", 1024, 22, 2816, 32000),
)


class Case(NamedTuple):
    """A model, and the layouts of the two groups."""

    model: ModelShape
    train: Layout
    generate: Layout

    def __str__(self) -> str:
        return f"{self.model.name} {self.train} -> {self.generate}"


CASES = (
    *(Case(size, Layout(tp=2), Layout(dp=2)) for size in SIZES),
    *(Case(size, Layout(pp=2), Layout(tp=2)) for size in SIZES),
)


def shardings(case: Case) -> tuple[Sharding, Sharding]:
    """What the senders hold and what the receivers are to hold, each numbered from 0."""
    source = interleave_qkv(shard(case.model, case.train, (0, 1)), case.model.head_dim)
    in_order = shard(case.model, case.generate, (0, 1))
    fused = concatenate(in_order, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    return source, concatenate(fused, ("gate_proj", "up_proj"), "gate_up_proj")


def tensors(sharding: Sharding, device: int) -> dict[str, Tensor]:
    """Random tensors of the shapes that a sharding means."""
    shapes: dict[str, list[int]] = {}
    for param in sharding.params:
        for piece in sharding.patterns[param.pattern]:
            if piece.device == device:
                shape = shapes.setdefault(param.tensor, [0] * len(param.dims))
                for i, (dim, start) in enumerate(zip(param.dims, piece.start, strict=True)):
                    length = piece.box[dim][1] - piece.box[dim][0]
                    shape[i] = max(shape[i], start + length)
    dtype = getattr(torch, sharding.dtype)
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Holder(Worker):
    """A worker as the exchange of slices sees it."""

    layout: Sharding
    values: Mapping[str, Tensor]

    def weights_layout(self) -> Sharding:
        """What its group holds."""
        return self.layout

    def local_tensors(self) -> Mapping[str, Tensor]:
        """What it holds."""
        return self.values


class Member:
    """One of the four processes, with an end of every channel.

    Args:
        home: Where it runs.
        group: Of the process.
        process: Its number there.
    """

    def __init__(self, home: ProcessHome, group: str, process: int) -> None:
        torch.set_num_threads(1)
        end = ChannelEnd(group, process, DEADLINE_S, home.put, home.get)
        self._channels = {name: make(end) for name, make in CHANNELS.items() if name in MEASURED}
        self._process, self._traffic = process, SliceTraffic(process, (0, 1))

    def prepare(self, layout: Sharding, other: Sharding) -> None:
        """Make the tensors of a case; `other` is the other group's layout."""
        self._worker = Holder(layout, tensors(layout, self._process))
        self._other = other
        self._traffic = SliceTraffic(self._process, (0, 1))

    def publish(self, channel: Transport, version: int) -> Offer:
        """Pack and publish; what was published before is forgotten."""
        room, receivers = self._channels[channel].room, {RECEIVERS.name: self._other}
        packets = self._traffic.export(self._worker, receivers, version, room)
        offer = self._channels[channel].publish(packets)
        self._channels[channel].forget(offer.number - 1)
        return offer

    def receive(self, channel: Transport, offers: Sequence[Offer], version: int) -> int:
        """Obtain, check and write; the bytes that came."""
        first = self._process  # As in a run, each begins with another sender.
        found = map(self._channels[channel].obtain, (*offers[first:], *offers[:first]))
        packets = [packet for packet in found if packet is not None]
        self._traffic.write("actor", self._worker, self._other, packets, version)
        self._traffic.check("actor", version)
        return sum(packet.num_bytes for packet in packets)

    def close(self) -> None:
        """End what the channels keep running."""
        for channel in self._channels.values():
            channel.close()


class Processes:
    """The four processes, each a Ray actor."""

    def __init__(self, backend: ProcessBackend) -> None:
        self._backend = backend
        self._devices = backend.reserve([SENDERS, RECEIVERS], DEADLINE_S)
        self.senders, self.receivers = (
            [self._start(group, process) for process in (0, 1)] for group in (SENDERS, RECEIVERS)
        )

    def _start(self, group: DeviceGroup, process: int) -> Process:
        arguments = group.name, process
        return self._backend.spawn(Member, arguments, group, process, self._devices)

    def all(self, processes: Sequence[Process], method: str, *arguments: Any) -> list[Any]:
        """Call a method of several at once; what they return."""
        refs = [self._backend.call(one, method, arguments)[0] for one in processes]
        return self._backend.get(refs, DEADLINE_S)

    def timed(self, channel: Transport, version: int, expected_bytes: int) -> float:
        """Seconds to move one version."""
        begin_s = time.perf_counter()
        offers = self.all(self.senders, "publish", channel, version)
        received = self.all(self.receivers, "receive", channel, offers, version)
        took_s = time.perf_counter() - begin_s
        if sum(received) != expected_bytes:
            raise SystemExit(f"{sum(received)} bytes came; expected {expected_bytes}")
        return took_s

    def close(self) -> None:
        """End them."""
        every = [*self.senders, *self.receivers]
        self.all(every, "close")
        for process in every:
            self._backend.kill(process)
        for group in (SENDERS.name, RECEIVERS.name):
            self._devices.release(group)


def measure(processes: Processes, case: Case, repeats: int) -> dict[str, Any]:
    """One case: seconds by channel, and how many times as long the object store took."""
    source, destination = shardings(case)
    processes.all(processes.senders, "prepare", source, destination)
    processes.all(processes.receivers, "prepare", destination, source)
    moved = sum(destination.bytes_on.values())
    times: dict[str, list[float]] = {name: [] for name in MEASURED}
    for version in range(repeats + 1):
        for name in sorted(MEASURED, reverse=bool(version % 2)):
            took_s = processes.timed(name, version, moved)
            if version:  # The first makes plans and connections.
                times[name].append(took_s)
    return {
        "case": str(case),
        "num_params": case.model.num_params(),
        "moved_bytes": moved,
        "seconds": {name: spread(values) for name, values in times.items()},
        "bytes_per_s": {name: moved / statistics.median(v) for name, v in times.items()},
    }


def main() -> None:
    """Run all cases and print a table."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--repeats", type=int, default=15, help="of each channel")
    args = options.parse_args()
    connect_ray()
    from penstock.workers.executors.on_ray.backend import RayBackend

    processes = Processes(RayBackend())
    try:
        rows = [measure(processes, case, args.repeats) for case in CASES]
        processes.close()
    finally:
        shutdown_ray()
    print(
        table(
            ["case", "MB moved", *(f"{name} GB/s" for name in MEASURED)],
            [
                [
                    one["case"],
                    f"{one['moved_bytes'] / 1e6:.1f}",
                    *(f"{one['bytes_per_s'][name] / 1e9:.2f}" for name in MEASURED),
                ]
                for one in rows
            ],
        )
    )  # fmt: skip
    report({"repeats": args.repeats, "cases": rows}, args.json)


if __name__ == "__main__":
    main()
