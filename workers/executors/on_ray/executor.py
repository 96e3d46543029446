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
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch

from ....dataflow.errors import ConfigError, PenstockError, WorkerError
from ....dataflow.graph.role import Role
from ....dataflow.runtime.device_sharing import Turns, needs_device
from ....dataflow.runtime.executor import Completion, Program, groups_of, servers_of
from ....dataflow.runtime.messages import CallWork, Handle, ImportSlicesWork, ImportWork, Part, Work
from ....dataflow.runtime.worker_protocol import WorkerSpec
from ...weight_sync.packet_server import Kept, Route
from .actor_group import (
    LEAST_START_S,
    ActorGroup,
    connect_groups,
    connect_mail,
    end_actors,
    routes_of,
    start_groups,
)
from .actor_pool import forget_parked, park_groups, take_parked
from .devices import SharedDevices

if TYPE_CHECKING:
    import ray

    from .actor import Answer

__all__ = ["RayExecutor", "Transport", "connect_ray", "shutdown_ray"]

# Ray itself is imported by `connect_ray`, which must set its environment before.
if find_spec("ray") is None:
    raise ModuleNotFoundError("No module named 'ray'", name="ray")

_ON_NETWORK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's switch for listening where other machines can connect; says what it does elsewhere."""

_MOST_RESTARTS = 3
"""A group that dies more often than this has a cause that starting again does not fix."""

_LOG = logging.getLogger("penstock.ray")

_Place = tuple[str, int, int]
"""Group, process and key of what a process keeps for others."""

Transport = Literal["object_store", "point_to_point"]
"""How slices of weights get from group to group; see `RayExecutor`."""


@dataclass
class _Asked:
    """Work that the processes of one rank are doing.

    Attributes:
        ticket: See `Executor.submit`.
        program: Of which program.
        group: Where it is done.
        rank: The data-parallel rank.
        work: What to do.
        parts: Handles that its outputs will have, if they are to outlive the process.
        processes: All that must answer; none once it is over.
        answers: Those that have, by process.
    """

    ticket: int
    program: str
    group: str
    rank: int
    work: Work
    processes: set[int]
    parts: Sequence[Handle] | None = None
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
        if isinstance(weights, dict | Kept):  # slices: every process has those that lie with it
            weights = tuple(one.weights for _, one in sorted(self.answers.items()))
        parts = lead.parts
        if self.parts is not None and lead.report is not None:
            parts = tuple(self.parts[: len(lead.report.num_rows)])
        self.processes.clear()
        return Completion(self.ticket, self.rank, lead.report, parts, weights)


