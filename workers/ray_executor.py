"""The Ray executor: every rank of every group is an actor; outputs stay where they were made.

The controller holds object references only. A rank stores what it makes in its node's object store
and the consumer pulls it from there. Ranks of one group share a torch.distributed process group, so
training inside a group is SPMD; groups are independent of each other and run at the same time.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

if "RAY_ADDRESS" not in os.environ:
    # Read when ray is imported: a Ray of our own then listens on the loopback address only, as it
    # does by itself on other systems than Linux.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Ray lowers its workers' priority by 15 to keep a desktop responsive; here they are the job.
    os.environ.setdefault("RAY_worker_niceness", "0")

import ray
from ray.exceptions import RayActorError, RayError

from ..dataflow.batch import Packed
from ..dataflow.errors import ConfigError, PlanError, WorkerError
from ..dataflow.executor import Completion, Program, build_role
from ..dataflow.host import Host
from ..dataflow.placement import DeviceGroup
from ..dataflow.role import Role
from ..dataflow.work import Handle, Part, Report, Work
from ..dataflow.worker import WorkerContext, WorkerSpec

__all__ = ["RayExecutor", "connect_ray", "shutdown_ray"]

_START_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class _Answer:
    """What an actor returns: a few hundred bytes, whatever it made."""

    report: Report | None
    parts: tuple[Any, ...] = ()
    weights: Any = None
    error: str = ""
    trace: str = ""


class RayExecutor:
    """Runs a program on Ray actors.

    Joins the cluster of `RAY_ADDRESS` if that is set; otherwise starts Ray on this machine, bound
    to the loopback address. Ray stays up between executors; `shutdown_ray` ends it.

    Args:
        num_threads: Torch threads per rank; the controller's own number shared among the ranks of
            the largest group by default, so that one rank computes exactly what one process does.
    """

    one_at_a_time = False

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self._actors: dict[tuple[str, int], Any] = {}
        self._pending: dict[ray.ObjectRef[Any], tuple[int, str, int]] = {}
        self._controller_bytes = 0

    def start(
        self,
        programs: Mapping[str, Program],
        workers: Mapping[str, WorkerSpec | Role],
        seed: int,
        deadline_s: float,
    ) -> None:
        """Start one actor per rank, all at once. See `Executor.start`."""
        for name, worker in workers.items():
            if not isinstance(worker, WorkerSpec):
                raise ConfigError(
                    f"role '{name}' is given as a live {type(worker).__name__}; on Ray it must be "
                    "built where it runs: give a WorkerSpec"
                )
        connect_ray()
        groups = _groups(programs)
        threads = self._num_threads or max(
            1, torch.get_num_threads() // max(group.num_ranks for group in groups)
        )
        for group in groups:
            for rank in range(group.num_ranks):
                options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
                if group.device.startswith("cuda"):
                    options["num_gpus"] = 1
                self._actors[group.name, rank] = (
                    ray.remote(_Rank).options(**options).remote(group, rank, threads)
                )
        self._join_groups(groups, deadline_s)
        hosted = ray.put((dict(programs), dict(workers)))
        self._all(
            [actor.build.remote([hosted], seed) for actor in self._actors.values()],
            "building its roles",
        )

    def _join_groups(self, groups: Sequence[DeviceGroup], deadline_s: float) -> None:
        several = [group for group in groups if group.num_ranks > 1]
        addresses = self._all(
            [self._actors[group.name, 0].free_address.remote() for group in several],
            "finding a free port",
        )
        self._all(
            [
                self._actors[group.name, rank].join.remote(address, deadline_s)
                for group, address in zip(several, addresses, strict=True)
                for rank in range(group.num_ranks)
            ],
            "joining its process group",
        )

    def _all(self, answers: list[Any], doing: str) -> list[Any]:
        try:
            return ray.get(answers, timeout=_START_TIMEOUT_S)
        except RayError as error:
            self.stop()
            raise WorkerError(f"a rank failed while {doing}: {error}") from error

    def submit(self, ticket: int, program: str, group: str, rank: int, work: Work) -> None:
        """See `Executor.submit`."""
        answer = self._actors[group, rank].perform.remote(program, work)
        self._pending[answer] = (ticket, group, rank)

    def wait(self, timeout_s: float) -> Sequence[Completion]:
        """See `Executor.wait`."""
        if not self._pending:
            return []
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        if len(self._pending) > 1 and ready:
            ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        return [self._completion(answer) for answer in ready]

    def _completion(self, ref: ray.ObjectRef[Any]) -> Completion:
        ticket, group, rank = self._pending.pop(ref)
        try:
            answer: _Answer = ray.get(ref, timeout=_START_TIMEOUT_S)
        except RayActorError as error:
            text = f"rank {rank} of group '{group}' died: {str(error).splitlines()[0]}"
            return Completion(ticket, rank, None, error=WorkerError(text))
        except RayError as error:
            text = f"rank {rank} of group '{group}' lost its work: {error}"
            return Completion(ticket, rank, None, error=WorkerError(text))
        self._controller_bytes += len(pickle.dumps(answer.report))
        if answer.report is None:
            failure = WorkerError(answer.error)
            return Completion(ticket, rank, None, error=failure, trace=answer.trace)
        return Completion(ticket, rank, answer.report, answer.parts, answer.weights)

    def put(self, part: Part) -> Handle:
        """See `Executor.put`; these bytes do pass through the controller."""
        self._controller_bytes += sum(column.num_bytes for column in part)
        return ray.put(_to_numpy(part))

    def release(self, handles: Sequence[Handle]) -> None:
        """Nothing to do: dropping the last reference frees the object."""

    def stop(self) -> None:
        """See `Executor.stop`."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        self._pending.clear()

    @property
    def controller_bytes(self) -> int:
        """Source batches stored by the controller, and reports received."""
        return self._controller_bytes


