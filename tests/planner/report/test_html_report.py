"""The plan's page, read as a browser would: it is complete in itself, and its numbers are right."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TypeAlias
from xml.etree import ElementTree

import pytest
from penstock.planner.plan.plan import Plan
from penstock.planner.report.gantt import round_text, ticks
from penstock.planner.report.html_report import to_html

from ..hand_made import CALLS, GB, memory_a, ppo, predicting, split_plan

Element: TypeAlias = ElementTree.Element
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def page(plan: Plan | None = None) -> Element:
    return ElementTree.fromstring(to_html(ppo(), plan or split_plan()).partition("\n")[2])


def by_id(root: Element, name: str) -> Element:
    (found,) = [element for element in root.iter() if element.get("id") == name]
    return found


def text_of(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_nothing_is_loaded_from_elsewhere_and_it_follows_the_reader_s_theme() -> None:
    html = to_html(ppo(), split_plan())
    assert re.findall(r"https?:|url\(|@import|<link|src=", html) == []
    assert "color-scheme: light dark" in html
    assert "@media (prefers-color-scheme: dark)" in html


def test_bars_are_where_the_calls_are() -> None:
    gantt = by_id(page(), "gantt")
    spans = {
        g.attrib["data-node"]: (float(g.attrib["data-start-s"]), float(g.attrib["data-end-s"]))
        for g in gantt.iter("g")
    }
    assert spans == {
        "actor.generate": (0.0, 12.0),
        "reward.score": (12.0, 14.0),
        "ref.logprob": (12.0, 15.0),
        "critic.value": (14.0, 16.0),
        "actor.train": (16.0, 30.0),
        "critic.train": (16.0, 29.0),
    }


def test_bars_are_as_wide_as_their_calls_are_long() -> None:
    gantt = by_id(page(), "gantt")
    lane = next(rect for rect in gantt.iter("rect") if rect.get("class") == "lane")
    left, width = float(lane.attrib["x"]), float(lane.attrib["width"])
    for g in gantt.iter("g"):
        (rect,) = g.iter("rect")
        start_s, end_s = float(g.attrib["data-start-s"]), float(g.attrib["data-end-s"])
        x, bar = float(rect.attrib["x"]), float(rect.attrib["width"])
        assert x == pytest.approx(left + width * start_s / 30, abs=0.02)
        assert bar == pytest.approx(width * (end_s - start_s) / 30 - 1, abs=0.02)


def test_bars_of_a_lane_do_not_overlap_and_stay_inside() -> None:
    plan = split_plan().model_copy(update={"max_lag": 1})
    gantt = by_id(page(plan), "gantt")
    lanes = [rect for rect in gantt.iter("rect") if rect.get("class") == "lane"]
    for lane in lanes:
        top, right = float(lane.attrib["y"]), float(lane.attrib["x"])
        for g in sorted(gantt.iter("g"), key=lambda g: float(g.attrib["data-start-s"])):
            (rect,) = g.iter("rect")
            if float(rect.attrib["y"]) == top + 4:
                assert float(rect.attrib["x"]) >= right - 0.02
                right = float(rect.attrib["x"]) + float(rect.attrib["width"])
        assert right <= float(lane.attrib["x"]) + float(lane.attrib["width"]) + 0.02


def test_overlapping_steps_are_shown_over_two_cycles() -> None:
    plan = split_plan().model_copy(update={"max_lag": 1})
    gantt = by_id(page(plan), "gantt")
    assert [g.get("data-node") for g in gantt.iter("g")].count("actor.generate") == 2
    assert "a step ends" in text_of(gantt)


def test_what_a_bar_stands_for_is_said_under_the_pointer() -> None:
    gantt = by_id(page(), "gantt")
    (train,) = [g for g in gantt.iter("g") if g.get("data-node") == "actor.train"]
    assert train.attrib["data-tip"].splitlines() == [
        "actor.train, step 23",
        "14.0 s (on the critical path)",
        "layout dp8 zero1",
        "compute 12.0 s",
        "gradient sync 2.00 s",
        "reads actor version 23",
    ]


def test_memory_bars_add_up_to_the_peak() -> None:
    memory = by_id(page(), "memory")
    rows: dict[tuple[str, str], int] = {}
    for rect in memory.iter("rect"):
        key = (rect.attrib["y"], rect.get("data-node", "always"))
        rows[key] = rows.get(key, 0) + int(rect.attrib["data-bytes"])
    totals = {call: size for (_, call), size in rows.items() if call != "always"}
    assert totals["actor.train"] == 66 * GB
    assert totals["critic.train"] == 57 * GB
    assert [size for (_, call), size in rows.items() if call == "always"] == [41 * GB, 40 * GB]


def test_memory_bars_are_to_scale_with_the_capacity() -> None:
    memory = by_id(page(), "memory")
    limit = next(line for line in memory.iter("line") if line.get("class") == "limit")
    first = next(memory.iter("rect"))
    left = float(first.attrib["x"])
    per_byte = (float(limit.attrib["x1"]) - left) / int(limit.attrib["data-capacity-bytes"])
    assert int(limit.attrib["data-capacity-bytes"]) == 77 * GB
    for rect in memory.iter("rect"):
        width = int(rect.attrib["data-bytes"]) * per_byte
        assert float(rect.attrib["width"]) == pytest.approx(max(width - 1, 0.5), abs=0.1)


def test_a_plan_without_memory_has_no_memory_bars() -> None:
    assert "Memory of a device" not in to_html(ppo(), predicting(memory={}))


def test_the_table_lists_every_call() -> None:
    rows = [[text_of(cell) for cell in row] for row in by_id(page(), "nodes").iter("tr")]
    assert rows[0] == ["node", "group", "model", "layout", "time", "of which"]
    assert [row[0] for row in rows[1:]] == list(CALLS)
    assert rows[1][3:] == ["tp2 dp4", "12.0 s", "decode 9.50 s, prefill 1.50 s, reshard 1.00 s"]


def test_the_tiles_and_the_reasons() -> None:
    root = page()
    tiles = [text_of(e) for e in root.iter("div") if e.get("class") == "tile"]
    assert tiles[:5] == [
        "30.0 sper step",
        "69,905tokens per second",
        "2.0 %could be gained at most; no plan beats 29.4 s",
        "23 %of device time idle, 16 devices",
        "86 %of memory used on the fullest device",
    ]
    reasons = text_of(by_id(root, "why"))
    assert "34.5 s (1.15 x)" in reasons
    assert "max_lag 1" in reasons


def test_names_cannot_break_the_page() -> None:
    odd = memory_a().model_copy(update={"resident_bytes": {"<b>&'\"": {"<i>": 3}}})
    root = page(predicting(memory={"a": odd}, calibration="<script>alert(1)</script>"))
    assert len(list(root.iter("script"))) == 1


@pytest.mark.parametrize(
    ("most", "expected"), [(30.0, [0, 5, 10, 15, 20, 25, 30]), (0.9, [0, 0.2, 0.4, 0.6, 0.8])]
)
def test_ticks_are_round(most: float, expected: list[float]) -> None:
    assert ticks(most) == pytest.approx(expected)
    assert ticks(0.0) == [0.0]


def test_labels_of_ticks_are_short() -> None:
    assert [round_text(t) for t in ("5.00 s", "0.50 s", "10.0 GiB", "100 s", "0 s")] == [
        "5 s", "0.5 s", "10 GiB", "100 s", "0 s",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_details_under_the_pointer(tmp_path: Path) -> None:
    """The script runs, and the detail of the first bar appears in the page."""
    point = (
        'const bar = document.querySelector("#gantt [data-tip]");'
        'bar.dispatchEvent(new PointerEvent("pointerenter"));'
        'bar.dispatchEvent(new PointerEvent("pointermove", {clientX: 300, clientY: 300}));'
    )
    file = tmp_path / "plan.html"
    file.write_text(to_html(ppo(), split_plan()).replace("</script>", f"{point}</script>"))
    ran = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    shown = re.search(r'<div id="tip" style="([^"]*)">([^<]*)<', ran.stdout)
    assert shown is not None
    assert "display: block" in shown[1]
    assert shown[2].startswith("actor.generate, step ")
    assert 'class="dim"' in ran.stdout
