"""Stable-Baselines3's PPO with CleanRL's ppo.py settings on CartPole-v1; prints one line of JSON.

Runs in the environment `.venv-sb3`, without Penstock: python sb3_side.py SEED STEPS THREADS
"""

# It runs where stable-baselines3 is installed, which is not where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import time
from collections import deque

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy


def falling(left: float) -> float:
    """The learning rate, by the share of training that is left."""
    return 2.5e-4 * left


def main(seed: int, steps: int, threads: int) -> None:
    """Train, then play 100 episodes with the likeliest actions."""
    torch.set_num_threads(threads)
    envs = make_vec_env("CartPole-v1", n_envs=4, seed=seed)
    model = PPO(
        "MlpPolicy",
        envs,
        learning_rate=falling,
        n_steps=128,
        batch_size=128,
        n_epochs=4,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        clip_range_vf=0.2,
        ent_coef=0.01,
        vf_coef=0.5,
        max_grad_norm=0.5,
        seed=seed,
        device="cpu",
        policy_kwargs={"optimizer_kwargs": {"eps": 1e-5}},
    )
    begin = time.perf_counter()
    model.learn(total_timesteps=steps)
    spent = time.perf_counter() - begin
    recent: deque[float] = deque((info["r"] for info in model.ep_info_buffer or ()), maxlen=100)
    played, _ = evaluate_policy(model, make_vec_env("CartPole-v1", seed=seed + 1), 100)
    print(
        json.dumps(
            {
                "frames_per_s": model.num_timesteps / spent,
                "last_100_return": sum(recent) / len(recent),
                "greedy_return": float(played),
                "seconds": spent,
            }
        )
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
