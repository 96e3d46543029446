"""Every command in a block of README.md, CONTRIBUTING.md, SECURITY.md and docs is right.

How each is checked, and how a page says that one is not, stands in `checked.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.launch.main import main

from . import pages
from .checked import distinct, expected_code, recipe, to_run, unchecked
from .pages import Command

COMMANDS = distinct()
RUN = [command for command in COMMANDS if to_run(command) is not None]
FIRST_PAGES = ("README.md", "CONTRIBUTING.md", "docs/getting_started.md", "docs/configuration.md")
"""Pages that most people read; the commands of the others are tried in `make test-all`."""
FIRST = [command for command in RUN if command.where.startswith(FIRST_PAGES)]
OTHERS = [command for command in RUN if command not in FIRST]
MADE = [command for command in COMMANDS if command.words[0] == "make"]


def run(command: Command) -> int:
    """Run what is to be run for a command in this process; its exit code."""
    words = to_run(command)
    assert words is not None
    try:
        return main(words)
    except SystemExit as stop:  # argparse, for --help and unknown options
        return int(stop.code or 0)


def test_every_command_is_run_or_says_why_not() -> None:
    assert [said for command in COMMANDS if (said := unchecked(command))] == []
    assert len(RUN) > 100
    assert len(MADE) > 5


def accepted(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(command)
    said = capsys.readouterr()
    assert code == expected_code(command), f"{command.where}: {command.text}\n{said.err}"
    assert (said.out if code == 0 else said.err).strip()


@pytest.mark.slow
@pytest.mark.parametrize("command", FIRST, ids=lambda command: command.where)
def test_a_command_is_accepted(
    command: Command, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted(command, capsys)


@pytest.mark.nightly
@pytest.mark.parametrize("command", OTHERS, ids=lambda command: command.where)
def test_a_command_of_another_page_is_accepted(
    command: Command, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted(command, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("command", MADE, ids=lambda command: command.where)
def test_a_target_is_there_and_runs_what_is_accepted(command: Command, reader: Path) -> None:
    for made in recipe(command.words[1:]):
        assert run(made) == 0, made.text


PAGE = """\
# A page

Prose that says

    $ penstock graph algorithm=grpo \\
        format=svg   # a comment
    what comes out
    penstock watch: all runs in runs

<!-- not run: it needs
a cluster -->
    RAY_ADDRESS=1.2.3.4:5 .venv/bin/penstock run 'a={b: c}'

```text
make quick
```

```python
make = 1
```
"""


def found_in(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commands of a page with this text, which is called `page.md`."""
    monkeypatch.setattr(pages, "ROOT", folder)
    (folder / "page.md").write_text(text)
    return list(pages.commands(folder / "page.md"))


def test_commands_are_read_from_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, ran, quick = found_in(PAGE, tmp_path, monkeypatch)
    assert graph.words == ("penstock", "graph", "algorithm=grpo", "format=svg")
    assert (graph.where, graph.note, graph.variables) == ("page.md:5", "", ())
    assert ran.words == ("penstock", "run", "a={b: c}")
    assert (ran.where, ran.variables) == ("page.md:12", ("RAY_ADDRESS=1.2.3.4:5",))
    assert ran.note == "not run: it needs a cluster"
    assert (quick.where, quick.words) == ("page.md:15", ("make", "quick"))


@pytest.mark.parametrize(
    ("note", "said"),
    [
        ("", "page.md:2: nothing runs 'penstock watch'"),
        ("<!-- not run: it -->", "page.md:2: 'not run' without a reason"),
        ("<!-- run by tests/nothing.py -->", "page.md:2: there is no test tests/nothing.py"),
        (
            "<!-- run by tests/conftest.py -->",
            "page.md:2: tests/conftest.py says nothing of 'watch' nor of page.md",
        ),
        ("<!-- run by tests/launch/cli/test_watch.py -->", None),
        ("<!-- not run: it serves until it is stopped -->", None),
    ],
)
def test_what_nothing_checks_is_said(
    note: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = found_in(f"{note}\n    penstock watch\n", tmp_path, monkeypatch)
    found = unchecked(command)
    assert said is None if found is None else found.startswith(str(said))


def test_a_target_that_is_not_there_is_found() -> None:
    with pytest.raises(AssertionError, match="No rule to make target 'nothing'"):
        list(recipe(["nothing"]))
