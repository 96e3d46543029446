"""What the controller spends per task at the size of SRL's largest experiment, and with streams.

The real scheduler runs steps under a virtual clock; environments, generation and training take
imagined time, and every microsecond between events and instructions is the scheduler's own. Two
steps are run:

- acting: a decoupled actor-learner step, one chunk of each environment worker, 32 data-parallel
  trainers; the last size is SRL's.
- streaming: rollout replicas answer each of their 8 chunks as it ends, a reward is computed of each
  at once, and trainers take them in the order of their lengths.

What happens within a millisecond is told together, as a controller hears it that looks for answers
when it has dealt with those before. The time is that of `Scheduler.handle`, in which Python's
collector also goes through what the simulation keeps. The figures that were published before, 69 us
of a task and 43.7 % at the largest size, had each event told alone, and counted the simulation as
well; `--alone` measures in that way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bench import machine, parser, report, table
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.events import (
    Event,
    Instruction,
    NodeTask,
    RunCall,
    RunStream,
    RunTrain,
    TaskDone,
)
from penstock.dataflow.scheduler.schedule import Flow, FlowNode, Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler
from penstock.dataflow.scheduler.simulate import dry_run

ACTING = ((1_000, 32), (4_000, 32), (15_000, 32))
"""Environment workers, trainers."""
STREAMING = ((100, 16), (1_000, 32))
"""Rollout replicas, trainers."""
CHUNKS_PER_REPLICA = 8
NUM_STEPS = 3
ROLLOUT_S = 6.0
TRAIN_S = 1.5
PART_S = 0.02
TOGETHER_S = 1e-3


class Timed(Scheduler):
    """A scheduler that knows how long it has taken.

    Attributes:
        spent_s: Of this thread, so that other work on the machine does not count.
        num_told: How often something was told.
        num_tasks: Tasks that are done.
    """

    spent_s = 0.0
    num_told = 0
    num_tasks = 0

    def start(self, at_s: float) -> list[Instruction]:
        """See `Scheduler.start`."""
        return self._timed(lambda: super(Timed, self).start(at_s))

    def handle(self, *events: Event) -> list[Instruction]:
        """See `Scheduler.handle`."""
        self.num_tasks += sum(isinstance(event, TaskDone) for event in events)
        return self._timed(lambda: super(Timed, self).handle(*events))

    def _timed(self, body: Callable[[], list[Instruction]]) -> list[Instruction]:
        begin = time.thread_time()
        found = body()
        self.spent_s += time.thread_time() - begin
        self.num_told += 1
        return found


def acting(num_envs: int, num_trainers: int) -> Flow:
    """IMPALA's step: workers act with copies of the policy, trainers correct and learn."""
    actor = WeightRead("actor")
    return Flow(
        name="impala_step",
        nodes=(
            FlowNode("seeds", "source"),
            FlowNode(
                "env.rollout",
                "rollout",
                group="envs",
                inputs=("seeds",),
                reads=(WeightRead("actor", lagged=True),),
            ),
            FlowNode("actor.evaluate", "forward", group="train", inputs=("env.rollout",),
                     reads=(actor,)),
            FlowNode("vtrace", "op", group="train", inputs=("env.rollout", "actor.evaluate")),
            FlowNode("actor.train", "train", chunked=False, group="train", trains="actor",
                     inputs=("env.rollout", "vtrace")),
        ),
        groups={"envs": num_envs, "train": num_trainers},
        homes={"actor": "train"},
        trains_per_step={"actor": 1},
        num_chunks=num_envs,
    )  # fmt: skip


def streaming(num_replicas: int, num_trainers: int) -> Flow:
    """GRPO's step with streaming rows: rewarded and trained on as they come."""
    return Flow(
        name="grpo_step",
        nodes=(
            FlowNode("prompts", "source"),
            FlowNode(
                "actor.generate",
                "rollout",
                group="rollout",
                inputs=("prompts",),
                reads=(WeightRead("actor", lagged=True),),
                streams=True,
            ),
            FlowNode("reward.score", "forward", group="train", inputs=("actor.generate",)),
            FlowNode("advantage", "op", group="train", inputs=("reward.score",)),
            FlowNode("actor.train", "train", chunked=False, group="train", trains="actor",
                     inputs=("actor.generate", "advantage"), order_of="actor.generate"),
        ),
        groups={"rollout": num_replicas, "train": num_trainers},
        homes={"actor": "train"},
        trains_per_step={"actor": 1},
        num_chunks=num_replicas * CHUNKS_PER_REPLICA,
    )  # fmt: skip


def duration_s(work: object) -> float:
    """Imagined: workers differ by up to a tenth, so that chunks come in one after another."""
    match work:
        case RunCall():
            if work.task.node != "env.rollout":
                return 1e-4
            return ROLLOUT_S * (1 + 0.1 * ((work.task.chunk or 0) * 7919 % 1000) / 1000)
        case RunStream():
            return ROLLOUT_S / CHUNKS_PER_REPLICA * (1 + 0.1 * (work.rank * 7919 % 1000) / 1000)
        case RunTrain():
            return TRAIN_S if work.part is None else PART_S
        case _:
            return 0.01


def length(task: NodeTask) -> int:
    """Of a chunk's longest row."""
    return 1 + (task.chunk or 0) * 7919 % 1000


def run(flow: Flow, *, alone: bool) -> dict[str, object]:
    """One simulation; what it cost for real."""
    scheduler = Timed(flow, Schedule(max_lag=1), NUM_STEPS)
    begin = time.process_time()
    within_s = 0.0 if alone else TOGETHER_S
    # What a simulation keeps no controller has, and the collector would look through it.
    found = dry_run(scheduler, duration_s, size=length, within_s=within_s, keep=False)
    spent_s = time.process_time() - begin if alone else scheduler.spent_s
    if scheduler.completed != NUM_STEPS:
        raise RuntimeError(f"only {scheduler.completed} of {NUM_STEPS} steps were completed")
    workers, trainers = flow.groups.values()
    return {
        "flow": flow.name,
        "num_workers": workers,
        "num_trainers": trainers,
        "tasks": scheduler.num_tasks,
        "events_told_together": scheduler.num_tasks / scheduler.num_told,
        "controller_us_per_task": 1e6 * spent_s / scheduler.num_tasks,
        "virtual_s": found.end_s,
        "controller_share": spent_s / found.end_s,
    }


def main() -> None:
    """Run every size and print what a task costs."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--alone", action="store_true", help="tell each event alone, as before")
    args = options.parse_args()
    flows = [acting(*size) for size in ACTING] + [streaming(*size) for size in STREAMING]
    results = [run(flow, alone=args.alone) for flow in flows]
    rows = [
        [
            f"{r['flow']}",
            f"{r['num_workers']:,}",
            f"{r['num_trainers']}",
            f"{r['tasks']:,}",
            f"{r['events_told_together']:.1f}",
            f"{r['controller_us_per_task']:.1f} us",
            f"{r['virtual_s']:.1f} s",
            f"{100 * float(str(r['controller_share'])):.1f} %",
        ]
        for r in results
    ]
    head = ["step", "workers", "trainers", "tasks", "together", "per task", "virtual", "of it busy"]
    print(table(head, rows))
    told = "alone" if args.alone else "together"
    report(
        {"machine": machine(), "num_steps": NUM_STEPS, "events": told, "sizes": results}, args.json
    )


if __name__ == "__main__":
    main()
