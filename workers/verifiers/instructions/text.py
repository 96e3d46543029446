"""How instruction checks take a text apart: words, tokens, sentences, paragraphs, languages.

No data files and no network: sentences end at `.`, `!` or `?` unless a known abbreviation stands
there, and languages are told apart by script, letters and common words. Published checkers use
trained tokenizers, so borderline texts may be cut differently.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Check = Callable[..., bool]
"""`check(response, **options)`; whether the response keeps the instruction."""

CHECKS: dict[str, Check] = {}
"""Every known instruction by its id, such as `keywords:existence`."""

COMPAT = "compat"
"""Name of the option that checks take which differ from how they were published."""

punctuation = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"

_ABBREVIATIONS: frozenset[str] = frozenset(
    re.findall(
        r"\S+",
        "mr mrs ms dr prof rev gen col sgt capt lt st jr sr vs etc inc ltd co corp dept est approx "
        "e.g i.e a.m p.m u.s u.k ph.d jan feb aug sept oct nov dec",
    )
)
_END = re.compile(r"[.!?…。！？]+[\"'”’)\]*_]*(?=\s|$)|[。！？]+")
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "less than": lambda count, bound: count < bound,
    "at least": lambda count, bound: count >= bound,
    "more than": lambda count, bound: count > bound,
    "at most": lambda count, bound: count <= bound,
    "exactly": lambda count, bound: count == bound,
}


def instruction(*names: str) -> Callable[[Check], Check]:
    """Register a check under the ids by which data sets call it."""

    def register(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return register


def words(text: str) -> list[str]:
    r"""Runs of word characters (`\w+`): "It's 3 o'clock - go!" has 6."""
    return re.findall(r"\w+", text)


def count_words(text: str) -> int:
    """How many `words` a text has."""
    return len(words(text))


def tokens(text: str) -> list[str]:
    """Words, with what an apostrophe joins, and every punctuation mark on its own."""
    return re.findall(r"\w+(?:['’]\w+)*|[^\w\s]", text)


def bare(word: str) -> str:
    """A word without the punctuation around it."""
    return word.strip(punctuation + " ")


def no_punctuation(text: str) -> str:
    """A text with all ASCII punctuation deleted."""
    return text.translate(str.maketrans("", "", punctuation))


def sentences(text: str) -> list[str]:
    """The text's sentences, each with the mark that ends it; line ends count as spaces."""
    flat = " ".join(text.split())
    found: list[str] = []
    start = 0
    for match in _END.finditer(flat):
        if match.group().rstrip("\"'”’)]*_") == "." and _abbreviates(flat[start : match.start()]):
            continue
        found.append(flat[start : match.end()].strip())
        start = match.end()
    rest = flat[start:].strip()
    return [*found, rest] if rest else found


def _abbreviates(before: str) -> bool:
    """Whether a full stop after this text belongs to an abbreviation or an initial."""
    last = before.rsplit(" ", 1)[-1].lstrip("(\"'[“‘")
    initial = len(last) == 1 and last.isupper() and last not in "AI"
    return initial or last.lower() in _ABBREVIATIONS


def count_sentences(text: str) -> int:
    """How many `sentences` a text has."""
    return len(sentences(text))


def paragraphs(text: str, separator: str = r"\s?\*\*\*\s?") -> list[str] | None:
    """The pieces between separators; None if one in the middle is empty.

    Args:
        text: Any text.
        separator: A regular expression; three stars unless given. Empty pieces before the first and
            after the last one are dropped.
    """
    pieces = [piece.strip() for piece in re.split(separator, text)]
    pieces = pieces[1:] if not pieces[0] else pieces
    pieces = pieces[:-1] if pieces and not pieces[-1] else pieces
    return None if any(not piece for piece in pieces) else pieces


def compare(count: int, relation: str, bound: Any) -> bool:
    """Whether `count` stands in that relation to `bound`: "at least", "less than", ...

    Raises:
        ValueError: If there is no such relation.
    """
    if relation not in _COMPARISONS:
        raise ValueError(f"relation {relation!r} is unknown; choose {', '.join(_COMPARISONS)}")
    return _COMPARISONS[relation](count, int(bound))


def count_keyword(text: str, keyword: str, *, compat: bool = False) -> int:
    """How often a keyword occurs, in any case: as whole words, or as published with `compat`.

    As published, a keyword is a regular expression and matches inside words: "art" is twice in
    "Art at the party".
    """
    pattern = keyword if compat else rf"(?<!\w){re.escape(keyword.strip())}(?!\w)"
    return len(re.findall(pattern, text, flags=re.IGNORECASE))
