"""Responses as a published reward model reads them: by its own tokenizer and chat template.

Where the model's folder has the policy's tokenizer and template, the policy's tokens go to it as
they are. Otherwise responses are decoded, and rendered and encoded anew with their prompts.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...dataflow.errors import WorkerError
from ..data.chat import ChatOptions, PromptEncoder
from ..data.task import Task, TaskSpec, checked_problems, same_task
from ..models.model_folder import folder_config
from ..models.tokenizer import END_MARK, ChatTemplateError, Tokenizer, TokenizerSpec, pad_rows


@dataclass(frozen=True, kw_only=True)
class OwnText:
    """Writes prompts and responses for one reward model; it reads its task when it is asked."""

    folder: str  # The reward model's, with its tokenizer
    task: TaskSpec
    tokenizer: TokenizerSpec  # The policy's
    task_fingerprint: str | None = None
    chat: bool = True  # Whether its chat template is used, if it has one; else texts are joined

    @property
    def differs(self) -> bool:
        """Whether the model has a tokenizer or a chat template that is not the policy's."""
        if not (Path(self.folder) / "tokenizer.json").is_file():
            return False
        return _content(self._own_spec) != _content(self.tokenizer)

    @property
    def num_tokens(self) -> int:
        return self._own.vocab_size

    def rows(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and mask of the same responses; the mask is empty where they do not fit."""
        texts = self._policy.decode_responses(tokens, mask)
        problems = checked_problems(self._task, prompt_id)
        made = [self._encoded(i, text, [0]) for i, text in zip(problems, texts, strict=True)]
        # From where the response begins, so that what comes before is computed once for a group.
        whole = [(ids, range(at[0] if at else len(ids) - 1, len(ids))) for ids, at in made]
        return self._table(whole, tokens.device)

    def steps(
        self, tokens: Tensor, mask: Tensor, ends: Tensor, prompt_id: Tensor, *, close: str, tag: str
    ) -> tuple[Tensor, Tensor]:
        """Return tokens, and where the steps are scored: bool, as many as `ends` where rows fit.

        `tag` stands in place of what ends a step in the policy's text, `close`; "" leaves that.
        """
        made: list[tuple[list[int], list[int]]] = []
        columns = zip(tokens.tolist(), mask.tolist(), ends.tolist(), strict=True)
        for index, row in zip(checked_problems(self._task, prompt_id), columns, strict=True):
            content, places, step = "", list[int](), list[int]()
            for token, kept, is_end in zip(*row, strict=True):
                step += [token] * kept
                if is_end:
                    text, step = self._policy.said(step), []
                    if tag:  # what a response writes as the tag itself ends no step
                        text = text.replace(tag, "").removesuffix(close) + tag
                    content += text
                    seen = content.rstrip() if tag.strip() else content
                    places.append(max(len(seen) - 1, 0))
            made.append(self._encoded(index, content, places))
        return self._table(made, tokens.device)

    def _encoded(
        self, index: int, response: str, places: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Ids of prompt and response, and the tokens at some places of the response's text."""
        text, begin = self._written(index, response)
        backend: Any = self._own.backend
        ours = {"split_special_tokens": False} if END_MARK in text else {}
        text = text.replace(END_MARK, backend.eos_token)
        made = backend(text, add_special_tokens=False, return_offsets_mapping=True, **ours)
        ids: list[int] = made["input_ids"]
        starts = [start for start, _ in made["offset_mapping"]]
        if not self._by_template:
            whole = self._own.begun(ids)
            starts = [0] * (len(whole) - len(ids)) + starts
            ids = [*whole, *self._own.encode_response("")]
        at = [bisect_right(starts, min(begin + place, len(text) - 1)) - 1 for place in places]
        return ids, at if begin >= 0 else []

    def _written(self, index: int, response: str) -> tuple[str, int]:
        """The whole text, and where the response begins in it; below 0 if it is written anew."""
        if not self._by_template:
            before = self._prompts.written(index)
            return before + response, len(before)
        reply = {"role": "assistant", "content": response}
        messages = [*(self._prompts.messages(index) or []), reply]
        tools = self._prompts.tools(index)
        try:
            text = self._own.render(messages, tools=tools, add_generation_prompt=False)
        except ChatTemplateError as error:
            raise WorkerError(
                f"the chat template of the reward model in '{self.folder}' fails on "
                f"{self._task.where(index)}: {error}\n    leave such problems out, or set chat: "
                "false in the reward's options"
            ) from error
        begin = text.rfind(response.strip())  # templates may strip it
        return text, begin if begin < 0 else begin - len(response) + len(response.lstrip())

    def _table(
        self, rows: Sequence[tuple[list[int], Sequence[int]]], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        most = getattr(folder_config(Path(self.folder)), "max_position_embeddings", None)
        fits = [most is None or len(ids) <= most for ids, _ in rows]
        tokens = pad_rows(ids for ids, _ in rows)
        mask = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, ((_, places), fit) in enumerate(zip(rows, fits, strict=True)):
            mask[row, [*places] if fit else []] = True
        return tokens.to(device), mask.to(device)

    @property
    def _own_spec(self) -> TokenizerSpec:
        return TokenizerSpec(kind="folder", folder=self.folder)

    @functools.cached_property
    def _own(self) -> Tokenizer:
        return self._own_spec.build()

    @functools.cached_property
    def _policy(self) -> Tokenizer:
        return self.tokenizer.build()

    @functools.cached_property
    def _task(self) -> Task:
        return same_task(self.task, self.task_fingerprint, "reward")

    @functools.cached_property
    def _prompts(self) -> PromptEncoder:
        return PromptEncoder(self._task, self._own, ChatOptions(wrap=self._by_template))

    @property
    def _by_template(self) -> bool:
        return self.chat and self._own.has_template


@functools.lru_cache(maxsize=64)
def _content(spec: TokenizerSpec) -> tuple[str, Any]:
    backend: Any = spec.build().backend
    read = json.loads(backend.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    return json.dumps(read), backend.chat_template
