"""The engine: a graph, a placement, workers and a schedule, made to run.

It owns no policy: what runs when is the scheduler's, how it runs the executor's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import ConfigError, WorkerError
from ..graph.check import check_lag
from ..graph.graph import Graph, check_segments
from ..graph.role import Role
from ..kinds import NodeKind
from ..scheduler.events import Load, NodeTask, Publish
from ..scheduler.schedule import Deadline, Flow, Schedule
from .checkpoint import CheckpointFolder, Pauses, Saving, StateInWorkers, Suspended
from .columns import Source
from .dispatcher import Dispatcher
from .executor import Executor, Program, Recoveries, Recovery, Told, WorkerLost, check_workers
from .host import Host
from .in_process import InProcess
from .ledger import Ledger
from .messages import StepResult, work
from .placement import Placement, check_in_flight, flow_of
from .recovery import GoingBack, Resizing, Scale
from .run import Asked, EngineRun, Trained
from .watch import WATCH, KeptColumns, Watch
from .worker_protocol import WorkerSpec

__all__ = ["Engine", "Source", "StepResult"]

_SETTLE_S = 60.0  # For a checkpoint to be written when a run ends with an error


class Engine:
    """Runs a graph as its placement and schedule say.

    No wait is longer than `Schedule.deadline_s` or, where that is not set, than what follows
    from the time that a plan predicts of the longest call; except that a source, and in this
    process a call, can be interrupted only in the main thread, without a debugger, and if nothing
    else uses SIGALRM. With Ray every call has its deadline.

    Args:
        graph: From `build`.
        placement: Where its nodes run; a plan reduces to one.
        workers: Role name -> `WorkerSpec`, or a live worker (in-process only).
        schedule: How far generation may run ahead; synchronous by default.
        seed: All randomness of the run derives from it.
        executor: Where work is carried out; in this process by default.
        also: Further programs on the same workers, such as an evaluation, by name.
        watch: Who looks at the columns of each step of the main program.
        recovery: How often a run with checkpoints may go back because processes have died.
        recovered: Told each time that it has, or that ranks were started again beside it.

    Attributes:
        longest: How long the longest call may take.

    Raises:
        ConfigError: If a role has no worker.
        FlowError: If the schedule allows lag that a loss cannot correct for.
        PlanError: If the placement does not fit the graph or the executor.

    Example:
        >>> with Engine(graph, one_group(graph), workers={"actor": spec, "reward": rule}) as engine:
        ...     for step in engine.run({"rows": source}, num_steps=200):
        ...         print(step.metrics)
    """

    def __init__(
        self,
        graph: Graph,
        placement: Placement,
        *,
        workers: Mapping[str, WorkerSpec | Role],
        schedule: Schedule | None = None,
        seed: int = 0,
        executor: Executor | None = None,
        also: Mapping[str, Program] | None = None,
        watch: Watch | None = None,
        recovery: Recovery | None = None,
        recovered: Told | None = None,
    ) -> None:
        self.schedule = schedule or Schedule()
        check_lag(
            graph,
            self.schedule.max_lag,
            self.schedule.segment_tokens,
            in_flight=self.schedule.in_flight,
        )
        if self.schedule.segment_tokens:
            check_segments(graph)
        placement = placement.streamed(self.schedule.streaming)
        programs = {"main": Program(graph, placement), **(also or {})}
        self._watch = watch
        if watch is not None:
            programs[WATCH] = watch.program
        longest_s = max(placement.predicted_s.values(), default=None)
        self.longest = self.schedule.deadline(longest_s)
        self.programs = {
            name: _timed(program, longest_s, self.longest) for name, program in programs.items()
        }
        for program in self.programs.values():
            check_workers(program.graph, workers)
            flow_of(program.graph, program.placement)
        if self.schedule.in_flight:
            check_in_flight(graph, placement)
        self.executor: Executor = executor or InProcess()
        self.seed = seed
        self._workers = workers
        self._dispatcher = Dispatcher(self.executor, recovered)
        self._trained: Trained = {}
        self._sizes: dict[str, int] = {}
        self._saving: Saving | None = None
        self._started = False
        self._recovery, self._recovered = recovery or Recovery(), recovered
        self._at_rest: Callable[[], None] | None = lambda: None

    def start(self) -> None:
        """Build the workers; `run` and `ask` do it if need be.

        Raises:
            ConfigError: If a worker cannot be built from what was configured.
            PlanError: If the executor cannot provide the groups.
            WorkerError: If a worker process fails or is not ready in time.
        """
        if not self._started:
            self.executor.recovery = self._recovery
            again = Recoveries(self._recovery)
            while not self._started:
                try:
                    self._started = self._build()
                except WorkerLost as lost:
                    time.sleep(again.pause_s(lost, 0))

    def _build(self) -> bool:
        try:
            self.executor.start(self.programs, self._workers, self.seed, self.schedule.wait_s)
        except BaseException as error:
            # A rank that was to meet one that died failed as well, and may report first.
            lost = self._dispatcher.loss() if isinstance(error, WorkerError) else None
            self.executor.stop()
            if lost is not None:
                raise lost from error
            raise
        return True

    def close(self) -> None:
        """Close the workers that were built here and end all worker processes; idempotent.

        A checkpoint that is being written is completed first, within the time that a call may take.
        """
        try:
            self._settle(self.longest.limit_s)
        finally:
            self._close()

    def _close(self) -> None:
        self._saving = None
        self._dispatcher.close()
        self.executor.stop()
        self._dispatcher = Dispatcher(self.executor, self._recovered)
        self._trained.clear()
        self._sizes.clear()
        self._started = False

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:
            if issubclass(kind, Exception):  # who interrupts does not want to wait
                # Raise the error that ended the run, whether or not the checkpoint was written.
                with suppress(Exception):
                    self._settle(min(_SETTLE_S, self.longest.limit_s))
        finally:
            self._close()

    def _settle(self, deadline_s: float) -> None:
        saving, self._saving = self._saving, None
        if saving is not None and not saving.settle(deadline_s):
            saving.give_up()

    def run(
        self,
        sources: Mapping[str, Source],
        num_steps: int,
        *,
        program: str = "main",
        checkpoint_every: int | None = None,
        checkpoints: CheckpointFolder | None = None,
        stop: Callable[[], bool] | None = None,
        pauses: Pauses | None = None,
        keep: Sequence[str] = (),
        mirror: CheckpointFolder | None = None,
        ledger: Ledger | None = None,
        scale: Scale | None = None,
    ) -> Generator[StepResult]:
        """Run steps and yield each as it completes, in order.

        A run begins when its first step is asked for, with the weights that the runs before it
        left; its versions count from 0. An engine does one run at a time. Breaking out of a run
        ends it: what is out at the workers is carried out, but its results are dropped.

        A run with checkpoints goes on when processes die: from the newest one, or from its start if
        there is none yet and it began with what was built. It hands every step out once.

        Args:
            sources: Source name -> where its rows come from.
            num_steps: Steps in all, those before a resume included.
            program: Which program to run; "main" is the graph the engine was made with.
            checkpoint_every: Save after every so many steps and at the end. Steps go on while a
                checkpoint is being written; it is there at the end of the run, or after `close`.
            checkpoints: Where to save, and where to resume from if it holds a checkpoint.
            stop: Asked between tasks; once it says so the run completes the steps that it has begun
                to train, saves, and ends without the others.
            pauses: Where to do something else between two steps. What later steps have begun is
                kept meanwhile, so that the weights come out as without.
            keep: Nodes and columns whose values each `StepResult.kept` is to hold, such as
                "reward.score", "actor.generate" or "actor.generate.mask". Where work is done in
                other processes they pass through the controller, and `controller_bytes` says how
                many bytes. Of steps that were begun before a checkpoint from which a run goes on
                what was not needed any more is missing.
            mirror: Where the state after every step is kept besides, in memory, so that the run has
                one step at most to do again when processes die.
            ledger: Where it is noted what each step reads, makes and trains on.
            scale: Who may wish that a group which trains nothing and keeps no state has more ranks,
                or fewer, while the run goes on. The weights come out as without.

        Raises:
            ConfigError: If a source is missing, or there is no such name to keep; with the first
                step, if a checkpoint belongs to another run.
            StateError: With the first step, if another run is not over.
            WorkerError: With any step, if user code fails or nothing comes back within the
                deadline.
        """
        graph = self.programs[program].graph
        for name in graph.sources:
            if name not in sources:
                raise ConfigError(
                    f"graph '{graph.name}' reads a source '{name}' that is not provided; give "
                    f"sources={{'{name}': ...}}"
                )
        KeptColumns(graph, keep)  # refused here, and not with the first step
        return self._steps(
            Asked(
                program,
                sources,
                num_steps,
                checkpoint_every if checkpoints else None,
                stop,
                pauses or Pauses(frozenset(), lambda _: True),
                keep,
                ledger,
                scale,
            ),
            checkpoints,
            mirror,
        )

    def _steps(
        self, asked: Asked, checkpoints: CheckpointFolder | None, mirror: CheckpointFolder | None
    ) -> Generator[StepResult]:
        self.start()
        homes = self._changed_by(asked.program)
        saving = self._new_saving(asked.program, checkpoints, mirror) if checkpoints else None
        reset, self._at_rest = self._at_rest, None
        going = GoingBack(
            self.executor,
            self._dispatcher,
            self._recovery,
            self._recovered,
            group_of=self.programs[asked.program].placement.nodes,
            homes=homes.values(),
            saving=saving,
            reset=reset,
        )
        try:
            completed = yield from self._going_on(asked, saving, going)
        finally:
            if not homes:
                self._at_rest = reset
        if homes and saving is not None and saving.saved == completed:
            self._at_rest = partial(self._reload, asked.program, saving)

    def _changed_by(self, program: str) -> dict[str, str]:
        homes = self._state_of(program).homes
        if program == "main":
            return dict(homes)
        nodes = self.programs[program].graph.nodes
        changed = {node.role for node in nodes if node.kind is not NodeKind.FORWARD}
        return {role: group for role, group in homes.items() if role in changed}

    def _going_on(
        self, asked: Asked, saving: Saving | None, going: GoingBack
    ) -> Generator[StepResult, None, int]:
        suspended: Suspended | None = None
        ahead, handed_out = asked.pauses.steps, 0
        while True:
            run = self._new_run(asked, saving, going, ahead, suspended)
            try:
                for result in run.steps():
                    if result.step >= handed_out:
                        handed_out = result.step + 1
                        yield result
                place = run.place
                if place is None:
                    return run.scheduler.completed
                suspended = run.suspended(place)
                if asked.pauses.between(run.interval(place)):
                    if saving is not None:
                        saving.finish(place.step)
                    self.executor.release(list(suspended.outputs.values()))
                    return run.scheduler.completed
                ahead = frozenset(step for step in ahead if step > place.step)
            except WorkerLost as lost:
                going.back(lost, max(handed_out, run.scheduler.completed), run.known)
                suspended = None

    def _new_run(
        self,
        asked: Asked,
        saving: Saving | None,
        going: GoingBack,
        ahead: frozenset[int],
        suspended: Suspended | None,
    ) -> EngineRun:
        schedule, is_main = self.schedule, asked.program == "main"
        if not is_main:
            schedule = replace(schedule, streaming=0, segment_tokens=0, in_flight=False)
        return EngineRun(
            self._as_sized(asked.program),
            asked,
            schedule,
            self.executor,
            self._dispatcher,
            self._trained,
            seed=self.seed,
            saving=saving,
            watch=self._watch if is_main else None,
            longest=self.longest,
            pauses=ahead,
            suspended=suspended,
            known=going.known,
            begun=going.begun,
            resizing=self._resizing(asked.scale),
        )

    def _as_sized(self, name: str) -> Program:
        program = self.programs[name]
        most = program.placement.num_chunks
        groups = tuple(
            replace(group, num_ranks=min(self._sizes[group.name], most))
            if group.name in self._sizes
            else group
            for group in program.placement.groups
        )
        return replace(program, placement=replace(program.placement, groups=groups))

    def _resizing(self, scale: Scale | None) -> Callable[[Flow], Resizing] | None:
        if scale is None:
            return None
        return lambda flow: Resizing(scale, self.executor, self.programs, flow, self._sizes)

    def _reload(self, program: str, saving: Saving) -> None:
        point = saving.newest_point(self.programs[program].graph, self.seed)
        if point is not None:
            self._state_of(program).load(point)

    def _state_of(self, program: str) -> StateInWorkers:
        one = self.programs[program]
        return StateInWorkers(self._dispatcher, program, one, self.longest)

    def _new_saving(
        self, program: str, checkpoints: CheckpointFolder, mirror: CheckpointFolder | None
    ) -> Saving:
        self._settle(self.longest.limit_s)
        ranks = self._state_of(program).num_ranks
        self._saving = Saving(checkpoints, self._dispatcher, program, ranks, self.longest, mirror)
        return self._saving

    def working(self) -> tuple[str, float] | None:
        """The oldest work of the workers, in words, and for how many seconds they have done it.

        None if they do nothing. May be called from any thread, and waits for nothing.

        Example:
            >>> engine.working()
            ('step 4: actor.generate', 35.2)
        """
        oldest = self._dispatcher.oldest()
        if oldest is None:
            return None
        task, elapsed_s = oldest
        match task:
            case NodeTask():
                return f"step {task.step + 1}: {task.node}", elapsed_s
            case Publish() | Load():
                return f"weights of {task.role}", elapsed_s
            case _:
                return "workers", elapsed_s

    def call(self, role: str, method: str, *arguments: Any, program: str = "main") -> Any:
        """Call a worker's own method outside the graph, on every rank of the role's home.

        During a run the ranks first finish what they have in hand.

        Args:
            role: The role whose worker is called; a frozen one, in the first group that hosts it.
            method: A public method outside the contract: `weights_sha256`, `save_pretrained`.
            *arguments: Small picklable arguments.
            program: The program that names the role.

        Returns:
            Rank 0's answer; it travels through the controller, so keep it small.

        Raises:
            ConfigError: If no group hosts the role.
            WorkerError: If the method fails or does not answer within the deadline.
        """
        self.start()
        graph, placement = self.programs[program].graph, self._as_sized(program).placement
        hosts = placement.hosts(graph, role)
        if not hosts:
            raise ConfigError(
                f"no group of program '{program}' hosts a role '{role}'; it has "
                f"{', '.join(graph.roles) or 'none'}"
            )
        group = placement.group(placement.home(graph, role) or hosts[0])
        call = work(Host.call_method, role, method, arguments)
        works = dict.fromkeys(range(group.num_ranks), call)
        done = self._dispatcher.perform_now(program, group.name, works, self.longest)
        return done.first.report.answer if done.first.report else None


def _timed(program: Program, longest_s: float | None, longest: Deadline) -> Program:
    placement = program.placement
    if not placement.predicted_s and longest_s is not None:
        expected = dict.fromkeys(placement.nodes, longest_s)
        placement = replace(placement, predicted_s=expected)
    return replace(program, placement=placement, longest_s=longest.limit_s)
