"""An observer that keeps the first scored responses of an evaluation as text, in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...algorithms.roles.language import Observer, PerSample, PromptId, TokenIds, TokenMask
from ...dataflow.file_errors import writing
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..models.tokenizer import TokenizerSpec

__all__ = ["ExampleFile", "ExampleFileSpec"]


@dataclass(frozen=True, kw_only=True)
class ExampleFileSpec:
    """Recipe for an `ExampleFile`; a `WorkerSpec`."""

    path: str
    """JSONL file; each evaluation replaces it."""
    tokenizer: TokenizerSpec
    """The policy's tokenizer."""
    num_examples: int = 4
    """Responses to keep."""
    conversations: Mapping[int, Sequence[Mapping[str, Any]]] = field(
        default_factory=dict[int, Sequence[Mapping[str, Any]]]
    )
    """Problem -> its messages, of those whose prompts are conversations: the decoded prompt would
    show the template around them."""

    def build(self, context: WorkerContext) -> ExampleFile:
        """Make the observer; every rank may write, and all see the same rows."""
        del context
        return ExampleFile(self)


class ExampleFile(Observer):
    """See `ExampleFileSpec`."""

    def __init__(self, spec: ExampleFileSpec) -> None:
        self._spec = spec
        self._tokenizer = spec.tokenizer.build()

    def observe(
        self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId, *, score: PerSample
    ) -> PerSample:
        """Write one line per kept response: prompt_id, prompt or messages, response, score."""
        count = self._spec.num_examples
        first, chosen = tokens[:count], mask[:count]
        before = first.masked_fill(chosen.cumsum(1) > 0, -1)
        rows = zip(
            prompt_id[:count].tolist(),
            self._tokenizer.decode_rows(before),
            self._tokenizer.decode_responses(first, chosen),
            score[:count].tolist(),
            strict=True,
        )
        known = self._spec.conversations
        lines = [
            json.dumps({"prompt_id": i, **asked, "response": response, "score": value})
            for i, prompt, response, value in rows
            for asked in [{"messages": known[i]} if i in known else {"prompt": prompt}]
        ]
        path = Path(self._spec.path)
        with writing(path):
            path.write_text("".join(f"{line}\n" for line in lines))
        return score
