"""Finding stop strings in responses while they are sampled.

A response's text grows with each token by what the token adds to it, decoded in the context of the
tokens before it, as vLLM does: `tokenizers`' own `DecodeStream`, which begins with the prompt and
holds back bytes that are no whole character yet. Only the end of the text is looked at, so a token
costs the same however long the response is.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from torch import Tensor

from ...algorithms.roles.language import Sampling

_INVALID_PREFIX = "Invalid prefix encountered"
"""How `tokenizers` reports tokens whose text changes once others follow them."""


class TokenizerRecipe(Protocol):
    """Recipe for the model's tokenizer, hashable: a `TokenizerSpec`."""

    def build(self) -> Any:
        """One whose `backend` is a fast tokenizer of transformers."""
        ...


class StopStrings:
    """Watches the responses of one call for stop strings.

    Args:
        tokenizer: The model's. Special tokens appear in the text under their names.
        sampling: With at least one string to stop at.
        prompt: i64[P, T], right padded with -1; its own text is not looked at.
    """

    def __init__(self, tokenizer: TokenizerRecipe, sampling: Sampling, prompt: Tensor) -> None:
        self._backend = _backend(tokenizer)
        self._stop = sampling.stop
        self._reach = max(map(len, self._stop)) - 1
        self._min_new_tokens = sampling.min_new_tokens
        prompts = [[token for token in row if token >= 0] for row in prompt.tolist()]
        self._streams = [_stream(ids) for ids in prompts for _ in range(sampling.num_samples)]
        self._tail = [""] * len(self._streams)
        self._count = [0] * len(self._streams)

    def complete(self, row: int, token: int) -> bool:
        """Whether the next token of a response completes a stop string in its text."""
        new = self._decoded(row, token)
        text = self._tail[row] + new
        self._tail[row] = text[-self._reach :] if self._reach else ""
        self._count[row] += 1
        if not new or self._count[row] <= self._min_new_tokens:
            return False
        # What ended in the text before was found, or came before it might.
        return any(text.find(s, max(len(text) - len(new) - len(s) + 1, 0)) >= 0 for s in self._stop)

    def _decoded(self, row: int, token: int) -> str:
        try:
            return self._streams[row].step(self._backend, token) or ""
        except Exception as error:  # `tokenizers` raises Exception itself
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            self._streams[row] = _stream([])
            return self._streams[row].step(self._backend, token) or ""


@functools.cache
def _backend(tokenizer: TokenizerRecipe) -> Any:
    """The tokenizer of `tokenizers`; made once in a process."""
    backend: Any = tokenizer.build().backend
    return backend.backend_tokenizer


def _stream(ids: list[int]) -> Any:
    from tokenizers.decoders import DecodeStream

    return DecodeStream(ids=ids, skip_special_tokens=False)
