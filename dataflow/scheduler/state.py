"""The state of a scheduler, which it alone writes, and reports and invariants read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from .checkpoint_drain import Checkpoints
from .events import Awaited, ResumeState, Task
from .flow import Flow
from .log import SchedulerLog
from .rank_queues import RankPool, Running
from .schedule import Schedule
from .steps import FlowIndex, StepState, restored_steps
from .weight_versions import Weights


class SchedulerState:
    """The state of a run of `num_steps` steps of `flow` under `schedule`; see `Scheduler`."""

    def __init__(
        self,
        flow: Flow,
        schedule: Schedule,
        num_steps: int,
        checkpoint_every: int | None,
        pauses: Collection[int],
        resume: ResumeState,
        one_at_a_time: bool,
        max_log: int,
    ) -> None:
        if not 0 <= resume.step <= num_steps:
            raise ValueError(f"cannot resume at step {resume.step} of a run of {num_steps} steps")
        self.flow, self.schedule, self.num_steps = flow, schedule, num_steps
        self.one_at_a_time = one_at_a_time
        # The flow's nodes by name, and who reads whom.
        self.index = FlowIndex(flow, in_flight=schedule.in_flight)
        # Which copy of which weights holds which version.
        self.weights = Weights(flow, schedule, num_steps, resume.step)
        together = frozenset(node.name for node in flow.nodes if node.streams)
        in_flight = together if schedule.in_flight else frozenset[str]()
        # Ranks and the tasks that wait for them.
        self.ranks = RankPool(flow.groups, flow.sharing, together, in_flight)
        self.log = SchedulerLog(flow.groups, max_log)  # Transitions, for stories
        # When one is due, and what may still run before it.
        self.checkpoints = Checkpoints(
            self.index, self.weights, schedule, num_steps, checkpoint_every, resume.step, pauses
        )
        self.completed = resume.step  # Steps complete
        self.running: dict[Task, Running] = {}  # Tasks running, oldest first
        self.resizing: dict[str, int] = {}  # Group -> how many ranks it is to have
        self.awaited: dict[Awaited, float] = {}  # Other things asked of the shell, and when
        # Over the whole run, how many rollout reads were how many versions behind.
        self.lag_counts: Counter[int] = Counter()
        self.done = self.aborted = False
        # Progress of the steps in flight.
        self.steps: dict[int, StepState] = restored_steps(
            self.index, self.weights.rules_of, resume, num_steps
        )
        self.admitted = resume.step + len(self.steps)  # Steps admitted
