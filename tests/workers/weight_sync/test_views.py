"""What processes lack of a second layout of the weights, read from memory or sent."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from penstock.planner.resharding.sharding import Sharding, unsharded
from penstock.workers.engines.divided_network import divided_sharding
from penstock.workers.weight_sync import peer_memory, views
from torch import Tensor

SHAPES = {
    "embed_tokens.weight": (24, 10),
    "o_proj.weight": (10, 4200),  # cut by columns, in more runs than a call takes
    "norm.weight": (10,),
    "up_proj.weight": (1200, 500),  # longer than the longest run
}


def held(layout: Sharding, process: int, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """A process's tensors."""
    return {
        param.tensor: whole[param.name][tuple(slice(*one) for one in piece.box)].contiguous()
        for param in layout.params
        for piece in layout.patterns[param.pattern]
        if piece.device == process
    }


def join(file: str, process: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=process, world_size=size)


def exchanged(
    file: str, process: int, size: int, machines: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Be one of the processes; another exit code than 0 says that something is wrong."""
    join(file, process, size)
    peer_memory._machine = lambda: machines[process]  # pyright: ignore[reportPrivateUsage]
    sent: list[Any] = []
    messages = dist.batch_isend_irecv

    def counted(calls: list[Any]) -> Any:
        sent.extend(calls)
        return messages(calls)

    dist.batch_isend_irecv = counted
    whole = {name: torch.randn(*shape) for name, shape in SHAPES.items()}
    for one in whole.values():
        dist.broadcast(one, 0)
    source = divided_sharding(SHAPES, shards=size, tensor=1, dtype="float32")
    view = unsharded(SHAPES, range(size), dtype=str(dtype).removeprefix("torch."))
    wanted = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
    plan = views.view_plan(source, view, tuple(range(size)))
    views.exchange(plan, process, held(source, process, whole), wanted)
    alone = machines.count(machines[process]) < size or dtype != torch.float32 or 0 in machines
    fits = all(torch.equal(wanted[name], one.to(dtype)) for name, one in whole.items())
    dist.destroy_process_group()
    os._exit(0 if fits and bool(sent) == alone else 1)


@pytest.mark.parametrize(
    ("machines", "dtype"),
    [
        ((1, 1), torch.float32),
        ((1, 1), torch.bfloat16),  # converted by who sends
        ((0, 0), torch.float32),  # of a system where none may read another
        ((1, 1, 2), torch.float32),
    ],
    ids=str,
)
def test_all_of_a_view_comes(tmp_path: Path, machines: tuple[int, ...], dtype: torch.dtype) -> None:
    fork = multiprocessing.get_context("fork")
    size, file = len(machines), str(tmp_path / "store")
    ranks = [
        fork.Process(target=exchanged, args=(file, process, size, machines, dtype))
        for process in range(size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0] * size


def test_any_strides_are_read(tmp_path: Path) -> None:
    join(str(tmp_path / "store"), 0, 1)
    try:
        base = torch.randn(6, 40, 50)
        offered = [base, base.permute(2, 0, 1), base[1:5, ::3, 7:], base[0, 0], base[:, :, :1]]
        places = [
            torch.zeros(one.shape[::-1]).permute(*reversed(range(one.ndim))) for one in offered
        ]
        with peer_memory.readable(offered, len(offered)) as peers:
            if 0 not in peers.sources:
                pytest.skip("none may read another on this system")
            peers.read(0, range(len(offered)), places)
        assert all(map(torch.equal, places, offered))
    finally:
        dist.destroy_process_group()


def test_a_process_that_has_ended_is_named() -> None:
    child = multiprocessing.get_context("fork").Process(target=os.getpid)
    child.start()
    child.join(60)
    runs = np.array([[4096, 4096, 8]])
    with pytest.raises(OSError, match=f"memory of process {child.pid} cannot be read"):
        peer_memory.read_memory(child.pid or 0, runs)
