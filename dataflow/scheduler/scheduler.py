"""The scheduler: a pure state machine that runs steps of a flow in the order weights demand.

Events go in, instructions come out; there are no threads, clocks, sockets or tensors here, so every
situation can be written down as a test. `engine.py` does the input and output.

Rules:

- Step s is admitted when `s <= completed + max_lag`; steps complete in index order.
- A task starts when its inputs are stored, every copy of weights it reads holds the right version,
  and its ranks are free. Ready tasks of one rank run by (step, node order, chunk), but a part that
  can be trained on goes first.
- A copy of weights leaves a version only when no task of any step to come must still read it;
  `weight_versions.py` says how, and why nothing here can deadlock.
- Before training goes past a checkpoint's step the checkpoint is saved; then nothing runs, and
  what later steps had to do with older weights is done and part of the checkpoint.
- A run that is told to stop ends with the first checkpoint that it can still take.
- A run that is to pause ends at a point like a checkpoint's, from which another goes on.
- A group that is to have other ranks starts nothing until those that it has are done. Then chunks
  are spread anew. Who computes a chunk does not decide what comes out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..errors import StateError
from .describe import hang_report, state_of
from .events import (
    Abort,
    AdmitStep,
    Awaited,
    CheckpointSaved,
    Event,
    FailureReport,
    Finished,
    HangReport,
    Instruction,
    Load,
    NodeTask,
    Output,
    Pause,
    Publish,
    Release,
    Resize,
    Resized,
    ResizeGroup,
    Restarted,
    ResumeState,
    RunCall,
    RunStream,
    RunTrain,
    SaveCheckpoint,
    SourceReady,
    StepCompleted,
    Stop,
    Task,
    TaskDone,
    TaskFailed,
    Tick,
    Versions,
)
from .rank_queues import Priority, Running
from .schedule import Flow, Schedule
from .state import SchedulerState, chain_sha256
from .steps import StepState

_NO_VERSIONS: Versions = ()
_TOLD = 50  # Transitions told with an error that concerns no task in particular


class Scheduler(SchedulerState):
    """Runs `num_steps` steps of `flow` under `schedule`.

    Call `start` once, then `handle` for every event, and carry out the instructions returned. What
    it knows is in `SchedulerState`, for reading only.
    """

    def __init__(
        self,
        flow: Flow,
        schedule: Schedule,
        num_steps: int,
        *,
        checkpoint_every: int | None = None,
        pauses: Collection[int] = (),
        resume: ResumeState | None = None,
        one_at_a_time: bool = False,
        max_log: int = 10_000,
    ) -> None:
        resume = resume or ResumeState(0)
        super().__init__(
            flow, schedule, num_steps, checkpoint_every, pauses, resume, one_at_a_time, max_log
        )
        self._started = False
        self._history = resume.history_sha256
        self._now = self._progress_s = 0.0
        self._out: list[Instruction] = []
        for i in range(len(flow.nodes)):
            self._move_frontier(i)
        self.checkpoints.check_resumable(self.steps)

    # --- the interface

    def start(self, at_s: float) -> list[Instruction]:
        """Begin; returns the first instructions. Call it once."""
        if self._started:
            raise StateError("start() was called twice")
        self._started = True
        self._now = self._progress_s = at_s
        for state in self.steps.values():
            self._consider(state.startable())
        self._settle()
        return self._take()

    def handle(self, *events: Event) -> list[Instruction]:
        """Take what has happened, in order, and say what is to be done about it.

        Events known together are given together: what may start is looked for once.
        """
        for event in events:
            if self.aborted:
                break
            if not self._started:
                raise StateError(f"{type(event).__name__} came before start()")
            self._now = event.at_s
            # A tick is no progress: it only lets time pass, so that a hang is noticed.
            if not isinstance(event, Tick):
                self._progress_s = event.at_s
            self._take_in(event)
        if not self.aborted:
            self._settle()
        return self._take()

    def _take_in(self, event: Event) -> None:
        match event:
            case TaskDone():
                self._task_done(event)
            case SourceReady():
                self._source_ready(event)
            case TaskFailed():
                self._task_failed(event)
            case CheckpointSaved():
                self._checkpoint_saved(event)
            case Restarted():
                self._restarted(event)
            case Stop():
                self._stop()
            case Resize():
                self._resize(event)
            case Resized():
                self._resized(event)
            case Tick():
                self._tick()

    def schedule_sha256(self) -> str:
        """Hash of which task read which versions so far, whatever the order and the times.

        Two runs in step order have the same hash whatever their timing, and so has a run that was
        stopped and resumed. In arrival order nothing of the kind holds.
        """
        history = self._history
        for step in sorted(self.steps):
            history = chain_sha256(history, self.steps[step].lines())
        return history

    def version_of(self, role: str) -> int:
        """The version that a role's home holds; 0 for a role that this flow does not train."""
        if role not in self.flow.homes:
            return 0
        return self.weights.home(role).holds

    # --- events

    def _task_done(self, event: TaskDone) -> None:
        task = event.task
        run = self.running.pop(task, None)
        if run is None:
            raise self._impossible(f"TaskDone for '{task}', which is {state_of(self, task)}", task)
        self.ranks.free(task, run.group, run.ranks)
        self._note("done", task, run)
        match task:
            case NodeTask():
                self._node_done(task, run, event)
            case Publish():
                ready, dropped = self.weights.published(task)
                self._out += dropped
                self._consider(ready)
            case Load():
                ready, dropped = self.weights.loaded(task, self._now)
                self._out += dropped
                self._consider(ready)

    def _node_done(self, task: NodeTask, run: Running, event: TaskDone) -> None:
        i, state = self.index.index[task.node], self.steps[task.step]
        node = self.flow.nodes[i]
        # Tasks of a call that takes parts as they come are no chunks, so their rows are not noted.
        if event.num_rows is not None and not node.order_of:
            state.note_rows(i, task.chunk, event.num_rows)
        ready, freed = state.finish(i, task, event.size)
        if node.streams:
            self._begin_again(run)
        self._release(freed)
        self._consider(ready)
        if state.left[i] == 0:
            self._consider(self._move_frontier(i))
        role = node.trains
        if role is not None and state.left[i] == 0:
            self._consider(self.weights.trained(role, dict(run.versions)[role] + 1, self._now))

    def _source_ready(self, event: SourceReady) -> None:
        if self.awaited.pop(Awaited("batch", event.step), None) is None:
            raise self._impossible(f"SourceReady for step {event.step}, whose batch is not awaited")
        state = self.steps[event.step]
        self._note("stored", "batch", step=event.step)
        ready, freed = state.source_arrived()
        for i, node in enumerate(self.flow.nodes):
            if node.kind == "source":
                if event.num_rows is not None:
                    state.note_rows(i, None, event.num_rows)
                self._move_frontier(i)
        self._release(freed)
        self._consider(ready)

    def _task_failed(self, event: TaskFailed) -> None:
        task, run = event.task, self.running.get(event.task)
        step = task.step if isinstance(task, NodeTask) else None
        is_source = isinstance(task, NodeTask) and Awaited("batch", task.step) in self.awaited
        if run is None and not is_source:
            raise self._impossible(
                f"TaskFailed for '{task}', which is {state_of(self, task)}", task
            )
        self._note("failed", task, run)
        where = "the source" if run is None else run.group
        if event.rank is not None:
            where = f"{where}[{event.rank}]"
        node = task.node if isinstance(task, NodeTask) else None
        self._abort(FailureReport(str(task), where, event.error, self.log.story(node, step)))

    def _checkpoint_saved(self, event: CheckpointSaved) -> None:
        if self.awaited.pop(Awaited("checkpoint", event.step), None) is None:
            raise self._impossible(f"CheckpointSaved({event.step}), which was not asked for")
        self._note("saved", "checkpoint", step=event.step)
        if self.checkpoints.pauses:
            self._pause()
            return
        self.checkpoints.saved()
        if not self.checkpoints.stopped:
            self.ranks.reconsider()

    def _restarted(self, event: Restarted) -> None:
        ranks = event.ranks or range(self.index.num_ranks[event.group])
        for task, run in list(self.running.items()):
            if run.group == event.group and not set(run.ranks).isdisjoint(ranks):
                self._note("start again", task, self._since_now(task, run))

    def _since_now(self, task: Task, run: Running) -> Running:
        del self.running[task]
        again = self.running[task] = Running(run.group, run.ranks, self._now, run.versions)
        return again

    def _begin_again(self, answered: Running) -> None:
        # A rank samples all its parts together: with each that ends, the others' deadlines begin
        # anew.
        for task in self.ranks.running_on(answered.group, answered.ranks[0]):
            self._since_now(task, self.running[task])

    def _resize(self, event: Resize) -> None:
        group, num_ranks = event.group, event.num_ranks
        if group in self.flow.homes.values() or not 1 <= num_ranks <= self.flow.num_chunks:
            raise self._impossible(f"Resize of group '{group}' to {num_ranks}, which cannot be")
        if any(one.what == "ranks" and one.group == group for one in self.awaited):
            raise self._impossible(f"Resize of group '{group}', whose ranks are changing")
        self.resizing[group] = num_ranks
        self.ranks.resizing.add(group)
        self._note("resize", group)

    def _resized(self, event: Resized) -> None:
        group, num_ranks = event.group, event.num_ranks
        awaited = [one for one in self.awaited if one.what == "ranks" and one.group == group]
        if not awaited or not 1 <= num_ranks <= self.flow.num_chunks:
            raise self._impossible(f"Resized of group '{group}' to {num_ranks}, which is not asked")
        del self.awaited[awaited[0]], self.resizing[group]
        self.index.num_ranks[group] = num_ranks
        self.ranks.resize(group, num_ranks)
        self.log.resize(group, num_ranks)
        for state in self.steps.values():
            state.spread(group)
        self._note("resized", group)

    def _ask_for_ranks(self) -> None:
        asked = {one.group for one in self.awaited if one.what == "ranks"}
        for group, num_ranks in self.resizing.items():
            # Ranks are only taken away where no result can still come from them.
            if group not in asked and not self.ranks.is_busy(group) and not self.done:
                self.awaited[Awaited("ranks", self.completed, group)] = self._now
                self._out.append(ResizeGroup(group, num_ranks))

    def _stop(self) -> None:
        if self.done or self.checkpoints.stopping:
            return
        self.checkpoints.stop(self.completed, self.steps, self.running)
        self._note("stop", "run")
        self.ranks.reconsider()

    def _tick(self) -> None:
        report = hang_report(self, self._now, self._progress_s)
        if report is not None and not self.done:
            self._abort(report)

    # --- transitions

    def _consider(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            match task:
                case Publish():
                    # Step -1: weights on their way go before the work of any step, as that waits
                    # for them.
                    self.ranks.push((-1, 0, 0), task, self.flow.homes[task.role], 0)
                case Load():
                    self.ranks.push((-1, 1, 0), task, task.group, None)
                case NodeTask():
                    i = self.index.index[task.node]
                    if not self.weights.gate(i, task, overwrites=self.index.is_last(i, task)):
                        self._note("wait for weights", task)
                        continue
                    self._push(i, task)
            self._note("ready", task)

    def _push(self, i: int, task: NodeTask) -> None:
        node = self.flow.nodes[i]
        # A part that can be trained on goes before what others still need: it is the longest work.
        first = -1 if node.order_of else i
        priority: Priority = (task.step, first, task.chunk or 0)
        rank = None if node.trains else (task.chunk or 0) % self.index.num_ranks[node.group]
        self.ranks.push(priority, task, node.group, rank)

    def _move_frontier(self, i: int) -> list[Task]:
        frontier, step = self.weights.frontier, self.weights.frontier[i]
        while step < self.admitted and self.steps[step].left[i] == 0:
            step += 1
        if step == frontier[i]:
            return []
        frontier[i] = step
        return self.weights.frontier_moved(i)

    def _settle(self) -> None:
        if self.checkpoints.stopped:
            self._finish()
            return
        self._advance_steps()
        for tasks, group, ranks in self.ranks.dispatch(self.checkpoints.may_start):
            self._start(tasks, group, ranks)
        if self.resizing:
            self._ask_for_ranks()
        if self.running or self.awaited or self.done:
            return
        if self.checkpoints.draining:
            self.checkpoints.check_drained(self.steps)
            if self.checkpoints.saves:
                self._save()
            else:
                self._pause()
        elif self.completed == self.num_steps:
            self._finish()

    def _finish(self) -> None:
        if self.done:
            return
        for state in self.steps.values():
            self._release(state.stored())
        self._out += self.weights.drop_rest()
        self._out.append(Finished())
        self.done = True
        self._note("finished", "run")

    def _advance_steps(self) -> None:
        # Admit and complete what can be, one step at a time. A checkpoint must hold what steps
        # after it read of older weights, so every step that may be admitted is admitted before the
        # next one completes.
        while not self.checkpoints.draining:
            self._admit()
            if self.completed == self.admitted or self.steps[self.completed].remaining:
                return
            self._complete(self.steps.pop(self.completed))

    def _complete(self, state: StepState) -> None:
        self.completed += 1
        self._history = chain_sha256(self._history, state.lines())
        self.lag_counts.update(state.lag)
        self._note("complete", "step", step=state.step)
        self._out.append(StepCompleted(state.step, tuple(sorted(state.lag.items()))))
        self._release(state.stored())
        if self.checkpoints.step_completed(self.completed):
            self._note("drain", "step", step=state.step)
            self.ranks.reconsider()

    def _admit(self) -> None:
        # The next step to complete, and as many after it as samples may be old.
        limit = min(self.num_steps, self.completed + self.schedule.max_lag + 1)
        while self.admitted < limit:
            step = self.admitted
            self.steps[step] = StepState(self.index, step)
            self.admitted += 1
            self.awaited[Awaited("batch", step)] = self._now
            self._note("admit", "step", step=step)
            self._out.append(AdmitStep(step))

    def _start(self, tasks: list[Task], group: str, ranks: tuple[int, ...]) -> None:
        task, versions, step = tasks[0], _NO_VERSIONS, None
        if isinstance(task, NodeTask):
            i, step = self.index.index[task.node], task.step
            versions, rules = self.weights.versions(i), self.weights.rules_of[i]
            mine = [one for one in tasks if isinstance(one, NodeTask)]
            self._out.append(self._run(i, mine, ranks, versions))
            state = self.steps[step]
            for one in mine:
                state.note_reads(i, one, rules, versions)
        else:
            self._out.append(task)
        run = Running(group, ranks, self._now, versions)
        for one in tasks:
            self.running[one] = run
            self.log.add(self._now, "start", one, step, run)

    def _run(
        self, i: int, tasks: list[NodeTask], ranks: tuple[int, ...], versions: Versions
    ) -> RunCall | RunStream | RunTrain:
        node, task = self.flow.nodes[i], tasks[0]
        if node.streams:
            chunks = tuple(one.chunk or 0 for one in tasks)
            return RunStream(task.node, task.step, chunks, ranks[0], versions)
        if node.trains is None:
            return RunCall(task.node, task.step, task.chunk, ranks[0], versions)
        if not node.order_of:
            return RunTrain(task.node, task.step, ranks, versions)
        chunks = tuple(self.steps[task.step].chunks_of(i, task))
        last = self.index.is_last(i, task)
        return RunTrain(task.node, task.step, ranks, versions, task.chunk, chunks, last)

    def _release(self, outputs: Iterable[Output]) -> None:
        released = tuple(outputs)
        if released:
            self._out.append(Release(released))

    def _save(self) -> None:
        self.awaited[Awaited("checkpoint", self.completed)] = self._now
        self._note("save", "checkpoint", step=self.completed)
        self._out.append(self._place())

    def _pause(self) -> None:
        self._out += [*self.weights.drop_rest(), Pause(self._place())]
        self.checkpoints.saved()
        self.done = True
        self._note("pause", "run", step=self.completed)

    def _place(self) -> SaveCheckpoint:
        step, states = self.completed, [self.steps[s] for s in sorted(self.steps)]
        live = tuple(output for state in states for output in state.stored())
        done = frozenset(task for state in states for task in state.done())
        sizes = tuple(pair for state in states for pair in state.sizes())
        rows = tuple(pair for state in states for pair in state.num_rows())
        return SaveCheckpoint(step, live, ResumeState(step, done, self._history, sizes, rows))

    # --- small things

    def _take(self) -> list[Instruction]:
        out, self._out = self._out, []
        return out

    def _abort(self, report: FailureReport | HangReport) -> None:
        self.aborted = True
        self._note("abort", "run")
        self._out.append(Abort(report))

    def _impossible(self, message: str, task: Task | None = None) -> StateError:
        if isinstance(task, NodeTask):
            return StateError(message, self.log.story(task.node, task.step))
        return StateError(message, self.log.story()[-_TOLD:])

    def _note(
        self, what: str, subject: Task | str, run: Running | None = None, *, step: int | None = None
    ) -> None:
        if isinstance(subject, NodeTask):
            step = subject.step
        self.log.add(self._now, what, subject, step, run)
