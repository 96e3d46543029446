"""What the controller spends per chunk of experience at the size of SRL's largest experiment.

The real scheduler runs a decoupled actor-learner step under a virtual clock: 15,000 environment
workers, one chunk of each per step, 32 data-parallel trainers. Environments and training take
imagined time; every microsecond between event and instructions is the scheduler's own, measured.
"""

from __future__ import annotations

import time

from bench import machine, parser, report, table
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.events import RunCall, RunTrain
from penstock.dataflow.scheduler.flow import Flow, FlowNode
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler
from penstock.dataflow.scheduler.simulate import Simulation, dry_run

SIZES = ((1_000, 32), (4_000, 32), (15_000, 32))
"""Environment workers, trainers; the last is SRL's."""
NUM_STEPS = 3
ROLLOUT_S = 6.0
TRAIN_S = 1.5


def flow(num_envs: int, num_trainers: int) -> Flow:
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


def duration_s(work: object) -> float:
    """Imagined: workers differ by up to a tenth, so that chunks come in one after another."""
    match work:
        case RunCall():
            if work.task.node != "env.rollout":
                return 1e-4
            return ROLLOUT_S * (1 + 0.1 * ((work.task.chunk or 0) * 7919 % 1000) / 1000)
        case RunTrain():
            return TRAIN_S
        case _:
            return 0.01


def run(num_envs: int, num_trainers: int) -> dict[str, float]:
    """One simulation; what it cost for real."""
    scheduler = Scheduler(flow(num_envs, num_trainers), Schedule(max_lag=1), NUM_STEPS)
    begin = time.process_time()  # one thread, so other work on the machine does not count
    found: Simulation = dry_run(scheduler, duration_s)
    spent = time.process_time() - begin
    if scheduler.completed != NUM_STEPS:
        raise RuntimeError(f"only {scheduler.completed} of {NUM_STEPS} steps were completed")
    chunks = NUM_STEPS * num_envs
    return {
        "num_envs": num_envs,
        "num_trainers": num_trainers,
        "tasks": len(found.spans),
        "controller_us_per_chunk": 1e6 * spent / chunks,
        "controller_us_per_task": 1e6 * spent / len(found.spans),
        "virtual_s": found.end_s,
        "controller_share": spent / found.end_s,
    }


def main() -> None:
    """Rehearse every size and print what a chunk costs."""
    args = parser(__doc__.splitlines()[0] if __doc__ else "").parse_args()
    results = [run(*size) for size in SIZES]
    rows = [
        [
            f"{r['num_envs']:,.0f}",
            f"{r['num_trainers']:.0f}",
            f"{r['tasks']:,.0f}",
            f"{r['controller_us_per_chunk']:.0f} us",
            f"{r['controller_us_per_task']:.0f} us",
            f"{r['virtual_s']:.1f} s",
            f"{100 * r['controller_share']:.1f} %",
        ]
        for r in results
    ]
    head = ["env workers", "trainers", "tasks", "per chunk", "per task", "virtual", "of it busy"]
    print(table(head, rows))
    report({"machine": machine(), "num_steps": NUM_STEPS, "sizes": results}, args.json)


if __name__ == "__main__":
    main()
