"""Reading the pages: which there are, their blocks of code, and the commands in these."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ALL = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
    ),
    *sorted(DOCS.rglob("*.md")),
]
"""Every page that is held against the code."""

PROGRAMS = (
    *("penstock", "make", "python", "python3", "pip", "uv", "pytest", "pre-commit"),
    *("docker", "kubectl", "ray", "sbatch", "srun", "ssh", "scp", "git", "curl", "lm_eval"),
)
"""What a line of a block begins with if it is a command."""

_COMMENT = re.compile(r"<!-- *(.*?) *-->", re.DOTALL)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*=")


@dataclass(frozen=True)
class Block:
    """A block of code, fenced or indented.

    Attributes:
        page: The page.
        line: The line of its first line.
        language: What stands behind the fence; "" for an indented block.
        lines: Its lines, without indentation.
        note: The comment of HTML directly before it, on one line; "" without one.
    """

    page: Path
    line: int
    language: str
    lines: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        where: The page and the line, as `docs/runs.md:14`.
        text: The command on one line, as it stands there.
        variables: Variables of the environment that it begins with.
        words: The words after those; the first is the program.
        note: What is said of its block: how it is checked, or why it is not run.
    """

    where: str
    text: str
    variables: tuple[str, ...]
    words: tuple[str, ...]
    note: str


def name(page: Path) -> str:
    """A page's path from the root."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page in order."""
    lines = page.read_text().splitlines()
    at = 0
    while at < len(lines):
        fence = re.match(r"(```+|~~~+)(\w*)", lines[at])
        indented = lines[at].startswith("    ") and re.fullmatch(r"|.*-->", lines[at - 1])
        if not fence and not indented:
            at += 1
            continue
        start = at + 1 if fence else at
        end = start
        if fence:
            while end < len(lines) and not lines[end].startswith(fence[1]):
                end += 1
        else:
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
        taken = lines[start:end] if fence else [line[4:] for line in lines[start:end]]
        yield Block(page, start + 1, fence[2] if fence else "", tuple(taken), _note(lines[:at]))
        at = end + 1 if fence else end


def _note(before: list[str]) -> str:
    """The comment that the lines before a block end with."""
    text = "\n".join(before).rstrip()
    if not text.endswith("-->"):
        return ""
    found = _COMMENT.fullmatch(text[text.rindex("<!--") :])
    return "" if found is None else " ".join(found[1].split())


def commands(page: Path) -> Iterator[Command]:
    """The commands of a page in order."""
    for block in blocks(page):
        if block.language in ("python", "yaml", "json", "toml"):
            continue
        at = 0
        while at < len(block.lines):
            line, text = block.line + at, block.lines[at]
            while text.endswith("\\") and at + 1 < len(block.lines):
                at += 1
                text = f"{text[:-1].rstrip()} {block.lines[at].strip()}"
            at += 1
            command = _command(f"{name(page)}:{line}", text.removeprefix("$ "), block.note)
            if command is not None:
                yield command


def _command(where: str, text: str, note: str) -> Command | None:
    """The line as a command, if it is one: outputs stand in blocks as well."""
    first = re.match(rf"(?:{_VARIABLE.pattern}\S* +)*(?:\.venv/bin/)?([\w-]+)(?= |$)", text)
    if first is None or first[1] not in PROGRAMS:
        return None
    words = shlex.split(text, comments=True)
    if len(words) > 1 and words[1].endswith(":"):
        return None  # what a command says, such as `penstock watch: all runs in runs`
    number = next(i for i, word in enumerate(words) if not _VARIABLE.match(word))
    program = words[number].removeprefix(".venv/bin/")
    return Command(where, text, tuple(words[:number]), (program, *words[number + 1 :]), note)
