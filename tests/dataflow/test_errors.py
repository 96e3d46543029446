"""The error family: complete texts, places in the user's source, and a life after pickling."""

from __future__ import annotations

import inspect
import linecache
import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import (
    ConfigError,
    FlowError,
    PenstockError,
    PlanError,
    StateError,
    Where,
    WorkerError,
    caller,
    closest,
    nearest,
    raised_at,
    users_line,
)

HERE = Where("/home/someone/steps.py", 12, "roll = actor.generate(prompts.prompt)")


def test_a_place_prints_without_folders_and_with_its_source_line() -> None:
    assert HERE.short == "steps.py:12"
    assert str(HERE) == "steps.py:12\n    roll = actor.generate(prompts.prompt)"
    assert str(Where("<stdin>", 1, "")) == "<stdin>:1"


def test_caller_is_the_line_that_called_into_the_package() -> None:
    where = caller()
    assert where.file == __file__
    assert where.source == "where = caller()"
    assert (
        where.line
        == inspect.getsourcelines(test_caller_is_the_line_that_called_into_the_package)[1] + 1
    )


def test_a_flow_error_says_where_what_whence_and_how_to_fix_it() -> None:
    error = FlowError(
        "node 'f', input 'x': expected f32[sample], got i64[sample]",
        where=HERE,
        origin="'g.out' was produced at steps.py:11",
        fix="convert it in an op",
    )
    assert str(error) == (
        "steps.py:12\n"
        "    roll = actor.generate(prompts.prompt)\n"
        "node 'f', input 'x': expected f32[sample], got i64[sample]\n"
        "    'g.out' was produced at steps.py:11\n"
        "    convert it in an op"
    )


def test_a_flow_error_without_a_producer_leaves_that_part_out() -> None:
    assert str(FlowError("what", where=HERE, fix="fix")).splitlines()[2:] == ["what", "    fix"]


def test_a_flow_error_points_at_the_line_that_raised_it_unless_told() -> None:
    error = FlowError("what", fix="fix")
    assert error.where.file == __file__
    assert error.where.source == 'error = FlowError("what", fix="fix")'


@pytest.mark.parametrize("kind", [WorkerError, StateError])
def test_a_story_follows_the_message(kind: type[WorkerError] | type[StateError]) -> None:
    assert str(kind("it broke")) == "it broke"
    error = kind("it broke", ("0.1 s  started", "0.2 s  failed"))
    assert error.story == ("0.1 s  started", "0.2 s  failed")
    assert str(error) == ("it broke\nwhat happened before:\n    0.1 s  started\n    0.2 s  failed")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no such key"),
        PlanError("no such group"),
        FlowError("what", where=HERE, origin="whence", fix="fix"),
        WorkerError("it broke", ("story",)),
        StateError("it cannot be", ("story",)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes_with_their_whole_text(error: PenstockError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.__dict__ == error.__dict__
    assert str(copy) == str(error)


def test_the_closest_known_name_is_offered() -> None:
    assert closest("chian", ["sum", "chain"]) == "chain"
    assert closest("zzz", ["chain", "sum"]) is None
    assert nearest("chian", ["chain", "sum"]) == "; did you mean 'chain'?"
    assert nearest("chian", ["chain"], at="task") == "; did you mean 'task.chain'?"
    assert nearest("zzz", ["chain", "sum"], at="task") == ""


@pytest.mark.parametrize(
    ("code", "line", "source"),
    [("import math\nx = 1 / 0\n", 2, "x = 1 / 0"), ("x = 1\n\nif x\n", 3, "if x")],
)
def test_an_error_tells_where_it_was_raised(
    tmp_path: Path, code: str, line: int, source: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(code)
    with pytest.raises((ZeroDivisionError, SyntaxError)) as caught:
        runpy.run_path(str(file))
    assert raised_at(caught.value) == Where(str(file), line, source)


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("/tmp/ipykernel_12/3405691582.py", True),
        ("<ipython-input-3-0badf00d>", True),
        ("<string>", False),
        ("<made by a library>", False),
    ],
)
def test_a_cell_of_a_notebook_is_the_user_s_own_code(
    name: str, is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def broken() -> None:\n    raise ValueError('on purpose')\n"
    lines = source.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, name, (len(source), None, lines, name))
    cell: dict[str, Any] = {}
    exec(compile(source, name, "exec"), cell)
    with pytest.raises(ValueError, match="on purpose") as raised:
        cell["broken"]()
    found = users_line(raised.value)
    assert found is not None
    place = (found.file, found.line, found.source)
    assert (place == (name, 2, "raise ValueError('on purpose')")) == is_ours
