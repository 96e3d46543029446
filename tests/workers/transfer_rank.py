"""One of the processes of `test_transfer`: `python -m tests.workers.transfer_rank RANK FOLDER`.

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
from penstock.planner.layout import Layout
from penstock.planner.sharding import Sharding, shard
from penstock.planner.transfer import plan_transfer
from penstock.planner.transfer_plan import TransferPlan
from penstock.workers.held_weights import HeldWeights, WeightsError
from penstock.workers.transfer import Ends, Transfer, execute
from penstock.workers.transfer_checksum import checksum
from penstock.workers.transfer_parts import plan_stamp, read_view
from penstock.workers.transfer_route import header_words, waves_of
from torch import Tensor

from ..planner.transfers import TINY
from .transfer_engines import Engine, empty, engine, expected, is_same

NUM_PROCESSES = 4
DEADLINE_S = 60.0


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
    transfer = Transfer(plan, here, process_of)
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


def refusal(ends: dict[int, Ends], plan: TransferPlan, process_of: dict[int, int],
            version: int, deadline_s: float = DEADLINE_S) -> str:  # fmt: skip
    """The error of a transfer; empty if it went well."""
    try:
        execute(plan, ends, process_of, version=version, deadline_s=deadline_s)
    except WeightsError as error:
        return str(error)
    return ""


def send_damaged(plan: TransferPlan, tensors: dict[str, Tensor], process_of: dict[int, int],
                 victim: int) -> str:  # fmt: skip
    """A sender by hand, which flips a bit of the last slice of its first message to `victim`."""
    works: list[dist.Work | None] = []
    buffers: list[Tensor] = []
    damaged = ""
    for wave in waves_of(plan, [0], process_of, 0):
        for message, processes in wave.sends:
            parts = [read_view(part, tensors).contiguous() for part in message.parts]
            data = [part.reshape(-1).view(torch.uint8) for part in parts]
            sums = [checksum(*pair, 1) for pair in zip(message.parts, data, strict=True)]
            header = torch.tensor([1, plan_stamp(plan), *sums]).view(torch.uint8)
            assert len(header) == 8 * header_words(message)
            buffers.append(torch.cat([header, *data]))
            if not damaged and message.destinations == (victim,):
                buffers[-1][-1] ^= 1
                damaged = str(message.parts[-1])
            works += [dist.isend(buffers[-1], process) for process in processes]
    for work in works:
        assert work is not None
        work.wait(timedelta(seconds=DEADLINE_S))
    return damaged


def damaged_relay() -> dict[str, str]:
    """Device 1 is sent a damaged slice that it must pass on to device 2."""
    source, destination = shard(TINY, Layout(), [0]), shard(TINY, Layout(dp=2), [1, 2])
    plan = plan_transfer(source, destination, min_part_bytes=1)
    process_of = {0: 0, 1: 1, 2: 2}
    before = engine(source, version=1)
    if dist.get_rank() == 0:
        return {"damaged": send_damaged(plan, before[0], process_of, victim=1)}
    if dist.get_rank() == 3:
        return {}
    here = ends_of(before, empty(destination), destination, process_of)
    said = refusal(here, plan, process_of, 1)
    held = next(iter(here.values())).held
    assert held is not None
    try:
        held.check(1)
    except WeightsError as error:
        return {"damaged": said, "damaged_check": str(error)}
    return {"damaged": said}


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
    found |= damaged_relay()
    found["stale"] = stale_sender()
    dist.barrier()
    found["absent"] = absent_sender()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    while not all((folder / f"{i}.json").exists() for i in range(NUM_PROCESSES)):
        time.sleep(0.02)  # Nobody leaves while another may still expect it to be there.


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
