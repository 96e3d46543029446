"""An environment that is another one in its vectorized form, as Atari games are."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.envs.spec import EnvSpec

from .acting import env_worker, roll

FRAME = spaces.Box(0, 255, (6, 5, 3), np.uint8)
STACK = spaces.Box(0, 255, (4, 3, 2), np.uint8)


class Screen(gym.Env[Any, Any]):
    observation_space, action_space = FRAME, spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.full(FRAME.shape, 200, np.uint8), {}

    def step(self, action: Any) -> Any:
        return np.full(FRAME.shape, 100 + action, np.uint8), 1.0, False, False, {}


class Screens(VectorEnv[Any, Any, Any]):
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(self, num_envs: int, shown: spaces.Box = STACK, broken: bool = False) -> None:
        if broken:
            raise RuntimeError("no screen")
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = shown, spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        shape: Any = self.single_observation_space.shape
        return np.full((self.num_envs, *shape), 200, np.uint8), {}

    def step(self, actions: Any) -> Any:
        obs: Any = self.reset()
        never = np.zeros(self.num_envs, bool)
        return obs[0], np.ones(self.num_envs), never, never, {}


@pytest.fixture(autouse=True)
def _registered() -> None:  # pyright: ignore[reportUnusedFunction]
    if "toys/Screen-v0" not in gym.registry:
        forms: dict[str, Any] = {
            "Screen": Screens,
            "SameScreen": partial(Screens, shown=FRAME),
            "NoScreen": partial(Screens, broken=True),
        }
        for name, form in forms.items():
            single: Any = Screen
            gym.register(f"toys/{name}-v0", single, vector_entry_point=form)


def test_another_vectorized_form_is_refused_before_anything_is_built() -> None:
    with pytest.raises(ConfigError) as error:
        EnvSpec(id="toys/Screen-v0", vectorized=True).spaces()
    assert str(error.value) == (
        "environment 'toys/Screen-v0' is another one in its vectorized form: there it shows "
        "Box(0, 255, (4, 3, 2), uint8) and takes Discrete(2), and stepped alone it shows "
        "Box(0, 255, (6, 5, 3), uint8) and takes Discrete(2)\n"
        "    leave out task.vectorized=true; if it is an Atari game, task.backend=envpool has it "
        "with stacked frames"
    )


def test_by_default_such_environments_are_stepped_alone() -> None:
    """Then the actor sees as many numbers as it was made for."""
    env = EnvSpec(id="toys/Screen-v0")
    assert env.spaces()[0] == 6 * 5 * 3
    spec = TorchActorCriticSpec(env=env, network=PerceptronSpec(hidden_sizes=(4,)))
    found = roll(env_worker(env), 0, actor=spec.build(WorkerContext("actor", 0)))
    assert set(found.obs.flatten().tolist()) <= {
        np.float32(n / 255).item() for n in (100, 101, 200)
    }


def test_images_are_laid_out_flat_in_the_vectorized_form() -> None:
    env = EnvSpec(id="toys/SameScreen-v0")
    assert env.spaces()[0] == 6 * 5 * 3
    found = roll(env_worker(env), 0)
    assert found.obs.shape[-1] == 6 * 5 * 3
    assert bool((found.obs == torch.tensor(200 / 255)).all())


@pytest.mark.parametrize("vectorized", [None, True])
def test_a_vectorized_form_that_cannot_be_made(vectorized: bool | None) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^environment 'toys/NoScreen-v0' cannot be made in its vectorized form: it raised "
        r"RuntimeError: no screen \([\w./-]*test_forms.py:\d+\)\n"
        "    set task.vectorized=false to step single environments$",
    ):
        EnvSpec(id="toys/NoScreen-v0", vectorized=vectorized).spaces()
