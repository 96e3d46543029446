"""Samples of a step as the page shows them, and what differs between two responses.

A step is one file, so however much a run keeps, only what is looked at is read. All text is handed
on as it is: the page shows it as text and nothing else.
"""

from __future__ import annotations

import difflib
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from ..run_dir.samples import Order, Sample, Sort, read_samples, sample_key, sample_steps
from .known_runs import Gone

_MOST_CHARACTERS = 200_000
"""Of one text; a response that is longer is cut, and says so."""
_MOST_WORDS = 3000
"""Beyond these, lines are compared instead of words: the time grows with their product."""
_MOST_LINES = 4000
_WORD = re.compile(r"\s+|\w+|[^\w\s]")

Segment = tuple[Literal["both", "left", "right"], str]
"""Who has a piece of text, and the piece."""


def found_samples(
    home: Path,
    step: int,
    *,
    search: str = "",
    sort: Sort = "step",
    order: Order = "highest",
    skip: int = 0,
    limit: int = 20,
) -> dict[str, Any]:
    """Some samples of a step, and how many there are.

    Args:
        home: The stage's folder.
        step: One that has samples.
        search: What the prompt, the response or a turn must hold, in any case of letters.
        sort: By what; all but "step" is a number, and what has none comes last.
        order: Whether the highest or the lowest comes first.
        skip: So many of them are left out at the beginning.
        limit: At most so many are given.

    Raises:
        ConfigError: If there are none of that step, or the file is damaged.
    """
    rows = list(enumerate(read_samples(home, [step])))
    wanted = search.casefold()
    rows = [row for row in rows if not wanted or _holds(row[1], wanted)]
    key = sample_key(sort, order)
    rows.sort(key=lambda row: key(row[1]))
    shown = [_shown(number, sample) for number, sample in rows[skip : skip + limit]]
    return {"num_found": len(rows), "samples": shown}


def same_prompt(home: Path, step: int, prompt: str) -> list[dict[str, Any]]:
    """The samples of a step that answer this very prompt, the best first.

    Raises:
        ConfigError: If there are none of that step, or the file is damaged.
    """
    rows = enumerate(read_samples(home, [step]))
    same = [row for row in rows if row[1].prompt == prompt]
    best = sample_key("reward")
    same.sort(key=lambda row: best(row[1]))
    return [_shown(number, sample) for number, sample in same]


def sample_of(home: Path, step: int, number: int) -> Sample:
    """One sample of a step.

    Raises:
        ConfigError: If there is none with that number.
    """
    rows = read_samples(home, [step])
    if not 0 <= number < len(rows):
        raise Gone("this step has no such sample any more")
    return rows[number]


def steps_with_prompt(home: Path, prompt: str, near: int, limit_s: float) -> dict[str, Any]:
    """The steps that answer a prompt, as far as they can be looked through in a time.

    Args:
        home: The stage's folder.
        prompt: The very text.
        near: Steps are looked through from here, the nearest first.
        limit_s: After so many seconds it ends.
    """
    until = time.monotonic() + limit_s
    steps = sorted(sample_steps(home), key=lambda step: abs(step - near))
    found: list[int] = []
    num_read = 0
    for step in steps:
        if time.monotonic() > until:
            break
        found += [step] if same_prompt(home, step, prompt) else []
        num_read += 1
    return {"steps": sorted(found), "num_read": num_read, "num_steps": len(steps)}


def differing(left: str, right: str) -> list[Segment]:
    """Both texts in pieces: what they share, and what only one of them has, in order.

    Words are compared, or lines where the texts are long. The pieces of "both" and "left" make the
    left text, those of "both" and "right" the right one, up to a bound on their length.
    """
    one, other = (_WORD.findall(text[:_MOST_CHARACTERS]) for text in (left, right))
    if max(len(one), len(other)) > _MOST_WORDS:
        one, other = (text[:_MOST_CHARACTERS].splitlines(keepends=True) for text in (left, right))
        one, other = one[:_MOST_LINES], other[:_MOST_LINES]
    segments: list[Segment] = []
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=len(one) * len(other) > 1_000_000)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            segments.append(("both", "".join(one[a:b])))
            continue
        pieces: tuple[Segment, ...] = (("left", "".join(one[a:b])), ("right", "".join(other[c:d])))
        segments += [piece for piece in pieces if piece[1]]
    return segments


def spoken(sample: Sample) -> str:
    """Everything that a policy said and was shown in one text, to be compared."""
    if not sample.turns:
        return sample.response
    return "\n".join(f"{turn.said}\n{turn.shown}".rstrip() for turn in sample.turns)


def _holds(sample: Sample, wanted: str) -> bool:
    texts = [sample.prompt, sample.response]
    texts += [text for turn in sample.turns for text in (turn.said, turn.shown)]
    return any(wanted in text.casefold() for text in texts)


def _shown(number: int, sample: Sample) -> dict[str, Any]:
    """A sample as JSON can say it, its texts within bounds."""
    shown = {**asdict(sample), "number": number}
    shown["prompt"], shown["response"] = _cut(sample.prompt), _cut(sample.response)
    shown["turns"] = [
        {"said": _cut(turn.said), "reward": turn.reward, "shown": _cut(turn.shown)}
        for turn in sample.turns
    ]
    return shown


def _cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}\n[{len(text) - _MOST_CHARACTERS} more characters]"
