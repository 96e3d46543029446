"""Transfer plans carried out by four processes over gloo, against the wire and against a gather.

Four things take turns, repeat by repeat, in the same processes:

- the plan, with packing, checksums, verification, writing, and copies of what stays on a device;
- the wire: the same messages, each in one send, between the same processes, as many at once, from
  buffers that are already full to buffers that nobody reads;
- point to point: one process sends as many bytes to one other while the rest wait, in messages of
  the size that was fastest of three: what one pair of processes can do on this machine;
- gather then broadcast: the first process collects whole weights and broadcasts every tensor to all
  receivers, which keep their part.

All of it is done in several launches of the processes, which differ more from each other than the
repeats of one do.

Trainers store query, key and value interleaved, generators store them fused, as do gate and up.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench import parser, report, spread, table
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.rank_assignment import fewest_bytes
from penstock.planner.resharding.sharding import NOT_A_DIM, Sharding, shard
from penstock.planner.resharding.storage import concatenate, interleave_qkv
from penstock.workers.weight_sync.p2p import Ends, Transfer
from penstock.workers.weight_sync.p2p_route import Wave, message_bytes, waves_of
from penstock.workers.weight_sync.packets import copy_local
from torch import Tensor

NUM_PROCESSES = 4
DEADLINE_S = 300.0
PAIR_BYTES = (4 * 2**20, 16 * 2**20, 64 * 2**20)
BUCKET_BYTES = 64 * 2**20
"""An eighth of the planner's: the largest of the models goes in several, the smallest in one."""


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


class Case(NamedTuple):
    """A transfer; process i has device i."""

    model: ModelShape
    train: Layout
    train_on: tuple[int, ...]
    generate: Layout
    generate_on: tuple[int, ...]
    train_dtype: str = "bfloat16"

    def __str__(self) -> str:
        sides = f"{self.train} -> {self.generate}"
        place = "apart" if self.train_on != self.generate_on else "in place"
        return f"{self.model.name} {sides} {place}, {self.train_dtype} -> bfloat16"


SIZES = (
    model("25M", 512, 6, 1408, 8000),
    model("100M", 768, 12, 2048, 16000),
    model("300M", 1024, 22, 2816, 32000),
)
CASES = (
    *(Case(size, Layout(tp=2), (0, 1), Layout(dp=2), (2, 3)) for size in SIZES),
    *(Case(size, Layout(pp=2), (0, 1), Layout(tp=2), (2, 3)) for size in SIZES),
    *(Case(size, Layout(tp=4), (0, 1, 2, 3), Layout(tp=2, dp=2), (0, 1, 2, 3)) for size in SIZES),
    Case(SIZES[1], Layout(tp=2), (0, 1), Layout(dp=2), (2, 3), "float32"),
)


