"""A population from Python, top to bottom: four actors balance poles, and inherit weights.

Run it: `python population.py`, or `python population.py 5` for five steps. 40 steps take a minute
on a laptop.

All four learn by PPO, each in environments of its own and at a learning rate of its own. Every
tenth step each is compared with the next one, and inherits its weights, slightly perturbed, if that
one has earned more. So the weights of the best learning rate spread.
"""

from __future__ import annotations

import sys

from penstock.algorithms.env_ppo import EnvPPO
from penstock.algorithms.papers.population import Population, population_step
from penstock.dataflow import Engine, build, one_group
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorkerSpec
from penstock.workers.executors.process_setup import use_threads
from penstock.workers.training.optimizer import OptimizerSpec

NUM_STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
RATES = {"first": 1e-5, "second": 1e-4, "third": 1e-3, "fourth": 1e-2}
use_threads(1)  # the same sums in the same order, whatever the machine

# --- 16 environments in 4 groups: one for each member

cartpole = EnvSpec(id="CartPole-v1")
rows = EnvRowSource(num_envs=16, group_size=4)
members = {
    name: TorchActorCriticSpec(
        env=cartpole,
        network=PerceptronSpec(init_seed=seed),
        optimizer=OptimizerSpec(lr=rate, eps=1e-5, max_grad_norm=0.5),
    )
    for seed, (name, rate) in enumerate(RATES.items())
}
cfg = Population(learning=EnvPPO(horizon=256), select_every=10)

# --- the graph, run by the engine in this process

graph = build(population_step, cfg=cfg)
workers = {"env": EnvWorkerSpec(env=cartpole), **members}
replaced = dict.fromkeys(RATES, 0)
with Engine(graph, one_group(graph), workers=workers) as engine:
    for result in engine.run({"rows": rows}, NUM_STEPS):
        for name in RATES:
            replaced[name] += int(result.metrics[f"{name}.inherit/replaced"])
        if result.step % 10 == 9 or result.step == NUM_STEPS - 1:
            fitness = [f"{result.metrics[f'{name}.inherit/fitness']:6.1f}" for name in RATES]
            print(f"step {result.step + 1:3d}  mean return", *fitness)
    for name, rate in RATES.items():
        weights = engine.call(name, "weights_sha256")[:16]
        print(f"{name:6}  lr {rate:g}  inherited {replaced[name]} times  weights {weights}")
