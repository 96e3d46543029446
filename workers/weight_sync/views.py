"""A second layout of weights in the processes that train them.

HybridFlow, section 5.3: a process makes its part of the second layout of what it holds of the first
and of what it lacks, which comes from processes that hold it. A transfer plan says what that is, so
nothing is sent twice. What is exchanged goes from tensor to tensor without packets: read by the
process that lacks it where both are on the CPUs of one machine, else through torch.distributed's
default group. All of them take part at once, so none trains before all have what they lack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ...dataflow.errors import WorkerError
from ...dataflow.graph.role import Role
from ...planner.resharding.plan_transfer import Move, TransferPlan, plan_transfer
from ...planner.resharding.sharding import Sharding
from .packets import Part, Tensors, dtype_of, read_view, write_view
from .peer_memory import readable


@lru_cache(maxsize=16)
def view_plan(source: Sharding, view: Sharding, places: tuple[int, ...]) -> TransferPlan:
    """Plan what each process lacks; `places` are the numbers of the view's processes."""
    return plan_transfer(source, view.on([places[process] for process in view.devices]))


def gather_view(
    trained: Role, source: Sharding, worker: Role, places: Sequence[int], process: int
) -> None:
    """Give a worker of a view the weights that the processes hold; all of them must ask at once.

    Args:
        trained: The worker in this process that trains the weights.
        source: The layout in which all processes hold them.
        worker: The worker that has them in another layout.
        places: The number of each of its processes in the group that trains.
        process: Its own process.
    """
    held, wanted = trained.local_tensors(), worker.local_tensors()
    if held is None or wanted is None:
        kind = type(trained if held is None else worker).__name__
        raise WorkerError(
            f"a {kind} does not say where its weights lie, so no view can be made of them\n    "
            "give it weights_layout, local_tensors and weights_changed"
        )
    plan = view_plan(source, worker.weights_layout(), tuple(places))
    worker.borrow(in_place(plan, places[process], held, wanted))
    below, lies = trained.frozen_weights(), worker.frozen_weights()
    with torch.no_grad():
        exchange(plan, places[process], held, worker.local_tensors() or {})
        if below is not None and lies is not None:
            plan = view_plan(below[0], lies[0], tuple(places))
            exchange(plan, places[process], below[1], lies[1])
    worker.weights_changed()


def in_place(plan: TransferPlan, device: int, held: Tensors, wanted: Tensors) -> dict[str, Tensor]:
    """Return tensors of a process that are, as they lie, tensors of its view, by name there."""
    found: dict[str, Tensor] = {}
    for move in plan.moves:
        if move.is_copy and move.source == device:
            for part in _parts(plan, move):
                name, dims = part.param.destination_tensor, part.param.destination_dims
                place = wanted.get(name)
                if place is None or part.shape != place.shape or [*dims] != sorted(dims):
                    continue
                given = read_view(part, held)
                if given.is_contiguous() and given.dtype == place.dtype:
                    found[name] = given
    return found


def exchange(plan: TransferPlan, device: int, held: Tensors, wanted: Tensors) -> None:
    """Carry a plan out between processes that run at once.

    What a process of this machine holds is read where it lies, straight into its place; the rest is
    sent, bucket by bucket.

    Args:
        plan: The plan; its devices are numbered as torch.distributed's processes.
        device: This process.
        held: Its tensors of the first layout.
        wanted: Its tensors of the second one, which are filled.
    """
    dtype = dtype_of(plan)
    moves: list[tuple[Move, int]] = []  # with the number of its first part among its source's
    offers = defaultdict[int, int](int)
    for move in plan.moves:
        if not move.is_copy:
            moves.append((move, offers[move.source]))
            offers[move.source] += len(plan.groups[move.group])
        elif move.source == device:
            for part in _parts(plan, move):
                place, given = write_view(part, wanted, dtype), read_view(part, held)
                if place.data_ptr() != given.data_ptr():  # else it is borrowed
                    place.copy_(given)
    offered = [
        read_view(part, held)
        for move, _ in moves
        if move.source == device
        for part in _parts(plan, move)
    ]
    # A reader takes what lies there as it is.
    fit = all(one.dtype == dtype and one.device.type == "cpu" for one in offered)
    if dist.get_backend() != "gloo":
        _send(plan, device, held, wanted, [move for move, _ in moves])
        return
    with readable(offered if fit else None, max(offers.values(), default=0)) as peers:
        rest: list[Move] = []
        for move, first in moves:
            if move.destination == device and move.source in peers.sources:
                places = [write_view(part, wanted, dtype) for part in _parts(plan, move)]
                peers.read(move.source, range(first, first + len(places)), places)
            elif move.source != device or move.destination not in peers.readers:
                rest.append(move)
        _send(plan, device, held, wanted, rest)


def _parts(plan: TransferPlan, move: Move) -> list[Part]:
    return [Part(plan.params[index], move) for index in plan.groups[move.group]]


def _send(
    plan: TransferPlan, device: int, held: Tensors, wanted: Tensors, moves: Sequence[Move]
) -> None:
    """Send and receive in an order that all processes share."""
    dtype = dtype_of(plan)
    buckets = defaultdict[int, list[Part]](list)
    for move in moves:
        if device in (move.source, move.destination):
            for part in _parts(plan, move):
                buckets[part.param.bucket].append(part)
    for number in sorted(buckets):
        calls: list[dist.P2POp] = []
        arriving: list[tuple[Tensor, Tensor]] = []
        for part in buckets[number]:
            if part.move.source == device:
                sent = read_view(part, held).to(dtype).contiguous()
                calls.append(dist.P2POp(dist.isend, sent, part.move.destination))
            else:
                place = write_view(part, wanted, dtype)
                here = place if place.is_contiguous() else torch.empty_like(place).contiguous()
                calls.append(dist.P2POp(dist.irecv, here, part.move.source))
                if here is not place:
                    arriving.append((place, here))
        for one in dist.batch_isend_irecv(calls):
            one.wait()
        for place, here in arriving:
            place.copy_(here)
