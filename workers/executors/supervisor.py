"""The executor whose groups are processes of their own; outputs stay where they were made.

The controller holds references only. A process stores what it makes, and the consumer gets it from
there. The processes of one group share a torch.distributed process group, so training inside a
group is SPMD; groups are independent of each other and run at the same time.

What provides the processes is a `ProcessBackend`; all that is decided about them is decided here:
which are started, what becomes of work whose process dies, who has a shared device, which stay
warm, and which snapshots of weights can be forgotten.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence

import torch

from ...dataflow.errors import ConfigError, PenstockError, StateError, WorkerError
from ...dataflow.graph.role import Role
from ...dataflow.runtime.columns import Part
from ...dataflow.runtime.executor import (
    Completion,
    Executor,
    Lost,
    Program,
    Recovery,
    Restart,
    groups_of,
    longest_s,
    routes_of,
    servers_of,
)
from ...dataflow.runtime.host import Host
from ...dataflow.runtime.messages import Handle, RankWork, work
from ...dataflow.runtime.placement import DeviceSharing
from ...dataflow.runtime.recovery import replica_groups, restartable_groups
from ...dataflow.runtime.worker_protocol import WorkerSpec, is_spec
from ..weight_sync.channel import DEFAULT_TRANSPORT, Offer, Transport, check_transport
from .jobs import LOOK, Books, Joining, Offers, RankJob, Returning
from .process_backend import BackendError, NotInTime, ProcessBackend, ProcessDied, Ref
from .process_setup import Address
from .rank_group import (
    LEAST_START_S,
    GroupProcesses,
    Started,
    all_results,
    dead_processes,
    end_groups,
    hosted_bytes,
    keep_warm,
    reserve_again,
    reserve_devices,
    start_groups,
    take_warm,
)
from .rank_process import RankAnswer, part_from_numpy, part_to_numpy

_LOOK_S = 1.0  # Seconds between checks that a server lives whose clients would not notice its death


class Connections:
    """The connections of one executor's groups."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self.servers = servers_of(programs)  # Group that serves -> the groups that it serves
        # The groups that others serve.
        self.clients = frozenset(name for names in self.servers.values() for name in names)
        self._token = secrets.token_hex(32)
        self._places: dict[str, list[Address]] = {}
        self._looked_s: dict[str, float] = {}

    def open(
        self, groups: Mapping[str, GroupProcesses], names: Iterable[str], start_s: float
    ) -> set[str]:
        """Have groups listen, and tell those that they serve where."""
        new = set(names)
        serving = {name: self._serve(groups[name]) for name in sorted(new & self.servers.keys())}
        moved = set[str]()
        for name, calls in serving.items():
            backend, doing = groups[name].backend, "opening a socket to answer at"
            places = all_results(backend, calls, doing, start_s)
            if self._places.get(name, places) != places:
                moved.update(self.servers[name])
            self._places[name] = places
        for name in moved - new:
            self._tell(groups[name])
        asking = sorted(new & self.clients)
        calls = [call for name in asking for call in self._tell(groups[name])]
        if calls:
            backend = groups[asking[0]].backend
            all_results(backend, calls, "being told who answers", start_s)
        return moved - new

    def _tell(self, group: GroupProcesses) -> list[Ref]:
        return group.call_all("connect_to_servers", self._places, self._token)

    def _serve(self, group: GroupProcesses) -> list[Ref]:
        before = self._places.get(group.group.name)
        return [
            group.call(process, "serve", self._token, before[process] if before else None)
            for process in range(len(group.processes))
        ]

    def to_look_at(self, busy: Iterable[str]) -> Generator[str]:
        """Yield servers that it is time to check, because clients may be waiting for them."""
        working, now_s = set(busy), time.monotonic()
        for name, clients in self.servers.items():
            if working.intersection(clients) and now_s >= self._looked_s.get(name, 0.0):
                self._looked_s[name] = now_s + _LOOK_S
                yield name


_Place = tuple[str, int | None]  # A group and a rank of it, or None for all of its ranks together


