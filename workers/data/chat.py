"""Prompts as tokens: texts as the tokenizer begins them, conversations by its own chat template.

The tokens of a conversation are exactly those of
`tokenizer.apply_chat_template(messages, tools=..., add_generation_prompt=True)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...dataflow.errors import ConfigError, one_process
from ..models.tokenizer import ChatTemplateError, Tokenizer
from .task import BadRow, Message, NotMessages, Task, check_messages, is_imitated

LossOn = Literal["response", "completion", "assistant", "all"]
"""Tokens of a demonstration that are imitated: see `task.loss_on`."""


class NoPrefix(ValueError):
    """A conversation whose turns cannot be told apart."""


@dataclass(frozen=True)
class Encoded:
    """A row of tokens."""

    ids: list[int]
    spans: list[tuple[int, int]]  # first and past-the-last place of each piece trained on, in order

    @property
    def num_before(self) -> int:
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
        return _with_spans(ids, runs(kept))
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


def runs(mask: Sequence[bool]) -> list[tuple[int, int]]:
    """First and past-the-last place of each run of True."""
    padded = [False, *mask, False]
    edges = [i for i in range(len(mask) + 1) if padded[i] != padded[i + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


TURNS = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
"""A chat template: every turn of the policy ends with the end of sequence, every other message with
a line feed. There is no generation prompt, and schemas of tools are not shown."""

# Arguments of `apply_chat_template` that are not the template's own.
_SET_BY_US = (
    *("self", "conversation", "messages", "tools", "documents", "tokenize", "tokenizer_kwargs"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    *("return_dict", "return_tensors", "padding", "truncation", "max_length"),
)
_PROBE = "penstock9probe"  # A word that no template writes and none escapes


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    wrap: bool = False
    """Whether a prompt that is a text is rendered as one message of a user."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further variables of the template, such as `{enable_thinking: false}`."""

    def __post_init__(self) -> None:
        for name in self.template_kwargs:
            if name in _SET_BY_US:
                raise ConfigError(
                    f"'task.chat_template_kwargs.{name}' is set by us\n"
                    "    give variables of the template alone, such as enable_thinking"
                )


class PromptEncoder:
    """Turns the prompts of a task into tokens: texts as they are, conversations by the template."""

    def __init__(self, task: Task, tokenizer: Tokenizer, chat: ChatOptions) -> None:
        self._task, self._tokenizer, self._chat = task, tokenizer, chat
        self._known_roles: set[str] = set()

    @one_process()
    def messages(self, index: int) -> list[dict[str, Any]] | None:
        """The conversation that the model is to continue; None if the prompt is a plain text."""
        given = self._task.messages(index)
        if given is None and not self._chat.wrap:
            return None
        if given is None:
            return [{"role": "user", "content": self._task.prompt_text(index)}]
        messages = check_messages(given)
        template = self._chat.template_kwargs.get("chat_template")
        if "developer" not in str(template or self._tokenizer.backend.chat_template):
            # A template that does not name the role would leave out what the developer says.
            system = {"role": "system"}
            messages = [{**m, **system} if m["role"] == "developer" else m for m in messages]
        if messages[-1]["role"] == "assistant":
            raise NotMessages("the last message of a prompt is the assistant's, not one to answer")
        return messages

    def conversations(self, indices: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
        found = {index: self.messages(index) for index in indices}
        return {index: messages for index, messages in found.items() if messages is not None}

    def encode(self, indices: Sequence[int]) -> list[list[int] | BadRow]:
        """The ids of each prompt; those of a conversation end with the generation prompt."""
        asked = [self._asked(index) for index in indices]
        good = [text for text in asked if not isinstance(text, BadRow)]
        encoded = iter(self._tokenizer.encode_many([text for text, _ in good]))
        return [
            one
            if isinstance(one, BadRow)
            else self._tokenizer.begun(next(encoded))
            if one[1]
            else next(encoded)
            for one in asked
        ]

    def with_reply(
        self, index: int, reply: str | Sequence[Message], loss_on: LossOn = "response"
    ) -> Encoded:
        """Encode a conversation and what follows; what `loss_on` says of it is trained on."""
        asked = self.messages(index) or []
        told = [{"role": "assistant", "content": reply}] if isinstance(reply, str) else list(reply)
        tools = self.tools(index)
        if loss_on in ("completion", "all"):
            whole = self._render([*asked, *told], tools, add_generation_prompt=False)
            ids, start = self._tokenizer.encode(whole), 1
            if loss_on == "completion":
                before = self._tokenizer.encode(self._render(asked, tools))
                _check_prefix(before, ids, "the prompt")
                start = len(before)
            return _with_spans(ids, [(start, len(ids))])
        with one_process():
            all_turns = loss_on == "assistant" or self._task.imitates_history(index)
        return encode_conversation(
            self._tokenizer,
            [*asked, *told],
            first=0 if all_turns else len(asked),
            tools=tools,
            variables=self._chat.template_kwargs,
        )

    @one_process()
    def tools(self, index: int) -> list[Mapping[str, Any]] | None:
        """Return schemas of the tools that the template, or `Tokenizer.render`, shows the model."""
        tools = self._task.tools(index)
        if not tools or (self._task.tells_calls and not self.has_tool_template):
            return None
        return list(tools)

    @property
    def has_tool_template(self) -> bool:
        """Whether the chat template shows tools; else `Tokenizer.render` writes them as text."""
        return self._tokenizer.shows_tools(self._chat.template_kwargs)

    @property
    def has_tools(self) -> bool:
        return any(self.tools(index) is not None for index in self._task.listed)

    def written(self, index: int) -> str:
        messages = self.messages(index)
        if messages is None:
            return one_process()(self._task.prompt_text)(index)
        return "".join(str(message["content"]) for message in messages)

    def _asked(self, index: int) -> tuple[str, bool] | BadRow:
        try:
            messages = self.messages(index)
        except NotMessages as error:
            return BadRow("no conversation", str(error))
        if messages is None:
            return one_process()(self._task.prompt_text)(index), True
        if not (self._tokenizer.has_template or "chat_template" in self._chat.template_kwargs):
            asked = "task.chat is true" if self._chat.wrap else "its prompts are conversations"
            raise ConfigError(
                f"task '{self._task.task_id}': {asked}, but the tokenizer '{self._tokenizer.name}' "
                "has no chat template\n    take an instruct model, put its chat_template.jinja "
                "into the model's folder, or give prompts as text"
            )
        tools = self.tools(index)
        try:
            text = self._render(messages, tools)
            unknown = [m["role"] for m in messages if not self._knows(m, messages, tools)]
        except ChatTemplateError as error:
            return BadRow("the chat template fails", str(error))
        if unknown:
            return BadRow(
                "role unknown to the chat template", f"it leaves out what '{unknown[0]}' says"
            )
        return text, False

    def _render(
        self,
        messages: Sequence[Message],
        tools: list[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        return self._tokenizer.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **self._chat.template_kwargs,
        )

    def _knows(
        self,
        message: Message,
        messages: Sequence[Message],
        tools: list[Mapping[str, Any]] | None,
    ) -> bool:
        """Return whether the template writes this role's messages; tried once for each role."""
        role = message["role"]
        # What the assistant said before may be shortened: templates leave out its thoughts.
        if role == "assistant" or role in self._known_roles or not message["content"]:
            return True
        probed = [{**m, "content": _PROBE} if m is message else m for m in messages]
        if _PROBE not in self._render(probed, tools):
            return False
        self._known_roles.add(role)
        return True
