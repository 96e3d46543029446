"""Rows of files and of `datasets`: bad rows, splits, rewards, decontamination, errors."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data import row_sources
from penstock.workers.data.orders import contaminated
from penstock.workers.data.row_sources import FileTaskSpec, HfTaskSpec, file_rows
from penstock.workers.data.row_task import good_rows
from penstock.workers.data.task import DataReport, Task, fingerprint, response_facts
from penstock.workers.verifiers.pool import RowsCall, VerifierPool, VerifierSpec

GOOD = b'{"id": "%d", "prompt": "%d+1=", "answer": %d}\n'


def _lines(folder: Path, *lines: bytes, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_bytes(b"".join(lines))
    return str(path)


def _problems(folder: Path, num_rows: int, name: str = "rows.jsonl", start: int = 0) -> str:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(start, start + num_rows)]
    return _lines(folder, *(json.dumps(row).encode() + b"\n" for row in rows), name=name)


def test_what_json_does_not_have_is_a_bad_row(tmp_path: Path) -> None:
    path = _lines(
        tmp_path,
        b'{"prompt": "a", "answer": NaN}\n',
        b'{"prompt": "b", "answer": "x", "other": [-Infinity]}\n',
        b'{"prompt": "c", "answer": 1e999}\n',
        b'{"prompt": "d", "answer": "x", "prompt": "e"}\n',
        b'{"prompt": "f", "answer": "x", "n": "' + b"x" * (17 << 20) + b'"}\n',
        GOOD % (1, 1, 2),
    )
    report = DataReport(path, num_examples=20)
    assert good_rows(file_rows(path), {"prompt": "prompt", "answer": "answer"}, report)["prompt"][
        :
    ] == ["1+1="]
    assert str(report).replace(path, "rows").splitlines()[-5:] == [
        "    rows:1: malformed JSON: NaN is no number of JSON's",
        "    rows:2: malformed JSON: -Infinity is no number of JSON's",
        "    rows:3: wrong type of 'answer': expected a finite number, got inf",
        "    rows:4: malformed JSON: the key 'prompt' stands twice in an object",
        "    rows:5: too long: 17825832 bytes",
    ]


def test_a_line_that_does_not_end_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_sources, "_MOST_PASSED_BYTES", 64 << 20)
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(20 << 30)  # without a block on the disk
    with pytest.raises(ConfigError) as caught:
        good_rows(file_rows(path), {"prompt": "prompt"}, DataReport("rows"))
    assert str(caught.value) == (
        f"'{path}:1': the line has more than 64 MiB\n    give a file with one JSON object a line"
    )


def test_every_kind_of_bad_row_is_reported_with_file_and_line(tmp_path: Path) -> None:
    path = _lines(
        tmp_path,
        b"\xef\xbb\xbf" + GOOD % (1, 1, 2),
        b'{"id": "2", "prompt": "x", "answer": "y"\n',
        b"\n",
        b'{"id": "4", "prompt": "\xff", "answer": "y"}\n',
        b"[" * 100_000 + b"\n",
        b'["prompt", "answer"]\n',
        b'{"id": "7", "answer": "y"}\n',
        b'{"id": "8", "prompt": null, "answer": "y"}\n',
        b'{"id": "9", "prompt": ["x"], "answer": "y"}\n',
        b'{"id": "10", "prompt": "x", "answer": true}\n',
        b'{"id": "11", "prompt": "  ", "answer": "y"}\n',
        b'{"id": "12", "prompt": "x", "answer": ""}\n',
        b'{"id": "13", "prompt": "\\ud800", "answer": "y"}\n',
        b'{"id": "1", "prompt": "x", "answer": "y"}\n',
        GOOD % (15, 15, 16),
        b'{"id": 16, "prompt": "last line without an end", "answer": 0.5}',
    )
    report = DataReport(path, num_examples=20)
    rows = good_rows(file_rows(path), {"prompt": "prompt", "answer": "answer", "id": "id"}, report)
    assert rows["prompt"][:] == ["1+1=", "15+1=", "last line without an end"]
    assert rows["answer"][:] == ["2", "16", "0.5"]
    assert rows["where"][:] == [f"{path}:{line}" for line in (1, 15, 16)]
    assert str(report).replace(path, "rows") == (
        "rows: 3 of 15 rows kept, 12 left out\n"
        "    3 x malformed JSON\n"
        "    2 x missing field 'prompt'\n"
        "    1 x not an object\n"
        "    1 x no conversation in 'prompt'\n"
        "    1 x wrong type of 'answer'\n"
        "    1 x empty prompt\n"
        "    1 x empty answer\n"
        "    1 x broken Unicode in 'prompt'\n"
        "    1 x duplicate id\n"
        "    rows:2: malformed JSON: Expecting ',' delimiter at column 41\n"
        "    rows:4: malformed JSON: byte 24 of the line is not UTF-8\n"
        "    rows:5: malformed JSON: nested too deeply, or a number with too many digits\n"
        "    rows:6: not an object: a row is an object with named fields, got a list\n"
        "    rows:7: missing field 'prompt': it has id, answer\n"
        "    rows:8: missing field 'prompt': it is null\n"
        "    rows:9: no conversation in 'prompt': message 1 is text, not an object\n"
        "    rows:10: wrong type of 'answer': expected text, got a boolean\n"
        "    rows:11: empty prompt: 'prompt' is '  '\n"
        "    rows:12: empty answer: 'answer' is ''\n"
        "    rows:13: broken Unicode in 'prompt': half a surrogate pair at character 1\n"
        "    rows:14: duplicate id: '1' first stands at rows:1"
    )


def test_parquet_rows_are_checked_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a local file needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    path = tmp_path / "rows[1].parquet"
    columns = {"question": ["1+1=", None, " ", "2+2="], "answer": [2, 3, 4, 4]}
    pq.write_table(pa.table(columns), path)
    report = DataReport("rows")
    rows = good_rows(file_rows(path), {"prompt": "question", "answer": "answer"}, report)
    assert rows["prompt"][:] == ["1+1=", "2+2="]
    assert rows["answer"][:] == ["2", "4"]
    assert rows["where"][:] == [f"{path} row 1", f"{path} row 4"]
    assert str(report).replace(str(path), "rows") == (
        "rows: 2 of 4 rows kept, 2 left out\n"
        "    1 x missing field 'question'\n"
        "    1 x empty prompt\n"
        "    rows row 2: missing field 'question': it is null\n"
        "    rows row 3: empty prompt: 'question' is ' '"
    )


def test_pairs_and_equal_pairs(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "a", "rejected": b} for b in ("b", "a", "c")]
    path = _lines(tmp_path, *(json.dumps(row).encode() + b"\n" for row in rows))
    task = FileTaskSpec(
        path=path,
        answer_field=None,
        chosen_field="chosen",
        rejected_field="rejected",
        max_bad_fraction=0.5,
    ).build()
    assert [task.pair_texts(index) for index in task.train] == [("a", "b"), ("a", "c")]
    assert task.answer_text(0) is None
    assert dict(task.report.reasons) == {"equal pair": 1}
    with pytest.raises(ConfigError) as caught:
        _ = task.needs_process
    assert str(caught.value) == (
        f"reward 'exact_match' compares with the answer, but '{path}' is read without one\n"
        "    set answer_field, or another reward; to answer no held-out problems: "
        "evaluation.num_prompts=0"
    )


def test_a_task_scores_and_imitates(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2", "response": "It is 2"}]
    task = FileTaskSpec(
        path=_lines(tmp_path, json.dumps(rows[0]).encode()), response_field="response"
    ).build()
    assert isinstance(task, Task)
    assert task.task_id == "rows"
    assert task.answer_text(0) == "It is 2"
    assert task.pair_texts(0) is None
    assert (task.score(0, " 2 "), task.score(0, "It is 2")) == (1.0, 0.0)
    assert task.verifier_call(0, "r") == ("1+1=", "r", "2")
    assert not task.needs_process


def test_held_out_prompts_are_kept_out_of_training(tmp_path: Path) -> None:
    path = _lines(tmp_path, *(GOOD % (i, i % 20, 1) for i in range(60)))
    task = FileTaskSpec(path=path, num_held_out=8).build()
    train = [task.prompt_text(index) for index in task.train]
    held_out = [task.prompt_text(index) for index in task.held_out]
    assert len(set(held_out)) == len(held_out) == 8
    assert (len(train), set(train) & set(held_out)) == (36, set())
    assert dict(task.report.reasons) == {"prompt is held out": 16}
    again = FileTaskSpec(path=path, num_held_out=8).build()
    assert held_out == [again.prompt_text(index) for index in again.held_out]


def test_a_held_out_file_takes_its_prompts_from_training(tmp_path: Path) -> None:
    path = _problems(tmp_path, 10)
    held_out = _problems(tmp_path, 4, name="held_out.jsonl", start=8)
    task = FileTaskSpec(path=path, held_out_path=held_out).build()
    assert [task.prompt_text(i) for i in task.train] == [f"{i}+1=" for i in range(8)]
    assert [task.prompt_text(i) for i in task.held_out] == [f"{i}+1=" for i in range(8, 12)]
    assert str(task.report).splitlines()[0] == (
        f"{path} and {held_out}: 12 of 14 rows kept, 2 left out"
    )


def test_rewards_are_named_for_another_process(tmp_path: Path) -> None:
    path = _problems(tmp_path, 3)
    (tmp_path / "mine.py").write_text("def third(prompt, response, answer):\n    return 1 / 3\n")
    mine = f"{tmp_path}/./mine.py:third"
    task = FileTaskSpec(path=path, reward=mine).build()
    assert task.score(0, "x") == 1 / 3
    read_as = {"prompt": "prompt", "answer": "answer"}
    assert task.verifiers()[""] == VerifierSpec(
        factory="penstock.workers.verifiers.reward_function:make_reward",
        arguments={"reward": f"{tmp_path.resolve()}/mine.py:third", "read_as": read_as},
        asks=frozenset({"prompt", "response", "answer"}),
    )
    assert task.needs_process
    assert not FileTaskSpec(path=path, reward=mine, reward_in_process=True).build().needs_process
    task = FileTaskSpec(path=path, reward="math_verify").build()
    assert task.verifiers()[""].arguments == {"reward": "math_verify", "read_as": read_as}

    def quarter(prompt: str, response: str, answer: str | None) -> float:
        return 0.25

    inner = FileTaskSpec(path=path, reward=quarter, reward_in_process=True).build()
    assert inner.score(0, "x") == 0.25


def _message(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        FileTaskSpec(**options).build()
    return str(caught.value)


@pytest.mark.slow
def test_errors_about_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _problems(tmp_path, 3, name="train.jsonl")
    assert _message(path="trian.jsonl") == (
        "there is no file 'trian.jsonl'; did you mean 'train.jsonl'?\n"
        "    give a JSONL or Parquet file, from the folder the run is started in"
    )
    assert _message(path="no/such.jsonl").startswith("there is no file 'no/such.jsonl'\n")
    assert _message(path=".") == "'.' is not a file\n    give a JSONL or Parquet file"
    (tmp_path / "rows.csv").write_text("a,b\n")
    assert _message(path="rows.csv") == (
        "'rows.csv': the ending '.csv' says neither JSONL nor Parquet\n"
        "    files end in .jsonl, .ndjson, .json, .parquet, .pq"
    )
    (tmp_path / "empty.jsonl").write_text("\n")
    assert _message(path="empty.jsonl") == (
        "empty.jsonl has no rows\n    give a file with at least one row"
    )
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but not really")
    first, second = _message(path="broken.parquet").split("\n")
    assert first.startswith("'broken.parquet' cannot be read as Parquet: Parquet magic bytes")
    assert second == "    write the file again"


def test_a_file_that_is_mostly_bad_stops_the_run(tmp_path: Path) -> None:
    path = _lines(tmp_path, GOOD % (1, 1, 2), b"1 2\n", b"?\n")
    assert _message(path=path).replace(path, "rows") == (
        "rows: 1 of 3 rows kept, 2 left out\n"
        "    2 x malformed JSON\n"
        "    rows:2: malformed JSON: Extra data at column 3\n"
        "    rows:3: malformed JSON: Expecting value at column 1\n"
        "    that is more than max_bad_fraction=0.1 of all rows; fix them, or raise "
        "max_bad_fraction to go on without them"
    )
    assert len(FileTaskSpec(path=path, max_bad_fraction=0.7).build().train) == 1
    found = _message(path=path, prompt_field="question")
    assert found.endswith(
        "fix the rows above, or name your columns: task.prompt_field and task.answer_field (null "
        "if rows have none), task.messages_field, or task.chosen_field and task.rejected_field"
    )


def test_errors_about_options(tmp_path: Path) -> None:
    path = _problems(tmp_path, 4)
    assert _message(path=path, num_held_out=5) == (
        f"'{path}' has 4 different prompts, of which 5 are to be held out\n"
        "    set num_held_out below 4"
    )
    assert _message(path=path, num_held_out=4) == (
        f"'{path}' has no problem left to train on: all its prompts are held out\n"
        "    lower num_held_out, or give other held-out rows"
    )
    assert _message(path=path, chosen_field="c") == (
        f"'{path}': only chosen_field is given, but a pair has a better and a worse response\n"
        "    give chosen_field and rejected_field together"
    )
    assert _message(path=path, held_out_path=path, num_held_out=2) == (
        f"'{path}': both held_out_path and num_held_out=2 are given\n    give one of them"
    )
    assert "max_bad_fraction from 0 to 1" in _message(path=path, max_bad_fraction=2)


@pytest.mark.parametrize("field", ["prompt", "answer", "response", "chosen", "rejected"])
def test_the_fingerprint_changes_with_every_field_that_is_read(tmp_path: Path, field: str) -> None:
    rows = [
        {
            part: f"{part} {i}"
            for part in ("prompt", "answer", "response", "chosen", "rejected", "note")
        }
        for i in range(3)
    ]

    def now() -> str:
        lines = (json.dumps(row).encode() + b"\n" for row in rows)
        spec = FileTaskSpec(
            path=_lines(tmp_path, *lines),
            response_field="response",
            chosen_field="chosen",
            rejected_field="rejected",
        )
        return fingerprint(spec.build())

    before = now()
    rows[1]["note"] = "a field that nobody reads"
    assert now() == before
    rows[1][field] = "changed"
    assert now() != before


@pytest.mark.timeout(20)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("target", ["/dev/zero", "/proc/kmsg"])
def test_devices_and_the_kernels_files_are_refused(
    tmp_path: Path, ending: str, target: str
) -> None:
    path = tmp_path / f"it.{ending}"
    path.symlink_to(target)
    with pytest.raises(ConfigError, match=f"it.{ending}"):
        list(file_rows(path))
    spec = HfTaskSpec(dataset="json", data_files=(str(path),), prompt_field="p", answer_field="a")
    with pytest.raises(ConfigError, match="where a file belongs"):
        spec.build()


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


@pytest.mark.slow
def test_a_folder_is_read_with_its_splits(tmp_path: Path) -> None:
    write(tmp_path / "sums", "train.jsonl", ROWS[:6])
    write(tmp_path / "sums", "test.jsonl", ROWS[6:])
    spec = HfTaskSpec(dataset=str(tmp_path / "sums"), held_out_split="test", max_rows=4, **FIELDS)
    task = spec.build()
    assert [task.prompt_text(i) for i in task.train] == [f"What is {i}?" for i in range(4)]
    assert [task.answer_text(i) for i in task.held_out] == ["6", "7"]
    assert task.where(2) == f"{tmp_path}/sums train row 3"
    assert task.task_id == "sums"


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
    verifier = task.verifiers()[""]
    made = {"": [verifier.factory, dict(verifier.arguments)]}
    spec = VerifierSpec(
        factory="penstock.workers.verifiers.reward_function:RewardFunctions",
        arguments={"functions": made},
    )
    pool = VerifierPool(spec, num_processes=1, time_limit_s=30.0)
    try:
        facts = [response_facts(verifier, task, index, "0.5") for index in task.train]
        (found,) = pool.run_rows([RowsCall(["", 0, facts], 2)])
        assert [outcome.score for outcome in found] == [1.0, 0.0]
    finally:
        pool.close()
    plain = FileTaskSpec(path=str(write(tmp_path, "a.jsonl", rows[1:])), reward_field="kind")
    assert not plain.build().needs_process


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
