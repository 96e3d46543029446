"""Data sets by `datasets.load_dataset`, rewards by row, and decontamination."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.orders import contaminated
from penstock.workers.data.row_sources import FileTaskSpec, HfTaskSpec
from penstock.workers.verifiers.pool import VerifierPool

ROWS = [{"question": f"What is {i}?", "gold": i, "kind": "exact_match"} for i in range(8)]
FIELDS: dict[str, Any] = {"prompt_field": "question", "answer_field": "gold"}


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_a_folder_is_read_with_its_splits(tmp_path: Path) -> None:
    write(tmp_path / "sums", "train.jsonl", ROWS[:6])
    write(tmp_path / "sums", "test.jsonl", ROWS[6:])
    spec = HfTaskSpec(dataset=str(tmp_path / "sums"), held_out_split="test", max_rows=4, **FIELDS)
    task = spec.build()
    assert [task.prompt_text(i) for i in task.train] == [f"What is {i}?" for i in range(4)]
    assert [task.answer_text(i) for i in task.held_out] == ["6", "7"]
    assert task.where(2) == f"{tmp_path}/sums train row 3"
    assert task.task_id == "sums"


@pytest.mark.parametrize("streaming", [False, True])
def test_files_are_read_whole_or_in_a_stream(tmp_path: Path, streaming: bool) -> None:
    path = write(tmp_path, "a.jsonl", ROWS)
    spec = HfTaskSpec(
        dataset="json",
        data_files=(str(path),),
        streaming=streaming,
        max_rows=5,
        num_held_out=1,
        **FIELDS,
    )
    task = spec.build()
    assert (len(task.train), len(task.held_out)) == (4, 1)


def _refused(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        HfTaskSpec(**{**FIELDS, **options}).build()
    return str(caught.value)


def test_what_cannot_be_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    said = _refused(dataset="nobody/nothing")
    assert said.startswith("dataset 'nobody/nothing', split 'train', cannot be loaded: ")
    assert said.endswith(
        "\n    give a hub id, a folder, or a format with data_files; without a network only what "
        "is in the cache can be had"
    )
    write(tmp_path / "sums", "train.jsonl", ROWS)
    assert "Unknown split" in _refused(dataset=str(tmp_path / "sums"), split="trian")
    assert _refused(dataset="x", streaming=True) == (
        "'x': it is streamed, and nothing says how many rows are read\n"
        "    give max_rows, or set streaming=false"
    )
    assert _refused(dataset="x", held_out_split="test", num_held_out=2) == (
        "'x': both held_out_split and num_held_out=2 are given\n    give one of them"
    )
    said = _refused(dataset=str(tmp_path / "sums"), prompt_field="qestion")
    assert "train row 1: missing field 'qestion': it has question, gold, kind\n" in said


def test_rows_name_their_rewards(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": "1/2", "kind": "math_verify"},
        {"prompt": "b", "answer": "1/2", "kind": "exact_match"},
    ]
    task = FileTaskSpec(path=str(write(tmp_path, "a.jsonl", rows)), reward_field="kind").build()
    assert [task.score(index, "1/2") for index in task.train] == [1.0, 1.0]
    assert [task.score(index, "0.5") for index in task.train] == [1.0, 0.0]
    assert task.verifier is not None
    pool = VerifierPool(task.verifier, num_processes=1, time_limit_s=30.0)
    try:
        calls = [task.verifier_call(index, "0.5") for index in task.train]
        assert [outcome.score for outcome in pool.run(calls)] == [1.0, 0.0]
    finally:
        pool.close()
    plain = FileTaskSpec(path=str(write(tmp_path, "a.jsonl", rows[1:])), reward_field="kind")
    assert plain.build().verifier is None


def test_a_reward_that_is_not_built_in_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", [{"prompt": "a", "answer": "b", "kind": "os:system"}])
    with pytest.raises(ConfigError) as caught:
        FileTaskSpec(path=str(path), reward_field="kind").build()
    assert (
        "a.jsonl:1: unknown reward in 'kind': 'os:system' is none of code_tests, exact_match, "
        "instructions, math_verify\n"
    ) in str(caught.value)


def test_prompts_that_share_words_with_held_out_ones_are_found(tmp_path: Path) -> None:
    texts = ["The quick brown fox jumps.", "A quick, BROWN fox jumps high!", "Two words", "Nothing"]
    train = write(tmp_path, "train.jsonl", [{"prompt": text, "answer": "x"} for text in texts])
    held = [{"prompt": "See: the quick brown fox", "answer": "x"}, {"prompt": "two words?"}]
    held[1]["answer"] = "x"
    test = write(tmp_path, "test.jsonl", held)
    task = FileTaskSpec(path=str(train), held_out_path=str(test)).build()
    found, report = contaminated(task, task.prompt_text, 3)
    assert found == {0, 1, 2}
    assert str(report) == (
        "training prompts without 3 words in a row of a held-out one: 1 of 4 rows kept, 3 left "
        "out\n    3 x contaminated\n"
        f"    {train}:1: contaminated: 'the quick brown' is in {test}:1\n"
        f"    {train}:2: contaminated: 'quick brown fox' is in {test}:1\n"
        f"    {train}:3: contaminated: 'two words' is in {test}:2"
    )
    assert contaminated(task, task.prompt_text, 5)[0] == {2}
