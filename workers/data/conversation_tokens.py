"""A whole conversation as tokens, and which of them the assistant wrote.

The tokens are exactly those of `tokenizer.apply_chat_template(messages, tools=...)`. Where the
template marks what is generated, its marks say which are the assistant's. Elsewhere each turn is
found by rendering what comes before it: the conversation up to turn n must be a token prefix of the
conversation up to turn n + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..models.tokenizer import Tokenizer
from .messages import is_imitated
from .task import Message


class NoPrefix(ValueError):
    """Why the turns of a conversation cannot be told apart."""


@dataclass(frozen=True)
class Encoded:
    """A row of tokens.

    Attributes:
        ids: All of them.
        spans: First and past-the-last place of each piece that is trained on, in order.
    """

    ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def num_before(self) -> int:
        """Tokens before the first one that is trained on."""
        return self.spans[0][0]


def encode_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    first: int,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any],
) -> Encoded:
    """Tokens of a conversation, the assistant's turns from message `first` on to be trained on.

    Those with a weight of 0 are only read.

    A turn ends with what ends a response; what the template writes after that, no policy
    samples, and it is not trained on.

    Args:
        tokenizer: With a chat template.
        messages: All of the conversation.
        first: How many messages are only read.
        tools: JSON schemas of what the model may call.
        variables: Further ones of the template.

    Raises:
        ChatTemplateError: If the template refuses the messages.
        NoPrefix: If the conversation up to a turn is no prefix of the whole, or nothing is trained.
    """

    def rendered(count: int, begins_answer: bool) -> list[int]:
        text = tokenizer.render(
            messages[:count], tools=tools, add_generation_prompt=begins_answer, **variables
        )
        return tokenizer.encode(text)

    ids = rendered(len(messages), False)
    marks = tokenizer.generation_marks(messages, tools=tools, **variables)
    if marks is not None:
        before = rendered(first, False) if first else []
        _check_prefix(before, ids, f"the end of message {first}")
        kept = [mark and place >= len(before) for place, mark in enumerate(marks)]
        for number in range(first, len(messages)):
            if messages[number]["role"] == "assistant" and not is_imitated(messages[number]):
                start, end = rendered(number, False) if number else [], rendered(number + 1, False)
                _check_prefix(start, ids, f"what comes before message {number + 1}")
                _check_prefix(end, ids, f"the end of message {number + 1}")
                kept[len(start) : len(end)] = [False] * (len(end) - len(start))
        spans = _runs(kept)
        return _with_spans(ids, spans)
    spans: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if number < first or not is_imitated(message):
            continue
        before, after = rendered(number, True), rendered(number + 1, False)
        _check_prefix(before, ids, f"what comes before message {number + 1}")
        _check_prefix(after, ids, f"the end of message {number + 1}")
        spans.append((len(before), tokenizer.end_of_turn(after, len(before))))
    return _with_spans(ids, spans)


def _check_prefix(part: list[int], ids: list[int], what: str) -> None:
    if ids[: len(part)] != part:
        raise NoPrefix(f"{what} is rendered in another way when the conversation goes on")


def _with_spans(ids: list[int], spans: list[tuple[int, int]]) -> Encoded:
    if not spans or any(start >= end for start, end in spans):
        raise NoPrefix("no token is the assistant's")
    return Encoded(ids, spans)


def _runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """Places where runs of True begin and end."""
    padded = [False, *mask, False]
    edges = [i for i in range(len(mask) + 1) if padded[i] != padded[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))
