"""Acting in CartPole-v1 by whoever steps it: steps per second of `env.rollout`, a trivial policy.

Beside ours, Gymnasium's bare SyncVectorEnv. All take turns, and the median of the turns is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import gymnasium as gym
import numpy as np
from bench import machine, parser, report, table
from env_throughput import Trivial
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorkerSpec

STEPS, REPEATS = 1_000, 7
SPECS = {
    "numpy object": EnvSpec(id="CartPole-v1"),
    "EnvPool, 1 thread": EnvSpec(id="CartPole-v1", backend="envpool", options={"num_threads": 1}),
    "EnvPool, 2 threads": EnvSpec(id="CartPole-v1", backend="envpool", options={"num_threads": 2}),
    "single environments": EnvSpec(id="CartPole-v1", vectorized=False),
}


def ours(spec: EnvSpec, num_envs: int) -> Callable[[int], None]:
    """What takes `STEPS` steps through `env.rollout`, given how often it has been asked."""
    worker = EnvWorkerSpec(env=spec).build(WorkerContext("env"))
    rows, actor = EnvRowSource(num_envs, num_envs).batch(0), Trivial()

    def act(step: int) -> None:
        with step_scope(step):
            worker.rollout(rows.env, rows.group, actor, horizon=STEPS)

    return act


def bare(num_envs: int) -> Callable[[int], None]:
    """The same of Gymnasium's SyncVectorEnv, which keeps nothing of what it shows."""
    env = gym.make_vec("CartPole-v1", num_envs, vectorization_mode="sync")
    env.reset(seed=0)

    def act(step: int) -> None:
        del step
        for count in range(STEPS):
            env.step(np.full(num_envs, count % 2))

    return act


def main() -> None:
    """Measure and print."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--envs", type=int, nargs="*", default=[8, 64])
    args = options.parse_args()
    found: dict[str, dict[int, float]] = {}
    for num_envs in args.envs:
        who = {name: ours(spec, num_envs) for name, spec in SPECS.items()}
        who["SyncVectorEnv, bare"] = bare(num_envs)
        took: dict[str, list[float]] = {name: [] for name in who}
        for step in range(REPEATS):
            for name, act in who.items():
                begin_s = time.perf_counter()
                act(step)
                took[name].append(time.perf_counter() - begin_s)
        for name, times in took.items():
            found.setdefault(name, {})[num_envs] = num_envs * STEPS / median(times)
    rows = [[name, *(f"{speed:,.0f}" for speed in by.values())] for name, by in found.items()]
    print(table(["steps/s", *(f"{n} environments" for n in args.envs)], rows))
    report({"machine": machine(), "steps_per_s": found}, args.json)


if __name__ == "__main__":
    main()
