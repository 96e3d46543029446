"""Responses kept as text: some of each step's, and the first ones of an evaluation.

A step of training is one file, `step-000010.jsonl.gz`, that is complete or absent; a step that is
taken again replaces its own. Text is made and written in a thread: the worker that is about to
train only copies the rows that are kept.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...algorithms.roles.language import Observer
from ...algorithms.roles.language_tables import PerSample, PromptId, TokenIds, TokenMask
from ...dataflow.errors import one_process
from ...dataflow.files import created, writing
from ...dataflow.graph.role import Role
from ...dataflow.runtime.call_context import call_staleness, current_step
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..models.tokenizer import Tokenizer, TokenizerSpec
from .chat import ChatOptions, PromptEncoder
from .sample_files import step_files, take_parts, tokens_key
from .task import TaskSpec

_LOG = logging.getLogger("penstock.samples")
_MOST_WAITING = 2  # steps whose text is not written yet; a worker that is further ahead waits


@dataclass(frozen=True, kw_only=True)
class SampleLogSpec:
    """Recipe for a `SampleLog`; a `WorkerSpec`."""

    folder: str  # made with the first file
    tokenizer: TokenizerSpec  # the policy's
    versions_per_step: int  # train calls of the policy in a step: so many versions of its weights
    max_rows: int  # responses kept of a step, whole prompts first
    keep_steps: int | None  # the newest ones; None for all
    max_bytes: int  # of all files, beyond which every second step is dropped
    # The problems, if their prompts are conversations: they are kept as what was said, a turn
    # after another, without the template around it.
    task: TaskSpec | None = None
    chat: ChatOptions = ChatOptions()  # how those are rendered

    def build(self, context: WorkerContext) -> SampleLog:
        return SampleLog(self, writes=context.answers)


class SampleLog(Role):
    """Writes the files of samples in a thread."""

    def __init__(self, spec: SampleLogSpec, *, writes: bool) -> None:
        self._spec = spec
        self._writes = writes
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []
        self._has_warned = False

    def record(self, tokens: Tensor, mask: Tensor, **columns: Tensor) -> None:
        """Keep the first rows of a step.

        Args:
            tokens: i64[rows, T], prompt and response, padded on the right with -1.
            mask: bool[rows, T], True on the response.
            **columns: More of these rows, by the name they get; per token, their mean is kept, and
                of "version" (i64[rows, T], which weights sampled each token) the ends. Of
                conversations "turn" (i64[rows, T], -1 outside turns) and "turn_reward" (f32[rows,
                T]) tell the turns, and "piece" (i64[rows]) which of its conversation's rows each
                is, if one has several.
        """
        if not self._writes:
            return
        count = self._spec.max_rows
        kept = {name: column[:count].clone() for name, column in columns.items()}
        kept |= {"tokens": tokens[:count].clone(), "mask": mask[:count].clone()}
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._waiting = [future for future in self._waiting if not future.done()]
        if len(self._waiting) >= _MOST_WAITING:
            self._waiting.pop(0).result()
        step, staleness = current_step(), call_staleness() or 0
        self._waiting.append(self._thread.submit(self._keep, step, staleness, kept))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _keep(self, step: int, staleness: int, columns: dict[str, Tensor]) -> None:
        try:
            version = step * self._spec.versions_per_step - staleness
            versions = _versions(columns.pop("version", None), columns["mask"], version)
            parts = take_parts(Path(self._spec.folder), step)
            own = [parts.get(tokens_key(row), {}) for row in columns["tokens"].tolist()]
            rows = [
                {"step": step, **versions[row], **own[row], **kept}
                for row, kept in enumerate(self._rows(columns))
            ]
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
            self._write(step, gzip.compress(text.encode(), compresslevel=6, mtime=0))
            self._thin_out()
        except Exception as error:  # noqa: BLE001 - a look at a run must never end it
            if not self._has_warned:
                _LOG.warning(
                    "step %d: its samples cannot be kept in '%s': %s; the run goes on, and nothing "
                    "is said of later steps",
                    step,
                    self._spec.folder,
                    f"{type(error).__name__}: {error}",
                )
            self._has_warned = True

    def _rows(self, columns: dict[str, Tensor]) -> list[dict[str, Any]]:
        tokens, mask = columns.pop("tokens"), columns.pop("mask")
        turn, earned = columns.pop("turn", None), columns.pop("turn_reward", None)
        pieces = _pieces(columns.pop("piece", None), len(tokens))
        length = mask.sum(1)
        numbers = {
            name: column if column.ndim == 1 else (column * mask).sum(1) / length.clamp(min=1)
            for name, column in columns.items()
        }
        # A response without a score is nan, which JSON does not know.
        values = {
            name: [None if value != value else value for value in column.tolist()]
            for name, column in numbers.items()
        }
        problems = values.get("prompt_id")
        said = self._tokenizer.decode_responses(tokens, mask)
        turns = None
        if turn is not None and earned is not None:
            turns = [self._turns(*one) for one in zip(tokens, turn, earned, strict=True)]
            said = ["".join(one["said"] for one in own) for own in turns]
        return [
            {
                **{name: column[row] for name, column in values.items()},
                **pieces[row],
                "length": int(length[row]),
                "prompt": self._conversation(problems[row] if problems else None)
                or self._text(tokens[row][(tokens[row] >= 0) & (mask[row].cumsum(0) == 0)]),
                "response": said[row],
                **({} if turns is None else {"turns": turns[row]}),
            }
            for row in range(len(tokens))
        ]

    def _turns(self, tokens: Tensor, turn: Tensor, earned: Tensor) -> list[dict[str, Any]]:
        ends = [int(torch.nonzero(turn == k)[-1]) for k in range(int(turn.max()) + 1)]
        known = int((tokens >= 0).sum())
        found: list[dict[str, Any]] = []
        for number, end in enumerate(ends):
            own = turn == number
            after = int(torch.nonzero(turn == number + 1)[0]) if end != ends[-1] else known
            found.append(
                {
                    "said": self._tokenizer.said(tokens[own].tolist()),
                    "reward": float(earned[own].sum()),
                    "shown": self._text(tokens[end + 1 : after]),
                }
            )
        return found

    def _conversation(self, problem: int | None) -> str | None:
        if problem is None or self._prompts is None:
            return None
        messages = self._prompts.messages(problem) or []
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)

    @cached_property
    def _prompts(self) -> PromptEncoder | None:
        if self._spec.task is None:
            return None
        task = one_process()(self._spec.task.build)()
        return PromptEncoder(task, self._tokenizer, self._spec.chat)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._spec.tokenizer.build()

    def _text(self, ids: Tensor) -> str:
        known = [token for token in ids.tolist() if token < self._tokenizer.vocab_size]
        text = self._tokenizer.backend.decode(
            known, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)

    def _write(self, step: int, content: bytes) -> None:
        folder = Path(self._spec.folder)
        folder.mkdir(exist_ok=True)  # not the run's own, which someone may have removed
        draft = folder / f".step-{step:06d}.{os.getpid()}.new"
        try:
            with created(draft) as file:
                file.writelines([content])
            draft.replace(folder / f"step-{step:06d}.jsonl.gz")
        finally:
            draft.unlink(missing_ok=True)

    def _thin_out(self) -> None:
        """Drop old steps, then every second one, until the rest has room; the newest stays."""
        files = step_files(Path(self._spec.folder))
        newest = max(files, default=0)
        if self._spec.keep_steps is not None:
            for step in list(files)[: -self._spec.keep_steps]:
                files.pop(step).unlink(missing_ok=True)
        sizes = {step: path.stat().st_size for step, path in files.items()}
        stride = 2
        while sum(sizes.values()) > self._spec.max_bytes and len(sizes) > 1:
            for step in [s for s in sizes if (s % stride or stride > newest) and s != newest]:
                files[step].unlink(missing_ok=True)
                del sizes[step]
            stride *= 2


def _pieces(column: Tensor | None, num_rows: int) -> list[dict[str, int]]:
    """Return each row's conversation, and which of its rows it is; nothing if all are one row."""
    if column is None or not bool(column.any()):
        return [{}] * num_rows
    conversation = ((column == 0).cumsum(0) - 1).clamp(min=0)
    both = zip(conversation.tolist(), column.tolist(), strict=True)
    return [{"conversation": which, "piece": piece} for which, piece in both]


