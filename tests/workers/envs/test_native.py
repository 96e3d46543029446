"""Numpy groups: what is saved of them, and what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import VectorWrapper
from penstock.dataflow.errors import StateError
from penstock.workers.envs.native import copied, same
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.worker import EnvWorker

from .acting import env_worker, roll


class Windy(CartPoleVectorEnv):
    """Pays by a wind that grows, and has what numpy groups may have besides."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.wind: Any = np.float32(0.1)
        self.name: str | None = None
        self.notes: Any = {
            "kinds": [1, 2],
            "table": np.arange(3),
            "draws": np.random.default_rng(0),
        }
        self.changes = ""

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        self.wind, self.name = np.float32(self.wind * 1.1), "breeze"
        if self.changes == "list":
            self.notes["kinds"].append(3)
        elif self.changes == "draws":
            self.notes["draws"].random()
        elif self.changes == "new":
            self.gusts = {1}
        return obs, reward * self.wind, *rest


class Doubles(VectorWrapper):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.factor = 1.0

    def step(self, actions: Any) -> Any:
        obs, reward, *rest = self.env.step(actions)
        self.factor *= 2
        return obs, reward * self.factor, *rest


def doubled(**options: Any) -> Doubles:
    return Doubles(Windy(**options))


@pytest.fixture(autouse=True)
def _windy() -> None:  # pyright: ignore[reportUnusedFunction]
    if "toys/Windy-v0" not in gym.registry:
        made: Any = {"Windy": Windy, "Doubled": doubled}
        for name, entry_point in made.items():
            gym.register(f"toys/{name}-v0", vector_entry_point=entry_point)


def worker(name: str = "Windy") -> EnvWorker:
    return env_worker(EnvSpec(id=f"toys/{name}-v0", vectorized=True))


def inside(worker: EnvWorker) -> Any:
    """The numpy object of group 0."""
    group: Any = worker._live[0]._group  # pyright: ignore[reportPrivateUsage]
    return group._env.unwrapped


@pytest.mark.parametrize("name", ["Windy", "Doubled"])
def test_numbers_of_every_kind_are_saved(name: str, tmp_path: Path) -> None:
    one, other = worker(name), worker(name)
    roll(one, 0, horizon=5)
    one.save_state(tmp_path)
    other.load_state(tmp_path)
    found = [roll(each, 1, horizon=5).reward for each in (one, other)]
    assert torch.equal(*found)
    assert type(inside(other).wind) is np.float32
    assert inside(other).name == "breeze"


@pytest.mark.parametrize("changes", ["list", "draws", "new"])
def test_what_cannot_be_saved_is_refused(changes: str, tmp_path: Path) -> None:
    one = worker()
    roll(one, 0, horizon=2)
    one.save_state(tmp_path)
    inside(one).changes = changes
    roll(one, 1, horizon=2)
    with pytest.raises(
        StateError,
        match=r"^environments \[0, 1\] of 'toys/Windy-v0' \(seed \d+\) cannot be saved: attribute "
        r"'\w+', a \w+, has changed since they were made, and only arrays, numbers and texts are "
        "saved\n"
        "    set task.vectorized=false to step single environments$",
    ):
        one.save_state(tmp_path)


@pytest.mark.parametrize("break_", ["name", "random"])
def test_what_does_not_come_to_where_it_was_is_refused(break_: str, tmp_path: Path) -> None:
    one = worker()
    roll(one, 0)
    one.save_state(tmp_path)
    file = tmp_path / "group-0.json"
    state = json.loads(file.read_text())
    if break_ == "name":
        state["envs"]["values"]["storm"] = 1.0
    else:
        state["envs"]["random"]["bit_generator"] = "MT19937"
    file.write_text(json.dumps(state))
    one.load_state(tmp_path)
    with pytest.raises(
        StateError,
        match=r"^environments \[0, 1\] of 'toys/Windy-v0' \(seed \d+\) do not come to where they "
        rf"were when they were saved: .*{'storm' if break_ == 'name' else 'MT19937'}",
    ):
        roll(one, 1)


class Part:
    def __init__(self, number: int) -> None:
        self.number, self.whole = number, self

    def method(self) -> int:
        return self.number


@pytest.mark.parametrize(
    "thing", [[1, (2.0, "a")], {"a": np.ones(2)}, Part(1), Part(1).method, len]
)
def test_a_copy_is_the_same(thing: Any) -> None:
    assert same(thing, copied(thing))


@pytest.mark.parametrize(
    ("one", "other"),
    [([1], [1, 2]), ([1], (1,)), ({"a": 1}, {"b": 1}), (np.ones(2), np.ones(2, np.float32)),
     (Part(1), Part(2)), (torch.ones(2), torch.zeros(2)), (iter([1]), iter([1]))],
)  # fmt: skip
def test_what_differs_is_not_the_same(one: Any, other: Any) -> None:
    assert not same(one, other)
