"""What there is to choose from, and what is said of a wrong choice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.executor import Executor
from penstock.dataflow.runtime.in_process import InProcess
from penstock.workers.executors.registry import EXECUTORS, ExecutorKind, check_executor
from penstock.workers.weight_sync.channel import DEFAULT_TRANSPORT, Transport

ROOT = Path(__file__).parents[3]


def _create(num_threads: int | None, transport: Transport) -> InProcess:
    return InProcess()


def test_every_executor_is_an_option_of_the_command_line() -> None:
    files = {path.stem for path in (ROOT / "configs" / "executor").glob("*.yaml")}
    assert set(EXECUTORS) <= files


@pytest.mark.parametrize("folder", ["launch", "planner", "configs", "algorithms"])
def test_nothing_outside_says_the_name_of_an_executor(folder: str) -> None:
    """Literals and modules; `dataflow` has the in-process one itself."""
    named = re.compile(rf"""["']({"|".join(EXECUTORS)})["']|executors\.on_|import ray\b""")
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [str(path.relative_to(ROOT)) for path in files if named.search(path.read_text())] == []


def test_a_name_that_is_none_is_refused() -> None:
    assert check_executor("ray") == "ray"
    assert check_executor("mine:EXECUTOR") == "mine:EXECUTOR"
    with pytest.raises(ValueError, match="no executor") as caught:
        check_executor("rya")
    assert str(caught.value) == (
        "'rya' is no executor; did you mean 'ray'?\n"
        "    there are: in_process, ray, or module:EXECUTOR for one of your own"
    )


def test_a_package_that_is_missing_is_named() -> None:
    kind = ExecutorKind(name="slurm", create=_create, package="no_such_package")
    with pytest.raises(ConfigError) as caught:
        kind.make(None, DEFAULT_TRANSPORT)
    assert str(caught.value) == (
        "executor=slurm needs the package no_such_package, which is not installed\n"
        "    pip install 'penstock-rl[no_such_package]', or set executor=in_process"
    )


@pytest.mark.parametrize("made", [None, 3])
def test_what_is_no_executor_is_refused_by_name(made: Any) -> None:
    kind = ExecutorKind(name="slurm", create=lambda num_threads, transport: made)
    with pytest.raises(ConfigError) as caught:
        kind.make(None, DEFAULT_TRANSPORT)
    assert str(caught.value) == (
        f"executor 'slurm': its ExecutorKind.create returned a {type(made).__name__}, which is no "
        "executor\n    return one of a class that inherits from Executor "
        "(penstock.dataflow.runtime.executor)"
    )


@pytest.mark.parametrize("kind", EXECUTORS.values(), ids=EXECUTORS)
def test_every_executor_is_one(kind: ExecutorKind) -> None:
    assert isinstance(kind.make(1, DEFAULT_TRANSPORT), Executor)
