"""The page in a real browser: what it draws, what it never runs, whom it asks, what it survives.

`PENSTOCK_WATCH_PICTURE=docs/watch.png PENSTOCK_WATCH_RUNS=runs` writes the picture of the
documentation, of the runs in that folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from penstock.launch.run_dir.loopback_server import PageServer
from penstock.launch.run_dir.run_folder import RunFolder
from penstock.launch.run_dir.step_logs import MetricsLog

from .browser import Browser, started
from .conftest import served
from .folders import add_samples, add_steps, new_run, row, write_many_steps
from .test_log_files import write_trace

pytestmark = pytest.mark.slow

HTML = (
    "<script>window.ran = true</script><img src=x onerror='window.ran = true'>"
    "<a href='http://example.com/'>out</a> &lt; <b>bold</b>"
)
STATUS = "(document.getElementById('curves-status')?.innerText ?? '')"

_RUN = """
import sys, time
from pathlib import Path
from penstock.launch.run_dir.run_folder import RunFolder
from penstock.launch.run_dir.step_logs import MetricsLog
run = RunFolder(Path(sys.argv[1]))
with run.locked(), MetricsLog(run.metrics) as log:
    for step in range(1_000_000):
        log.write(step, {"reward/mean": step / 10, "train/loss": 1.0})
        print(step, flush=True)
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser]:
    """One browser for all tests of this file."""
    with started(tmp_path_factory.mktemp("browser")) as made:
        yield made


def said(text: str) -> str:
    """An expression that is true when the whole page says a text."""
    return f"(document.body?.innerText ?? '').includes({json.dumps(text)})"


def view(browser: Browser, name: str, wait: str) -> None:
    """Go to one of the views and wait for what it shows."""
    browser.value(f"document.getElementById('view-{name}').click()")
    browser.until(wait)


def test_a_live_run_is_followed_killed_resumed_and_deleted(
    browser: Browser, server: PageServer, runs: Path
) -> None:
    run = new_run(runs)
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, str(run.path)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n"
            browser.open(server.url)
            browser.until(f"/last step [0-9]/.test({STATUS})")
            first = int(browser.value(f"{STATUS}.match(/last step ([0-9]+)/)[1]"))
            browser.until(f"Number({STATUS}.match(/last step ([0-9]+)/)?.[1]) > {first + 10}")
            browser.until("document.querySelector('.state')?.innerText === 'running'")
        finally:
            os.kill(process.pid, signal.SIGKILL)
    browser.until("document.querySelector('.state')?.innerText === 'not running'")
    browser.until(said("was running, is not running"))
    add_steps(run.path, range(3, 5))  # as a run that is resumed at step 3
    browser.until(f"{STATUS}.includes('it was resumed from a checkpoint')")
    browser.until(f"{STATUS}.includes('last step 4 ')")
    shutil.rmtree(run.path)
    browser.until("document.querySelector('.state')?.innerText === 'gone'")
    browser.until(f"{STATUS}.includes('nothing follows')")
    assert browser.value("document.querySelectorAll('canvas').length") > 0  # what was drawn stays
    run = new_run(runs, "later")
    browser.until(said(run.id))


def test_five_long_runs_are_drawn_and_zoomed_into(
    browser: Browser, server: PageServer, runs: Path
) -> None:
    keys = [new_run(runs, f"run{i}") for i in range(5)]
    for run in keys:
        write_many_steps(run.path, 100_000)
    browser.open(f"{server.url}#view=curves")
    browser.until(f"({STATUS}.match(/last step 99999 /g) ?? []).length === 5")
    assert browser.value("document.querySelectorAll('.u-series:not(.beneath)').length") == 2 * 6
    assert browser.value(f"({STATUS}.match(/evenly spaced/g) ?? []).length") == 5
    left, top = browser.value(
        "(({left, top}) => [left, top])(document.querySelector('.u-over').getBoundingClientRect())"
    )
    browser.drag(left + 100, left + 108, top + 50)
    browser.until("!document.getElementById('zoom-out').disabled")
    browser.until(f"!{STATUS}.includes('evenly spaced')")  # every step of so short a range
    browser.value("document.getElementById('zoom-out').click()")
    browser.until(f"{STATUS}.includes('evenly spaced')")


