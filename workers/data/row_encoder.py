"""Problems as tokens: those that are too long or cannot be expressed are reported and left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...dataflow.errors import one_process
from ..models.tokenizer import ChatTemplateError, Tokenizer
from .chat import BadPrompt, ChatOptions, PromptEncoder
from .conversation_tokens import Encoded, NoPrefix
from .row_report import DataReport
from .task import HasReplies, Message, Task

Response = str | Sequence[Message]
"""What is learned from: a text, or the messages that follow the prompt's."""


class RowEncoder:
    """Encodes problems, and reports those that are too long or cannot be expressed.

    Args:
        task: The problems.
        tokenizer: Encodes them.
        report: Is told what is left out.
        chat: How conversations are rendered.
        max_prompt_tokens: Of what comes before the first token that is trained on.
        max_response_tokens: Of the rest.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        report: DataReport,
        chat: ChatOptions,
        max_prompt_tokens: int | None,
        max_response_tokens: int | None = None,
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._report = report
        self._prompts = PromptEncoder(task, tokenizer, chat)
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens

    def prompts(self, indices: Sequence[int]) -> dict[int, list[int]]:
        """Index -> ids of the prompts that can be used, in order."""
        usable = self._encoded_prompts(indices)
        self._report.keep(len(usable))
        return usable

    def with_responses(
        self, indices: Sequence[int], texts_of: Callable[[int], Sequence[str | None]]
    ) -> dict[int, list[Encoded]]:
        """Index -> its prompt with each of its responses, of those that can be used.

        Args:
            indices: The problems.
            texts_of: Their responses where they are no messages; None is missing.
        """
        prompts = self._encoded_prompts(indices)
        kept: dict[int, list[Encoded]] = {}
        for index, prompt in prompts.items():
            replies = self._replies(index)
            given: Sequence[Response | None] = texts_of(index) if replies is None else replies
            encoded = [self._usable(index, prompt, response) for response in given]
            whole = [row for row in encoded if row is not None]
            if len(whole) == len(encoded):
                kept[index] = whole
        self._report.keep(len(kept))
        return kept

    def with_response(self, index: int, prompt: list[int], response: Response) -> Encoded:
        """A prompt with a response, by the chat template if the prompt is a conversation.

        Raises:
            ChatTemplateError: If the template refuses it.
            NoPrefix: If its turns cannot be told apart.
        """
        if self._prompts.messages(index) is not None:
            return self._prompts.with_reply(index, response)
        ids = self._tokenizer.encode_response(str(response))
        return Encoded([*prompt, *ids], [(len(prompt), len(prompt) + len(ids))])

    @one_process()
    def _replies(self, index: int) -> Sequence[Sequence[Message]] | None:
        return self._task.replies(index) if isinstance(self._task, HasReplies) else None

    def _encoded_prompts(self, indices: Sequence[int]) -> dict[int, list[int]]:
        usable: dict[int, list[int]] = {}
        for index, ids in zip(indices, self._prompts.encode(indices), strict=True):
            if isinstance(ids, BadPrompt):
                self._reject(index, ids.reason, ids.detail)
            elif not ids:
                self._reject(index, "empty prompt", "it has no tokens")
            elif self._fits(
                index, "prompt", self._prompts.written(index), len(ids), self._max_prompt_tokens
            ):
                usable[index] = ids
        return usable

    def _usable(self, index: int, prompt: list[int], response: Response | None) -> Encoded | None:
        if response is None:
            self._reject(index, "missing answer")
            return None
        try:
            row = self.with_response(index, prompt, response)
        except ChatTemplateError as error:
            self._reject(index, "the chat template fails", str(error))
            return None
        except NoPrefix as error:
            self._reject(index, "turns cannot be told apart", str(error))
            return None
        text = response if isinstance(response, str) else _said(response)
        num_tokens = row.spans[-1][1] - row.num_before
        several = len(row.spans) > 1
        what = "conversation from the assistant's first turn on" if several else "response"
        fits = self._fits(index, what, text, num_tokens, self._max_response_tokens)
        return row if fits else None

    def _fits(self, index: int, what: str, text: str, num_tokens: int, limit: int | None) -> bool:
        if limit is not None and num_tokens > limit:
            self._reject(index, f"over-long {what}", f"{num_tokens} tokens, limit {limit}")
        elif unknown := self._tokenizer.inexpressible(text):
            self._reject(
                index, f"{what} outside the alphabet", f"the tokenizer cannot express {unknown!r}"
            )
        else:
            return True
        return False

    @one_process()
    def _reject(self, index: int, reason: str, detail: str = "") -> None:
        self._report.reject(self._task.where(index), reason, detail)


def _said(messages: Sequence[Message]) -> str:
    return "".join(str(message["content"]) for message in messages)
