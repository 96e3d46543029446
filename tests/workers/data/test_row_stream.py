"""Streams: rows of a buffer, again from any step, held-out rows, ends of the set, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.orders import Order
from penstock.workers.data.row_sources import HfTaskSpec
from penstock.workers.data.sources import DemonstrationSource, PairSource, PromptSource
from penstock.workers.data.task import Task, fingerprint
from penstock.workers.models.tokenizer import TokenizerSpec

TOKENIZER = TokenizerSpec(alphabet="0123456789+=").build()
NUM_ROWS, BUFFER = 100, 32


def _spec(folder: Path, **options: Any) -> HfTaskSpec:
    """A set in which every tenth row has no answer."""
    path = folder / "rows.parquet"
    if not path.exists():
        answers = [str(i + 1) if i % 10 else None for i in range(NUM_ROWS)]
        columns = {"prompt": [f"{i}+1=" for i in range(NUM_ROWS)], "answer": answers}
        pq.write_table(pa.table(columns), path, row_group_size=30)
    given: dict[str, Any] = {"max_bad_fraction": 0.2, "buffer_rows": BUFFER, **options}
    return HfTaskSpec(dataset="parquet", data_files=(str(path),), streaming=True, **given)


def _prompts(task: Task, buffer: int) -> list[str]:
    return [task.prompt_text(index) for index in task.buffered(buffer)]


def test_every_row_comes_once_in_as_many_rows_as_there_are(tmp_path: Path) -> None:
    task = _spec(tmp_path, num_held_out=3).build()
    held_out = {task.prompt_text(index) for index in task.held_out}
    assert len(held_out) == 3
    # Twenty-five buffers are eight times the set.
    buffers = [_prompts(task, number) for number in range(25)]
    seen = Counter(text for buffer in buffers for text in buffer)
    assert set(seen.values()) == {8}
    assert seen.keys() | held_out == {f"{i}+1=" for i in range(NUM_ROWS) if i % 10}
    assert not seen.keys() & held_out
    again = _spec(tmp_path, num_held_out=3).build()
    assert fingerprint(again) == fingerprint(task)
    for number in (20, 2, 3, 24, 0):  # beyond the end, back, the next one, and the first
        assert _prompts(again, number) == buffers[number]
    problem = again.buffered(5)[7]
    assert again.score(problem, again.answer_text(problem) or "") == 1.0
    where = again.where(problem)
    assert where == f"parquet train row {int(again.prompt_text(problem).partition('+')[0]) + 1}"


def test_a_set_that_is_smaller_than_a_buffer_is_one(tmp_path: Path) -> None:
    task = _spec(tmp_path, buffer_rows=1000).build()
    assert task.buffer_rows == NUM_ROWS
    assert _prompts(task, 0) == _prompts(task, 1)
    source = PromptSource(task, TOKENIZER, batch_size=90, seed=0, max_prompt_tokens=9)
    first, second = source.batch(0), source.batch(1)
    assert sorted(TOKENIZER.decode_rows(first.prompt)) == sorted(
        TOKENIZER.decode_rows(second.prompt)
    )
    assert not torch.equal(first.prompt, second.prompt)


@pytest.mark.parametrize("pack_tokens", [None, 40])
def test_a_resumed_run_reads_the_rows_that_would_have_come(
    tmp_path: Path, pack_tokens: int | None
) -> None:
    def source() -> DemonstrationSource:
        task = _spec(tmp_path, num_held_out=2).build()
        given: dict[str, Any] = {"max_prompt_tokens": 9, "max_response_tokens": 9, "seed": 3}
        return DemonstrationSource(task, TOKENIZER, batch_size=3, pack_tokens=pack_tokens, **given)

    through = source()
    steps = [through.batch(step).tokens for step in range(60)]
    for step in (59, 17, 0):
        assert torch.equal(source().batch(step).tokens, steps[step])
    assert torch.equal(through.batch(2).tokens, steps[2])  # and back
    assert len(through._rows_of) < 3 * BUFFER  # pyright: ignore[reportPrivateUsage]
    assert through.longest == 18
    held_out = through.held_out()
    assert held_out is not None
    evaluated = TOKENIZER.decode_rows(held_out.tokens)
    seen = {text for tokens in steps for text in TOKENIZER.decode_rows(tokens)}
    assert not seen & set(evaluated)
    assert seen | set(evaluated) == {f"{i}+1={i + 1}<eos>" for i in range(NUM_ROWS) if i % 10}


def test_pairs_are_made_of_a_stream_too(tmp_path: Path) -> None:
    task = _spec(tmp_path).build()
    given: dict[str, Any] = {"max_prompt_tokens": 9, "max_response_tokens": 9, "seed": 0}
    source = PairSource(task, TOKENIZER, batch_size=4, **given)
    assert len(source.batch(30).pair_id.unique()) == 4


def test_what_needs_all_rows_is_refused(tmp_path: Path) -> None:
    task = _spec(tmp_path).build()
    with pytest.raises(ConfigError, match=r"say what to leave out: task\.max_prompt_tokens=1024"):
        PromptSource(task, TOKENIZER, batch_size=2, seed=0)
    with pytest.raises(ConfigError, match=r"'task\.order' and 'task\.pass_rates' compare all"):
        PromptSource(task, TOKENIZER, batch_size=2, seed=0, order=Order(kind="priority"))
    with pytest.raises(ConfigError, match="buffer 0 of the stream has only 28 that can be used"):
        PromptSource(task, TOKENIZER, batch_size=29, seed=0, max_prompt_tokens=9)
