"""A run that lives several times: ranks are started again, and all of it goes back after a death.

What the engine does then is done here: a new scheduler goes on from the newest checkpoint that was
written, or from the start. Each life is acted out by a shell that trusts no books.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from penstock.dataflow.runtime.executor import Recoveries, Recovery, WorkerLost
from penstock.dataflow.scheduler.events import (
    CheckpointSaved,
    Event,
    Instruction,
    NodeTask,
    Pause,
    Resize,
    Resized,
    Restarted,
    RunCall,
    RunStream,
    RunTrain,
    SaveCheckpoint,
    StepCompleted,
    TaskDone,
    Versions,
)
from penstock.dataflow.scheduler.schedule import Flow, Schedule
from penstock.dataflow.scheduler.simulate import dry_run

from .acted_out import Recorded, Shell
from .random_flows import size, timing

NEVER = 1 << 30
"""So many events that a life does not end before its run."""


class Died(Exception):
    """A process died that had something which nobody else has."""


class Mortal(Recorded):
    """A scheduler whose ranks are started again now and then, until its run dies."""

    rng: random.Random
    events_left: int
    often: float

    def handle(self, *events: Event) -> list[Instruction]:
        if self.events_left == 0:
            raise Died
        self.events_left -= 1
        instructions = super().handle(*events)
        if not self.done and self.rng.random() < self.often:
            instructions += self.disturb(events[-1].at_s)
        return instructions

    def disturb(self, at_s: float) -> list[Instruction]:
        """A rank, or all of a group, does again what it has running; nobody else notices."""
        group = self.rng.choice(sorted(self.flow.groups))
        if self.rng.random() < 0.6:
            return self.resize(group, at_s)
        ranks = (self.rng.randrange(self.index.num_ranks[group]),) * self.rng.randint(0, 1)
        before = dict(self.running)
        instructions = super().handle(Restarted(group, at_s, ranks))
        assert instructions == []
        assert self.running.keys() == before.keys()
        for task, run in self.running.items():
            owed = run.group == group and (not ranks or set(ranks) & set(run.ranks))
            assert run.since_s == (at_s if owed else before[task].since_s)
        assert [run.since_s for run in self.running.values()] == sorted(
            run.since_s for run in self.running.values()
        )
        return instructions

    def resize(self, group: str, at_s: float) -> list[Instruction]:
        """Ranks join, or leave, as soon as the group has nothing to do."""
        changing = any(one.group == group for one in self.awaited if one.what == "ranks")
        if changing or group in self.flow.homes.values():
            return []
        return super().handle(Resize(group, self.rng.randint(1, self.flow.num_chunks), at_s))


@dataclass
class Lives:
    """What has become of a run so far."""

    flow: Flow
    schedule: Schedule
    num_steps: int
    every: int | None
    rng: random.Random
    handed: list[int] = field(default_factory=list[int])  # steps, in order
    # Of every task that counts: computed, and not lost since.
    reads: dict[NodeTask, Versions] = field(default_factory=dict[NodeTask, Versions])
    ever: dict[NodeTask, Versions] = field(default_factory=dict[NodeTask, Versions])
    saves: list[SaveCheckpoint] = field(default_factory=list[SaveCheckpoint])
    place: SaveCheckpoint | None = None  # where the next life begins; None for the start
    groups: dict[str, int] = field(default_factory=dict[str, int])
    deaths: int = 0
    lost: WorkerLost | None = None
    num_resized: int = 0

    def live(self, pauses: Collection[int], events_left: int) -> Mortal:
        """One life, acted out; its scheduler is done, or it has died."""
        life = Mortal(
            self.as_resized(),
            self.schedule,
            self.num_steps,
            checkpoint_every=self.every,
            pauses=pauses,
            resume=self.place.resume if self.place else None,
        )
        life.rng, life.events_left = self.rng, events_left
        life.often = self.rng.choice([0.05, 0.3])
        seconds, known = timing(self.rng.randrange(10_000)), set(self.ever)

        def duration_s(work: object) -> float:
            """Rollouts that are still stored are not made again."""
            tasks = {work.task} if isinstance(work, RunCall) else set[NodeTask]()
            tasks = set(work.tasks) if isinstance(work, RunStream) else tasks
            return 0.0 if tasks and tasks <= known else seconds(work)

        within_s = self.rng.choice([0.0, 0.5])
        try:
            dry_run(life, duration_s, size=size, within_s=within_s)
        except Died:
            self.deaths += 1
        self.act_out(life)
        return life

    def as_resized(self) -> Flow:
        """The flow with as many ranks as groups have by now, or as at the start."""
        groups = {**self.flow.groups, **self.groups}
        return replace(self.flow, groups=groups) if self.rng.random() < 0.5 else self.flow

    def act_out(self, life: Mortal) -> None:
        shell = Shell(life.flow, self.schedule)
        if self.place:
            shell = Shell.at(self.place, life.flow, self.schedule)
        begun: dict[NodeTask, Versions] = {}
        asked: list[SaveCheckpoint] = []
        for message in life.trace:
            shell.take(message)
            match message:
                case RunCall() | RunTrain():
                    begun[message.task] = message.versions
                case RunStream():
                    begun |= dict.fromkeys(message.tasks, message.versions)
                case TaskDone() if isinstance(message.task, NodeTask):
                    self.count(message.task, begun[message.task])
                case Resized():
                    self.num_resized += 1
                case SaveCheckpoint():
                    asked.append(message)
                case CheckpointSaved():
                    self.saves.append(asked.pop())
                case StepCompleted():
                    if message.step == len(self.handed):
                        self.handed.append(message.step)
                    assert message.step < len(self.handed)
                case _:
                    pass
        self.groups = dict(shell.num_ranks)

    def count(self, task: NodeTask, versions: Versions) -> None:
        """A task counts once; what is computed again is computed as it was."""
        assert task not in self.reads
        self.reads[task] = versions
        if not self.schedule.why_not_reproducible:
            assert self.ever.setdefault(task, versions) == versions

    def go_to(self, place: SaveCheckpoint | None) -> None:
        """The next life begins here; what was computed after it is lost."""
        step, done = (place.step, place.resume.done) if place else (0, frozenset[NodeTask]())
        self.reads = {t: v for t, v in self.reads.items() if t.step < step or t in done}
        self.place = place

    def newest(self) -> SaveCheckpoint | None:
        """The newest checkpoint; the very last one may not be wholly written."""
        if self.saves and self.rng.random() < 0.3:
            self.saves.pop()
        return self.saves[-1] if self.saves else None


def survive(
    flow: Flow,
    schedule: Schedule,
    num_steps: int,
    every: int | None,
    pauses: frozenset[int],
    recovery: Recovery,
    seed: int,
) -> tuple[Mortal, Lives]:
    """Live until the run is over, or may go back no more; returns its last life, and all."""
    rng = random.Random(seed)
    lives = Lives(flow, schedule, num_steps, every, rng)
    recoveries, paused, furthest, in_a_row = Recoveries(recovery), 0, -1, 0
    while True:
        ahead = frozenset(step for step in pauses if step > paused)
        events_left = rng.choice([0, rng.randrange(8), rng.randrange(30), rng.randrange(80), NEVER])
        life = lives.live(ahead, events_left)
        if life.done:
            last = life.trace[-1]
            if not isinstance(last, Pause):
                return life, lives
            paused = last.place.step
            lives.go_to(last.place)
            continue
        completed = len(lives.handed)
        in_a_row = in_a_row + 1 if completed == furthest else 1
        furthest = completed
        assert in_a_row <= recovery.max_repeats + 1
        try:
            assert recoveries.pause_s(WorkerLost("it died"), completed) <= 60.0
        except WorkerLost as lost:
            lives.lost = lost
            return life, lives
        lives.go_to(lives.newest())