def _versions(column: Tensor | None, mask: Tensor, of_all: int) -> list[dict[str, int]]:
    """Return the weights that sampled each response, and its last tokens if those were others."""
    if column is None:
        return [{"version": of_all}] * len(mask)
    own = [row[said] for row, said in zip(column, mask, strict=True)]
    ends = [(int(row[0]), int(row[-1])) if len(row) else (of_all, of_all) for row in own]
    return [
        {"version": first} if first == last else {"version": first, "last_version": last}
        for first, last in ends
    ]


@dataclass(frozen=True, kw_only=True)
class ExampleFileSpec:
    """Recipe for an `ExampleFile`; a `WorkerSpec`."""

    path: str  # JSON file; each evaluation replaces it
    tokenizer: TokenizerSpec  # the policy's
    num_examples: int = 4  # prompts whose first response is kept
    # Problem -> its messages, of those whose prompts are conversations: the decoded prompt would
    # show the template around them.
    conversations: Mapping[int, Sequence[Mapping[str, Any]]] = field(
        default_factory=dict[int, Sequence[Mapping[str, Any]]]
    )

    def build(self, context: WorkerContext) -> ExampleFile:
        return ExampleFile(self)


class ExampleFile(Observer):
    """Keeps an evaluation's scores, and the first responses as text, in a file."""

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