# What is drawn on canvases: texts, and the colors of areas.
_DRAWN = """
window.drawn = {texts: [], fills: []};
for (const [name, list, what] of [["fillText", "texts", (brush, [text]) => text],
                                  ["fill", "fills", (brush) => brush.fillStyle]]) {
  const own = CanvasRenderingContext2D.prototype[name];
  CanvasRenderingContext2D.prototype[name] = function (...given) {
    window.drawn[list].push(what(this, given));
    return own.apply(this, given);
  };
}
"""
_LEGENDS = """
Object.fromEntries([...document.querySelectorAll('.charts section')].filter((one) => one.id === "")
  .map((one) => [one.querySelector('h3').textContent,
    [...one.querySelectorAll('.u-series:not(.beneath)')].map((row) =>
      [...row.querySelectorAll('.u-label, .u-value')].map((cell) => cell.textContent).join(' '))]))
"""
_BANDS = "window.drawn.fills.filter((color) => color.startsWith('rgba')).length"


def test_the_overview_needs_no_choosing(browser: Browser, server: PageServer, runs: Path) -> None:
    seeds = [new_run(runs, seed=seed) for seed in range(2)]
    other = new_run(runs, "other")
    for number, run in enumerate((*seeds, other)):
        with MetricsLog(run.metrics) as log:
            for step in range(3):
                values = {"a.train/loss": 40.0 * number + 20.0 * step}
                values |= {"a.train/entropy": 10.0 * step} if run is other else {}
                log.write(step, values)
    add_samples(other.path, 2, [row("p", "good", 1.0), row("p", HTML, -1.0)])
    script = browser.send("Page.addScriptToEvaluateOnNewDocument", source=_DRAWN)["identifier"]
    try:
        browser.open(f"{server.url}#smoothing=off")
        browser.until("document.querySelectorAll('canvas').length === 2")
        browser.until("document.querySelectorAll('#extremes pre').length === 4")
        alone, two = other.id, "grpo, 2 runs"
        assert browser.value(_LEGENDS) == {
            "Entropy (nats): a": ["steps 2", f"{alone} 20"],
            "Loss: a": ["steps 2", f"{two} 60", f"{alone} 120"],
        }
        assert browser.value(_BANDS) > 0
        texts = browser.value("[...new Set(window.drawn.texts)]")
        assert {"0", "1", "2"} <= set(texts)
        assert all(text.isdecimal() for text in texts), texts  # whole steps
        (left, top) = browser.value(
            "(({left, width, top}) => [left + width / 2, top + 40])"
            "(document.querySelector('.u-over').getBoundingClientRect())"
        )
        browser.drag(left, left, top)
        browser.until("[...document.querySelectorAll('.u-legend')]"
                      ".every((one) => one.innerText.startsWith('steps1'))")  # fmt: skip
        assert browser.value(_LEGENDS)["Loss: a"][1:] == [f"{two} 40", f"{alone} 100"]
        assert browser.value(
            "[...document.querySelectorAll('#extremes pre')].at(-1).textContent"
        ) == (HTML)
        browser.resize(390, 800)
        browser.value(
            "window.drawn.fills = []; document.getElementById('seeds').value = 'apart';"
            "document.getElementById('seeds').onchange()"
        )
        browser.until(f"document.body.innerText.includes('{seeds[1].id}80')")
        assert browser.value(_BANDS) == 0
        assert browser.value("document.documentElement.scrollWidth") <= 390
        lefts = (
            "[...document.querySelectorAll('.u-wrap')].map((one) => one.getBoundingClientRect())"
        )
        assert browser.value(f"new Set({lefts}.map((one) => one.left)).size") == 1
        assert browser.value(f"{lefts}.every((one) => one.right <= 390)")
    finally:
        browser.send("Page.removeScriptToEvaluateOnNewDocument", identifier=script)
        browser.resize(1400, 1000)


def test_a_response_full_of_markup_is_text(
    browser: Browser, server: PageServer, runs: Path
) -> None:
    run = new_run(runs, "html")
    turns = [{"said": HTML, "reward": 1.0, "shown": HTML}]
    add_samples(run.path, 0, [row(HTML, HTML, 1.0), row(HTML, "plain", 0.0, turns=turns)])
    add_samples(run.path, 4, [row(HTML, f"{HTML} more", 1.0)])
    add_steps(run.path, range(2))
    browser.open(server.url)
    browser.until(said(run.id))
    view(browser, "samples", "document.querySelectorAll('.sample').length === 1")
    browser.value(
        "document.getElementById('samples-step').value = '0';"
        "document.getElementById('samples-step').dispatchEvent(new Event('change'))"
    )
    browser.until("document.querySelectorAll('.sample').length === 2")
    texts = browser.value("[...document.querySelectorAll('pre')].map((one) => one.textContent)")
    assert texts == [HTML, HTML, HTML, HTML, HTML]
    browser.value("document.querySelector('.compare').click()")
    browser.until("document.querySelector('.diff ins')")
    assert browser.value("document.querySelector('.diff').textContent") == f"{HTML} more"
    assert (
        browser.value("document.querySelectorAll('#view script, #view img, #view a').length") == 0
    )
    assert browser.value("window.ran === undefined")


