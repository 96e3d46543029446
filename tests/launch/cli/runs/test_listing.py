"""`penstock runs list`, `show` and `diff`: which runs a listing has, and in what two differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.launch.run_dir.run_folder import RunFolder

from ...conftest import Penstock
from .conftest import Make, made


def listed(said: str) -> list[int]:
    """The seeds of the listed runs, in order."""
    rows = [line.split()[0] for line in said.splitlines()[1:]]
    return [int(name[-1]) for name in rows if name[-1] != ":"]


def test_a_line_per_run_and_a_word_on_what_is_damaged(
    penstock: Penstock, runs: list[RunFolder]
) -> None:
    said = penstock("runs", "list")
    assert (said.code, said.err) == (0, "")
    assert said.out == (
        "run                         state        num_steps  accuracy_after_rl\n"
        "20261121-031454-grpo-seed0  finished     200        0.5\n"
        "20261121-041454-grpo-seed1  stopped      9          0.75\n"
        "20261121-051454-grpo-seed2  not running  -          -\n"
        "20261121-061454-grpo-seed3  damaged      -          -\n"
        "20261121-061454-grpo-seed3: summary.json cannot be read (JSONDecodeError: Expecting "
        "property name enclosed in double quotes: line 1 column 2 (char 1))\n"
    )


@pytest.mark.parametrize(
    ("words", "seeds"),
    [
        (["sort=accuracy_after_rl"], [1, 0, 2, 3]),
        (["name=20261121-041454-grpo-seed1"], [1]),
        (["sort=created", "limit=2"], [3, 2]),
        (["optimizer.lr=0.00001"], [0, 2, 3]),
        (["optimizer.lr=1e-4"], [1]),
        (["optimizer.lr=small"], []),
        (["seed=2"], [2]),
        (["state=finished", "name=grpo"], [0]),
    ],
)
def test_runs_are_chosen_and_sorted_by_any_key(
    penstock: Penstock, runs: list[RunFolder], words: list[str], seeds: list[int]
) -> None:
    said = penstock("runs", "list", "show=seed", *words)
    assert said.code == 0, said.err
    assert listed(said.out) == seeds


def test_control_characters_of_a_name_only_show(penstock: Penstock, tmp_path: Path) -> None:
    folder = made(tmp_path / "runs", 0, "1", {"task": "a\x1b[31m\nb" + "c" * 80})
    said = penstock("runs", "list", "show=task")
    row = said.out.splitlines()[1]
    assert row == f"{folder.id}  a\\x1b[31m\\nb{'c' * 49}..."


def test_two_runs_differ_in_files_configuration_and_result(
    penstock: Penstock, runs: list[RunFolder]
) -> None:
    said = penstock("runs", "diff", "20261121-031454-grpo-seed0", str(runs[1].path))
    assert (said.code, said.err) == (0, "")
    assert said.out == (
        "20261121-031454-grpo-seed0 and 20261121-041454-grpo-seed1\n"
        "\n"
        "files and models\n"
        f"  files.reward.py  {'0' * 64}  {'1' * 64}\n"
        "\n"
        "configuration\n"
        "  optimizer.lr  1e-05  0.0001\n"
        "\n"
        "what came out\n"
        "  accuracy_after_rl  0.5  0.75\n"
        "  num_steps          200  9\n"
        "  stopped            -    asked\n"
    )


def test_a_run_does_not_differ_from_itself(penstock: Penstock, runs: list[RunFolder]) -> None:
    said = penstock("runs", "diff", runs[0].id, runs[0].id)
    assert said.out.splitlines()[1:] == [
        "are the same in code, data, models, packages, machine, configuration and what came out"
    ]


def test_a_number_and_a_truth_are_different(penstock: Penstock, tmp_path: Path) -> None:
    made(tmp_path / "runs", 0, "true", None)
    said = penstock("runs", "list", "optimizer.lr=1").out
    assert said == "no run in 'runs' has optimizer.lr=1\n"
    assert listed(penstock("runs", "list", "optimizer.lr=true").out) == [0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"],
         "penstock runs: expected one of list, show, diff, plot, compare, reproduce, export, "
         "import, got 'lst'; did you mean 'list'?\n    penstock runs --help says what each "
         "takes\n"),
        (["list", "grpo"], "penstock runs list: expected KEY=VALUE, got 'grpo'\n"),
        (["list", "optimizer.rl=1"],
         "penstock runs: no run here has a key 'optimizer.rl'; did you mean 'optimizer.lr'?\n"
         "    penstock runs --help says which options and keys there are\n"),
        (["list", "sort=sead"],
         "penstock runs: no run here has a key 'sead'; did you mean 'seed'?\n"
         "    penstock runs --help says which options and keys there are\n"),
        (["list", "show=sead"], "'show': no run here has a key 'sead'; did you mean 'seed'?\n"),
        (["list", "limit=-1"], "'limit': expected a whole number of at least 0, got '-1'\n"),
        (["list", "runs=none"],
         "'none' is no folder of runs\n    give runs=FOLDER, which `penstock run` writes to\n"),
        (["diff", "one"], "penstock runs diff: expected two runs, got 1\n"),
        (["diff", "one", "two"],
         "'one' is not the folder of a run: it has no run.json\n    give a folder that `penstock "
         "run` made, such as runs/20261121-031454-grpo-seed0\n"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused_with_a_message(
    penstock: Penstock, runs: list[RunFolder], words: list[str], message: str
) -> None:
    said = penstock("runs", *words)
    assert (said.code, said.out, said.err) == (2, "", f"penstock: {message}")


def test_a_damaged_run_is_not_compared(penstock: Penstock, runs: list[RunFolder]) -> None:
    said = penstock("runs", "diff", runs[0].id, runs[3].id)
    assert said.code == 2
    assert said.err.startswith(f"penstock: run '{runs[3].id}': summary.json cannot be read")


def test_no_runs_are_an_empty_table(penstock: Penstock, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert penstock("runs", "list", "sort=seed").out == "run\n"
    assert penstock("runs", "list", "seed=1").out == "no run in 'runs' has seed=1\n"
    assert penstock("runs", "--help").out.startswith("usage: penstock runs ACTION")


def test_a_run_is_shown_with_its_packages_and_curves(penstock: Penstock, make: Make) -> None:
    make(0, "1e-5", {"num_steps": 3, "nodes": {"a": 1.0}, "none": None}, [4.0, 2.0, 1.0])
    said = penstock("runs", "show", "20261121-031454-grpo-seed0")
    assert (said.code, said.err) == (0, "")
    assert said.out == (
        "runs/20261121-031454-grpo-seed0\n"
        "\n"
        "the run\n"
        "  state     finished\n"
        "  created   2026-11-21T03:14:54+00:00\n"
        "  seed      0\n"
        "  code      0.1.0\n"
        "  data      0123456789abcdef\n"
        "  packages  python 3.12.1, torch 2.13.0\n"
        "  machine   num_cores 2, processor one\n"
        "\n"
        "what came out\n"
        "  num_steps  3\n"
        "\n"
        "metric               first  last\n"
        "  a.train/loss       4      1     █▃▁\n"
        "  run/step_time_s    0.5    0.5   ▁▁▁\n"
        "  run/samples_per_s  32     32    ▁▁▁\n"
        "  a.train/tokens     7      7     ▁▁▁\n"
    )


def test_other_packages_and_machines_are_a_difference(penstock: Penstock, make: Make) -> None:
    one = make(0, "1e-5", None)
    other = make(0, "1e-5", None, environment=({"torch": "2.12.0"}, {"num_cores": 4}))
    said = penstock("runs", "diff", one.id, other.id).out
    assert "packages\n  python  3.12.1  -\n  torch   2.13.0  2.12.0\n" in said
    assert "machine\n  num_cores  2    4\n  processor  one  -\n" in said
