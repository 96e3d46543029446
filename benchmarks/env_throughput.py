"""PPO on CartPole-v1, ours beside Stable-Baselines3's, and acting beside the bare environment.

Both train for as many steps of the environment as CleanRL's published runs, in turns, one thread
each: Stable-Baselines3 with the settings of CleanRL's ppo.py, ours with `SETTINGS`, which has more
environments and fewer, larger updates. What counts is the time of the training loop, start-up not
included, and the score is the mean return of the last 100 episodes of training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
from bench import machine, parser, report, table
from numpy.typing import NDArray
from penstock.algorithms.roles.environment import Actor, Acts
from penstock.dataflow.runtime.call_context import step_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorkerSpec

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parent / ".venv-sb3"
REQUIRED = ("torch==2.13.0", "stable-baselines3==2.9.2", "gymnasium==1.4.0")
NUM_ENVS, HORIZON = 16, 128
SETTINGS = (
    "algorithm=env_ppo",
    "task=cartpole",
    "model=mlp",
    f"algorithm.per_step.rows={NUM_ENVS}",
    f"algorithm.cfg.horizon={HORIZON}",
    "algorithm.optimizer.lr=1e-3",
    "executor.num_threads=1",
    "checkpoint_every=1000",
    "evaluation.num_episodes=0",
)
ACTING_ENVS, ACTING_STEPS, REPEATS = 8, 2_000, 7


def peer(seed: int, steps: int) -> dict[str, float]:
    """Stable-Baselines3 in its own environment, which is made if it is missing."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        venv.create(ENVIRONMENT, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIRED], check=True)
    entry = [str(python), str(HERE / "sb3_side.py"), str(seed), str(steps), "1"]
    found = subprocess.run(
        entry, check=True, timeout=3600, stdout=subprocess.PIPE, text=True, env=one_thread()
    )
    result: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return result


def ours(seed: int, steps: int, runs: Path) -> dict[str, float]:
    """`penstock run`, timed by its own main stage."""
    updates = -(-steps // (NUM_ENVS * HORIZON))
    folder = runs / f"seed{seed}"
    entry = [sys.executable, "-m", "penstock.launch.main", "run", *SETTINGS]
    entry += [f"seed={seed}", f"runs={folder}", f"algorithm.num_steps={updates}"]
    subprocess.run(entry, check=True, timeout=3600, env=one_thread(), stdout=subprocess.DEVNULL)
    run = max(folder.glob("*/summary.json"), key=os.path.getmtime).parent
    seconds = json.loads((run / "summary.json").read_text())["main_stage_wall_time_s"]
    frames = updates * NUM_ENVS * HORIZON
    return {
        "frames_per_s": frames / seconds,
        "last_100_return": last_return(run, 100),
        "seconds": seconds,
    }


def last_return(run: Path, episodes: int) -> float:
    """Mean return of at least the last so many episodes."""
    total = count = 0.0
    for line in reversed((run / "metrics.jsonl").read_text().splitlines()):
        row = json.loads(line)
        ended = row["env.rollout/episodes"]
        if ended:
            total += ended * row["env.rollout/episode_return"]
            count += ended
        if count >= episodes:
            break
    return total / max(count, 1)


def one_thread() -> dict[str, str]:
    """The environment of both sides."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


class Trivial(Actor):
    """Pushes left and right in turns, whatever it sees."""

    def __init__(self) -> None:
        self.count = 0

    def act(
        self,
        obs: NDArray[np.float32],
        noise: NDArray[np.float64],
        action_mask: NDArray[np.bool_] | None,
        recurrent_state: NDArray[np.float32] | None = None,
    ) -> Acts:
        """See `Actor.act`."""
        del noise, action_mask, recurrent_state
        self.count += 1
        action = np.full((len(obs), 1), self.count % 2, np.float32)
        return Acts(action=action, logprob=np.zeros(len(obs), np.float32))


def acting() -> dict[str, float]:
    """Steps per second of `env.rollout` with a trivial policy, and of the bare vector env."""
    worker = EnvWorkerSpec(env=EnvSpec(id="CartPole-v1")).build(WorkerContext("env"))
    rows = EnvRowSource(ACTING_ENVS, ACTING_ENVS).batch(0)
    bare = gym.make_vec("CartPole-v1", ACTING_ENVS, vectorization_mode="vector_entry_point")
    bare.reset(seed=0)
    actor = Trivial()
    took: dict[str, list[float]] = {"ours": [], "bare": []}
    for step in range(REPEATS):
        begin = time.perf_counter()
        with step_scope(step):
            worker.rollout(rows.env, rows.group, actor, horizon=ACTING_STEPS)
        middle = time.perf_counter()
        for count in range(ACTING_STEPS):
            bare.step(np.full(ACTING_ENVS, count % 2))
        took["ours"].append(middle - begin)
        took["bare"].append(time.perf_counter() - middle)
    steps = ACTING_ENVS * ACTING_STEPS
    speed = {name: steps / median(times) for name, times in took.items()}
    ratios = [b / o for o, b in zip(took["ours"], took["bare"], strict=True)]
    return {"ours": speed["ours"], "bare": speed["bare"], "ratio": median(ratios)}


def train_pairs(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both sides, seed by seed, in turns."""
    return [
        {
            "seed": seed,
            "peer": peer(seed, args.steps),
            "ours": ours(seed, args.steps, args.runs),
        }
        for seed in args.seeds
    ]


def main() -> None:
    """Run both and print frames per second, scores and ratios."""
    options = parser(__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    options.add_argument("--steps", type=int, default=500_000)
    options.add_argument("--runs", type=Path, default=Path("runs") / "throughput")
    args = options.parse_args()
    speed = acting()
    print(table(["acting", "steps/s"], [[k, f"{v:,.2f}"] for k, v in speed.items()]), flush=True)
    pairs = train_pairs(args)
    rows: list[list[object]] = [
        [
            pair["seed"],
            *(
                f"{pair[side]['frames_per_s']:,.0f} ({pair[side]['last_100_return']:.0f})"
                for side in ("peer", "ours")
            ),
            f"{pair['ours']['frames_per_s'] / pair['peer']['frames_per_s']:.2f}",
        ]
        for pair in pairs
    ]
    print(table(["seed", "SB3 frames/s (return)", "ours", "ratio"], rows))
    report({"machine": machine(), "settings": SETTINGS, "acting": speed, "pairs": pairs}, args.json)


if __name__ == "__main__":
    main()
