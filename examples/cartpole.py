"""PPO in CartPole, top to bottom: half a million steps, in half a minute on an idle core.

Run it: `python cartpole.py`, or `python cartpole.py 5` for five steps.
"""

from __future__ import annotations

import sys
import time

from penstock.algorithms.env_ppo import EnvPPO, env_ppo_step
from penstock.dataflow import Engine, build, one_group
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorkerSpec
from penstock.workers.executors.process_setup import use_threads
from penstock.workers.training.optimizer import OptimizerSpec

NUM_STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 245
NUM_ENVS, HORIZON = 16, 128
use_threads(1)  # the same sums in the same order, whatever the machine

cartpole = EnvSpec(id="CartPole-v1")
optimizer = OptimizerSpec(
    lr=1e-3, eps=1e-5, max_grad_norm=0.5, schedule="linear", total_calls=max(NUM_STEPS, 1)
)
workers = {
    "env": EnvWorkerSpec(env=cartpole),
    "actor": TorchActorCriticSpec(env=cartpole, optimizer=optimizer),
}
rows = EnvRowSource(num_envs=NUM_ENVS, group_size=NUM_ENVS)
graph = build(env_ppo_step, cfg=EnvPPO(horizon=HORIZON))

began = time.monotonic()
with Engine(graph, one_group(graph), workers=workers) as engine:
    for result in engine.run({"rows": rows}, NUM_STEPS):
        if result.step % 35 == 34 or result.step == NUM_STEPS - 1:
            steps = (result.step + 1) * NUM_ENVS * HORIZON
            mean = result.metrics.get("env.rollout/episode_return", float("nan"))
            print(f"{steps:7,} steps  {time.monotonic() - began:4.0f} s  mean return {mean:5.1f}")
    print("weights", engine.call("actor", "weights_sha256")[:16])
