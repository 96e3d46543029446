"""Environments of Gymnasium that speak, some of which raise, hang or say something else."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Generator
from typing import Any

import gymnasium as gym
import pytest
from gymnasium import spaces
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.adapters.text_environments import (
    GymnasiumTextTask,
    GymnasiumTextTaskSpec,
)
from penstock.workers.agents.environment import TurnResult
from penstock.workers.data.task import Task, fingerprint, task_alphabet

from ..conversing import converse

LETTERS = "abcdefgh"
RELEASE = threading.Event()


class Echo(gym.Env[str, str]):
    """Shows a word, and wants to hear it backwards."""

    def __init__(self, word_length: int = 4, fault: str = "") -> None:
        self.observation_space = spaces.Text(50, charset=LETTERS)
        self.action_space = spaces.Text(50, charset=LETTERS)
        self._length, self._fault = word_length, fault
        self._word = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        if self._fault == "number":
            return 7, {}  # pyright: ignore[reportReturnType] - what a bad environment does
        if self._fault == "hangs at once":
            RELEASE.wait(20)
        letters = self.np_random.integers(len(LETTERS), size=self._length)
        self._word = "".join(LETTERS[place] for place in letters)
        return self._word, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._fault == "raises":
            raise ZeroDivisionError("on purpose")
        if self._fault == "exits":
            raise SystemExit(3)
        if self._fault == "hangs":
            RELEASE.wait(20)
        right = action == self._word[::-1]
        if self._fault == "nan":
            return "", float("nan"), False, False, {}
        return f"not {action}", float(right), right, False, {}


NAME = f"{__name__}:Echo"


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    """This module by its name, and every thread that hangs let go at the end."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this())
    RELEASE.clear()
    yield
    RELEASE.set()


def _this() -> Any:
    from types import ModuleType

    module = ModuleType(__name__)
    module.__dict__.update(globals())
    return module


def spec(fault: str = "", **others: Any) -> GymnasiumTextTaskSpec:
    given: dict[str, Any] = {
        "env": NAME,
        "options": {"word_length": 4, "fault": fault},
        "num_train": 8,
        "num_held_out": 3,
        **others,
    }
    return GymnasiumTextTaskSpec(**given)


def test_the_first_observation_is_the_prompt() -> None:
    task = spec().build()
    assert isinstance(task, GymnasiumTextTask)
    assert isinstance(task, Task)
    prompts = [task.prompt_text(index) for index in (*task.train, *task.held_out)]
    assert len(set(prompts)) == 11
    assert all(len(prompt) == 4 for prompt in prompts)
    assert (task.answer_text(0), task.replies(0)) == (None, None)
    assert fingerprint(task) == fingerprint(spec().build())


@pytest.mark.slow
def test_a_conversation() -> None:
    task = spec().build()
    prompt = task.prompt_text(2)
    wrong, right = converse(task.environment(2), "x", prompt[::-1])
    assert wrong == TurnResult(
        messages=[{"role": "user", "content": "not x"}], reward=0.0, counts={"steps": 1.0}
    )
    assert right == TurnResult(reward=1.0, done=True, counts={"steps": 1.0})
    assert task.score(2, prompt[::-1]) == 1.0
    assert task.score(2, "x") == task.unfinished_score


def test_a_conversation_ends_after_so_many_steps() -> None:
    task = spec(max_steps=2).build()
    assert [result.done for result in converse(task.environment(0), "x", "y")] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises", "exits", "hangs", "nan", "number", "hangs at once"])
def test_an_environment_that_goes_wrong_ends_its_conversation(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = spec().build()
    bad = spec(fault, step_limit_s=0.3)
    object.__setattr__(task, "spec", bad)
    with caplog.at_level(logging.WARNING):
        (result,) = converse(task.environment(0), "x")
    assert result == TurnResult(reward=None, done=True, counts={"env_errors": 1.0})
    expected = {
        "raises": "in step: ZeroDivisionError('on purpose')",
        "exits": "SystemExit(3) was raised",
        "hangs": "in step: took longer than 0.3 s",
        "nan": "in step: ValueError('a reward is nan')",
        "number": "in reset: TypeError('an observation is a int, and not a text')",
        "hangs at once": "in reset: took longer than 0.3 s",
    }
    assert expected[fault] in caplog.text


def test_a_conversation_that_never_began_is_closed() -> None:
    async def close() -> None:
        waits: Any = spec().build().environment(0)
        await waits.close()

    asyncio.run(close())


@pytest.mark.slow
def test_the_alphabet_is_that_of_the_prompts_and_the_option() -> None:
    assert set(task_alphabet(spec(characters="not x").build())) <= set("\nnot x" + LETTERS)


def test_registered_names() -> None:
    gym.register("penstock_test/Echo-v0", entry_point=lambda **options: Echo(**options))
    try:
        task = spec(env="penstock_test/Echo-v0", options={"word_length": 3}).build()
    finally:
        del gym.registry["penstock_test/Echo-v0"]
    assert len(task.prompt_text(0)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env": "no_such_module:Env"},
         '\'task.env\': \'no_such_module:Env\' cannot be made: ModuleNotFoundError("No module '
         'named \'no_such_module\'")\n    give the name of a registered environment, or '
         "module:factory"),
        ({"options": {"fault": "number"}},
         f"'task.env': '{NAME}' gave no first observation: "
         "TypeError('an observation is a int, and not a text')\n"
         "    it must return a text from reset(seed=...); task.step_limit_s is the time it may "
         "take"),
        ({"options": {"fault": "hangs at once"}, "step_limit_s": 0.2},
         f"'task.env': '{NAME}' gave no first observation: not within 0.2 s\n"
         "    it must return a text from reset(seed=...); task.step_limit_s is the time it may "
         "take"),
        ({"options": {"word_length": 1}},
         f"task 'gymnasium_text[{NAME}]' has only about 8 different prompts, and 11 are asked "
         "for\n    lower task.num_train or task.num_held_out, or make the task larger"),
    ],
)  # fmt: skip
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        spec(**given).build()
    assert str(refused.value) == message
