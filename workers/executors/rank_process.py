"""One process of one group: what it builds and does, under any executor that has processes.

What a process makes stays in its store, and others get it from there by a reference.
"""

from __future__ import annotations

import contextlib
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from ...dataflow.errors import PenstockError, WorkerError
from ...dataflow.files import file_error
from ...dataflow.graph.role import Role
from ...dataflow.runtime.columns import Packed, Part
from ...dataflow.runtime.executor import Program, WorkerLost, build_role, methods_of
from ...dataflow.runtime.host import Host, HostOutcome
from ...dataflow.runtime.messages import HeldLayout, RankWork, Report, Result
from ...dataflow.runtime.placement import DeviceGroup
from ...dataflow.runtime.remote_inference import ServedRole, ServedWeights
from ...dataflow.runtime.worker_protocol import (
    WorkerContext,
    close_workers,
    sleep_offloaded,
    wake_workers,
)
from ...planner.resharding.sharding import Sharding
from ..inference.link import InferenceClient, InferenceServer
from ..training.host_memory import give_back_freed
from ..weight_sync.channel import CHANNELS, DEFAULT_TRANSPORT, ChannelEnd, Offer, WeightChannel
from ..weight_sync.packets import SliceTraffic
from ..weight_sync.views import gather_view
from .process_backend import BackendError, CallFailed, NotInTime, ProcessDied, ProcessHome, Ref
from .process_setup import Address, bound_groups, meet, use_threads


@dataclass(frozen=True)
class RankAnswer:
    """The answer of a process: a few hundred bytes, whatever it made."""

    report: Report | None
    parts: tuple[Ref, ...] = ()  # References to the outputs
    weights: Any = None  # Reference to a snapshot, or the offer of its slices
    error: str = ""  # What was raised
    trace: str = ""  # Its traceback
    leads: bool = True  # Whether this process answers for its rank
    lost: Literal["", "process", "stored"] = ""


class SliceHost(Host):
    """A host whose roles' weights travel in slices, through the weight channel of its process."""

    def __init__(
        self,
        *given: Any,
        process: int,
        traffic: SliceTraffic,
        channel: WeightChannel,
        woke_s: Mapping[str, float],
    ) -> None:
        super().__init__(*given)
        self._process, self._traffic, self._channel = process, traffic, channel
        self._woke_s = woke_s  # Role -> when making its view began; seconds since the epoch

    @override
    def check_version(self, role: str, version: int) -> None:
        self._traffic.check(role, version)

    @override
    def layout(self, role: str) -> HeldLayout | None:
        return self._traffic.layout(self.roles[role])

    @override
    def export_slices(self, role: str, receivers: Mapping[str, Any], version: int) -> HostOutcome:
        worker, room = self.roles[role], self._channel.room
        packets = self._traffic.export(worker, receivers, version, room)
        return HostOutcome(weights=self._channel.publish(packets))

    @override
    def hold_view(self, role: str, version: int) -> HostOutcome:
        self._traffic.hold(role, self.roles[role], version)
        return HostOutcome(start_s=self._woke_s[role])

    @override
    def import_slices(self, role: str, source: Any, slices: tuple[Any, ...], version: int) -> None:
        worker = self.roles[role]
        self._traffic.expect(role, worker)
        # Each begins with another process, so that all of those send at the same time.
        first = self._process % len(slices)
        found = map(self._channel.obtain, (*slices[first:], *slices[:first]))
        packets = [packet for packet in found if packet is not None]
        with self.served_weights.changing(role, version):
            self._traffic.write(role, worker, source, packets, version)