class RayExecutor:
    """Runs a program on Ray actors.

    Joins the cluster of `RAY_ADDRESS` if that is set; otherwise starts Ray on this machine, bound
    to the loopback address, whatever other Ray runs here. Ray stays up between executors;
    `shutdown_ray` ends it.

    A group that trains nothing and keeps no state is started again when one of its processes dies:
    it takes the weights it had, and does again what was not finished. Random numbers belong to
    samples, so the run's result is the same. What its calls had made is kept by Ray, not by the
    dead. A group that serves roles to another is not started again, nor is that other one.

    A group that generates with an engine that is dear to start (vLLM) is put by when the executor
    stops. The next executor takes it if it needs one like it, and ends it if not.

    Groups that share devices sleep in turn. The processes see to it themselves: those whose turn
    it is wait for the others to sleep before they wake, and what they are asked next waits as well.

    Args:
        num_threads: Torch's and numpy's threads per process; the controller's own number shared
            among the processes of the largest group by default, so that one rank computes exactly
            what one process does.
        transport: How slices of weights get to other groups. "object_store": through Ray's.
            "point_to_point": from process to process, over torch.distributed. Weights of workers
            that cannot say how they hold them, and all columns, go through the store.
    """

    one_at_a_time = False
    moves_slices = True

    def __init__(
        self, num_threads: int | None = None, *, transport: Transport = "object_store"
    ) -> None:
        self._num_threads = num_threads
        self._transport = transport
        self._routes: list[Route] = []
        self._kept: dict[_Place, weakref.finalize[..., Any]] = {}
        self._programs: Mapping[str, Program] = {}
        self._groups: dict[str, ActorGroup] = {}
        self._devices = SharedDevices(())
        self._turns = Turns(())
        self._restartable: set[str] = set()
        self._loaded: dict[tuple[str, int, str], _Asked] = {}
        self._pending: dict[ray.ObjectRef[Any], tuple[_Asked, int]] = {}
        self._hosted: Any = None
        self._seed = 0
        self._controller_bytes = 0
        self._deadline_s = self._start_s = LEAST_START_S

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
        groups = groups_of(programs)
        self._programs, self._seed = programs, seed
        self._deadline_s, self._start_s = deadline_s, max(deadline_s, LEAST_START_S)
        connect_ray()
        import ray

        threads = self._num_threads or max(
            1, torch.get_num_threads() // max(group.num_processes for group in groups)
        )
        self._turns = Turns(groups)
        self._devices = SharedDevices(groups)
        self._groups = {
            group.name: ActorGroup(
                group, threads, deadline_s, self._devices, _hosted(programs, workers, group.name)
            )
            for group in groups
        }
        servers = servers_of(programs)
        kept = {*servers, *(name for names in servers.values() for name in names)}
        self._restartable = {
            group.name
            for group in groups
            if group.name not in kept and not _changes(programs, group.name)
        }
        self._hosted = ray.put((dict(programs), dict(workers)))
        take_parked(list(self._groups.values()))
        self._devices.reserve(self._start_s)
        asleep = frozenset(group.name for group in groups if self._turns.shares(group.name))
        every = list(self._groups.values())
        start_groups(every, self._hosted, seed, self._start_s, asleep)
        if servers:
            connect_groups(every, servers, self._start_s)
        self._routes = routes_of(programs) if self._transport == "point_to_point" else []
        connect_mail(self._groups, self._routes, self._start_s)

    def submit(self, ticket: int, program: str, group: str, rank: int, work: Work) -> None:
        """Ask every process of the rank. See `Executor.submit`."""
        self._ask(_Asked(ticket, program, group, rank, work, set()))

    def _hand_over(self, group: str, *, awake: bool = False) -> list[Any]:
        """Give a group its devices before its next work; comes back at once.

        Args:
            group: Whose turn it is.
            awake: Whether its processes are awake already, because they were started just now.

        Returns:
            What its processes wait for: the groups that give the devices up.
        """
        change = self._turns.take(group)
        asleep = [
            actor.sleep.remote() for name in change.sleep for actor in self._groups[name].actors
        ]
        if change.wake is not None and not awake:
            for actor in self._groups[change.wake].actors:
                actor.wake.remote(asleep)
        return asleep

    def _ask(self, asked: _Asked) -> None:
        if needs_device(asked.work):
            self._hand_over(asked.group)
        group = self._groups[asked.group]
        processes = group.group.processes(asked.rank)
        asked.processes.update(processes)
        for process in processes:
            leads = process == processes[0]
            actor = group.actors[process]
            if leads and asked.group in self._restartable and isinstance(asked.work, CallWork):
                count = 1 if asked.work.chunk is not None else self._num_chunks(asked)
                call = actor.perform_apart.options(num_returns=1 + count)
                answer, *asked.parts = call.remote(asked.program, asked.work, count)
            else:
                answer = actor.perform.remote(asked.program, asked.work, leads)
            self._pending[answer] = (asked, process)

    def _num_chunks(self, asked: _Asked) -> int:
        return self._programs[asked.program].placement.num_chunks

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

        if ref not in self._pending:
            return None  # Its group was started again meanwhile.
        asked, process = self._pending.pop(ref)
        of = f"of group '{asked.group}'"
        if process != asked.rank:
            of = f"(process {process}) {of}"
        try:
            answer: Answer = ray.get(ref, timeout=self._deadline_s)
        except RayActorError as error:
            said = f"rank {asked.rank} {of} died: {str(error).splitlines()[0]}"
            return self._died(asked, said)
        except RayError as error:
            return asked.failed(f"rank {asked.rank} {of} lost its work: {error}")
        self._controller_bytes += len(pickle.dumps(answer.report))
        if answer.report is None:
            return asked.failed(answer.error, answer.trace)
        if isinstance(answer.weights, Kept):
            self._watch(answer.weights)
        asked.answers[process] = answer
        completion = asked.complete()
        if completion is not None and isinstance(asked.work, (ImportWork, ImportSlicesWork)):
            self._loaded[asked.group, asked.rank, asked.work.role] = asked
        return completion

    def _watch(self, kept: Kept) -> None:
        """Have the process forget weights once nothing here can ask for them any more."""
        actor = self._groups[kept.group].actors[kept.process]
        place = kept.group, kept.process, kept.key
        forget = weakref.finalize(kept, _forget, self._kept, place, actor)
        forget.atexit = False
        self._kept[place] = forget

    def _died(self, asked: _Asked, said: str) -> Completion | None:
        """Start the group again if that can be done, and have it do again what it owes."""
        group = self._groups[asked.group]
        if asked.group not in self._restartable or group.num_starts > _MOST_RESTARTS:
            return asked.failed(said)
        _LOG.warning("%s; its group is started again", said)
        owed = list(
            {id(a): a for a, _ in self._pending.values() if a.group == asked.group}.values()
        )
        owed = sorted([*(a for a in owed if a is not asked), asked], key=lambda a: a.ticket)
        self._pending = {r: p for r, p in self._pending.items() if p[0].group != asked.group}
        end_actors(group.actors, closing=False)
        try:
            self._wait_asleep(asked.group)
            start_groups([group], self._hosted, self._seed, self._start_s)
            broken = [route for route in self._routes if route.receivers == asked.group]
            connect_mail(self._groups, broken, self._start_s)
        except PenstockError as error:
            self._pending.clear()
            return asked.failed(f"{said}; it could not be started again: {error}")
        before = [a for (name, _, _), a in self._loaded.items() if name == asked.group]
        for again in (*before, *owed):
            again.processes.clear()
            again.answers.clear()
            self._ask(again)
        return None

    def _wait_asleep(self, group: str) -> None:
        """Until the devices of a group that is started again are its own."""
        import ray
        from ray.exceptions import RayError

        try:
            ray.get(self._hand_over(group, awake=True), timeout=self._start_s)
        except RayError as error:
            raise WorkerError(f"its devices were not given up: {error}") from error

    def put(self, part: Part) -> Handle:
        """See `Executor.put`; these bytes do pass through the controller."""
        import ray

        from .actor import part_to_numpy

        self._controller_bytes += sum(column.num_bytes for column in part)
        return ray.put(part_to_numpy(part))

    def release(self, handles: Sequence[Handle]) -> None:
        """Nothing to do: dropping the last reference frees the object."""

    def stop(self) -> None:
        """Ask every rank to close its workers, wait a little, and end it. See `Executor.stop`."""
        for forget in self._kept.values():
            forget.detach()  # The processes end, and with them what they keep.
        self._kept.clear()
        is_idle = not self._pending
        self._pending.clear()
        self._loaded.clear()
        groups, self._groups = self._groups, {}
        kept = [g for g in groups.values() if is_idle and self._may_be_parked(g)]
        ending = [*(g for g in groups.values() if g not in kept), *park_groups(kept)]
        end_actors([actor for group in ending for actor in group.actors], closing=True)
        self._devices.release()

    def _may_be_parked(self, group: ActorGroup) -> bool:
        """Those that train nothing, and hold no part of a GPU that is given back."""
        shares_gpu = group.group.device.startswith("cuda") and self._turns.shares(group.group.name)
        return group.group.name in self._restartable and not shares_gpu

    @property
    def num_kept(self) -> int:
        """Snapshots that processes keep for others; 0 unless slices go from process to process."""
        return len(self._kept)

    @property
    def controller_bytes(self) -> int:
        """Source batches stored by the controller, and reports received."""
        return self._controller_bytes


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

    forget_parked()
    if ray.is_initialized():
        ray.shutdown()


def _forget(kept: dict[_Place, Any], place: _Place, actor: Any) -> None:
    del kept[place]
    actor.forget.remote(place[-1])


def _hosted(
    programs: Mapping[str, Program], workers: Mapping[str, WorkerSpec | Role], group: str
) -> bytes:
    """All that a group builds, pickled."""
    roles = {
        role for one in programs.values() for role in one.placement.hosted_roles(one.graph, group)
    }
    return pickle.dumps([(role, workers.get(role)) for role in sorted(roles)])


def _changes(programs: Mapping[str, Program], group: str) -> bool:
    """Whether any program changes weights, or a state, in the group."""
    return any(
        group in {*one.placement.state_homes(one.graph).values()}
        or any(one.placement.home(one.graph, role) == group for role in one.graph.trains_per_step)
        for one in programs.values()
    )
