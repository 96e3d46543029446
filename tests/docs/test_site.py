"""The documentation site: built without a warning, complete, and sufficient to itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from ..launch.watch.browser import started
from .pages import DOCS, ROOT

pytestmark = pytest.mark.slow

DEADLINE_S = 280.0
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
"""Attributes by which a browser loads something without being asked to."""


class Read(HTMLParser):
    """What is in a page of HTML.

    Attributes:
        links: Where its links lead.
        loads: What a browser loads for it: scripts, styles, pictures, fonts.
        anchors: What `#...` can name in it.
    """

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value for key, value in attrs if value}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag == "link" and "href" in given:
            kinds = given.get("rel", "").split()
            if {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch"} & set(kinds):
                self.loads.add(given["href"])
        elif LOADS.get(tag, "") in given:
            self.loads.add(given[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does, somewhere else."""
    folder = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
    return folder


@cache
def read(page: Path) -> Read:
    return Read(page)


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def broken(site: Path, page: Path) -> Iterator[str]:
    """Links and loads of a page that lead to nothing on the site."""
    for link in sorted(read(page).links | read(page).loads):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        # 404.html is shown at any address, so its links begin at the top.
        start = site if parts.path.startswith("/") else page.parent
        target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
        if target.is_dir():
            target /= "index.html"
        anchor = unquote(parts.fragment) if target.suffix == ".html" else ""
        if not target.is_file() or (anchor and anchor not in read(target).anchors):
            yield link


def test_every_page_is_there(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file(), page
    for name in ("index", "contributing", "security", "changelog", "examples"):
        assert (site / f"{name}.html").is_file()
    assert "An algorithm is one function" in (site / "index.html").read_text()


def test_every_link_leads_to_a_page_and_an_anchor(site: Path) -> None:
    found = {page.relative_to(site).as_posix(): list(broken(site, page)) for page in pages(site)}
    assert {page: links for page, links in found.items() if links} == {}
    assert sum(len(read(page).links) for page in pages(site)) > 5000


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    outside = {
        load
        for page in pages(site)
        for load in read(page).loads
        if urlsplit(load).netloc or urlsplit(load).scheme not in ("", "data")
    }
    assert outside == set()
    styles = [path.read_text() for path in site.rglob("*.css")]
    assert not [style for style in styles if "url(http" in style or "@import" in style]


def test_the_search_knows_the_pages_and_the_reference(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    for words in ("getting_started.html", "debugging.html", "penstock.dataflow.Engine"):
        assert words in index
    assert "source/algorithms" not in index


def test_the_reference_has_what_docstrings_say(site: Path) -> None:
    page = read(site / "reference" / "dataflow.html")
    assert {"penstock.dataflow.Engine.run", "penstock.dataflow.Schedule"} <= page.anchors


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#x">1</a><a href="b.html#y"><img src="c.png">')
    (tmp_path / "b.html").write_text('<h1 id="x">')
    assert list(broken(tmp_path, tmp_path / "a.html")) == ["b.html#y", "c.png"]


@contextmanager
def served(folder: Path) -> Generator[str]:
    """The address of a folder's files on the loopback device."""
    handler = partial(QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def test_a_search_in_a_browser_asks_nobody_else(site: Path, tmp_path: Path) -> None:
    with served(site) as url, started(tmp_path) as browser:
        browser.open(f"{url}index.html?q=debugging+a+bad+run")
        browser.until("document.querySelectorAll('.md-search-result__item').length > 0")
        found = "[...document.querySelectorAll('.md-search-result__link')].map(one => one.href)"
        results: list[str] = browser.value(found)
        requests = browser.requests()
    assert any(result.startswith(f"{url}debugging.html") for result in results)
    assert len(requests) > 5
    assert [asked for asked in requests if not asked.startswith((url, "data:", "blob:"))] == []
