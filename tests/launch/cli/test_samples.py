"""`penstock samples`: what it shows, and what it says of what is not there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.evaluations import Evaluations, Measured
from penstock.launch.run_dir.samples import Sample, read_samples, sample_key, shown

from ..conftest import Penstock


def row(step: int, prompt: str, response: str, reward: float, **more: Any) -> dict[str, Any]:
    of_row = {"step": step, "version": step, "prompt": prompt, "response": response}
    return {**of_row, "length": len(response), "reward": reward, "rule.score": reward, **more}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with the samples of two steps."""
    folder = tmp_path / "runs" / "one"
    (folder / "samples").mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    steps = {
        0: [row(0, "1+1=", "3", 0.0, finished=True, prompt_id=5, advantage=-1.0)],
        7: [
            row(7, "1+1=", "2", 1.0, finished=True, prompt_id=5, advantage=0.5, group=0.5),
            row(7, "2*2=\n", "4\x1b[31m\nyes", 0.25, finished=False, advantage=1.5, style=0.125),
        ],
    }
    for step, rows in steps.items():
        text = "".join(f"{json.dumps(one)}\n" for one in rows)
        (folder / "samples" / f"step-{step:06d}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return folder


def test_a_block_per_sample(penstock: Penstock, run: Path) -> None:
    said = penstock("samples", "run=runs/one")
    assert said.code == 0, said.err
    assert said.out == (
        "step 7, version 7, prompt 5: reward 1, advantage 0.5, 1 tokens\n"
        "  1+1=\n"
        "  --\n"
        "  2\n"
        "\n"
        "step 7, version 7: reward 0.25 (rule.score 0.25, style 0.125), advantage 1.5, 10 tokens, "
        "cut off\n"
        "  2*2=\n"
        "  --\n"
        "  4\\x1b[31m\n"
        "  yes\n"
        "\n"
    )


def test_a_sample_without_a_score_says_so() -> None:
    sample = Sample(3, 3, "1+1=", "2", 1, advantage=0.0)
    assert str(shown(sample)).startswith("step 3, version 3: no score, advantage 0, 1 tokens\n")


def rewards(said: str) -> list[str]:
    return [line.split("reward ")[1].split(",")[0] for line in said.splitlines() if "step" in line]


def test_samples_are_chosen_and_sorted(penstock: Penstock, run: Path) -> None:
    assert rewards(penstock("samples", "run=runs/one", "step=0").out) == ["0"]
    said = penstock("samples", "run=runs/one", "step=all", "sort=reward", "limit=2")
    assert rewards(said.out) == ["1", "0.25 (rule.score 0.25"]
    assert said.out.endswith("2 of 3 samples; limit=0 shows all\n")
    said = penstock("samples", "run=runs/one", "step=all", "sort=advantage", "limit=0")
    assert rewards(said.out) == ["0.25 (rule.score 0.25", "1", "0"]
    said = penstock("samples", "run=runs/one", "step=all", "sort=reward", "order=lowest")
    assert rewards(said.out) == ["0", "0.25 (rule.score 0.25", "1"]
    said = penstock("samples", "run=runs/one", "step=all", "prompt=1+")
    assert rewards(said.out) == ["0", "1"]


def test_they_are_read_from_python(run: Path) -> None:
    found = read_samples(run)
    assert [sample.step for sample in found] == [0, 7, 7]
    assert found[0] == Sample(0, 0, "1+1=", "3", 1, True, 0.0, -1.0, 5, parts={"rule.score": 0.0})
    assert read_samples(run, [0]) == found[:1]
    longest = min(found, key=sample_key("length"))
    assert longest.length == 10
    none = Sample(1, 1, "", "", 0)
    assert max([none, *found], key=sample_key("reward")) == none


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "penstock samples: which run?\n    give run=FOLDER, such as runs/..."),
        (["run=runs/one", "srt=reward"],
         "penstock samples: there is no key 'srt'; did you mean 'sort'?\n    keys are: run, "
         "step, sort, order, limit, prompt, stage"),
        (["run=runs/one", "order=worst"], "'order': expected one of highest, lowest, got 'worst'"),
        (["run=runs/one", "sort=best"],
         "'sort': expected one of step, reward, advantage, length, got 'best'"),
        (["run=runs/one", "limit=-1"], "'limit': expected a whole number of at least 0, got '-1'"),
        (["run=runs/one", "step=3"], "'{run}' has no samples of step 3; it has some of 2: 0 to 7"),
        (["run=runs/one", "stage=sft"], "'stage': run 'one' has no stage 'sft'"),
        (["run=runs/one", "prompt=?"], "'prompt': no prompt of these samples holds '?'"),
        (["run=runs"],
         "'runs' is not the folder of a run: it has no run.json\n    give a folder that "
         "`penstock run` made, such as runs/20261121-031454-grpo-seed0"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_said(
    penstock: Penstock, run: Path, words: list[str], message: str
) -> None:
    said = penstock("samples", *words)
    assert said.code == 2
    assert said.err == f"penstock: {message.replace('{run}', 'runs/one')}\n"


def test_a_run_without_samples_says_why(penstock: Penstock, run: Path) -> None:
    for path in (run / "samples").iterdir():
        path.unlink()
    assert penstock("samples", "run=runs/one").err == (
        "penstock: 'runs/one' has no samples: its run keeps none (samples.max_rows=0), trains on "
        "no responses, or has not taken a step yet\n"
    )
    assert read_samples(run) == []


def test_without_samples_the_newest_evaluation_is_shown(penstock: Penstock, run: Path) -> None:
    for path in (run / "samples").iterdir():
        path.unlink()
    for step, said in ((0, "3"), (4, "2")):
        example = {"prompt": "1+1=", "response": said, "score": step / 4}
        measured = Measured({}, 1.0, [example], scores={}, correct={})
        Evaluations(run).write(step, {"": measured})
    assert penstock("samples", "run=runs/one").out == (
        "nothing is sampled to train on; responses of the evaluation after 4 steps:\n"
        "'1+1=': '2' (1)\n"
    )
    assert penstock("samples", "run=runs/one", "sort=reward").code == 2


def test_a_damaged_file_is_named(run: Path) -> None:
    path = run / "samples" / "step-000007.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError) as error:
        read_samples(run)
    assert str(error.value) == (
        f"'{path}' cannot be read (EOFError: Compressed file ended before the end-of-stream marker "
        "was reached)\n    remove it; the run does not need it"
    )
