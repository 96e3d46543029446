"""What a recurrent state is worth where velocities are not shown: CartPole, by PPO.

A policy that sees places only cannot tell where the pole is going, unless it remembers where it
was. With and without it, the same settings and seeds.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from bench import machine, parser, report, table
from penstock.algorithms.env_ppo import EnvPPO, env_ppo_step
from penstock.dataflow import Engine, build, one_group
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorkerSpec
from penstock.workers.training.optimizer import OptimizerSpec

NUM_ENVS = 8
NUM_STEPS = 120
LAST = 20
UNITS = (0, 16)
CFG = EnvPPO()


def places_only(**options: Any) -> gym.Env[Any, Any]:
    """CartPole that shows where cart and pole are, the pole in fifths of a radian."""
    box = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    scale = np.array([1.0, 5.0], np.float32)
    made = gym.make("CartPole-v1", **options).unwrapped
    return gym.wrappers.TransformObservation(made, lambda obs: obs[[0, 2]] * scale, box)


def trained(units: int, seed: int) -> dict[str, Any]:
    """Train once; the mean return of episodes in the last steps, and seconds."""
    env = EnvSpec(id="penstock/Places-v0")
    actor = TorchActorCriticSpec(
        env=env,
        network=PerceptronSpec(recurrent_units=units, init_seed=seed),
        optimizer=OptimizerSpec(lr=1e-3, max_grad_norm=0.5),
    )
    graph = build(env_ppo_step, cfg=CFG)
    workers = {"env": EnvWorkerSpec(env=env), "actor": actor}
    begin_s = time.perf_counter()
    with Engine(graph, one_group(graph), workers=workers, seed=seed) as engine:
        steps = list(engine.run({"rows": EnvRowSource(NUM_ENVS, NUM_ENVS)}, NUM_STEPS))
    returns = [step.metrics["env.rollout/episode_return"] for step in steps[-LAST:]]
    seconds = time.perf_counter() - begin_s
    return {"units": units, "seed": seed, "return": float(np.nanmean(returns)), "seconds": seconds}


def main() -> None:
    """Run both, and print what they came to."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    args = options.parse_args()
    torch.set_num_threads(1)
    gym.register("penstock/Places-v0", places_only, max_episode_steps=500)
    runs = [trained(units, seed) for seed in args.seeds for units in UNITS]
    rows: list[list[object]] = [
        [run["units"], run["seed"], f"{run['return']:.0f}", f"{run['seconds']:.1f}"] for run in runs
    ]
    print(table(["units", "seed", "return", "seconds"], rows))
    steps = NUM_ENVS * NUM_STEPS * CFG.horizon
    report({"machine": machine(), "env_steps": steps, "runs": runs}, args.json)


if __name__ == "__main__":
    main()