class RestartBudget:
    """Forgives a rank its deaths as soon as it has answered.

    A rank that dies again and again without an answer in between has a cause that starting it again
    does not fix. Before the second time in a row it waits, and before each further one twice as
    long: what it had, a port or memory of a device, may not be free at once.
    """

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery
        self._in_a_row: Counter[_Place] = Counter()

    def answered(self, group: str, rank: int) -> None:
        self._in_a_row.pop((group, rank), None)
        self._in_a_row.pop((group, None), None)

    def pause_s(self, group: str, rank: int | None, said: str) -> float:
        limits, place = self._recovery, (group, rank)
        count = self._in_a_row[place]
        if count >= limits.max_repeats:
            raise WorkerError(
                f"{said}\n    it had been started again {count} times without an answer in "
                "between: that does not fix it (recovery.max_repeats)"
            )
        self._in_a_row[place] += 1
        return limits.wait_s(count)


_LOG = logging.getLogger("penstock.executor")

_RETURN_S = 0.2  # How often is looked at ranks that are being started again

_COULD_NOT = "could not be started again"

_LOAD_S = 20.0  # How long weights may take to come before it is looked who lives


class Supervisor(Executor):
    """Runs a program on the processes of a backend.

    A rank of a group that trains nothing and keeps no state is started again when one of its
    processes dies: it takes the weights it had, and does again what it had not finished. The other
    ranks go on with their work; only those that take turns on devices with another group, or talk
    to one, are started again together. Random numbers belong to samples, so the run's result is the
    same. What its calls had made is kept by the backend, not by the dead. A group that serves roles
    to another listens where it did, and is asked again.

    The processes of a group that generates with an engine that is expensive to start (vLLM) stay
    warm when the executor stops. The next executor takes them if it needs such a group, and ends
    them if not.

    Groups that share devices sleep in turn. The processes see to it themselves: those whose turn it
    is wait for the others to sleep before they wake, and what they are given next waits as well.
    """

    moves_slices = True
    elastic = True

    def __init__(
        self,
        where: str,
        connect: Callable[[], ProcessBackend],
        num_threads: int | None = None,
        *,
        transport: Transport = DEFAULT_TRANSPORT,
    ) -> None:
        # How often a rank is started again without an answer in between, and how long to wait
        # before. An engine sets it before `start`.
        self.recovery = Recovery()
        self._budget = RestartBudget(self.recovery)
        self._where, self._connect = where, connect
        self._num_threads = num_threads
        self._transport: Transport = transport
        self._offers = Offers()
        self._programs: Mapping[str, Program] = {}
        self._groups: dict[str, GroupProcesses] = {}
        self._sharing = DeviceSharing(())
        self._asleep: dict[str, list[Ref]] = {}
        self._restartable: set[str] = set()
        self._replicas: set[str] = set()
        self._connections = Connections({})
        self._books = Books()
        self._joining: dict[str, Joining] = {}
        self._returning: dict[tuple[str, int], Returning] = {}
        self._started: Started | None = None
        self._controller_bytes = 0
        self._deadline_s = self._start_s = LEAST_START_S

    def start(
        self,
        programs: Mapping[str, Program],
        workers: Mapping[str, WorkerSpec | Role],
        seed: int,
        deadline_s: float,
    ) -> None:
        for name, worker in workers.items():
            # An object of this process cannot be built where it runs, nor built again after a
            # death.
            if not is_spec(worker):
                raise ConfigError(
                    f"role '{name}' is given as a live {type(worker).__name__}; on {self._where} "
                    "it must be built where it runs: give a WorkerSpec"
                )
        check_transport(self._transport, routes_of(programs))
        self._programs, groups = programs, groups_of(programs)
        self._deadline_s = longest_s(programs, deadline_s)
        # A start, with its imports, may take longer than any call.
        self._start_s = max(deadline_s, LEAST_START_S)
        backend = self._connect()
        threads = self._num_threads or max(
            1, torch.get_num_threads() // max(group.num_processes for group in groups)
        )
        self._sharing = DeviceSharing(groups)
        self._budget = RestartBudget(self.recovery)
        self._restartable = restartable_groups(programs)
        self._replicas = replica_groups(programs)
        self._groups = {}
        for group in sorted(groups, key=lambda group: bool(group.within)):
            self._groups[group.name] = GroupProcesses(
                backend,
                group,
                threads,
                self._deadline_s,
                hosted_bytes(programs, workers, group.name),
                replicas=group.name in self._replicas,
                around=self._groups.get(group.within),
            )
        every = list(self._groups.values())
        # Before devices are reserved: warm groups bring theirs.
        take_warm(backend, every)
        training = self._groups.keys() - self._restartable
        reserve_devices(backend, every, [], training, self._start_s)
        # Once in the backend's store, instead of once with the call of each process.
        hosted = backend.put((dict(programs), dict(workers), self._transport))
        self._started = Started(backend, hosted, seed, self._start_s)
        asleep = frozenset(group.name for group in groups if self._sharing.shares(group.name))
        start_groups(every, self._started, asleep)
        self._connections = Connections(programs)
        self._connections.open(self._groups, self._groups, self._start_s)

    @property
    def _here(self) -> Started:
        if self._started is None:
            raise StateError("the executor has not been started, or has been stopped")
        return self._started

    def submit(self, ticket: int, program: str, group: str, rank: int, work: RankWork) -> None:
        self._send(RankJob(ticket, program, group, rank, work, set()))

    def _hand_off(self, group: str, *, awake: bool = False) -> None:
        change = self._sharing.hand_off(group)
        for name in change.sleep:
            self._asleep[name] = self._groups[name].call_all("sleep", group)
        if change.wake is not None and not awake:
            self._groups[change.wake].call_all("wake", self._given_up(group))

    def _given_up(self, group: str) -> list[Ref]:
        # The last calls of `sleep` of all who share a group's devices: what it must wait for.
        others = sorted(self._sharing.others(group))
        return [call for name in others for call in self._asleep.get(name, ())]

    def _send(self, job: RankJob) -> None:
        if (job.group, job.rank) in self._returning:
            # It has no process now; the job is sent once it is back.
            self._returning[job.group, job.rank].owed.append(job)
            return
        if job.work.needs != "nothing":
            self._hand_off(job.group)
        group = self._groups[job.group]
        processes = group.group.processes(job.rank)
        job.processes.update(processes)
        for process in processes:
            leads = process == processes[0]
            count = job.most_parts(self._programs)
            # Each part becomes an object of the backend's store: what was made outlives the
            # process.
            if leads and job.group in self._restartable and count:
                arguments = job.program, job.work, count
                answer, *job.parts = group.backend.call(
                    group.processes[process], "perform_apart", arguments, 1 + count
                )
            else:
                answer = group.call(process, "perform", job.program, job.work, leads)
            self._books.out[answer] = (job, process)

    def wait(self, timeout_s: float) -> Sequence[Completion | Restart]:
        if not (self._books.out or self._returning):
            return []
        self._look()
        refs = [*self._books.out, *(ref for one in self._returning.values() for ref in one.calls)]
        if self._returning:
            timeout_s = min(timeout_s, _RETURN_S)
        if not refs:  # what died is not started before its pause is over
            time.sleep(timeout_s)
        ready = self._here.backend.watch(refs, timeout_s) if refs else []
        answers = [self._answer(ref) for ref in ready]
        answers += [self._bring_back(one) for one in list(self._returning.values())]
        return [answer for answer in answers if answer is not None]

    def _look(self) -> None:
        for name in self._connections.to_look_at(self._books.busy):
            group = self._groups[name]
            for process in range(len(group.processes)):
                rank = group.group.rank_of(process)
                job = RankJob(LOOK, "", name, rank, work(Host.layout, ""), {process})
                self._books.out[group.call(process, "is_running")] = (job, process)

    def _answer(self, ref: Ref) -> Completion | Restart | None:
        if ref not in self._books.out:
            return None  # Its group was started again meanwhile.
        job, process = self._books.out.pop(ref)
        of = f"of group '{job.group}'"
        if process != job.rank:
            of = f"(process {process}) {of}"
        try:
            answer: RankAnswer
            (answer,) = self._here.backend.get([ref], self._deadline_s)
        except ProcessDied as error:
            return self._died(job, f"rank {job.rank} {of} died: {error}")
        except BackendError as error:
            lost = f"rank {job.rank} {of} lost its work: {error}"
            return job.failed(lost, lost="stored")
        if job.ticket == LOOK:
            return None
        # Only reports come here; rows and weights stay where they were made.
        self._controller_bytes += len(pickle.dumps(answer.report))
        if answer.report is None and answer.lost == "process":
            # A process without one that it has started is as good as dead.
            self._here.backend.kill(self._groups[job.group].processes[process])
            return self._died(job, f"rank {job.rank} {of} died: {answer.error}")
        if answer.report is None:
            return job.failed(answer.error, answer.trace, answer.lost)
        if isinstance(answer.weights, Offer):
            offer = answer.weights
            having = self._groups[offer.group].processes[offer.process]
            self._offers.watch(offer, self._here.backend, having)
        job.answers[process] = answer
        completion = job.complete()
        if completion is not None:
            self._books.note(job)
        # Not for loads: they come with every new start, so they would forgive every death.
        if completion is not None and job.work.method in (Host.call, Host.answer):
            self._budget.answered(job.group, job.rank)
            for server, clients in self._connections.servers.items():
                if job.group in clients:  # no other group knows that it answers
                    self._budget.answered(server, job.rank)
        return completion

    def _died(self, job: RankJob, said: str) -> Completion | Restart | None:
        if job.group not in self._restartable:
            return self._failed(job, said)
        # Those that take turns on devices, or talk to others, are started together.
        alone = job.group in self._replicas and not self._sharing.shares(job.group)
        rank = job.rank if alone else None
        try:
            pause_s = self._budget.pause_s(job.group, rank, said)
        except WorkerError as error:
            return self._failed(job, str(error), "for good")
        _LOG.warning("%s; %s is started again", said, "it" if alone else "its group")
        owed = self._books.take_owed(job, rank)
        if not alone:
            return self._bring_back_all(job, said, owed, pause_s)
        group, here = self._groups[job.group], self._here
        one = Returning(group, job, said, owed, pause_s, here)
        self._returning[one.place] = one
        return one.sign()

    def _bring_back(self, one: Returning) -> Completion | Restart | None:
        since_s, job = time.monotonic(), one.job
        try:
            if not one.is_ready():
                return one.sign()
            del self._returning[one.place]
            self._load_again(job.group, job.rank, one.owed)
        except PenstockError as error:
            self._returning.pop(one.place, None)
            return self._not_back(job, job.rank, f"{one.said}; it {_COULD_NOT}: {error}")
        self._send_again(one.owed)
        return one.is_back(since_s)

    def _bring_back_all(
        self, job: RankJob, said: str, owed: Sequence[RankJob], pause_s: float
    ) -> Completion | Restart | None:
        since_s, group = time.monotonic(), self._groups[job.group]
        time.sleep(pause_s)
        try:
            group.kill()
            if not group.is_there():
                raise WorkerError("a machine that it was on is gone")
            self._wait_asleep(job.group)
            start_groups([group], self._here)
            self._load_again(job.group, None, owed)
            for name in self._connections.open(self._groups, [job.group], self._start_s):
                if name in self._books.busy:
                    self._groups[name].kill()  # it waits for a process that will not come
        except PenstockError as error:
            return self._not_back(job, None, f"{said}; it {_COULD_NOT}: {error}")
        self._send_again(owed)
        took_s = time.monotonic() - since_s
        return Restart(job.group, took_s, held_up_s=took_s)

    def _load_again(self, group: str, rank: int | None, owed: Sequence[RankJob]) -> None:
        # A stream that was begun goes on from what was answered; nothing is done of one that ended.
        begun = [one for one in self._books.begun(group, rank) if one not in owed]
        self._load([*self._books.loads(group, rank), *begun])

    def _not_back(self, job: RankJob, rank: int | None, said: str) -> Completion | None:
        self._groups[job.group].kill(rank)
        self._books.take_owed(job, rank)
        return self._failed(job, said)

    def prepare(self, group: str, num_ranks: int) -> bool:
        one, here = self._groups[group], self._here
        joining = self._joining.get(group)
        if joining is not None and joining.num_ranks != num_ranks:
            self._joining.pop(group).give_up()
            joining = None
        if num_ranks <= one.num_ranks:
            return True
        try:
            if joining is None:
                held = [held for other in self._groups.values() for held in other.reservations]
                joining = Joining(one, num_ranks, held, here)
                self._joining[group] = joining
            return joining.is_ready()
        except PenstockError:
            if group in self._joining:
                self._joining.pop(group).give_up()
            raise

    def resize(self, group: str, num_ranks: int) -> int:
        one = self._groups[group]
        joining = self._joining.pop(group, None)
        if joining is not None:
            try:
                for rank in joining.ranks:
                    found = self._books.loads(group, 0)
                    jobs = [RankJob(0, job.program, group, rank, job.work, set()) for job in found]
                    self._load(jobs)
                    for job in jobs:
                        self._books.note(job)
            except PenstockError as error:
                _LOG.warning("ranks that were to join group '%s' are ended again: %s", group, error)
                joining.give_up()
                return one.num_ranks
        self._books.forget({group}, num_ranks)
        self._give_up_returning([p for p in self._returning if p[0] == group and p[1] >= num_ranks])
        one.end(range(num_ranks, one.num_ranks), closing=True)
        one.num_ranks = num_ranks
        return num_ranks

    def _load(self, jobs: Sequence[RankJob]) -> None:
        self._send_again(jobs)
        calls, end_s = self._books.take_loads(jobs), time.monotonic() + self._deadline_s
        while calls:
            try:
                answers = self._here.backend.get(calls, min(self._deadline_s, _LOAD_S))
            except NotInTime as error:
                said = self.died() or str(error)  # the process that sends them may have died too
                if said != str(error) or time.monotonic() > end_s:
                    raise WorkerError(f"it could not have its weights: {said}") from error
                continue
            except BackendError as error:
                raise WorkerError(f"it could not have its weights: {error}") from error
            for answer in answers:
                if answer.report is None:
                    raise WorkerError(answer.trace or answer.error)
            return

    def _send_again(self, jobs: Sequence[RankJob]) -> None:
        for job in sorted(jobs, key=lambda job: job.ticket):
            job.processes.clear()
            job.answers.clear()
            if job.ticket != LOOK:
                self._send(job)

    def _failed(self, job: RankJob, said: str, lost: Lost = "process") -> Completion | None:
        if job.ticket != LOOK:
            return job.failed(said, lost=lost)
        clients = self._connections.servers[job.group]
        asking = (one for one, _ in self._books.out.values() if one.group in clients)
        return next((failed for one in asking if (failed := one.failed(said, lost=lost))), None)

    def _give_up_returning(self, places: Sequence[tuple[str, int]]) -> None:
        for place in places:
            self._returning.pop(place).give_up()

    def _wait_asleep(self, group: str) -> None:
        self._hand_off(group, awake=True)
        end_s = time.monotonic() + self._start_s
        try:
            for call in self._given_up(group):
                with contextlib.suppress(ProcessDied):  # The dead hold nothing.
                    self._here.backend.get([call], max(end_s - time.monotonic(), 0.001))
        except BackendError as error:
            raise WorkerError(f"its devices were not given up: {error}") from error

    def died(self) -> str:
        if self._started is None:
            return ""
        dead = dead_processes(self._started.backend, self._groups.values(), self._returning)
        return "\n".join(
            f"rank {rank} of group '{name}' died: {said}" for (name, rank), said in dead.items()
        )

    def revive(self, groups: Collection[str]) -> frozenset[str]:
        here = self._here
        dead = dead_processes(here.backend, self._groups.values(), self._returning)
        wanted = {*groups, *(name for name, _ in (*dead, *self._returning))}
        self._give_up_returning(list(self._returning))
        # A group and those that live within it have their processes in common.
        around = {n: g.around.group.name for n, g in self._groups.items() if g.around is not None}
        wanted |= {around[name] for name in wanted & around.keys()}
        wanted |= {name for name, other in around.items() if other in wanted}
        names = [name for name in self._groups if name in wanted]
        again = [self._groups[name] for name in names]
        self._offers.drop(names)
        self._books.forget(names)
        self._asleep = {k: calls for k, calls in self._asleep.items() if k not in names}
        for joining in [self._joining.pop(name) for name in names if name in self._joining]:
            joining.give_up()
        for group in again:
            group.kill()
        try:
            waiting = self._build(again)
        except BaseException:
            for group in again:  # it is not known which of those that run are connected
                group.kill()
            raise
        return frozenset(names) | (self.revive(waiting) if waiting else set())

    def _build(self, groups: Sequence[GroupProcesses]) -> set[str]:
        here, names = self._here, [group.group.name for group in groups]
        others = [group for group in self._groups.values() if group not in groups]
        training = self._groups.keys() - self._restartable
        reserve_again(here.backend, groups, others, training, self._start_s)
        # Those that share devices build one after another, each after the others have slept.
        together = [group for group in groups if not self._sharing.shares(group.group.name)]
        turns = [together] if together else []
        turns += [[group] for group in groups if group not in together]
        for some in turns:
            for group in some:
                self._wait_asleep(group.group.name)
            start_groups(some, here)
            for group in some:
                if group.around is not None:  # what it reads is a view, made when it wakes
                    self._hand_off(group.around.group.name)
        return self._connections.open(self._groups, names, self._start_s) & self._books.busy

    def outlives(self, group: str) -> bool:
        return group in self._restartable

    def put(self, part: Part) -> Handle:
        self._controller_bytes += sum(column.num_bytes for column in part)
        return self._here.backend.put(part_to_numpy(part))

    def get(self, handles: Sequence[Handle]) -> list[Part]:
        if not handles:
            return []
        try:
            stored = self._here.backend.get(list(handles), self._deadline_s)
        except BackendError as error:
            raise WorkerError(f"what a step has made cannot be had: {error}") from error
        parts = [part_from_numpy(one) for one in stored]
        self._controller_bytes += sum(column.num_bytes for part in parts for column in part)
        return parts

    def release(self, handles: Sequence[Handle]) -> None:
        """Nothing to do: dropping the last reference frees the object."""

    def stop(self) -> None:
        self._offers.drop()
        is_idle = not (self._books.out or self._returning)
        self._give_up_returning(list(self._returning))
        self._books.clear()
        for joining in self._joining.values():
            joining.give_up()
        self._joining.clear()
        self._asleep.clear()
        groups, self._groups = self._groups, {}
        warm = [group for group in groups.values() if is_idle and self._may_stay_warm(group)]
        ending = [*(group for group in groups.values() if group not in warm), *keep_warm(warm)]
        end_groups(ending)
        self._started = None

    def _may_stay_warm(self, group: GroupProcesses) -> bool:
        shares_gpu = group.group.device.startswith("cuda") and self._sharing.shares(
            group.group.name
        )
        as_placed = group.num_ranks == group.group.num_ranks
        return group.group.name in self._restartable and as_placed and not shares_gpu

    @property
    def num_offers(self) -> int:
        """Snapshots in slices that processes have ready for others."""
        return len(self._offers.ready)

    @property
    def controller_bytes(self) -> int:
        """Source batches stored by the controller, reports and kept columns received."""
        return self._controller_bytes
