"""What MkDocs does besides: pages from outside `docs`, and links that lead out of it.

The Markdown is written for the repository: a page links to `../../algorithms/grpo.py`, which a site
made of `docs` alone has not got. Here the pages outside join the site, the README as its home, and
every other file that a page links to becomes a page that shows it. So each link works in both.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_config", "on_files", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "results.md",
}
"""Pages outside `docs`, by where they are on the site."""
SHOWN = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", "": "docker"}
"""Languages of files that a page shows, by suffix; others are copied as they are."""

_LINK = re.compile(r"^```.*?^```$|^    .*?$|\]\(([^)\s]+)\)", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"^<!--.*?-->$", re.MULTILINE | re.DOTALL)
_SEVERAL = "*.md"
"""Ends an entry of the navigation that stands for all pages of a folder not named elsewhere."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder where the navigation says `FOLDER/*.md`."""
    nav: list[Any] = config.nav or []
    config.nav = [_filled(entry, set(_named(nav))) for entry in nav]
    return config


def _named(entry: Any) -> Iterator[str]:
    """Every page that a part of the navigation names."""
    if isinstance(entry, str):
        yield entry
        return
    for below in entry.values() if isinstance(entry, dict) else entry:
        yield from _named(below)


def _filled(entry: Any, named: set[str]) -> Any:
    if isinstance(entry, dict):
        return {title: _filled(below, named) for title, below in entry.items()}
    if not isinstance(entry, list):
        return entry
    filled: list[Any] = []
    for below in entry:
        if isinstance(below, str) and below.endswith(_SEVERAL):
            found = sorted((ROOT / "docs").glob(below))
            pages = (path.relative_to(ROOT / "docs").as_posix() for path in found)
            filled += [page for page in pages if page not in named]
        else:
            filled.append(_filled(below, named))
    return filled


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside `docs` and the files that pages link to."""
    for path, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
    pages = [*((ROOT / "docs").rglob("*.md")), *(ROOT / path for path in OUTSIDE)]
    for path in sorted({target for page in pages for target in _linked(page)}):
        files.append(_copy(config, path))
    return files


def _linked(page: Path) -> Iterator[str]:
    """Files and folders outside the site's pages that a page links to, from the root."""
    at = page.relative_to(ROOT).as_posix()
    for found in _LINK.finditer(page.read_text()):
        target = _target(at, found[1])
        if target and not target.startswith("docs/") and target not in OUTSIDE:
            yield target


def _target(page: str, link: str | None) -> str | None:
    """What a link leads to, from the root; None for what is no file."""
    name = (link or "").partition("#")[0]
    if not name or "://" in name or name.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), name))


def _on_site(path: str) -> str:
    """Where on the site a file of the repository is."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in OUTSIDE:
        return OUTSIDE[path]
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    return f"source/{path}.md" if Path(path).suffix in SHOWN else f"source/{path}"


def _copy(config: MkDocsConfig, path: str) -> File:
    """A file or a folder of the repository as a page, which a search does not find."""
    here = ROOT / path
    if not here.exists():
        raise PluginError(f"a page links to '{path}', which does not exist")
    if here.is_dir():
        names = sorted(p.name for p in here.iterdir() if p.name[0] not in "._")
        text = "\n".join(f"- `{name}`" for name in names)
    elif here.suffix not in SHOWN:
        return File.generated(config, _on_site(path), abs_src_path=str(here))
    else:
        text = f"~~~~{SHOWN[here.suffix]}\n{here.read_text()}\n~~~~"
    content = f"---\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n{text}\n"
    return File.generated(config, _on_site(path), content=content)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links that leave `docs`, or come from outside, lead to what is on the site."""
    del config, files
    here = page.file.src_uri
    sources = {uri: path for path, uri in OUTSIDE.items()}
    source = sources.get(here, f"docs/{here}")

    def rewritten(found: re.Match[str]) -> str:
        target = _target(source, found[1])
        if target is None or (target.startswith("docs/") and here not in sources):
            return found[0]
        link = posixpath.relpath(_on_site(target), posixpath.dirname(here) or ".")
        _, mark, anchor = found[1].partition("#")
        return f"]({link}{mark}{anchor})"

    # A comment directly before a table or a block would make it part of a paragraph.
    return _LINK.sub(rewritten, _COMMENT.sub("", markdown))
