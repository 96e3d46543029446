"""The log of samples: what it keeps, how it makes room, and that it never ends a run."""

from __future__ import annotations

import gzip
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.data.sample_files import step_files
from penstock.workers.data.sample_log import ExampleFileSpec, SampleLog, SampleLogSpec
from penstock.workers.models.tokenizer import TokenizerSpec, pad_rows

TOKENIZER = TokenizerSpec(kind="char", alphabet="abcdefgh")  # ids 4 to 11; <eos> is 2


def log_in(folder: Path, context: WorkerContext | None = None, **options: Any) -> SampleLog:
    settings: dict[str, Any] = {
        "versions_per_step": 2,
        "max_rows": 8,
        "keep_steps": None,
        "max_bytes": 1 << 20,
    }
    spec = SampleLogSpec(folder=str(folder), tokenizer=TOKENIZER, **{**settings, **options})
    return spec.build(context or WorkerContext("samples"))


def record(log: SampleLog, step: int, tokens: list[list[int]], staleness: int = 0) -> None:
    """Rows of a prompt of two tokens, with a score and an advantage per token."""
    rows = torch.tensor(tokens)
    mask = (rows >= 0) & (torch.arange(rows.shape[1]) >= 2)
    with call_scope(step, 0, staleness):
        log.record(
            rows,
            mask,
            prompt_id=torch.arange(len(rows)),
            finished=torch.ones(len(rows), dtype=torch.bool),
            advantage=torch.arange(rows.shape[1]).float().expand(rows.shape),
        )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def test_a_step_is_a_file_of_its_first_rows(tmp_path: Path) -> None:
    log = log_in(tmp_path / "samples", max_rows=2)
    record(log, 3, [[4, 5, 6, 7, 2], [0, 8, 9, 2, -1], [4, 4, 4, 4, 4]], staleness=1)
    log.close()
    assert list(step_files(tmp_path / "samples")) == [3]
    first = {"step": 3, "version": 5, "prompt_id": 0, "finished": True, "advantage": 3.0}
    second = {"step": 3, "version": 5, "prompt_id": 1, "finished": True, "advantage": 2.5}
    assert lines(tmp_path / "samples" / "step-000003.jsonl.gz") == [
        {**first, "length": 3, "prompt": "ab", "response": "cd"},
        {**second, "length": 2, "prompt": "e", "response": "f"},  # without <pad> and <eos>
    ]


@pytest.mark.parametrize(
    ("piece", "expected"),
    [([0, 1, 0, 0], [(0, 0), (0, 1), (1, 0), (2, 0)]), ([0, 0, 0, 0], [(None, None)] * 4)],
)
def test_rows_of_one_conversation_are_told(
    tmp_path: Path, piece: list[int], expected: list[tuple[int | None, int | None]]
) -> None:
    log: Any = log_in(tmp_path)
    rows = torch.full((4, 3), 5)
    with call_scope(0, 0, 0):
        log.record(rows, torch.arange(3).expand(4, 3) > 0, piece=torch.tensor(piece))
    log.close()
    found = lines(tmp_path / "step-000000.jsonl.gz")
    assert [(row.get("conversation"), row.get("piece")) for row in found] == expected


def test_a_response_that_went_on_says_which_weights_began_and_which_ended_it(
    tmp_path: Path,
) -> None:
    log = log_in(tmp_path)
    tokens = torch.tensor([[4, 5, 6, 7, 8], [4, 5, 6, -1, -1], [4, 5, -1, -1, -1]])
    mask = (tokens >= 0) & (torch.arange(5) >= 2)
    version = torch.tensor([[0, 0, 3, 4, 6], [0, 0, 4, -1, -1], [0, 0, -1, -1, -1]])
    with call_scope(4, 0, None):
        log.record(tokens, mask, version=version)
    log.close()
    rows = lines(tmp_path / "step-000004.jsonl.gz")
    assert [(row["version"], row.get("last_version")) for row in rows] == [
        (3, 6),
        (4, None),
        (8, None),  # nothing was sampled: the newest
    ]


