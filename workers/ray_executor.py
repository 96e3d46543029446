"""The Ray executor: every rank of every group is an actor; outputs stay where they were made.

The controller holds object references only. A rank stores what it makes in its node's object store
and the consumer pulls it from there. Ranks of one group share a torch.distributed process group, so
training inside a group is SPMD; groups are independent of each other and run at the same time.

Who can connect: a Ray that is started here listens on the loopback address only, and the processes
of a group meet and talk on the address that Ray has on their machine. On a cluster that somebody
else started Ray listens as it was told to, and neither it nor torch.distributed asks who connects:
it belongs on a private network.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ..dataflow.errors import ConfigError, PenstockError, PlanError, WorkerError
from ..dataflow.executor import Completion, Program
from ..dataflow.placement import DeviceGroup
from ..dataflow.role import Role
from ..dataflow.work import Handle, Part, Work
from ..dataflow.worker import CLOSE_S, WorkerSpec

if TYPE_CHECKING:
    import ray

    from .ray_rank import Answer

__all__ = ["RayExecutor", "connect_ray", "shutdown_ray"]

# Ray itself is imported by `connect_ray`, which must set its environment before.
if find_spec("ray") is None:
    raise ModuleNotFoundError("No module named 'ray'", name="ray")

_ON_NETWORK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for listening where other machines can connect; says what it does elsewhere."""

_LEAST_START_S = 300.0
"""Starting processes and loading models may take this long, however short a step's deadline is."""


@dataclass
class _Asked:
    """Work that the processes of one rank are doing.

    Attributes:
        ticket: See `Executor.submit`.
        group: Where it is done.
        rank: The data-parallel rank.
        processes: All that must answer; none once it is over.
        answers: Those that have, by process.
    """

    ticket: int
    group: str
    rank: int
    processes: set[int]
    answers: dict[int, Answer] = field(default_factory=dict[int, "Answer"])

    def failed(self, text: str, trace: str = "") -> Completion | None:
        """The first failure speaks for the rank."""
        if not self.processes:
            return None
        self.processes.clear()
        return Completion(self.ticket, self.rank, None, error=WorkerError(text), trace=trace)

    def complete(self) -> Completion | None:
        """What the rank answers, if all its processes have."""
        if self.answers.keys() != self.processes:
            return None
        (lead,) = (one for one in self.answers.values() if one.leads)
        weights = lead.weights
        if isinstance(weights, dict):  # slices: every process has those that lie with it
            weights = tuple(one.weights for _, one in sorted(self.answers.items()))
        self.processes.clear()
        return Completion(self.ticket, self.rank, lead.report, lead.parts, weights)


