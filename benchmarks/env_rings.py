"""Overlapped environment groups: what stepping several at the same time wins, and what is best.

An environment that sleeps 5 ms a step, four groups of one in one worker, acting inline and served
by another process. Every number of them is measured several times, in turn, and the quickest time
counts: other work on the machine only ever adds to it. Then the planner chooses from one rollout.
Also: how long a request to another process takes, against a Ray actor's call.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
from bench import parser, report, table
from gymnasium import spaces
from penstock.algorithms.roles.environment import Actor
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.remote_inference import ServedRole, ServedWeights
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors.actor_critic import TorchActorCritic, TorchActorCriticSpec
from penstock.workers.envs.overlapped_groups import NumOverlapped
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorker, EnvWorkerSpec
from penstock.workers.inference.link import InferenceClient, InferenceServer

SLEEP_S = 5e-3
NUM_GROUPS = 4
HORIZON = 60
REPEATS = 8
SIZES = (1, 2, 3, 4)
NUM_QUESTIONS = 1000


class Sleepy(gym.Env[Any, Any]):
    """Sleeps, and shows nothing of interest."""

    observation_space = spaces.Box(-1.0, 1.0, (8,), np.float32)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Nothing is rendered."""
        super().reset(seed=seed)
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Sleep."""
        time.sleep(SLEEP_S)
        return np.full(8, float(action) / 4, np.float32), 1.0, False, False, {}


def spec() -> EnvSpec:
    """The environment, known to Gymnasium."""
    if "bench/Sleepy-v0" not in gym.registry:
        gym.register("bench/Sleepy-v0", lambda **options: Sleepy(**options))
    return EnvSpec(id="bench/Sleepy-v0")


def actor() -> TorchActorCritic:
    """Whoever acts in it: two layers of 64."""
    return TorchActorCriticSpec(env=spec()).build(WorkerContext("actor"))


def _serve(address: Any, done: Any) -> None:
    served_weights = ServedWeights("group 'policy'")
    served_weights.add("actor", Actor, actor())
    served_weights.set_version("actor", 0)
    server = InferenceServer(served_weights, "127.0.0.1", "bench")
    address.put(server.address)
    done.wait()
    server.close()


@contextmanager
def served() -> Generator[Actor]:
    """The actor in another process."""
    spawn = multiprocessing.get_context("spawn")
    address, done = spawn.Queue(), spawn.Event()
    process = spawn.Process(target=_serve, args=(address, done))
    process.start()
    client = InferenceClient("group 'policy'", 60.0)
    try:
        client.connect(address.get(timeout=120), "bench")
        stand_in = ServedRole("actor", Actor, client.send).at(0)
        assert isinstance(stand_in, Actor)
        yield stand_in
    finally:
        done.set()
        client.close()
        process.join(10)


def rollout(num_overlapped: NumOverlapped, one: Actor) -> tuple[EnvWorker, Callable[[int], float]]:
    """A worker that has done one rollout, and the seconds of another by its step."""
    worker = EnvWorkerSpec(env=spec(), num_overlapped=num_overlapped).build(WorkerContext("env"))
    rows = EnvRowSource(NUM_GROUPS, 1).batch(0)

    def seconds(step: int) -> float:
        begin = time.perf_counter()
        with step_scope(step):
            worker.rollout(rows.env, rows.group, one, horizon=HORIZON)
        return time.perf_counter() - begin

    seconds(0)
    return worker, seconds


def measure(placement: str, one: Actor) -> dict[str, Any]:
    """Steps per second of every size, and the planner's choice."""
    runs = {size: rollout(size, one)[1] for size in SIZES}
    took: dict[int, list[float]] = {size: [] for size in SIZES}
    for step in range(1, REPEATS + 1):
        for size, seconds in runs.items():
            took[size].append(seconds(step))
    steps = NUM_GROUPS * HORIZON
    speed = {size: steps / min(times) for size, times in took.items()}
    chosen, _ = rollout("auto", one)
    return {
        "placement": placement,
        "steps_per_s": speed,
        "seconds": took,
        "ring_2_over_1": speed[2] / speed[1],
        "planner_chose": chosen.num_overlapped(),
        "fastest": max(speed, key=lambda each: speed[each]),
    }


def question_us(one: Actor) -> float:
    """Median time of asking for eight environments' actions."""
    arguments = (np.zeros((8, 8), np.float32), np.full((8, 1), 0.5), None)
    times: list[float] = []
    for _ in range(NUM_QUESTIONS):
        begin = time.perf_counter()
        one.act(*arguments)
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


class _Policy:
    """A Ray actor that acts."""

    def __init__(self) -> None:
        self._actor = actor()

    def act(self, *arguments: Any) -> Any:
        return self._actor.act(*arguments)


class _Asker:
    """A Ray actor that asks it."""

    def send(self, policy: Any) -> float:
        import ray

        class Remote(Actor):
            def act(
                self, obs: Any, noise: Any, action_mask: Any, recurrent_state: Any = None
            ) -> Any:
                return ray.get(policy.act.remote(obs, noise, action_mask, recurrent_state))

        return question_us(Remote())


def ray_call_us() -> float:
    """The same request as a call of a Ray actor, between two actors."""
    import ray
    from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray

    connect_ray()
    try:
        policy: Any = ray.remote(num_cpus=0)(_Policy).remote()
        asker: Any = ray.remote(num_cpus=0)(_Asker).remote()
        return ray.get(asker.ask.remote(policy), timeout=300)
    finally:
        shutdown_ray()


def main() -> None:
    """Measure, and print a table."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--ray", action="store_true", help="also time a call between Ray actors")
    options = arguments.parse_args()
    found = [measure("inline", actor())]
    with served() as one:
        found.append(measure("served", one))
        asked_us = {"inline": question_us(actor()), "served": question_us(one)}
    if options.ray:
        asked_us["ray_call"] = ray_call_us()
    head = ("placement", *(f"{size} at once" for size in SIZES), "2 over 1", "planner", "fastest")
    rows = [
        (
            one["placement"],
            *(f"{one['steps_per_s'][size]:.0f}/s" for size in SIZES),
            f"{one['ring_2_over_1']:.2f}",
            one["planner_chose"],
            one["fastest"],
        )
        for one in found
    ]
    print(table(head, rows))
    print("a request takes " + ", ".join(f"{us:.0f} us {name}" for name, us in asked_us.items()))
    result = {"sleep_s": SLEEP_S, "num_groups": NUM_GROUPS,
              "horizon": HORIZON, "rings": found, "question_us": asked_us}  # fmt: skip
    report(result, options.json)


if __name__ == "__main__":
    main()
