"""Nim in PettingZoo's form: who takes the last of seven stones has won. Tests copy it.

`wrong` says what the game does at its third move instead of what it should.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Nim(AECEnv[str, dict[str, Any], int]):
    """One may take one, two or three."""

    metadata = {"name": "nim"}  # noqa: RUF012

    def __init__(self, wrong: str = "", players: int = 2) -> None:
        self.wrong = wrong
        self.possible_agents = ["one", "two", "three"][:players]

    def observation_space(self, agent: str) -> spaces.Dict:
        if self.wrong == "silent":
            raise KeyError(agent)
        width = 3 if self.wrong == "spaces" and agent == "two" else 2
        return spaces.Dict(
            {
                "observation": spaces.Box(0, 7, (width,), np.float64),
                "action_mask": spaces.Box(0, 1, (3,), np.int8),
            }
        )

    def action_space(self, agent: str) -> spaces.Discrete:
        del agent
        return spaces.Discrete(3, start=1) if self.wrong == "start" else spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        del options
        self.random = np.random.default_rng(seed)
        self.agents = [*self.possible_agents]
        self.left, self.moves = 7, 0
        self.agent_selection = self.agents[int(self.random.integers(2))]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)

    def observe(self, agent: str) -> dict[str, Any]:
        wrong = self.wrong if self.moves == 2 else ""
        mine = float(agent == self.agent_selection)
        if wrong == "bare":
            return np.zeros(2)  # type: ignore[return-value]
        obs: Any = np.array([self.left, np.nan if wrong == "nan" else mine])
        if wrong == "shape":
            obs = obs[:1]
        elif wrong == "text":
            obs = ["seven", "stones"]
        left = 0 if wrong == "stuck" else self.left
        return {"observation": obs, "action_mask": np.arange(1, 4) <= left}

    def step(self, action: int) -> None:
        """Take `action + 1` stones; misbehave at the third move as `wrong` says."""
        self.moves += 1
        if self.moves == 3 and self.wrong == "raises":
            raise RuntimeError("no stones any more")
        if self.moves == 3 and self.wrong == "hangs":
            time.sleep(30)
        self.left -= action + 1
        player = self.agent_selection
        self.agent_selection = next(name for name in self.agents if name != player)
        if self.moves == 3 and self.wrong == "stranger":
            self.agent_selection = "nobody"
        reward: Any = np.nan if self.moves == 3 and self.wrong == "reward" else 0.0
        if self.moves == 3 and self.wrong == "none":
            reward = None
        self.rewards = {name: reward for name in self.agents}  # noqa: C420
        if self.left == 0:
            self.rewards = {name: 1.0 if name == player else -1.0 for name in self.agents}
            self.terminations = dict.fromkeys(self.agents, True)
        elif self.moves == 3 and self.wrong == "limit":
            self.truncations = dict.fromkeys(self.agents, True)


def env(**options: Any) -> Nim:
    return Nim(**options)


def stateless() -> AECEnv[str, dict[str, Any], int]:
    """Never says whose turn it is."""

    class Stateless(Nim):
        def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
            self.agents = [*self.possible_agents]

    return Stateless()


def gym_env() -> Any:
    return gym.make("CartPole-v1")


def parallel() -> Any:
    class Rain(ParallelEnv[str, Any, int]):
        possible_agents = ["one", "two"]  # noqa: RUF012

    return Rain()


def nothing() -> None:
    """A function without a return."""


NUMBER = 7


class Leaves(AECEnv[str, dict[str, Any], int]):
    """The second player leaves at its third move; the other earns 1 in each of five further ones.

    With `wrong` "limit" it leaves by a limit; with "stays" the game does not let it go.
    """

    metadata = {"name": "leaves"}  # noqa: RUF012

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.possible_agents = ["first", "second"]

    def observation_space(self, agent: str) -> spaces.Dict:
        del agent
        mask = spaces.Box(0, 1, (2,), np.int8)
        return spaces.Dict({"observation": spaces.Box(0, 99, (1,)), "action_mask": mask})

    def action_space(self, agent: str) -> spaces.Discrete:
        del agent
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        del seed, options
        self.agents = [*self.possible_agents]
        self.agent_selection = "first"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}
        self.turns = dict.fromkeys(self.agents, 0)

    def observe(self, agent: str) -> dict[str, Any]:
        assert agent in self.agents
        return {"observation": np.array([sum(self.turns.values())]), "action_mask": np.ones(2)}

    def step(self, action: int | None) -> None:
        """Make a move; a player who is alone earns 1 by it."""
        mover = self.agent_selection
        if self.terminations[mover] or self.truncations[mover]:
            if self.wrong != "stays":
                self._was_dead_step(action)  # type: ignore[arg-type]
            return
        self.turns[mover] += 1
        alone = len(self.agents) == 1
        self.rewards = {agent: float(alone) for agent in self.agents}
        if mover == "second" and self.turns[mover] == 3:
            (self.truncations if self.wrong == "limit" else self.terminations)[mover] = True
        if mover == "first" and self.turns[mover] == 8:
            self.terminations[mover] = True
        others = [agent for agent in self.agents if agent != mover]
        self.agent_selection = (others or self.agents)[0]
        self._deads_step_first()


def leaves(**options: Any) -> Leaves:
    return Leaves(**options)
