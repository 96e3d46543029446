"""One of the processes of `test_p2p`: `python -m tests.workers.weight_sync.transfer_rank ...`.

Its arguments are RANK and FOLDER.

Carries out every plan of FOLDER/cases.json and compares its tensors bit by bit, then takes part in
transfers that go wrong. Writes what came of it all to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from penstock.planner.inputs.layout import Layout
from penstock.planner.resharding.plan import TransferPlan
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.sharding import Sharding, shard
from penstock.workers.weight_sync.checksum import checksum
from penstock.workers.weight_sync.device_slices import Message, Part, plan_stamp, read_view
from penstock.workers.weight_sync.p2p import LARGE_BYTES, Ends, Transfer
from penstock.workers.weight_sync.p2p_route import waves_of
from penstock.workers.weight_sync.version_tracker import HeldWeights, WeightsError
from torch import Tensor

from ...planner.transfers import TINY
from .transfer_engines import Engine, bits, empty, engine, expected, is_same

NUM_PROCESSES = 4
DEADLINE_S = 60.0

LARGE = {"packed": LARGE_BYTES, "direct": 1}
"""From which size on slices are sent from tensor to tensor: none of the test's, and all."""


def ends_of(
    source: Engine, destination: Engine, sharding: Sharding, process_of: dict[int, int]
) -> dict[int, Ends]:
    """The tensors of this process's devices."""
    devices = [d for d in {*source, *destination} if process_of[d] == dist.get_rank()]
    return {
        device: Ends(
            source.get(device, {}),
            destination.get(device, {}),
            HeldWeights.of(sharding, device) if device in destination else None,
        )
        for device in devices
    }


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Two versions through one `Transfer`, whose buffers and routes are used again."""
    plan = TransferPlan.from_json(case["plan"])
    source, destination = (Sharding.from_json(case[side]) for side in ("source", "destination"))
    process_of = {share.device: share.device % NUM_PROCESSES for share in plan.devices}
    before, after = engine(source), empty(destination)
    here = ends_of(before, after, destination, process_of)
    transfer = Transfer(plan, here, process_of, large_bytes=case["large_bytes"])
    found: dict[str, Any] = {}
    for version in range(2):
        newer = engine(source, version=version)
        for device, tensors in before.items():
            for name, tensor in tensors.items():
                tensor.copy_(newer[device][name])
        found = asdict(transfer.run(version, deadline_s=DEADLINE_S))
        wanted = expected(destination, source.dtype, version=version)
        for device, ends in here.items():
            if ends.held is not None:
                assert is_same({device: after[device]}, {device: wanted[device]}), device
                ends.held.check(version)
    return found


def refusal(
    ends: dict[int, Ends], plan: TransferPlan, process_of: dict[int, int], version: int,
    deadline_s: float = DEADLINE_S, large_bytes: int = LARGE_BYTES,
) -> str:  # fmt: skip
    """The error of a transfer; empty if it went well."""
    try:
        Transfer(plan, ends, process_of, large_bytes=large_bytes).run(
            version, deadline_s=deadline_s
        )
    except WeightsError as error:
        return str(error)
    return ""


def pieces(
    message: Message, stamp: int, tensors: dict[str, Tensor], large_bytes: int, damaged: Part | None
) -> list[Tensor]:
    """What is sent of a message of version 1: large slices, then the header with the small.

    In one of them a bit is flipped after the checksum was made.
    """
    made = {
        part: read_view(part, tensors).clone(memory_format=torch.contiguous_format)
        for part in message.parts
    }
    data = {part: tensor.view(-1).view(torch.uint8) for part, tensor in made.items()}
    large = [part for part in message.parts if len(data[part]) >= large_bytes]
    small = [part for part in message.parts if len(data[part]) < large_bytes]
    sums = [checksum(part, data[part], 1) for part in (*large, *small)]
    if damaged is not None:
        data[damaged][-1] ^= 1
    header = torch.tensor([1, stamp, *sums]).view(torch.uint8)
    return [*(data[part] for part in large), torch.cat([header, *(data[p] for p in small)])]


def send_damaged(plan: TransferPlan, tensors: dict[str, Tensor], process_of: dict[int, int],
                 victim: int, large_bytes: int) -> str:  # fmt: skip
    """A sender by hand, which damages the slice of the output layer that `victim` alone gets."""
    works: list[dist.Work | None] = []
    buffers: list[Tensor] = []
    said = ""
    for wave in waves_of(plan, [0], process_of, 0):
        for message, processes in wave.sends:
            heads = [part for part in message.parts if part.param.name == "lm_head.weight"]
            damaged = heads[0] if heads and message.destinations == (victim,) else None
            said = said or str(damaged or "")
            listed = pieces(message, plan_stamp(plan), tensors, large_bytes, damaged)
            buffers += listed
            works += [dist.isend(data, process) for process in processes for data in listed]
    for work in works:
        assert work is not None
        work.wait(timedelta(seconds=DEADLINE_S))
    return said


def damaged_relay(large_bytes: int) -> dict[str, Any]:
    """Device 1 is sent a damaged slice that it must pass on to device 2; then all is sent again."""
    source, destination = shard(TINY, Layout(), [0]), shard(TINY, Layout(dp=2), [1, 2])
    plan = plan_transfer(source, destination, min_part_bytes=1)
    process_of = {0: 0, 1: 1, 2: 2}
    before, after = engine(source, version=1), empty(destination)
    rank = dist.get_rank()
    if rank == 3:
        return {}
    here = ends_of(before, after, destination, process_of)
    held = here[rank].held
    if held is None:
        said = send_damaged(plan, before[0], process_of, 1, large_bytes)
        return {"said": said, "again": refusal(here, plan, process_of, 1, large_bytes=large_bytes)}
    found: dict[str, Any] = {"said": refusal(here, plan, process_of, 1, large_bytes=large_bytes)}
    try:
        held.check(1)
    except WeightsError as error:
        found["check"] = str(error)
    wanted = expected(destination, source.dtype, version=1)
    found["num_wrong"] = sum(
        int((bits(tensor) != bits(wanted[rank][name])).sum())
        for name, tensor in after[rank].items()
    )
    found["again"] = refusal(here, plan, process_of, 1, large_bytes=large_bytes)
    held.check(1)
    assert is_same({rank: after[rank]}, {rank: wanted[rank]})
    return found


def stale_sender() -> str:
    """Process 0 sends what it says is version 4; version 5 is expected."""
    source, destination = shard(TINY, Layout(), [0]), shard(TINY, Layout(), [1])
    plan = plan_transfer(source, destination)
    process_of = {0: 0, 1: 1}
    after = empty(destination)
    if dist.get_rank() > 1:
        return ""
    here = ends_of(engine(source), after, destination, process_of)
    said = refusal(here, plan, process_of, 4 + dist.get_rank())
    assert is_same(after, empty(destination))
    return said


def absent_sender() -> str:
    """Process 0 does not take part."""
    source, destination = shard(TINY, Layout(), [0]), shard(TINY, Layout(), [1])
    plan = plan_transfer(source, destination)
    if dist.get_rank() != 1:
        return ""
    here = ends_of(engine(source), empty(destination), destination, {0: 0, 1: 1})
    begin = time.monotonic()
    said = refusal(here, plan, {0: 0, 1: 1}, 1, deadline_s=0.5)
    assert time.monotonic() - begin < 30
    return said


def main(rank: int, folder: Path) -> None:
    """Everything, in the same order in all processes."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=NUM_PROCESSES,
        timeout=timedelta(seconds=DEADLINE_S),
    )  # fmt: skip
    found: dict[str, Any] = {}
    found["cases"] = [run_case(case) for case in json.loads((folder / "cases.json").read_text())]
    found["damaged"] = {name: damaged_relay(size) for name, size in LARGE.items()}
    found["stale"] = stale_sender()
    dist.barrier()
    found["absent"] = absent_sender()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    while not all((folder / f"{i}.json").exists() for i in range(NUM_PROCESSES)):
        time.sleep(0.02)  # Nobody leaves while another may still expect it to be there.


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
