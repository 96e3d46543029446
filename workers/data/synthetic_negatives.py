"""Wrong answers made from right ones: the worse half of a preference pair when no file gives one.

A reward model must tell a right answer from the mistakes a policy makes, so several kinds of
mistake are mixed: numbers nearby, wrong digits and signs, missing and extra characters, and the
answers of other problems.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

_NUMBER = re.compile(r"[+-]?[0-9]{1,1000}")


def wrong_answer(
    answer: str, other: str, rng: random.Random, accept: Callable[[str], bool] = lambda _: True
) -> str:
    """A text that differs from `answer`, also as a whole number.

    Args:
        answer: The right answer; not empty.
        other: The answer of another problem, used as it is for one mistake in four.
        rng: Where the choice comes from; the same state gives the same text.
        accept: Further demands on the text. If 32 tries meet none, the text is empty.
    """
    for _ in range(32):
        made = _mistake(answer, other, rng)
        if not _same(made, answer) and accept(made):
            return made
    return ""


def _mistake(answer: str, other: str, rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return other
    if _NUMBER.fullmatch(answer):
        value = int(answer)
        if kind == 1:
            return str(value + rng.choice((-10, -3, -2, -1, 1, 2, 3, 10)))
        if kind == 2:
            return str(-value) if rng.random() < 0.25 else _with_digit_changed(answer, rng)
    return _with_character_changed(answer, rng)


def _with_digit_changed(answer: str, rng: random.Random) -> str:
    place = rng.choice([i for i, c in enumerate(answer) if c.isdigit()])
    return answer[:place] + rng.choice("0123456789") + answer[place + 1 :]


def _with_character_changed(answer: str, rng: random.Random) -> str:
    """Drop one character, double it, or swap it with the next."""
    place = rng.randrange(len(answer))
    before, rest = answer[:place], answer[place:]
    kind = rng.randrange(3)
    if kind == 0:
        return before + rest[1:]
    if kind == 1:
        return before + rest[0] + rest
    return before + rest[:2][::-1] + rest[2:]


def _same(made: str, answer: str) -> bool:
    if _NUMBER.fullmatch(made) and _NUMBER.fullmatch(answer):
        return int(made) == int(answer)
    return made.strip() == answer.strip()
