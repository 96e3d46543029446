"""Answers of the other side as tokens: the piece of the chat template that follows a turn.

A conversation is never rendered again once the policy has spoken: to the tokens that were sampled,
those are added that the template writes between the end of a turn and the beginning of the next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ...dataflow.errors import ConfigError
from ..data.task import Message
from ..models.tokenizer import ChatTemplateError, Tokenizer

_PROBE = "penstock9turn"  # stands for what a turn says; no template writes or changes it
_THOUGHT = "penstock9thought"
_THOUGHT_MARKS = ("<think>", "</think>")
_MOST_PASSES = 4
"""Most passes that look for marks: in few tokenizers, taking one apart makes another."""


class TurnRenderer:
    """Renders messages between two turns.

    Attributes:
        reads_calls: Whether calls that the policy makes can be read; without that, `before` refuses
            tools.
    """

    def __init__(
        self, tokenizer: Tokenizer, variables: Mapping[str, Any], *, keeps_history: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self.reads_calls = True
        # Runs of white space may be added tokens, too: those of source code stay as they are.
        added = {str(token) for token in tokenizer.backend.added_tokens_decoder.values()}
        marks = {mark for mark in added if len(mark) > 1 and not mark.isspace()} | {_PROBE}
        self._marks = _any_of(marks)
        self._marks_beside_thoughts = _any_of(marks.difference(_THOUGHT_MARKS))
        self._written: set[str] = set()
        if not tokenizer.has_template and "chat_template" not in self._variables:
            raise ConfigError(
                f"conversations need a chat template, and the tokenizer '{tokenizer.name}' has "
                "none\n    take an instruct model, or give one: task.chat_template_kwargs="
                "{chat_template: ...}"
            )
        if not keeps_history:
            self._check_history()

    def before(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """The tokens of a whole conversation, up to the turn that answers it."""
        if tools and not self.reads_calls:
            raise ChatTemplateError(
                "the format in which it writes calls is not known; set options.calls of the agent"
            )
        plain, tools = [self._apart(message) for message in messages], self._plain(tools)
        text = self._tokenizer.render(plain, tools=tools, **self._variables)
        for number, message in enumerate(plain):
            if message["role"] in self._written or not message["content"]:
                continue
            probed = [*plain[:number], {**message, "content": _PROBE}, *plain[number + 1 :]]
            if _PROBE not in self._tokenizer.render(probed, tools=tools, **self._variables):
                raise ChatTemplateError(f"it leaves out what '{message['role']}' says")
            self._written.add(message["role"])
        return self._tokenizer.encode(text)

    def after(
        self,
        history: Sequence[Message],
        shown: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        finished: bool,
    ) -> list[int]:
        turn = {"role": "assistant", "content": _PROBE}
        plain = [self._apart(message) for message in shown]
        text = self._tokenizer.render([*history, turn, *plain], tools=tools, **self._variables)
        ids = self._tokenizer.encode(text[text.rindex(_PROBE) + len(_PROBE) :])
        return ids[1:] if finished and self._tokenizer.ends_with(ids[:1]) else ids

    def _apart(self, message: Message) -> Message:
        """Return the message with special tokens in its texts taken apart: a result ends no turn.

        That holds of its content, of names, and of the arguments of calls. The assistant may think:
        what begins and ends a thought of its own stays.
        """
        plain = {key: self._plain(value) for key, value in message.items() if key != "role"}
        if message["role"] == "assistant" and isinstance(message.get("content"), str):
            plain["content"] = _parted(message["content"], self._marks_beside_thoughts)
        return {"role": message["role"], **plain}

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str):
            return _parted(value, self._marks)
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {self._plain(key): self._plain(one) for key, one in items}
        if isinstance(value, list | tuple):
            return [self._plain(one) for one in cast("Sequence[Any]", value)]
        return value

    def _check_history(self) -> None:
        said = f"<think>\n{_THOUGHT}\n</think>\n\n{_PROBE}"
        first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}]
        more = [*first, {"role": "user", "content": "b"}]
        before, after = (
            self._tokenizer.render(each, add_generation_prompt=False, **self._variables)
            for each in (first, more)
        )
        if _THOUGHT in before and _THOUGHT not in after:
            raise ConfigError(
                f"the chat template of '{self._tokenizer.name}' leaves out of earlier turns what "
                "was thought in them, so a policy would be trained on texts that it never reads "
                "again\n    let it read its turns as it said them: options.keeps_history=true of "
                "the agent, and serve the model with such a template"
            )


def _any_of(marks: set[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=lambda mark: (-len(mark), mark)))))


def _parted(text: str, marks: re.Pattern[str]) -> str:
    """Return the text with a space behind the first character of each mark."""
    for _ in range(_MOST_PASSES):
        text, count = marks.subn(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        if not count:
            break
    return text