def test_a_step_that_is_taken_again_replaces_its_own(tmp_path: Path) -> None:
    for tokens in ([4, 5, 6], [4, 5, 7]):
        log = log_in(tmp_path)
        record(log, 0, [tokens])
        log.close()
    assert [row["response"] for row in lines(tmp_path / "step-000000.jsonl.gz")] == ["d"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000.jsonl.gz"]


def test_the_newest_steps_are_kept(tmp_path: Path) -> None:
    log = log_in(tmp_path, keep_steps=3)
    for step in range(7):
        record(log, step, [[4, 5, 6]])
    log.close()
    assert list(step_files(tmp_path)) == [4, 5, 6]


def test_every_second_step_goes_where_there_is_no_room(tmp_path: Path) -> None:
    log, draw = log_in(tmp_path, max_bytes=4000), random.Random(0)
    for step in range(33):
        record(log, step, [[4, 5, *draw.choices(range(4, 12), k=300)]])
    log.close()
    files = step_files(tmp_path)
    assert sum(path.stat().st_size for path in files.values()) <= 4000
    steps = list(files)
    assert {0, 16, 32} <= set(steps), "they are spread over the run"
    assert len(steps) > 4


def test_one_step_is_kept_however_large_it_is(tmp_path: Path) -> None:
    log = log_in(tmp_path, max_bytes=10)
    for step in (0, 1, 2):
        record(log, step, [[4, 5, 6]])
    log.close()
    assert list(step_files(tmp_path)) == [2]


def test_what_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    log = log_in(tmp_path / "file")
    with caplog.at_level(logging.WARNING, logger="penstock.samples"):
        for step in (4, 5):
            record(log, step, [[4, 5, 6]])
        log.close()
    (message,) = [entry.getMessage() for entry in caplog.records]
    assert message == (
        f"step 4: its samples cannot be kept in '{tmp_path / 'file'}': FileExistsError: [Errno 17] "
        f"File exists: '{tmp_path / 'file'}'; the run goes on, and nothing is said of later steps"
    )


def test_the_process_that_answers_writes(tmp_path: Path) -> None:
    log = log_in(tmp_path, WorkerContext("samples", tensor_parallel=2, tensor_rank=1))
    record(log, 0, [[4, 5, 6]])
    log.close()
    assert step_files(tmp_path) == {}


def test_the_first_responses_are_kept_and_the_scores_returned(tmp_path: Path) -> None:
    spec = TokenizerSpec(kind="char", alphabet="0123456789+=")
    tokenizer = spec.build()
    file = tmp_path / "examples.json"
    said = [{"role": "user", "content": "10+2="}]
    worker = ExampleFileSpec(
        path=str(file), tokenizer=spec, num_examples=2, conversations={8: said}
    ).build(WorkerContext("observer"))
    prompts = [tokenizer.encode(text) for text in ("1+2=", "10+2=", "1+1=")]
    answers = [[*tokenizer.encode(text), tokenizer.eos_id] for text in ("3", "13", "2")]
    tokens = pad_rows(p + a for p, a in zip(prompts, answers, strict=True))
    start = torch.tensor([len(p) for p in prompts])[:, None]
    mask = (torch.arange(tokens.shape[1]) >= start) & (tokens >= 0)
    score = torch.tensor([1.0, 0.0, 1.0])
    assert worker.observe(tokens, mask, torch.tensor([7, 8, 9]), score=score) is score
    assert json.loads(file.read_text()) == {
        "examples": [
            {"prompt_id": 7, "prompt": "1+2=", "response": "3", "score": 1.0},
            {"prompt_id": 8, "messages": said, "response": "13", "score": 0.0},
        ],
        "scores": {"7": [1.0], "8": [0.0], "9": [1.0]},
    }
