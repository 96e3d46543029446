"""What the other side says as tokens: the piece of the chat template that follows a turn.

A conversation is never rendered again once the policy has spoken: to the tokens that were sampled,
those are added that the template writes between the end of a turn and the beginning of the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...dataflow.errors import ConfigError
from ..data.task import Message
from ..models.tokenizer import ChatTemplateError, Tokenizer

_PROBE = "penstock9turn"
"""Stands for what a turn says; no template writes or changes it."""
_THOUGHT = "penstock9thought"


class TurnRenderer:
    """Renders messages between two turns.

    Args:
        tokenizer: Holds the template.
        variables: Further variables of the template.
        keeps_history: Whether the policy is to read its turns as it said them though the template
            would leave out parts of earlier ones.

    Raises:
        ConfigError: If there is no template, or it writes earlier turns in another way once the
            conversation has gone on, and that is not to be passed over.
    """

    def __init__(
        self, tokenizer: Tokenizer, variables: Mapping[str, Any], *, keeps_history: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        added = tokenizer.backend.added_tokens_decoder.values()
        self._marks = [str(token) for token in added if token.special and len(str(token)) > 1]
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
        """The tokens of a whole conversation, up to the turn that answers it.

        Args:
            messages: What was said; special tokens that are spelled in it are taken apart.
            tools: Schemas of what may be called.

        Raises:
            ChatTemplateError: If the template refuses the messages, or leaves tools or a message
                out.
        """
        plain = [{**message, "content": self._plain(message["content"])} for message in messages]
        text = self._tokenizer.render(plain, tools=tools, **self._variables)
        if tools and text == self._tokenizer.render(plain, **self._variables):
            raise ChatTemplateError("it shows no tools")
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
        """The tokens between a turn and the next one.

        Args:
            history: What was said before the turn.
            shown: What follows it; special tokens that are spelled in it are taken apart.
            tools: Schemas that the prompt was rendered with.
            finished: Whether the turn has ended with its end of sequence; it is written for it
                otherwise.

        Raises:
            ChatTemplateError: If the template refuses the messages.
        """
        turn = {"role": "assistant", "content": _PROBE}
        plain = [{**message, "content": self._plain(message["content"])} for message in shown]
        text = self._tokenizer.render([*history, turn, *plain], tools=tools, **self._variables)
        ids = self._tokenizer.encode(text[text.rindex(_PROBE) + len(_PROBE) :])
        return ids[1:] if finished and ids[:1] == [self._tokenizer.eos_id] else ids

    def _plain(self, text: str) -> str:
        """The text, with a space in what would become a special token: a result ends no turn."""
        for mark in self._marks:
            text = text.replace(mark, f"{mark[0]} {mark[1:]}")
        return text

    def _check_history(self) -> None:
        """Refuse a template that leaves out of earlier turns what was said in them."""
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
