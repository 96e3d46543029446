"""`penstock runs plot` and `compare`: sets of runs on the terminal, in a picture, in a report."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ...conftest import Penstock
from .conftest import Make

PNG = b"\x89PNG\r\n\x1a\n"


pytestmark = pytest.mark.usefixtures("fonts")


@pytest.fixture
def sets(make: Make) -> None:
    """Three seeds of a high learning rate, which come out better, and three of a low one."""
    for seed in range(6):
        better = seed < 3
        summary = {"num_steps": 3, "accuracy_after_rl": 0.25 * better + seed / 64}
        losses = [4.0, 3.0 - better, 2.0 - better + seed / 8]
        make(seed, "1.0e-03" if better else "1.0e-05", summary, losses)


def test_two_sets_by_a_key(penstock: Penstock, sets: None) -> None:
    said = penstock("runs", "compare", "by=optimizer.lr")
    assert (said.code, said.err) == (0, "")
    assert said.out == (
        "accuracy_after_rl                                runs  mean [95 % interval]"
        "       of each run\n"
        "optimizer.lr=0.001                               3     0.2656 [0.25, 0.2812]"
        "      0.25 0.265625 0.28125\n"
        "optimizer.lr=1e-05                               3     0.0625 [0.04688, 0.07812]"
        "  0.046875 0.0625 0.078125\n"
        "optimizer.lr=1e-05: higher by                          -0.2031 [-0.224, -0.1823]\n"
        "optimizer.lr=1e-05: probability of a higher run        0 [0, 0]\n"
        "a set has 3 runs: too few to tell a difference from chance, and intervals of fewer than "
        "5 runs are narrower than 95 %; run 5 seeds of each\n"
    )


@pytest.mark.parametrize(("gain", "says"), [(0.25, "beyond"), (0.0, "within")])
def test_a_difference_is_judged_from_five_runs_on(
    penstock: Penstock, make: Make, gain: float, says: str
) -> None:
    for seed in range(10):
        better = seed < 5
        make(
            seed, "1.0e-03" if better else "1.0e-05", {"gain": gain * better + seed % 5 / 64}, [1.0]
        )
    said = penstock("runs", "compare", "by=optimizer.lr", "key=gain")
    assert said.out.endswith(f"the difference is {says} what these runs vary by\n"), said.err


@pytest.mark.parametrize("key", ["accuracy_after_rl", "a.train/loss"])
def test_one_run_has_no_interval(penstock: Penstock, sets: None, key: str) -> None:
    low, high = "20261121-06*", "20261121-0[3-5]*"
    for words in ((low, "20261121-03*"), (low, high), (high, low)):
        said = penstock("runs", "compare", *words, f"key={key}")
        assert said.code == 0, said.err
        table, remarks = said.out.splitlines()[:-1], said.out.splitlines()[-1]
        assert remarks.startswith("a set has 1 run: nothing tells whether the difference is more")
        assert "beyond" not in said.out
        assert "probability" not in said.out
        of_three = [line for line in table if line.startswith(high)]
        assert all("[" not in line for line in table[1:] if line not in of_three)


def test_two_patterns_and_a_metric_of_the_steps(penstock: Penstock, sets: None) -> None:
    low, high = "20261121-0[6-9]*", "20261121-0[3-5]*"
    said = penstock("runs", "compare", low, high, "key=a.train/loss")
    assert said.code == 0, said.err
    rows = said.out.splitlines()
    assert rows[1].split()[-3:] == ["2.375", "2.5", "2.625"]
    assert rows[2].split()[-3:] == ["1", "1.125", "1.25"]


def test_a_report_can_be_read_by_itself(penstock: Penstock, sets: None) -> None:
    said = penstock("runs", "compare", "by=optimizer.lr", "report=report.md")
    assert said.out.endswith("\nreported in report.md\n")
    report = Path("report.md").read_text()
    assert report.startswith("# optimizer.lr=1e-05 against optimizer.lr=0.001\n")
    assert "| optimizer.lr=0.001 | 3 | 0.2656 [0.25, 0.2812] | 0.25 0.265625 0.28125 |" in report
    assert "\n| optimizer.lr | 0.001 | 1e-05 |\n" in report
    assert report.count("| 20261121-") == 6


def test_curves_of_sets_on_the_terminal_and_in_a_picture(penstock: Penstock, sets: None) -> None:
    words = ("by=optimizer.lr", "metric=a.train/loss", "over=samples")
    said = penstock("runs", "plot", *words, "file=loss.svg")
    assert (said.code, said.err) == (0, "")
    assert said.out == (
        "metric   set                 runs  samples  first  last\n"
        "Loss: a  optimizer.lr=0.001  3     48       4      1.125  █▃▁\n"
        "Loss: a  optimizer.lr=1e-05  3     48       4      2.5    █▃▁\n"
        "drawn in loss.svg\n"
    )
    texts = [one.text for one in ElementTree.parse("loss.svg").iter() if one.tag.endswith("text")]
    assert {
        "samples", "Loss: a", "a.train/loss", "optimizer.lr=0.001 (3 runs)",
        "interquartile mean, 95 % interval",
    } <= set(texts)  # fmt: skip
    first = Path("loss.svg").read_bytes()
    penstock("runs", "plot", *words, "file=loss.svg")
    assert Path("loss.svg").read_bytes() == first
    assert penstock("runs", "plot", *words, "file=loss.png").code == 0
    assert Path("loss.png").read_bytes().startswith(PNG)


def test_runs_of_different_lengths_are_compared_as_far_as_both_go(
    penstock: Penstock, make: Make
) -> None:
    make(0, "1", {}, [4.0, 3.0, 2.0, 1.0])
    make(1, "1", {}, [2.0, 1.0])
    said = penstock("runs", "plot", "2026*", "metric=a.train/loss")
    assert said.out.splitlines()[1].split() == [
        "Loss:", "a", "2026*", "2", "2", "3", "2", "█▁",
    ]  # fmt: skip
    own_files_differ = penstock("runs", "plot", "metric=a.train/loss", "file=one.svg")
    assert [line.split()[2:4] for line in own_files_differ.out.splitlines()[1:3]] == [
        ["20261121-031454-grpo-seed0", "1"], ["20261121-041454-grpo-seed1", "1"],
    ]  # fmt: skip
    picture = Path("one.svg").read_text()
    assert "(1 run)" in picture
    ticks = re.findall(r'id="xtick_.*?<text.*?>([^<]+)</text>', picture, re.DOTALL)
    assert ticks == ["1", "2", "3", "4"]  # whole steps
    assert "interval" not in picture


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plot"],
         "penstock runs plot: which metric?\n    give metric=NAME; penstock runs show RUN lists "
         "those that a run has"),
        (["plot", "metric=a.train/los"],
         "run '20261121-031454-grpo-seed0' has no metric 'a.train/los'; did you mean "
         "'a.train/loss'?\n    penstock runs show 20261121-031454-grpo-seed0 lists those that it "
         "has"),
        (["plot", "metric=a.train/loss", "over=time"],
         "'over': expected one of steps, samples, tokens, seconds, got 'time'"),
        (["plot", "metric=a.train/loss", "stage=sft"],
         "'stage': run '20261121-031454-grpo-seed0' has no stage 'sft'"),
        (["plot", "metric=a.train/loss", "file=loss.pdf"],
         "'loss.pdf': expected a name that ends in .svg or .png"),
        (["plot", "x*", "metric=a.train/loss"], "no run in 'runs' is called 'x*'"),
        (["plot", "state=gone", "metric=a.train/loss"],
         "there is no such run in 'runs'\n    penstock runs list says which there are"),
        (["compare"],
         "penstock runs compare: expected two sets of runs, got 6: 20261121-031454-grpo-seed0, "
         "20261121-041454-grpo-seed1, 20261121-051454-grpo-seed2, 20261121-061454-grpo-seed3, "
         "20261121-071454-grpo-seed4, 20261121-081454-grpo-seed5\n    name two, such as 'A*' 'B*', "
         "or give by=KEY, of which the runs have two values"),
        (["compare", "by=seed", "key=x"],
         "penstock runs compare: expected two sets of runs, got 6: seed=0, seed=1, seed=2, "
         "seed=3, seed=4, seed=5\n    name two, such as 'A*' 'B*', or give by=KEY, of which the "
         "runs have two values"),
        (["compare", "by=optimizer.lr", "key=accuracy"],
         "run '20261121-031454-grpo-seed0' has no key and no metric 'accuracy'; did you mean "
         "'accuracy_after_rl'?"),
        (["compare", "by=optimizer.lr", "key=name"],
         "'name' of run '20261121-031454-grpo-seed0': expected a number, got 'grpo'"),
        (["compare", "--by", "x"],
         "penstock runs compare: expected KEY=VALUE or a name, got '--by'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(
    penstock: Penstock, sets: None, words: list[str], message: str
) -> None:
    said = penstock("runs", *words)
    assert (said.code, said.err) == (2, f"penstock: {message}\n")
    assert not re.search("drawn|reported", said.out)
