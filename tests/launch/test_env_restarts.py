"""A run in which an environment of a group goes wrong, from the command line."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from penstock.launch.metrics import read_metrics

from .conftest import Penstock

FRAIL = """
    import gymnasium as gym
    import numpy as np
    from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv


    class Frail(CartPoleVectorEnv):
        \"\"\"In one of its steps, the 40th in the process, environment 2 loses its state.\"\"\"

        taken = 0

        def step(self, action):
            Frail.taken += 1
            if Frail.taken == 40:
                self.state[:, 2] = np.nan
            return super().step(action)


    gym.register("Frail-v0", CartPoleEnv, vector_entry_point=Frail, max_episode_steps=500)
"""
WORDS = (
    "algorithm=env_ppo",
    "algorithm.num_steps=3",
    "algorithm.cfg.horizon=32",
    "task=gymnasium",
    "task.id=frail:Frail-v0",
    "model=mlp",
    "evaluation.num_episodes=0",
)


def test_one_bad_environment_of_many_is_restarted_and_counted(
    penstock: Penstock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "frail.py").write_text(textwrap.dedent(FRAIL))
    monkeypatch.syspath_prepend(tmp_path)
    said = penstock("run", *WORDS, "runs=all")
    assert said.code == 0, said.err
    (run,) = Path("all").iterdir()
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["env.rollout/env_restarts"] for row in rows] == [0, 1, 0]
    assert all(row["actor.train/loss"] == row["actor.train/loss"] for row in rows)
    assert (run / "models" / "actor" / "model.safetensors").is_file()
    (warned,) = (record.getMessage() for record in caplog.records if "restarted" in record.msg)
    assert warned.startswith("environment 2 of 'frail:Frail-v0' (seed ")
    assert warned.endswith(
        "showed an observation that is not finite: [nan, nan, nan, nan] at step 40 since it was "
        "made; restarted: [0, 1, 2, 3]"
    )
