"""Stages of `gpu.py` that move weights: to another process on the device, and to the host and back.

Two processes hold the weights of a 7B as a trainer and a generator do, without computing with them.
They go over CUDA IPC twice: as plain torch does it (`torch.multiprocessing` passes handles, the
receiver copies into its own tensors), and through `executor.transport=cuda_ipc`, with what a run
does besides: packing, checksums, checks. On a CPU the same goes through shared memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import Empty
from typing import Any

import torch
import torch.multiprocessing as mp
from gpu_case import Bench, Figure, batch_of
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.dataflow.graph.role import Worker
from penstock.dataflow.runtime.call_context import call_scope
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import shape_of
from penstock.planner.resharding.sharding import Sharding, shard
from penstock.workers.weight_sync.channel import CHANNELS, ChannelEnd
from penstock.workers.weight_sync.packets import SliceTraffic
from torch import Tensor

SENT_S = 1.0
SLEEP_WAKE_S = 2.0
START_S, DEADLINE_S = 150.0, 30.0
"""How long the other process may take to start, and for anything else."""
VERSIONS = 3
CHANNEL: Any = "cuda_ipc"
SENDER, RECEIVER = "train", "rollout"

Tensors = dict[str, Tensor]

# --- between processes


@dataclass(frozen=True)
class Holder(Worker):
    """A worker as the exchange of slices sees it.

    Attributes:
        layout: What its group holds.
        values: What it holds.
    """

    layout: Sharding
    values: Tensors

    @staticmethod
    def of(architecture: dict[str, Any], device: str, fill: float) -> Holder:
        """Of a whole model in bfloat16, each of its weights the same number."""
        layout = shard(shape_of(architecture, dtype="bfloat16"), Layout(), (0,))
        shapes = {param.tensor: param.shape for param in layout.params}
        return Holder(layout, {
            name: torch.full(shape, fill, dtype=torch.bfloat16, device=device)
            for name, shape in shapes.items()
        })  # fmt: skip

    def weights_layout(self) -> Sharding:
        """What its group holds."""
        return self.layout

    def local_tensors(self) -> Mapping[str, Tensor]:
        """What it holds."""
        return self.values

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return sum(tensor.nbytes for tensor in self.values.values())


def weights(bench: Bench) -> Iterator[Figure]:
    """Seconds of a 7B from process to process on one device."""
    held = Holder.of(bench.sizes.sent, bench.sizes.device, 1.0)
    details = {"gb": held.num_bytes / 1e9, "copied_bytes_per_s": bench.copied_per_s}
    ways: dict[str, Callable[[Bench, Holder], list[float]]] = {
        "torch alone": _plainly, f"executor.transport={CHANNEL}": _by_channel,
    }  # fmt: skip
    for name, way in ways.items():
        full = f"weights between two processes, {name}"
        if way is _by_channel and CHANNEL not in CHANNELS:
            yield Figure(name=full, open=f"there is no weight channel '{CHANNEL}'")
            continue
        times = way(bench, held)
        best_s = min(times[1:])
        share = 2 * held.num_bytes / best_s / bench.copied_per_s
        yield Figure(
            name=full, value=best_s, unit="s", goal=SENT_S, most=True,
            details={**details, "first_s": times[0], "share_of_copying": share},
        )  # fmt: skip


def _exchange(
    target: Callable[..., None], bench: Bench, held: Holder, send: Callable[[int], object]
) -> list[float]:
    """Seconds of each version, from before it is sent until the receiver has it.

    Args:
        target: What the other process runs, given two queues, the model and the device.
        bench: The model and the device.
        held: What is sent; each version is another number.
        send: Makes what is put in the queue of a version.
    """
    context = mp.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    arguments = (there, back, bench.sizes.sent, bench.sizes.device)
    process = context.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        _answer(back, START_S, "start")
        times: list[float] = []
        for version in range(VERSIONS):
            _fill(held, version)
            begin_s = time.perf_counter()
            there.put(send(version))
            total = _answer(back, DEADLINE_S, f"have version {version}")
            times.append(time.perf_counter() - begin_s)
            if total != version + 1:
                raise RuntimeError(f"version {version} has weights of {total}")
        there.put(None)
        process.join(DEADLINE_S)
        return times
    finally:
        if process.is_alive():
            process.kill()
            process.join(DEADLINE_S)


def _answer(back: Any, deadline_s: float, what: str) -> float:
    try:
        return back.get(timeout=deadline_s)
    except Empty:
        raise TimeoutError(f"the other process did not {what} within {deadline_s:g} s") from None


def _fill(held: Holder, version: int) -> None:
    """Train, as it were."""
    for tensor in held.values.values():
        tensor.fill_(version + 1)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _plainly(bench: Bench, held: Holder) -> list[float]:
    def send(version: int) -> Tensors:
        del version
        return held.values

    return _exchange(_receive_plainly, bench, held, send)


def _receive_plainly(there: Any, back: Any, architecture: dict[str, Any], device: str) -> None:
    """The other process."""
    own = Holder.of(architecture, device, 0.0)
    back.put(0)
    while (found := there.get(timeout=DEADLINE_S)) is not None:
        for name, tensor in own.values.items():
            tensor.copy_(found[name])
        back.put(_number(own))
        del found


def _number(own: Holder) -> float:
    """The number that the first and the last weight of every tensor are; -1 if they differ."""
    ends = [tensor.view(-1)[[0, -1]] for tensor in own.values.values()]
    found = torch.cat(ends).unique().tolist()
    return found[0] if len(found) == 1 else -1.0


def _end_of(group: str) -> ChannelEnd:
    """What a channel stores is small, and travels with its offer."""

    def get(references: Any, deadline_s: float) -> list[Any]:
        del deadline_s
        return list(references)

    def put(packet: Any) -> Any:
        return packet

    make: Any = ChannelEnd
    return make(group, 0, DEADLINE_S, put, get)


def _by_channel(bench: Bench, held: Holder) -> list[float]:
    channel: Any = CHANNELS[CHANNEL](_end_of(SENDER))
    traffic: Any = SliceTraffic(0, (0,))
    other = held.layout
    offers: list[int] = []

    def send(version: int) -> tuple[Any, int]:
        if offers:  # before the next is packed, which takes its room
            channel.forget(offers[-1] - 1)
        packets = traffic.export(held, {RECEIVER: other}, version, channel.room)
        offer = channel.publish(packets)
        offers.append(offer.number)
        return offer, version

    try:
        return _exchange(_receive_by_channel, bench, held, send)
    finally:
        channel.close()


def _receive_by_channel(there: Any, back: Any, architecture: dict[str, Any], device: str) -> None:
    """The other process."""
    own = Holder.of(architecture, device, 0.0)
    channel: Any = CHANNELS[CHANNEL](_end_of(RECEIVER))
    traffic = SliceTraffic(0, (0,))
    back.put(0)
    while (found := there.get(timeout=DEADLINE_S)) is not None:
        offer, version = found
        traffic.write("actor", own, own.layout, [channel.obtain(offer)], version)
        traffic.check("actor", version)
        back.put(_number(own))
    channel.close()


# --- to the host and back


def sleep(bench: Bench) -> Iterator[Figure]:
    """Seconds in which a trainer gives up the device and comes back, the first time and later."""
    sizes, name = bench.sizes, bench.sizes.large
    policy = bench.policy(name, offload=True)
    with call_scope(0, 0):
        policy.train(ClippedPolicyLoss(), batch_of(sizes, 1))
    num_bytes = sum(tensor.nbytes for tensor in policy.device_tensors())
    before = policy.weights_sha256()
    times: list[tuple[float, float]] = []
    for _ in range(3):
        down_s = bench.meter.once(policy.sleep)
        times.append((down_s, bench.meter.once(policy.wake)))
    down_s, up_s = min(times[1:], key=sum)
    yield Figure(
        name=f"sleep and wake of a trainer, {name}",
        value=down_s + up_s,
        unit="s",
        goal=SLEEP_WAKE_S,
        most=True,
        details={
            "sleep_s": down_s,
            "wake_s": up_s,
            "first_sleep_s": times[0][0],
            "gb_held": num_bytes / 1e9,
            "held_gb_per_s": [num_bytes / s / 1e9 for s in (down_s, up_s)],
            "same_bits": policy.weights_sha256() == before,
        },
    )
