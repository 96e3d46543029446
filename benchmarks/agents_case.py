"""What all sides of `agents.py` share; imports the standard library only, for two environments.

A conversation: the policy says some words and calls `look_up`, is shown an entry, and so on for a
given number of turns. The answer to the last turn is not waited for, and not shown.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOOL = "look_up"
ENTRIES = "abcdefgh"
GROUP, NUM_GROUPS = 12, 8  # words of one phase, and phases; see `chain_folder`
MEAN_MORE_WORDS = 16
MAX_TURN_TOKENS = 256  # one turn in a million is longer
MAX_TOTAL_TOKENS = 1024
NUM_PROMPTS, NUM_SAMPLES, NUM_TURNS = 16, 4, 4  # of an update against TRL
ROWS = NUM_PROMPTS * NUM_SAMPLES
LONGEST_S = 0.1  # of a tool's answer in every second update
WARM_UP = 1
LEARNING_RATE = 1e-6  # every update is taken in full, but the chain does not drift

CHAT_TEMPLATE = r"""{% if tools %}<|im_start|>system
You answer questions about entries. You may call functions:
{% for tool in tools %}{{ tool | tojson }}{{ "\n" }}{% endfor %}
Write each call as <tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>{{ "\n" }}{% endif %}
{% for message in messages %}
{% if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>{{ "\n" }}
{%- else %}<|im_start|>{{ message.role + "\n" + message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>{{ "\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{{ "\n" }}{% endif %}"""
"""As Qwen's: messages between <|im_start|> and <|im_end|>, calls in Hermes' format."""


def words() -> list[str]:
    """What a turn says before its call, a token each: `GROUP` for each phase."""
    return [f" w{number:02}" for number in range(GROUP * NUM_GROUPS)]


def calls() -> list[str]:
    """What it may call, a token each."""
    made = [json.dumps({"name": TOOL, "arguments": {"entry": entry}}) for entry in ENTRIES]
    return [f"<tool_call>\n{call}\n</tool_call>" for call in made]


def question(number: int) -> list[dict[str, str]]:
    """What a conversation begins with."""
    asked = f"Question {number}: which of the entries {', '.join(ENTRIES)} says most about it?"
    return [{"role": "user", "content": asked}]


def answer(entry: str, number: int) -> str:
    """What an entry says about a question."""
    return f"Entry {entry} of the catalog holds {ord(entry) * (number + 7) % 100}."


def wait_s(number: int, turn: int, longest_s: float) -> float:
    """How long the answer to a turn takes: uniform, given by the question and the turn.

    Args:
        number: Of the question.
        turn: Of the policy, from 0; the last one is not answered.
        longest_s: Longest wait in seconds.
    """
    return random.Random(f"{number}/{turn}").uniform(0, longest_s)


def longest_of(number: int) -> float:
    """Longest wait in seconds of a question: every second update against TRL has waits."""
    return LONGEST_S * (number // NUM_PROMPTS % 2)


class LookUps:
    """The other side of a conversation, as TRL has it: its public methods are tools."""

    def __init__(self) -> None:
        self._number = self._turn = 0
        self._entries: list[str] = []
        self._longest_s: float | None = None

    def reset(self, number: int, longest_s: float | None = None, **_: Any) -> None:
        """Begin.

        Args:
            number: Of the question.
            longest_s: Longest wait in seconds; None for that of the update.
        """
        self._number, self._turn, self._entries = number, 0, []
        self._longest_s = longest_of(number) if longest_s is None else longest_s

    async def look_up(self, entry: str) -> str:
        """Look an entry up in the catalog, which may take a while.

        Args:
            entry: The letter of the entry, from a to h.

        Returns:
            What the entry holds.
        """
        seconds = wait_s(self._number, self._turn, self._longest_s or 0.0)
        self._turn += 1
        self._entries.append(entry)
        if seconds:
            await asyncio.sleep(seconds)
        return answer(entry, self._number)

    def get_reward(self) -> float:
        """The share of calls that were about the first half of the entries."""
        first = sum(entry in ENTRIES[: len(ENTRIES) // 2] for entry in self._entries)
        return first / max(len(self._entries), 1)


def write_side(
    file: Path,
    steps: Sequence[Mapping[str, float]],
    mean_tokens: float,
    mean_turns: float,
    **more: Any,
) -> None:
    """Write what one process measured.

    Args:
        file: Where to.
        steps: Of each timed update seconds of all (`step_s`) and of its conversations
            (`rollout_s`), from the one after the warm-up.
        mean_tokens: Sampled ones of a conversation of the timed updates.
        mean_turns: Of a conversation.
        more: Anything else worth keeping.

    Raises:
        RuntimeError: If some conversations have not all of their turns.
    """
    if mean_turns != NUM_TURNS:
        raise RuntimeError(f"conversations have {mean_turns} turns; all should have {NUM_TURNS}")
    measured = {"steps": list(steps), "mean_tokens": mean_tokens}
    file.write_text(json.dumps(measured | more))
