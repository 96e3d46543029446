"""The curve in a notebook: one display for each stage, drawn again now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import IPython.display
import pytest
from penstock.launch.from_python.handle import Curve, LiveCurve, in_notebook
from penstock.launch.run_dir.trackers import RunInfo, Tracker

RUN = RunInfo("20261121-031454-<b>grpo</b>-seed0", {"sft": Path("a"), "grpo": Path("b")}, {}, False)


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What each display has shown, one picture after another."""
    shown: list[list[str]] = []

    class Display:
        def __init__(self, page: Any) -> None:
            self.pages = [page.data]
            shown.append(self.pages)

        def update(self, page: Any) -> None:
            self.pages.append(page.data)

    def display(page: Any, display_id: bool) -> Display:
        assert display_id
        return Display(page)

    monkeypatch.setattr(IPython.display, "display", display)
    return shown


def test_each_stage_has_one_display_that_is_drawn_again(pictures: list[list[str]]) -> None:
    live = LiveCurve(every_s=0.0)
    assert isinstance(live, Tracker)
    live.start(RUN)
    live.rewind(0, "sft")
    for step in range(3):
        live.log(step, "sft", {"actor.train/cross_entropy": 2.0 - step})
    live.rewind(0, "grpo")
    for step in range(2):
        live.log(step, "grpo", {"reward.score/reward/mean": float("nan") if step else 0.5})
    live.log(2, "grpo", {"evaluation/accuracy": 0.25})
    live.finish(None)
    assert [len(pages) for pages in pictures] == [4, 3]
    assert "sft: 3 steps" in pictures[0][-1]
    assert "cross-entropy, nats" in pictures[0][-1]
    assert "grpo: 2 steps" in pictures[1][-1]
    assert "mean reward" in pictures[1][-1]
    assert "&lt;b&gt;grpo&lt;/b&gt;" in pictures[1][-1]
    assert "<b>" not in pictures[1][-1]


def test_pictures_are_drawn_now_and_then_and_at_the_end(pictures: list[list[str]]) -> None:
    live = LiveCurve(every_s=3600.0)
    live.start(RUN)
    live.rewind(0, "grpo")
    for step in range(1000):
        live.log(step, "grpo", {"reward.score/reward/mean": step / 1000})
    live.finish(None)
    (pages,) = pictures
    assert len(pages) == 2
    assert "1000 steps" in pages[-1]


def test_a_long_curve_is_a_small_picture() -> None:
    curve = Curve("run", "reward", [(float(x), float(x % 7)) for x in range(100_000)])
    assert len(str(curve)) < 40_000
    assert ElementTree.fromstring(str(curve)).tag.endswith("svg")


def test_a_metric_that_nothing_is_judged_by_is_no_curve(pictures: list[list[str]]) -> None:
    live = LiveCurve(every_s=0.0)
    live.start(RUN)
    live.rewind(0, "grpo")
    live.log(0, "grpo", {"own/number": 1.0})
    assert pictures == [["<p>grpo: 1 steps  </p>"]]


def test_this_is_no_notebook() -> None:
    assert not in_notebook()