class RankProcess:
    """One process of a rank: a `Host`, and the conversions between tensors and what is stored."""

    def __init__(
        self,
        home: ProcessHome,
        group: DeviceGroup,
        process: int,
        num_threads: int,
        deadline_s: float,
        start_s: float,
        replica: tuple[int, int] = (0, 1),
        around: RankProcess | None = None,
        places: tuple[int, ...] = (),
    ) -> None:
        use_threads(num_threads)
        # The process of the group that this one lives within, and those that live within this one.
        self._around, self._places = around, places
        self._within: dict[str, RankProcess] = {}
        self._views: dict[str, Sharding] = {}  # Role that is trained around it -> how it lies there
        self._woke_s: dict[str, float] = {}
        self._home = home
        self._group, self._process = group, process
        self._traffic = SliceTraffic(process, group.processes(0))
        self._end = ChannelEnd(group.name, process, deadline_s, home.put, home.get)
        self._channel = CHANNELS[DEFAULT_TRANSPORT](self._end)  # until `build` knows which
        self._deadline_s, self._start_s = deadline_s, start_s
        self._replica = replica
        self._hosts: dict[str, Host] = {}
        self._roles: dict[str, Role] = {}
        self._listener: socket.socket | None = None
        self._served_weights = ServedWeights(f"group '{group.name}' (process {process})")
        self._clients: dict[str, InferenceClient] = {}
        self._server: InferenceServer | None = None
        self._sleeps = ""
        self._imported: dict[str, tuple[str, RankWork]] = {}
        self._emptied = set[str]()

    def listen(self) -> Address:
        """Open the socket at which this process is met next."""
        self._listener = socket.create_server((self._home.host, 0))
        return self._listener.getsockname()

    def join(self, address: Address | Ref) -> None:
        """Join the group's process group, whose process 0 listens at `address`, or will."""
        if not isinstance(address, tuple):
            address = self._got(address, self._start_s)
        listener, self._listener = self._listener, None
        bound_groups(self._deadline_s)
        # Without a device NCCL would guess it, by the number of the process.
        on_gpu = self._group.device.startswith("cuda")
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=meet(
                address, listener, self._home.host, self._group.num_processes, self._start_s
            ),
            rank=self._process,
            world_size=self._group.num_processes,
            timeout=timedelta(seconds=self._deadline_s),
            device_id=torch.device("cuda:0") if on_gpu else None,
        )

    def admit(self, group: DeviceGroup, process: int, places: tuple[int, ...]) -> None:
        """Have a process of a group that lives within this one's be part of this process."""
        num_threads = torch.get_num_threads()
        limits = num_threads, self._deadline_s, self._start_s
        self._within[group.name] = RankProcess(
            self._home, group, process, *limits, around=self, places=places
        )

    def call_within(self, group: str, method: str, *arguments: Any) -> Any:
        """Call a method of the process that `admit` has made for a group."""
        return getattr(self._within[group], method)(*arguments)

    def forget(self, number: int) -> None:
        self._channel.forget(number)

    def is_running(self) -> bool:
        """True, as soon as all calls before this one have ended."""
        return True

    def build(self, hosted: Ref, seed: int) -> None:
        """Build the roles, clients and hosts of every program that runs on this process's group."""
        ((programs, workers, transport),) = self._home.get([hosted], self._start_s)
        self._channel = CHANNELS[transport](self._end)
        for key, program in programs.items():
            if all(group.name != self._group.name for group in program.placement.groups):
                continue
            names = program.placement.hosted_roles(program.graph, self._group.name)
            for name in names:
                # Programs of a run share their roles: what is evaluated is what is trained.
                if name not in self._roles:
                    self._roles[name] = build_role(
                        name, workers[name], self._context(name, seed, programs)
                    )
            served: dict[str, ServedRole] = {}
            found = program.placement.served_roles(program.graph, self._group.name)
            for role, server in found.items():
                if server not in self._clients:
                    self._clients[server] = InferenceClient(
                        f"group '{server}'", self._deadline_s, self._start_s
                    )
                send = self._clients[server].send
                served[role] = ServedRole(role, program.graph.roles[role], send)
            self._hosts[key] = SliceHost(
                program.graph,
                {name: self._roles[name] for name in names},
                program.placement.num_chunks,
                self._fetch,
                served,
                self._served_weights,
                process=self._process,
                traffic=self._traffic,
                channel=self._channel,
                woke_s=self._woke_s,
            )
            for name in names:
                if (
                    self._around
                    and program.placement.home(program.graph, name) == self._group.within
                ):
                    self._views[name] = self._around._roles[name].weights_layout()
            for role, server in program.placement.serving(program.graph):
                if server == self._group.name:
                    self._served_weights.add(role, program.graph.roles[role], self._roles[role])
        sleep_offloaded(self._roles.values())
        give_back_freed(torch.device(self._group.device))  # what building took besides

    def serve(self, token: str, before: Address | None) -> Address:
        """Answer inference requests from now on, on this process's own address; where that is."""
        host = self._home.host
        # Where it listened before it was started again, as its clients go on asking there.
        port = before[1] if before is not None and before[0] == host else 0
        self._server = InferenceServer(self._served_weights, host, token, port)
        return self._server.address

    def connect_to_servers(
        self, servers: Mapping[str, Sequence[tuple[str, int]]], token: str
    ) -> None:
        rank = self._group.rank_of(self._process)
        for group, addresses in servers.items():
            if group in self._clients:
                # Ranks are spread over the processes that serve.
                self._clients[group].connect(addresses[rank % len(addresses)], token)

    def _context(self, role: str, seed: int, programs: Mapping[str, Program]) -> WorkerContext:
        group = self._group
        beside, tensor_rank = divmod(self._process, group.tensor_parallel)
        stage, rank = divmod(beside, group.num_ranks)
        return WorkerContext(
            role,
            seed,
            rank,
            group.num_ranks,
            group.device,
            group.tensor_parallel,
            tensor_rank,
            group.pipeline_parallel,
            stage,
            methods_of(programs, group.name, role),
            *self._replica,
            self._places,
            group.name,
        )

    def sleep(self, to: str = "") -> None:
        """Give the device up to a group, `to`; whatever needs it is refused until `wake`."""
        self._sleeps = "it was not woken"
        viewed = self._within[to]._views if to in self._within else {}
        for name, role in self._roles.items():
            if name in viewed:
                role.sleep_but_weights()
            elif name in self._views and role.sleep_empty():
                continue
            # Weights that came from another group are not kept either, if the worker can do
            # without: they come again, or newer ones. Their last offer stands until then.
            elif name in self._imported and role.sleep_empty():
                self._emptied.add(name)
            else:
                role.sleep()
        if self._around is not None and to != self._around._group.name:
            self._around.sleep(
                to
            )  # its weights lie on the device as long as views are made of them

    def wake(self, asleep: Sequence[Ref]) -> None:
        """Take the device back once others have given it up."""
        try:
            for one in asleep:
                with contextlib.suppress(ProcessDied):  # The dead hold nothing.
                    self._home.get([one], self._deadline_s)
            wake_workers(self._roles.values())
            for role in self._views:
                self._make_view(role)
            self._sleeps = ""
        except Exception as error:  # noqa: BLE001 - said when work is asked for: no answer is read
            said = str(error) if isinstance(error, PenstockError) else traceback.format_exc()
            self._sleeps = f"waking it failed:\n{said}"

    def _make_view(self, role: str) -> None:
        """Give a role the weights that the processes around train; all of them must, at once.

        They cannot change until this group sleeps, so one view serves all calls until then.
        """
        assert self._around is not None
        trained, self._woke_s[role] = self._around._roles[role], time.time()
        trained.wake_weights()
        layout, worker = self._views[role], self._roles[role]
        gather_view(trained, layout, worker, self._places, self._process)
        sleep_offloaded([trained])

    def perform(self, program: str, work: RankWork, leads: bool) -> RankAnswer:
        """Do one piece of work; outputs stay in this process's store."""
        answer, parts = self._answer(program, work, leads)
        return replace(answer, parts=tuple(self._home.put(part) for part in parts))

    def perform_apart(self, program: str, work: RankWork, count: int) -> tuple[Any, ...]:
        answer, parts = self._answer(program, work, leads=True)
        return answer, *parts, *[None] * (count - len(parts))

    def _answer(self, program: str, work: RankWork, leads: bool) -> tuple[RankAnswer, list[Any]]:
        try:
            result = self._perform(program, work)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is passed on
            # Ours are complete without a traceback, and so is what is said of a file.
            said = str(error) if isinstance(error, PenstockError) else file_error(error)
            text = said or f"{type(error).__name__}: {error}"
            trace = "" if said else traceback.format_exc()
            return RankAnswer(None, error=text, trace=trace, leads=leads, lost=_lost(error)), []
        weights = result.weights
        if weights is not None and not isinstance(weights, Offer):
            # A whole snapshot is the same in each process of a rank, so one of them stores it.
            weights = self._home.put(_weights_to_numpy(weights)) if leads else None
        parts = [part_to_numpy(part) for part in result.parts] if leads else []
        return RankAnswer(result.report, weights=weights, leads=leads), parts

    def _perform(self, program: str, work: RankWork) -> Result:
        if work.needs != "nothing":
            if self._sleeps:
                where = f"process {self._process} of group '{self._group.name}'"
                raise WorkerError(f"{where} sleeps; {self._sleeps}")
            # Other roles that have slept without weights need their last ones again; what this very
            # call brings need not come twice.
            brought = work.arguments[0] if work.method is Host.import_slices else None
            for role in sorted(self._emptied - {brought}):
                before, last = self._imported[role]
                self._hosts[before].perform(last)
                self._emptied.discard(role)
        result = self._hosts[program].perform(work)
        if work.method is Host.import_slices:
            role = work.arguments[0]
            self._imported[role] = program, work
            self._emptied.discard(role)
        return result

    def _got(self, ref: Ref, timeout_s: float = 0.0) -> Any:
        (found,) = self._home.get([ref], timeout_s or self._deadline_s)
        return found

    def keep_warm(self) -> bool:
        """Get ready for another run, if every worker leaves an engine behind; says whether."""
        if not self._roles or not all(role.stays_warm for role in self._roles.values()):
            return False
        if self._clients or self._server:
            return False  # Others may still be connected.
        self._channel.close()
        for role in self._roles.values():
            role.keep_warm()
        again = self._home, self._group, self._process, torch.get_num_threads()
        RankProcess.__init__(self, *again, self._deadline_s, self._start_s, self._replica)
        return True

    def close(self) -> None:
        """Close the workers; the process ends next."""
        try:
            for one in (*self._clients.values(), *([self._server] if self._server else ())):
                one.close()
        finally:
            hosts, self._hosts = self._hosts, {}
            roles, self._roles = self._roles, {}
            try:
                close_workers([*hosts.values(), *roles.values()])
            finally:
                self._channel.close()

    def _fetch(self, handle: Any) -> Any:
        # Get a stored part or snapshot; copied, because arrays may be shared and read-only.
        stored = self._got(handle)
        if isinstance(stored, dict):
            return {name: _tensor(array, dtype) for name, (dtype, array) in stored.items()}
        return part_from_numpy(stored)


