"""Training prompts that share n words in a row with a prompt that is evaluated on.

The usual measure of contamination, with n from 8 to 13: Brown et al., "Language models are few-shot
learners", 2020, appendix C. Words are runs of letters and digits, their case left aside; a prompt
of fewer than n words is compared as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ...dataflow.errors import one_process
from .row_report import DataReport
from .task import Task

_Gram = tuple[str, ...]


def contaminated(
    task: Task, written: Callable[[int], str], num_words: int
) -> tuple[frozenset[int], DataReport]:
    """Training problems that are too near to a held-out one.

    Args:
        task: The problems.
        written: The text of a problem's prompt.
        num_words: How many words in a row are too many in common.

    Returns:
        Their indices, and a report that says of each which words they are.
    """
    evaluated: dict[_Gram, int] = {}
    for index in task.held_out:
        for gram in _grams(written(index), num_words):
            evaluated.setdefault(gram, index)
    report = DataReport(f"training prompts without {num_words} words in a row of a held-out one")
    where = one_process()(task.where)
    found: set[int] = set()
    for index in task.train:
        shared = next((g for g in _grams(written(index), num_words) if g in evaluated), None)
        if shared is None:
            report.keep()
            continue
        found.add(index)
        detail = f"'{' '.join(shared):.80}' is in {where(evaluated[shared])}"
        report.reject(where(index), "contaminated", detail)
    return frozenset(found), report


def _grams(text: str, num_words: int) -> Sequence[_Gram]:
    words = re.findall(r"\w+", text.lower())
    if not words:
        return []
    last = max(1, len(words) - num_words + 1)
    return [tuple(words[start : start + num_words]) for start in range(last)]
