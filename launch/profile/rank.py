"""One rank of `penstock profile`, whoever has started its process.

All ranks measure the same things at the same times, so each finds what it gets of the machine while
the others work too: that is what a device of the plan will be. On this machine a rank is a process
of its own (`python -m penstock.launch.profile.rank FOLDER < request.json`), which writes what it
found to a file; on a cluster it is the object in a process of an executor's backend.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import psutil
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field

from ...workers.executors.process_backend import ProcessHome
from ...workers.executors.process_setup import Address, Store, meet
from ..placement.machine import machine_name
from .calls import ProfileCall, make_policy
from .links import LinkTimes, across_nodes, link_times, within_nodes

_FEWEST, _MOST = 2, 25  # repeats of anything

_MATRIX = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}
_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}

AtLeastOne = Annotated[int, Field(ge=1)]


class RankRequest(BaseModel):
    """What a rank is to measure."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: Annotated[int, Field(ge=0)]  # which one it is
    # number of the node that each rank is on, by rank; there are as many ranks
    nodes: tuple[int, ...]
    # `cpu`, or the CUDA device of this rank
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")]
    num_threads: AtLeastOne  # torch threads
    calls: tuple[ProfileCall, ...]  # calls to time; those of one dtype and width stand together
    seconds: Annotated[float, Field(gt=0)]  # how long each is repeated, about
    deadline_s: Annotated[float, Field(gt=0)]  # longest time for all of it

    @property
    def num_ranks(self) -> int:
        return len(self.nodes)

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]


class RankResult(BaseModel):
    """What a rank found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device_name: str  # of a CUDA device its maker's; else the processor's
    memory_bytes: AtLeastOne  # of the device; on a CPU its share of the machine's
    reserved_bytes: Annotated[int, Field(ge=0)]  # held before any model is there
    flops_per_s: Mapping[str, float]  # dtype -> rate of a large matrix product
    memory_bytes_per_s: float  # A long copy, bytes read and bytes written together
    host_bytes_per_s: float  # to host memory, one direction
    within: LinkTimes | None  # to the ranks of its node; None if it is the only one there
    between: LinkTimes | None  # to ranks of other nodes; None if there are none
    calls_s: tuple[float, ...]  # median seconds of each call


class Together:
    """Times things on all ranks at once."""

    def __init__(self, num_ranks: int, device: str, seconds: float) -> None:
        self._alone = num_ranks == 1
        self._cuda = device.startswith("cuda")
        self._seconds = seconds

    def median_s(self, body: Callable[[], object]) -> float:
        self.once_s(body)
        first_s = self.once_s(body)
        count = int(self._slowest(self._seconds / max(first_s, 1e-6)))
        count = min(max(count, _FEWEST), _MOST)
        return statistics.median([first_s, *(self.once_s(body) for _ in range(count - 1))])

    def once_s(self, body: Callable[[], object]) -> float:
        if not self._alone:
            dist.barrier()
        self._synchronize()
        begin = time.perf_counter()
        body()
        self._synchronize()
        return time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _slowest(self, count: float) -> float:
        if self._alone:
            return count
        agreed = torch.tensor(count, dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return float(agreed)


class ProfileRank:
    """A rank that lives in a process of an executor's backend."""

    def __init__(self, home: ProcessHome, request: RankRequest) -> None:
        self._host, self._request = home.host, request
        self._listener: socket.socket | None = None

    def listen(self) -> Address:
        self._listener = socket.create_server((self._host, 0))
        return self._listener.getsockname()

    def measure(self, address: Address) -> RankResult:
        request = self._request
        listener = self._listener if request.rank == 0 else None
        return measured(
            request, meet(address, listener, self._host, request.num_ranks, request.deadline_s)
        )


def measured(request: RankRequest, store: Store) -> RankResult:
    """Measure all that is asked for; every rank must do so at the same time."""
    torch.set_num_threads(request.num_threads)
    cuda, device = request.kind == "cuda", request.device
    if cuda:
        torch.cuda.set_device(device)
    if request.num_ranks > 1:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=request.rank,
            world_size=request.num_ranks,
            timeout=timedelta(seconds=request.deadline_s),
        )
    together = Together(request.num_ranks, device, request.seconds)
    memory, reserved = _memory(request.nodes.count(request.nodes[request.rank]), cuda)
    copy = _copy_s(together, device)
    size = _COPY_BYTES[request.kind]
    result = RankResult(
        device_name=machine_name(request.kind),
        memory_bytes=memory,
        reserved_bytes=reserved,
        flops_per_s={name: _flops(together, device, name) for name in _DTYPES[request.kind]},
        memory_bytes_per_s=2 * size / copy,
        host_bytes_per_s=size / (_host_s(together, device) if cuda else copy),
        within=link_times(within_nodes(request.nodes), request.rank, device, together.once_s),
        between=link_times(across_nodes(request.nodes), request.rank, device, together.once_s),
        calls_s=_calls_s(request, device, together),
    )
    if request.num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return result


def _memory(sharing: int, cuda: bool) -> tuple[int, int]:
    if cuda:
        free, total = torch.cuda.mem_get_info()
        return total, total - free
    return psutil.virtual_memory().total // sharing, psutil.Process().memory_info().rss


def _flops(together: Together, device: str, dtype: str) -> float:
    size = _MATRIX[device.partition(":")[0]]
    left, right = (
        torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2)
    )
    out = torch.empty_like(left)
    return 2 * size**3 / together.median_s(lambda: torch.mm(left, right, out=out))


def _copy_s(together: Together, device: str) -> float:
    size = _COPY_BYTES[device.partition(":")[0]] // 4
    source = torch.zeros(size, device=device)
    target = torch.empty_like(source)
    return together.median_s(lambda: target.copy_(source))


def _host_s(together: Together, device: str) -> float:
    host = torch.zeros(_COPY_BYTES["cuda"] // 4, pin_memory=True)
    target = torch.empty_like(host, device=device)
    return together.median_s(lambda: target.copy_(host, non_blocking=True))


def _calls_s(request: RankRequest, device: str, together: Together) -> tuple[float, ...]:
    seconds: list[float] = []
    policy, made = None, None
    for call in request.calls:
        wanted = (call.width, call.dtype)
        if policy is None or made != wanted:
            policy = make_policy(call.width, call.dtype, device)
            made = wanted
        seconds.append(together.median_s(call.prepared(policy)))
    return tuple(seconds)


def answer_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def main() -> None:
    """Do what the request on standard input says."""
    request, folder = RankRequest.model_validate_json(sys.stdin.read()), Path(sys.argv[1])
    file = str(folder / "store")
    store = dist.FileStore(file, request.num_ranks)  # pyright: ignore[reportPrivateImportUsage] - torch documents it
    result = measured(request, store)
    answer_file(folder, request.rank).write_text(result.model_dump_json())


if __name__ == "__main__":
    main()