def test_a_runs_names_are_text_as_well(browser: Browser, server: PageServer, runs: Path) -> None:
    run = new_run(runs)
    strange = runs / "<img src=x onerror=window.ran=1>"
    run.path.rename(strange)
    about = json.loads((strange / "run.json").read_text())
    (strange / "run.json").write_text(json.dumps({**about, "name": HTML, "not_reproducible": HTML}))
    RunFolder(strange).write_summary({"num_steps": 1, HTML: HTML})
    with MetricsLog(strange / "metrics.jsonl") as log:
        log.write(0, {f"{HTML}/reward": 1.0})
    write_trace(strange / "trace.json", 2)
    browser.open(server.url)
    browser.until(said(strange.name))
    for name, wait in (
        ("curves", f"{STATUS}.includes('last step 0')"),
        ("run", "document.querySelector('.about')"),
        ("timeline", "document.querySelector('svg.timeline')"),
    ):
        view(browser, name, wait)
        assert browser.value("document.querySelectorAll('#columns script, #columns a').length") == 0
        assert browser.value("window.ran === undefined")


def test_nothing_leaves_the_machine_and_nothing_fails(
    browser: Browser, server: PageServer, runs: Path
) -> None:
    run = new_run(runs)
    add_steps(run.path, range(20))
    add_samples(run.path, 0, [row("p", "r", 1.0)])
    write_trace(run.trace, 5)
    run.graph.write_text(
        "<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'>"
        "<image href='http://example.com/a.png'/><script href='http://example.com/a.js'/></svg>"
    )
    browser.events.clear()
    browser.open(server.url)
    browser.until(f"{STATUS}.includes('last step 19')")
    view(browser, "samples", "document.querySelector('.sample')")
    view(browser, "run", "document.querySelector('.about')")
    view(browser, "timeline", "document.querySelector('img.graph')?.complete")
    assert browser.value("document.querySelector('img.graph').naturalWidth") == 10
    own = f"http://127.0.0.1:{server.server_port}/"
    asked = [url for url in browser.requests() if url != "about:blank"]
    assert len(asked) > 10
    assert [url for url in asked if not url.startswith(own)] == []
    wrong = [
        event["params"]
        for event in browser.events
        if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
    ]
    icon = f"{own}favicon.ico"  # which every browser asks for, and which has no token
    assert [one for one in wrong if one.get("entry", {}).get("url") != icon] == []


def test_a_wrong_token_sees_nothing(browser: Browser, server: PageServer, runs: Path) -> None:
    new_run(runs)
    other = server.url.replace(server.token, "x" * len(server.token))
    browser.events.clear()
    browser.open(other)
    codes = "performance.getEntriesByType('navigation')[0]?.responseStatus === 404"
    browser.until(codes)
    said_of_it = browser.value("document.body.innerText")  # by the browser itself
    assert "penstock" not in said_of_it
    assert "grpo" not in said_of_it
    assert [url for url in browser.requests() if "api/" in url or "static/" in url] == []


def test_another_sites_page_cannot_read_it(browser: Browser, server: PageServer) -> None:
    browser.open("data:text/html,<title>other</title>")
    browser.until("document.title === 'other'")
    url = json.dumps(f"{server.url}api/runs")
    read = f"fetch({url}).then(() => 'read', () => 'refused')"
    assert browser.value(read) == "refused"


def test_the_page_says_when_its_server_has_ended(
    browser: Browser, server: PageServer, runs: Path
) -> None:
    add_steps(new_run(runs).path, range(3))
    browser.open(server.url)
    browser.until(f"{STATUS}.includes('last step 2')")
    server.shutdown()
    server.socket.close()
    browser.until(said("was penstock watch ended?"))


def test_the_picture_of_the_documentation(browser: Browser, runs: Path) -> None:
    shown = Path(os.environ.get("PENSTOCK_WATCH_RUNS", runs))
    if shown == runs:
        for seed in range(2):
            add_steps(new_run(runs, f"grpo-{seed}").path, range(50))
    browser.resize(1280, 820)
    with served(shown) as server:
        browser.open(server.url)
        browser.until("document.querySelectorAll('canvas').length >= 2")
        browser.until(f"({STATUS}.match(/last step/g) ?? []).length >= 2")
        picture = browser.picture()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 300_000
    if target := os.environ.get("PENSTOCK_WATCH_PICTURE"):
        Path(target).write_bytes(picture)