def _lost(error: BaseException | None) -> Literal["", "process", "stored"]:
    # Whether something failed because a process died, and what of it is gone.
    while error is not None:
        if isinstance(error, WorkerLost):
            return "stored" if error.stored else "process"
        if isinstance(error, BackendError) and not isinstance(error, CallFailed | NotInTime):
            return "stored"  # who has made it has died, or its machine is gone
        error = error.__cause__
    return ""


# --- tensors as they are stored: numpy arrays, which Ray stores without copying


_Column = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]


def part_to_numpy(part: Part) -> tuple[_Column, ...]:
    return tuple(
        (
            column.values.cpu().numpy(),
            None if column.lengths is None else column.lengths.cpu().numpy(),
        )
        for column in part
    )


def part_from_numpy(stored: Sequence[_Column]) -> Part:
    return tuple(
        Packed(_tensor(values), None if lengths is None else _tensor(lengths))
        for values, lengths in stored
    )


def _weights_to_numpy(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, Any]]:
    stored: dict[str, tuple[str, Any]] = {}
    for name, tensor in weights.items():
        array = tensor.detach().cpu().contiguous()
        bits = array.view(torch.int16) if array.dtype is torch.bfloat16 else array
        stored[name] = (str(array.dtype).removeprefix("torch."), bits.numpy())
    return stored


def _tensor(array: np.ndarray[Any, Any], dtype: str = "") -> torch.Tensor:
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
