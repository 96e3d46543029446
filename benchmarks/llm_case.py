"""What the processes of `llm_step.py` and `time_to_reward.py` share; imported in two environments.

A case is a JSON file: the prompts of every update in order, each with what its reward is checked
against and how many tokens it has. A curve is a file with a JSON object per update.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NUM_PROMPTS = 12
NUM_SAMPLES = 8
ROWS = NUM_PROMPTS * NUM_SAMPLES
MAX_NEW_TOKENS = 40
TEMPERATURE = 0.8
LEARNING_RATE = 1e-5
RUNNING_MEAN_STEPS = 3


class Prompt(NamedTuple):
    """A prompt of an update.

    Attributes:
        text: What a user says.
        answer: What `instruction_score` checks a response against.
        num_tokens: With the chat template around it.
    """

    text: str
    answer: str
    num_tokens: int


def write_case(file: Path, updates: Sequence[Sequence[Prompt]]) -> None:
    """Write the prompts of all updates."""
    file.write_text(json.dumps(updates))


def read_case(file: Path) -> list[list[Prompt]]:
    """Read what `write_case` wrote."""
    return [[Prompt(*row) for row in update] for update in json.loads(file.read_text())]


def read_curve(file: Path) -> list[dict[str, Any]]:
    """The updates that a file has so far; a last line that was cut off does not count."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_curve(file: Path, updates: Sequence[Mapping[str, Any]]) -> None:
    """Write a whole curve."""
    file.write_text("".join(json.dumps(update) + "\n" for update in updates))


def reached(rewards: Sequence[float], target: float) -> int | None:
    """Updates until the mean reward of the last `RUNNING_MEAN_STEPS` is at least `target`."""
    for end in range(RUNNING_MEAN_STEPS, len(rewards) + 1):
        if sum(rewards[end - RUNNING_MEAN_STEPS : end]) / RUNNING_MEAN_STEPS >= target:
            return end
    return None
