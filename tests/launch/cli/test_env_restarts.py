"""A run in which an environment of a group goes wrong, from the command line."""

from __future__ import annotations

import importlib
import json
import textwrap
from pathlib import Path

import pytest
from penstock.launch.run_dir.step_logs import read_metrics

from ..conftest import Penstock

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


@pytest.mark.slow
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
    assert json.loads((run / "summary.json").read_text())["env_restarts"] == 1
    assert "environments restarted: 1" in said.err + said.out
    (warned,) = (record.getMessage() for record in caplog.records if "restarted" in record.msg)
    assert warned.startswith("environment 2 of 'frail:Frail-v0' (seed ")
    assert warned.endswith(
        "showed an observation that is not finite: [nan, nan, nan, nan] at step 40 since it was "
        "made; restarted: [0, 1, 2, 3]"
    )


BRITTLE = """
    import gymnasium as gym
    from gymnasium.envs.classic_control.cartpole import CartPoleEnv


    class Brittle(CartPoleEnv):
        \"\"\"Breaks in its fifth, seventh and ninth step.\"\"\"

        taken = 0

        def step(self, action):
            self.taken += 1
            if self.taken in (5, 7, 9):
                raise RuntimeError("broken")
            return super().step(action)


    gym.register("Brittle-v0", Brittle, max_episode_steps=500)
"""


@pytest.mark.slow
def test_a_run_that_ended_of_too_many_failures_goes_on_with_more_patience(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "brittle.py").write_text(textwrap.dedent(BRITTLE))
    monkeypatch.syspath_prepend(tmp_path)
    words = (*WORDS, "task.id=brittle:Brittle-v0", "runs=all")
    patient = penstock("run", *words, "task.max_restarts=1000")
    assert patient.code == 0, patient.err
    assert penstock("run", *words).code == 1
    (ended,) = (run for run in Path("all").iterdir() if not (run / "summary.json").is_file())
    assert penstock("run", f"resume={ended}").code == 1
    again = penstock("run", f"resume={ended}", "task.max_restarts=1000")
    assert again.code == 0, again.err
    first, second = (
        json.loads((run / "summary.json").read_text())["weights_sha256"]
        for run in Path("all").iterdir()
    )
    assert first == second


LATE = """
    from pathlib import Path

    import gymnasium as gym
    from gymnasium.envs.classic_control.cartpole import CartPoleEnv


    class Late(CartPoleEnv):
        \"\"\"Breaks once there is a checkpoint: here, when all has been learnt.\"\"\"

        fixed = False

        def step(self, action):
            if not self.fixed and any(Path("all").glob("*/checkpoints/*")):
                raise RuntimeError("broken")
            return super().step(action)


    gym.register("Late-v0", Late, max_episode_steps=500)
"""


@pytest.mark.slow
def test_what_was_learnt_is_written_though_the_last_measurement_fails(
    penstock: Penstock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late.py").write_text(textwrap.dedent(LATE))
    monkeypatch.syspath_prepend(tmp_path)
    words = (*WORDS[:-1], "task.id=late:Late-v0", "evaluation.num_episodes=4", "runs=all")
    said = penstock("run", *words)
    assert said.code == 1
    assert "env.evaluate" in said.err
    (run,) = Path("all").iterdir()
    assert (run / "models" / "actor" / "model.safetensors").is_file()
    assert not (run / "summary.json").is_file()
    monkeypatch.setattr(importlib.import_module("late").Late, "fixed", True)
    said = penstock("run", f"resume={run}")
    assert said.code == 0, said.err
    assert "nan" not in said.out + said.err
    assert json.loads((run / "summary.json").read_text())["episode_return_after"]["actor"] > 0
