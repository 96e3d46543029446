"""The one rule for the end of a response, and for its text without what ended it.

Whatever samples, scores, judges, shows or imitates responses asks here, through the tokenizer. A
response ends with an id, or with the token that completes a string. That token is sampled and
trained like the others; what ended a response is no part of its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...algorithms.roles.language import Sampling


@dataclass(frozen=True)
class ResponseEnd:
    """The ends of a response.

    Attributes:
        ids: Tokens; the first is the tokenizer's end of sequence.
        strings: A response ends with the token that completes one of them in its text.
    """

    ids: tuple[int, ...]
    strings: tuple[str, ...] = ()

    def also(self, ids: Iterable[int], strings: Iterable[str] = ()) -> ResponseEnd:
        """Return these ends and more."""
        return ResponseEnd(
            tuple(dict.fromkeys((*self.ids, *ids))),
            tuple(dict.fromkeys((*self.strings, *strings))),
        )

    def sampled_by(self, sampling: Sampling) -> ResponseEnd:
        """Return the ends of responses under a sampling, whose strings replace these."""
        return ResponseEnd(self.ids).also(sampling.stop_token_ids, sampling.stop)

    def as_generation_config(self) -> dict[str, Any]:
        """Return the ends as fields of generation_config.json."""
        ids = [*self.ids]
        found: dict[str, Any] = {"eos_token_id": ids if len(ids) > 1 else ids[0]}
        return {**found, "stop_strings": [*self.strings]} if self.strings else found

    def said(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Return the text of one response without what ended it, if it has ended."""
        end = next((place for place, token in enumerate(ids) if token in self.ids), None)
        if end is not None:
            return decode(ids[:end])
        text = decode(ids)
        if not self.strings:
            return text
        # Only the last token can have ended it: `min_new_tokens` may have let a string pass before.
        # Before the last token the text may have ended with part of a character's bytes.
        before = len(decode(ids[:-1]).rstrip("\ufffd"))
        places = [text.find(one, max(before + 1 - len(one), 0)) for one in self.strings]
        return text[: min((place for place in places if place >= 0), default=len(text))]

    def past_turn(self, turn: Sequence[int], start: int, marks: Iterable[int]) -> int:
        """Return the place behind a turn that is imitated; what a template writes after it is not.

        Args:
            turn: Tokens up to the end of the turn as the template writes it.
            start: The turn's first place.
            marks: Places of special tokens with nothing but white space behind them: the last of
                them ends a turn that has no id of ours.
        """
        ends = [place for place in range(start, len(turn)) if turn[place] in self.ids]
        ends = ends or [place for place in marks if place >= start]
        return max(ends) + 1 if ends else len(turn)