class RayExecutor:
    """Runs a program on Ray actors.

    Joins the cluster of `RAY_ADDRESS` if that is set; otherwise starts Ray on this machine, bound
    to the loopback address, whatever other Ray runs here. Ray stays up between executors;
    `shutdown_ray` ends it.

    Args:
        num_threads: Torch threads per process; the controller's own number shared among the
            processes of the largest group by default, so that one rank computes exactly what one
            process does.
    """

    one_at_a_time = False
    moves_slices = True

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self._groups: dict[str, DeviceGroup] = {}
        self._actors: dict[tuple[str, int], Any] = {}
        self._pending: dict[ray.ObjectRef[Any], tuple[_Asked, int]] = {}
        self._controller_bytes = 0
        self._deadline_s = self._start_s = _LEAST_START_S

    def start(
        self,
        programs: Mapping[str, Program],
        workers: Mapping[str, WorkerSpec | Role],
        seed: int,
        deadline_s: float,
    ) -> None:
        """Start one actor per process, all at once. See `Executor.start`."""
        for name, worker in workers.items():
            if not isinstance(worker, WorkerSpec):
                raise ConfigError(
                    f"role '{name}' is given as a live {type(worker).__name__}; on Ray it must be "
                    "built where it runs: give a WorkerSpec"
                )
        groups = _groups(programs)
        self._deadline_s, self._start_s = deadline_s, max(deadline_s, _LEAST_START_S)
        connect_ray()
        import ray

        self._start_actors(groups)
        self._join_groups([group for group in groups if group.num_processes > 1])
        hosted = ray.put((dict(programs), dict(workers)))
        self._all(
            [actor.build.remote([hosted], seed) for actor in self._actors.values()],
            "building its roles",
        )

    def _start_actors(self, groups: Sequence[DeviceGroup]) -> None:
        import ray

        from .ray_rank import Rank

        threads = self._num_threads or max(
            1, torch.get_num_threads() // max(group.num_processes for group in groups)
        )
        for group in groups:
            self._groups[group.name] = group
            for process in range(group.num_processes):
                options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
                if group.device.startswith("cuda"):
                    options["num_gpus"] = 1
                actor = ray.remote(Rank).options(**options)
                self._actors[group.name, process] = actor.remote(
                    group, process, threads, self._deadline_s, self._start_s
                )

    def _join_groups(self, groups: Sequence[DeviceGroup]) -> None:
        addresses = self._all(
            [self._actors[group.name, 0].listen.remote() for group in groups],
            "opening a socket for its group",
        )
        self._all(
            [
                self._actors[group.name, process].join.remote(address)
                for group, address in zip(groups, addresses, strict=True)
                for process in range(group.num_processes)
            ],
            "joining its process group",
        )

    def _all(self, answers: list[Any], doing: str) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        try:
            return ray.get(answers, timeout=self._start_s)
        except GetTimeoutError as error:
            raise WorkerError(
                f"a rank was still {doing} after {self._start_s:g} s (Schedule.deadline_s, but at "
                f"least {_LEAST_START_S:g} s)"
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, PenstockError):
                raise error.cause from error
            raise WorkerError(f"a rank failed while {doing}: {error}") from error
        except RayError as error:
            raise WorkerError(f"a rank failed while {doing}: {error}") from error

    def submit(self, ticket: int, program: str, group: str, rank: int, work: Work) -> None:
        """Ask every process of the rank. See `Executor.submit`."""
        processes = self._groups[group].processes(rank)
        asked = _Asked(ticket, group, rank, set(processes))
        for process in processes:
            leads = process == processes[0]
            answer = self._actors[group, process].perform.remote(program, work, leads)
            self._pending[answer] = (asked, process)

    def wait(self, timeout_s: float) -> Sequence[Completion]:
        """See `Executor.wait`."""
        import ray

        if not self._pending:
            return []
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        if len(self._pending) > 1 and ready:
            ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        completions = [self._completion(answer) for answer in ready]
        return [completion for completion in completions if completion is not None]

    def _completion(self, ref: ray.ObjectRef[Any]) -> Completion | None:
        """What a rank answers: once all its processes have, or as soon as one of them fails."""
        import ray
        from ray.exceptions import RayActorError, RayError

        asked, process = self._pending.pop(ref)
        of = f"of group '{asked.group}'"
        if process != asked.rank:
            of = f"(process {process}) {of}"
        try:
            answer: Answer = ray.get(ref, timeout=self._deadline_s)
        except RayActorError as error:
            return asked.failed(f"rank {asked.rank} {of} died: {str(error).splitlines()[0]}")
        except RayError as error:
            return asked.failed(f"rank {asked.rank} {of} lost its work: {error}")
        self._controller_bytes += len(pickle.dumps(answer.report))
        if answer.report is None:
            return asked.failed(answer.error, answer.trace)
        asked.answers[process] = answer
        return asked.complete()

    def put(self, part: Part) -> Handle:
        """See `Executor.put`; these bytes do pass through the controller."""
        import ray

        from .ray_rank import part_to_numpy

        self._controller_bytes += sum(column.num_bytes for column in part)
        return ray.put(part_to_numpy(part))

    def release(self, handles: Sequence[Handle]) -> None:
        """Nothing to do: dropping the last reference frees the object."""

    def stop(self) -> None:
        """Ask every rank to close its workers, wait a little, and end it. See `Executor.stop`."""
        self._pending.clear()
        actors, self._actors = list(self._actors.values()), {}
        if actors:
            _end(actors)

    @property
    def controller_bytes(self) -> int:
        """Source batches stored by the controller, and reports received."""
        return self._controller_bytes


def _end(actors: Sequence[Any]) -> None:
    import ray

    if not ray.is_initialized():
        return  # They ended with it.
    try:
        ray.wait(
            [actor.close.remote() for actor in actors], num_returns=len(actors), timeout=CLOSE_S
        )
    finally:
        for actor in actors:
            ray.kill(actor)


def connect_ray() -> None:
    """Join the cluster of `RAY_ADDRESS`, or start Ray here; nothing if that has been done."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        # A Ray of our own shall listen on the loopback address only, as it does by itself on other
        # systems than Linux. The processes it starts read this.
        os.environ.setdefault(_ON_NETWORK, "0")
        # Ray lowers its workers' priority by 15 to keep a desktop responsive; here they are the
        # job.
        os.environ.setdefault("RAY_worker_niceness", "0")
    import ray
    from ray._private import ray_constants  # pyright: ignore[reportPrivateImportUsage]

    if ray.is_initialized():
        return
    if not address:
        # Read when ray was imported, which may have been before.
        ray_constants.ENABLE_RAY_CLUSTER = os.environ[_ON_NETWORK] not in ("0", "false")
    # "local", because by default Ray joins whatever `ray start` has left on this machine.
    ray.init(
        address=address or "local",
        include_dashboard=False,
        log_to_driver=True,
        logging_level=logging.ERROR,
    )


def shutdown_ray() -> None:
    """End the Ray that `RayExecutor` started on this machine, or leave the cluster it joined."""
    import ray

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