def shardings(case: Case) -> tuple[Sharding, Sharding]:
    """What the trainer has and what the generator needs."""
    shape = case.model
    trained = shape.model_copy(update={"dtype": case.train_dtype})
    source = interleave_qkv(shard(trained, case.train, case.train_on), shape.head_dim)
    in_order = shard(shape, case.generate, case.generate_on)
    destination = fewest_bytes(source, in_order)
    fused = concatenate(destination, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    return source, concatenate(fused, ("gate_proj", "up_proj"), "gate_up_proj")


def tensors(sharding: Sharding, device: int) -> dict[str, Tensor]:
    """Random tensors of the shapes that a sharding means."""
    shapes: dict[str, list[int]] = {}
    for param in sharding.params:
        for piece in sharding.patterns[param.pattern]:
            if piece.device == device:
                shape = shapes.setdefault(param.tensor, [0] * len(param.dims))
                for i, (dim, start) in enumerate(zip(param.dims, piece.start, strict=True)):
                    length = 1 if dim == NOT_A_DIM else piece.box[dim][1] - piece.box[dim][0]
                    shape[i] = max(shape[i], start + length)
    dtype = getattr(torch, sharding.dtype)
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


class Wire:
    """The messages of a plan without what is in them."""

    def __init__(self, waves: tuple[Wave, ...]) -> None:
        self._waves = waves
        most = max(wave.message_bytes for wave in waves)
        self._buffers = [torch.ones(most, dtype=torch.uint8) for _ in range(2)]

    def run(self) -> None:
        """Two waves under way at once, as in the transfer."""
        before: list[dist.Work] = []
        for number, wave in enumerate(self._waves):
            works = self._post(wave, self._buffers[number % 2])
            for work in before:
                work.wait(timedelta(seconds=DEADLINE_S))
            before = works
        for work in before:
            work.wait(timedelta(seconds=DEADLINE_S))

    def _post(self, wave: Wave, buffer: Tensor) -> list[dist.Work]:
        begin = 0
        works: list[dist.Work | None] = []
        for receive in wave.receives:
            end = begin + message_bytes(receive.message)
            works.append(dist.irecv(buffer[begin:end], receive.process))
            begin = end
        for send in wave.sends:
            end = begin + message_bytes(send.message)
            works += [dist.isend(buffer[begin:end], process) for process in send.processes]
            begin = end
        return [work for work in works if work is not None]


class Pair:
    """Process 0 sends to process 1, two messages under way at once; the others wait."""

    def __init__(self, message_bytes: int) -> None:
        self.message_bytes = message_bytes
        self._buffers = [torch.ones(message_bytes, dtype=torch.uint8) for _ in range(2)]

    def run(self, num_bytes: int) -> None:
        """Send that many."""
        rank = dist.get_rank()
        if rank > 1:
            return
        under_way: list[dist.Work] = []
        for number, begin in enumerate(range(0, num_bytes, self.message_bytes)):
            if len(under_way) == len(self._buffers):
                under_way.pop(0).wait(timedelta(seconds=DEADLINE_S))
            message = self._buffers[number % 2][: num_bytes - begin]
            work = dist.isend(message, 1) if rank == 0 else dist.irecv(message, 0)
            assert work is not None
            under_way.append(work)
        for work in under_way:
            work.wait(timedelta(seconds=DEADLINE_S))

    @classmethod
    def fastest(cls, num_bytes: int = 2**29, repeats: int = 5) -> Pair:
        """With the size of messages that sends so many soonest, by the median."""
        pairs = [cls(size) for size in PAIR_BYTES]
        took = [
            statistics.median(timed(lambda p=pair: p.run(num_bytes)) for _ in range(repeats))
            for pair in pairs
        ]
        return pairs[took.index(min(took))]


class GatherBroadcast:
    """Whole weights on process 0, from there to every receiver."""

    def __init__(self, case: Case, source: Sharding, destination: Sharding, ends: Ends) -> None:
        rank = dist.get_rank()
        whole = shard(case.model, Layout(), [0])
        self._order = sorted({param.tensor for param in whole.params})
        self._whole = tensors(whole, 0)
        gather = plan_transfer(source, whole, bucket_bytes=BUCKET_BYTES)
        devices = {share.device for share in gather.devices}
        here = (
            {rank: Ends(ends.source, self._whole if rank == 0 else {})} if rank in devices else {}
        )
        self._gather = (
            Transfer(gather, here, {d: d for d in range(NUM_PROCESSES)}) if here else None
        )
        receivers = sorted({0, *destination.devices})
        group = dist.new_group(receivers)
        self._group = group if isinstance(group, dist.ProcessGroup) else None
        self._is_in = rank in receivers
        self._is_receiver = rank in destination.devices
        self._split = plan_transfer(whole.on([rank]), only(destination, rank))
        self._ends = ends
        size = case.model.num_params() * case.model.dtype_bytes
        self.moved_bytes = gather.sent_bytes + size * (len(receivers) - 1)
        self.most_on_one_bytes = size

    def run(self) -> None:
        """Gather, broadcast tensor by tensor, keep what is needed."""
        if self._gather is not None:
            self._gather.run(1, deadline_s=DEADLINE_S)
        if not self._is_in:
            return
        for name in self._order:
            dist.broadcast(self._whole[name], 0, group=self._group)
        if self._is_receiver:
            copy_local(self._split, dist.get_rank(), self._whole, self._ends.destination)


def only(sharding: Sharding, device: int) -> Sharding:
    """The part of a sharding that one device has."""
    patterns = tuple(
        tuple(piece for piece in pattern if piece.device == device) for pattern in sharding.patterns
    )
    return Sharding((device,), sharding.params, patterns, sharding.dtype)


def timed(what: Callable[[], object]) -> float:
    """Seconds until the last process has finished, from when all began."""
    dist.barrier()
    begin = time.perf_counter()
    what()
    took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(case: Case, pair: Pair, repeats: int) -> dict[str, Any]:
    """One case, in one process of four; all of them return the same times."""
    rank = dist.get_rank()
    source, destination = shardings(case)
    plan = plan_transfer(source, destination, bucket_bytes=BUCKET_BYTES)
    ends = Ends(tensors(source, rank), tensors(destination, rank))
    process_of = {device: device for device in range(NUM_PROCESSES)}
    transfer = Transfer(plan, {rank: ends}, process_of)
    wire = Wire(waves_of(plan, [rank], process_of, rank))
    baseline = GatherBroadcast(case, source, destination, ends)
    done = transfer.run(0, deadline_s=DEADLINE_S)
    wire.run()
    baseline.run()
    moved = plan.lower_bound_bytes
    times: dict[str, list[float]] = {"plan": [], "wire": [], "pair": [], "gather": []}
    for version in range(1, repeats + 1):
        times["wire"].append(timed(wire.run))
        times["pair"].append(timed(lambda: pair.run(moved)))
        times["plan"].append(timed(lambda v=version: transfer.run(v, deadline_s=DEADLINE_S)))
        times["gather"].append(timed(baseline.run))
    totals = torch.tensor([done.received_bytes, done.header_bytes])
    staging = torch.tensor(done.staging_bytes)
    dist.all_reduce(totals)
    dist.all_reduce(staging, dist.ReduceOp.MAX)
    assert totals[0] == moved
    return {
        "case": str(case),
        "num_params": case.model.num_params(),
        "moved_bytes": moved,
        "lower_bound_bytes": moved,
        "header_bytes": int(totals[1]),
        "num_buckets": plan.num_buckets,
        "staging_bytes": int(staging),
        "gather_broadcast_bytes": baseline.moved_bytes,
        "gather_broadcast_bytes_ratio": baseline.moved_bytes / moved,
        "gather_broadcast_most_on_one_bytes": baseline.most_on_one_bytes,
        "times": times,
    }


def row(launches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A case over all launches: ratios are of one repeat each, then their median."""
    found, of_launches = dict(launches[0]), [one["times"] for one in launches]
    times = {name: [t for one in of_launches for t in one[name]] for name in found.pop("times")}
    seconds = {name: spread(values) for name, values in times.items()}
    for name in ("plan", "wire", "pair"):
        found[f"{name}_bytes_per_s"] = found["moved_bytes"] / seconds[name]["median"]
    return {
        **found,
        "seconds": seconds,
        "share_of_wire_bandwidth": spread(ratios(times, "wire")),
        "share_of_pair_bandwidth": spread(ratios(times, "pair")),
        "share_of_pair_bandwidth_by_launch": [
            statistics.median(ratios(one, "pair")) for one in of_launches
        ],
        "gather_broadcast_time_ratio": spread(ratios(times, "gather")),
    }


def ratios(times: dict[str, list[float]], what: str) -> list[float]:
    """How many times as long as the plan something took, repeat by repeat."""
    return [other / plan for other, plan in zip(times[what], times["plan"], strict=True)]


def rank_main(rank: int, folder: Path, repeats: int) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=NUM_PROCESSES,
        timeout=timedelta(seconds=DEADLINE_S),
    )  # fmt: skip
    pair = Pair.fastest()
    cases = [measure(case, pair, repeats) for case in CASES]
    if rank == 0:
        result = {"pair_message_bytes": pair.message_bytes, "cases": cases}
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run_processes(repeats: int) -> dict[str, Any]:
    """Start four of this script and wait for the result."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--folder", folder, "--repeats", str(repeats)]
        processes = [
            subprocess.Popen([sys.executable, __file__, "--rank", str(rank), *arguments],
                             env=environment)
            for rank in range(NUM_PROCESSES)
        ]  # fmt: skip
        try:
            codes = [process.wait(timeout=1800) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"processes ended with {codes}")
        return json.loads((Path(folder) / "result.json").read_text())


def shares(found: dict[str, float]) -> tuple[str, str]:
    """Median and quartiles as a table has them."""
    return f"{found['median']:.2f}", f"{found['quartile_1']:.2f}-{found['quartile_3']:.2f}"


def main() -> None:
    """Run all cases and print a table."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--launches", type=int, default=5, help="of all processes anew")
    options.add_argument("--repeats", type=int, default=7, help="in each launch")
    options.add_argument("--rank", type=int, help="used by the script itself")
    options.add_argument("--folder", type=Path, help="used by the script itself")
    args = options.parse_args()
    if args.rank is not None:
        rank_main(args.rank, args.folder, args.repeats)
        return
    launches = [run_processes(args.repeats) for _ in range(args.launches)]
    rows = [row(alike) for alike in zip(*(one["cases"] for one in launches), strict=True)]
    print(
        table(
            ["case", "MB moved", "plan GB/s", "wire GB/s", "pair GB/s",
             "share of wire", "quartiles", "share of pair", "quartiles",
             "bytes of gather", "time of gather"],
            [
                [
                    one["case"],
                    f"{one['moved_bytes'] / 1e6:.1f}",
                    f"{one['plan_bytes_per_s'] / 1e9:.2f}",
                    f"{one['wire_bytes_per_s'] / 1e9:.2f}",
                    f"{one['pair_bytes_per_s'] / 1e9:.2f}",
                    *shares(one["share_of_wire_bandwidth"]),
                    *shares(one["share_of_pair_bandwidth"]),
                    f"{one['gather_broadcast_bytes_ratio']:.2f} x",
                    f"{one['gather_broadcast_time_ratio']['median']:.2f} x",
                ]
                for one in rows
            ],
        )
    )  # fmt: skip
    result = {
        f"smallest_share_of_{what}_bandwidth": min(
            one[f"share_of_{what}_bandwidth"]["median"] for one in rows
        )
        for what in ("wire", "pair")
    } | {
        "launches": args.launches,
        "repeats": args.repeats,
        "pair_message_bytes": [one["pair_message_bytes"] for one in launches],
        "bucket_bytes": BUCKET_BYTES,
        "num_processes": NUM_PROCESSES,
        "cases": rows,
    }
    report(result, args.json)


if __name__ == "__main__":
    main()
