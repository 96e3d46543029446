"""An observer that keeps an evaluation's scores, and the first responses as text, in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...algorithms.roles.language import Observer
from ...algorithms.roles.language_tables import PerSample, PromptId, TokenIds, TokenMask
from ...dataflow.files import writing
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..models.tokenizer import TokenizerSpec


@dataclass(frozen=True, kw_only=True)
class ExampleFileSpec:
    """Recipe for an `ExampleFile`; a `WorkerSpec`."""

    path: str
    """JSON file; each evaluation replaces it."""
    tokenizer: TokenizerSpec
    """The policy's tokenizer."""
    num_examples: int = 4
    """Prompts whose first response is kept."""
    conversations: Mapping[int, Sequence[Mapping[str, Any]]] = field(
        default_factory=dict[int, Sequence[Mapping[str, Any]]]
    )
    """Problem -> its messages, of those whose prompts are conversations: the decoded prompt would
    show the template around them."""

    def build(self, context: WorkerContext) -> ExampleFile:
        return ExampleFile(self)


class ExampleFile(Observer):
    """Writes one file for each evaluation."""

    def __init__(self, spec: ExampleFileSpec) -> None:
        self._spec = spec
        self._tokenizer = spec.tokenizer.build()

    def observe(
        self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId, *, score: PerSample
    ) -> PerSample:
        """Write `examples`, and all `scores`.

        Of each example its prompt_id, its prompt or messages, its response and score.
        `scores` has a problem's index, as text, and what each of its samples scored. Where there
        is no score it is null.
        """
        scores: dict[int, list[float | None]] = {}
        for problem, value in zip(prompt_id.tolist(), _known(score), strict=True):
            scores.setdefault(problem, []).append(value)
        examples = self._examples(tokens, mask, prompt_id, score)
        path = Path(self._spec.path)
        with writing(path):
            path.write_text(json.dumps({"examples": examples, "scores": scores}))
        return score

    def _examples(
        self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId, score: PerSample
    ) -> list[dict[str, Any]]:
        firsts: dict[int, int] = {}
        for row, problem in enumerate(prompt_id.tolist()):
            firsts.setdefault(problem, row)
        kept = torch.tensor(list(firsts.values())[: self._spec.num_examples], dtype=torch.int64)
        first, chosen = tokens[kept], mask[kept]
        before = first.masked_fill(chosen.cumsum(1) > 0, -1)
        rows = zip(
            prompt_id[kept].tolist(),
            self._tokenizer.decode_rows(before),
            self._tokenizer.decode_responses(first, chosen),
            _known(score[kept]),
            strict=True,
        )
        known = self._spec.conversations
        return [
            {"prompt_id": i, **asked, "response": response, "score": value}
            for i, prompt, response, value in rows
            for asked in [{"messages": known[i]} if i in known else {"prompt": prompt}]
        ]


def _known(score: PerSample) -> list[float | None]:
    return [None if math.isnan(value) else value for value in score.tolist()]