class _Rank:
    """The actor: a `Host` and the conversions between tensors and what Ray stores."""

    def __init__(self, group: DeviceGroup, rank: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._group, self._rank = group, rank
        self._hosts: dict[str, Host] = {}

    def free_address(self) -> str:
        """An address on this node where rank 0 can be met."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    def join(self, address: str, timeout_s: float) -> None:
        """Join the group's process group."""
        backend = "nccl" if self._group.device.startswith("cuda") else "gloo"
        dist.init_process_group(
            backend,
            init_method=address,
            rank=self._rank,
            world_size=self._group.num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )

    def build(self, hosted: list[Any], seed: int) -> None:
        """Build this rank's roles, each once, for all programs."""
        programs, workers = ray.get(hosted[0])
        device = "cuda:0" if self._group.device.startswith("cuda") else "cpu"
        roles: dict[str, Role] = {}
        for key, program in programs.items():
            if all(group.name != self._group.name for group in program.placement.groups):
                continue
            names = program.placement.hosted_roles(program.graph, self._group.name)
            for name in names:
                if name not in roles:
                    context = WorkerContext(name, seed, self._rank, self._group.num_ranks, device)
                    roles[name] = build_role(name, workers[name], context)
            self._hosts[key] = Host(
                program.graph,
                {name: roles[name] for name in names},
                program.placement.num_chunks,
                fetch=_fetch,
            )

    def perform(self, program: str, work: Work) -> _Answer:
        """Do one piece of work; outputs stay in this node's object store."""
        try:
            result = self._hosts[program].perform(work)
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is passed on
            text = f"{type(error).__name__}: {error}"
            return _Answer(None, error=text, trace=traceback.format_exc())
        parts = tuple(ray.put(_to_numpy(part)) for part in result.parts)
        weights = None if result.weights is None else ray.put(_weights_to_numpy(result.weights))
        return _Answer(result.report, parts, weights)


def connect_ray() -> None:
    """Join the cluster of `RAY_ADDRESS`, or start Ray here; nothing if that has been done."""
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=True, logging_level=logging.ERROR)


def shutdown_ray() -> None:
    """End the Ray that `RayExecutor` started on this machine, or leave the cluster it joined."""
    if ray.is_initialized():
        ray.shutdown()


def _groups(programs: Mapping[str, Program]) -> list[DeviceGroup]:
    """Every group named by any program, once."""
    groups: dict[str, DeviceGroup] = {}
    for program in programs.values():
        for group in program.placement.groups:
            known = groups.setdefault(group.name, group)
            if known != group:
                raise PlanError(
                    f"group '{group.name}' is declared as {known} and as {group}; programs that "
                    "share a group must agree on it"
                )
    return list(groups.values())


# --- tensors on the wire: numpy arrays, which Ray stores without copying


_Column = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]


def _to_numpy(part: Part) -> tuple[_Column, ...]:
    return tuple(
        (
            column.values.cpu().numpy(),
            None if column.lengths is None else column.lengths.cpu().numpy(),
        )
        for column in part
    )


def _weights_to_numpy(weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, Any]]:
    """bfloat16, which numpy lacks, travels as its bits."""
    stored: dict[str, tuple[str, Any]] = {}
    for name, tensor in weights.items():
        array = tensor.detach().cpu().contiguous()
        bits = array.view(torch.int16) if array.dtype is torch.bfloat16 else array
        stored[name] = (str(array.dtype).removeprefix("torch."), bits.numpy())
    return stored


def _fetch(handle: Any) -> Any:
    """Pull a stored part or snapshot; copied, because Ray's arrays are shared and read-only."""
    stored = ray.get(handle, timeout=_START_TIMEOUT_S)
    if isinstance(stored, dict):
        return {name: _tensor(array, dtype) for name, (dtype, array) in stored.items()}
    return tuple(
        Packed(_tensor(values), None if lengths is None else _tensor(lengths))
        for values, lengths in stored
    )


def _tensor(array: np.ndarray[Any, Any], dtype: str = "") -> torch.Tensor:
    tensor = torch.from_numpy(array.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
