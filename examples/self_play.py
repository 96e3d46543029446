"""Self-play from Python, top to bottom: two players of tic-tac-toe, trained against each other.

Run it: `python self_play.py`, or `python self_play.py 5` for five steps. 200 steps of 256 games
take a minute on a laptop. Against random moves the first player then wins 89 % of games and the
second 38 %, where random moves win 58 % and 29 %; against each other they draw 86 %.

Both are roles of one graph, and both are trained by PPO on their own turns of the same games. For
connect four replace TIC_TAC_TOE by CONNECT_FOUR, and take more steps; for a game of EnvPool use
LibraryGameSpec(id="Hex-v1") from penstock.workers.envs.games.libraries.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from penstock.algorithms.env_ppo import EnvPPO
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.losses.actor_critic import ActorCriticLoss
from penstock.algorithms.papers.self_play import SelfPlay, self_play_step
from penstock.algorithms.roles.environment import Actor, Acts
from penstock.dataflow import Engine, build, one_group
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.envs.games.mnk_games import TIC_TAC_TOE
from penstock.workers.envs.task import GameRowSource
from penstock.workers.executors.process_setup import use_threads
from penstock.workers.training.optimizer import OptimizerSpec

NUM_STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
use_threads(1)  # the same sums in the same order, whatever the machine

# --- the game, and two players who begin with different random weights

board = TIC_TAC_TOE
rows = GameRowSource(num_games=256, group_size=256)
players = {
    name: TorchActorCriticSpec(
        env=board,
        network=PerceptronSpec(hidden_sizes=(128, 128), init_seed=seed),
        optimizer=OptimizerSpec(lr=1e-3, eps=1e-5, max_grad_norm=0.5),
    )
    for seed, name in enumerate(("first", "second"))
}
loss = ActorCriticLoss(policy=ClippedPolicyLoss(entropy_coef=0.06))
cfg = SelfPlay(learning=EnvPPO(discount=1.0, loss=loss))

# --- somebody to measure them by


class AtRandom(Actor):
    """Takes any move that is allowed."""

    def act(
        self,
        obs: NDArray[np.float32],
        noise: NDArray[np.float64],
        action_mask: NDArray[np.bool_] | None,
        recurrent_state: NDArray[np.float32] | None = None,
    ) -> Acts:
        """See `Actor.act`."""
        allowed = np.ones((len(obs), 1)) if action_mask is None else action_mask
        count = allowed.sum(axis=1)
        move = (allowed.cumsum(axis=1) > (noise[:, 0] * count)[:, None]).argmax(axis=1)
        return Acts(move[:, None].astype(np.float32), -np.log(count).astype(np.float32))


def shares(first: Any, second: Any) -> str:
    """Of 1000 games."""
    judge = board.build(WorkerContext("judge", seed=1))
    numbers = torch.arange(1000)
    with step_scope(0):
        judge.play(numbers, torch.zeros_like(numbers), first, second)
    won, lost = (judge.metrics[f"{name}_wins"].value for name in ("first", "second"))
    return f"first wins {won:5.1%}  draws {1 - won - lost:5.1%}  second wins {lost:5.1%}"


# --- the graph, run by the engine in this process

graph = build(self_play_step, cfg=cfg)
executor = InProcess()
workers = {"board": board, **players}
with Engine(graph, one_group(graph), workers=workers, executor=executor) as engine:
    for result in engine.run({"rows": rows}, NUM_STEPS):
        if result.step % max(NUM_STEPS // 10, 1) == 0:
            won, lost = (result.metrics[f"board.play/{name}_wins"] for name in players)
            print(f"step {result.step:3d}  first wins {won:.2f}  second wins {lost:.2f}")
    first, second = (executor.role("all", name) for name in players)
    print("against each other        ", shares(first, second))
    print("first against chance      ", shares(first, AtRandom()))
    print("second against chance     ", shares(AtRandom(), second))
    print("chance against itself     ", shares(AtRandom(), AtRandom()))
    for name in players:
        print(name, engine.call(name, "weights_sha256")[:16])
