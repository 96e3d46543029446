"""One engine for environments and language: what both need is written once and shared."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dataflow", "algorithms", "planner", "workers", "configs", "launch")

OF_ENVIRONMENTS = ("env_ppo", "impala", "dqn", "mappo", "papers.self_play", "papers.population")
OF_LANGUAGE = ("ppo", "grpo", "papers.remax", "papers.vtrace_ppo", "online_dpo")

SHARED = {
    "gae": ("algorithms.ops.returns", "gae"),
    "vtrace": ("algorithms.ops.returns", "vtrace"),
    "PPO's loss": ("algorithms.losses.tokens", "ClippedPolicyLoss"),
    "the critic's loss": ("algorithms.losses.tokens", "ClippedValueLoss"),
}

# What the engine must not know of. Axis and column names come from the algorithms.
KINDS = re.compile(
    r"\b(env|envs|environments?|episodes?|gym\w*|games?|languages?|prompts?|tokens?)\b",
    re.IGNORECASE,
)


@cache
def _imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, as "package.module"; names inside them as well."""
    here = path.relative_to(ROOT).with_suffix("").parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level]
            module = (*base, *(node.module or "").split(".")) if node.module else base
            found.add(".".join(module))
            found |= {".".join((*module, alias.name)) for alias in node.names}
    return found


def _path(module: str) -> Path:
    """The file of a module, or of a package's own code."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _reached(start: str) -> set[str]:
    """Everything that importing a module imports, as far as it is ours."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        path = _path(module)
        if module in seen or not path.is_file():
            seen.add(module)
            continue
        seen.add(module)
        waiting += _imports(path)
    return seen


def _files(modules: set[str]) -> list[Path]:
    return [path for path in map(_path, modules) if path.is_file()]


def _uses(path: Path, name: str) -> bool:
    """Whether a file calls a function or class, or has a field of it: importing is not enough."""
    return any(
        isinstance(node, ast.Name) and node.id == name
        for node in ast.walk(ast.parse(path.read_text()))
    )


@cache
def _definitions() -> dict[str, list[str]]:
    """Functions and classes by name -> the files that define them."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    found[node.name].append(str(path.relative_to(ROOT)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", SHARED)
def test_maths_is_one_object_for_both(what: str):
    """Algorithms of both kinds use, and not in one file alone, what one file defines."""
    module, name = SHARED[what]
    (defined,) = _definitions()[name]
    assert defined == f"{module.replace('.', '/')}.py"
    of_environments, of_language = (
        {path for algorithm in kind for path in _files(_reached(f"algorithms.{algorithm}"))}
        for kind in (OF_ENVIRONMENTS, OF_LANGUAGE)
    )
    using = [
        {path.name for path in kind if _uses(path, name)} for kind in (of_environments, of_language)
    ]
    assert all(using)
    assert len(using[0] | using[1]) > 1


@pytest.mark.parametrize(
    "module",
    [
        "dataflow.runtime.engine",
        "dataflow.scheduler.scheduler",
        "dataflow.runtime.host",
        "dataflow.runtime.remote_inference",
        "workers.executors.on_ray.executor",
        "workers.executors.supervisor",
        "workers.training.trainer",
        "workers.training.optimizer",
        "workers.training.data_parallel",
        "launch.run_dir.checkpoint",
        "launch.run_dir.resume",
    ],
)
def test_what_runs_a_graph_imports_neither_kind(module: str):
    reached = _reached(module)
    assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
    assert not [found for found in reached if found.startswith("workers.envs")]
    assert not [
        found
        for found in reached
        if found in {f"algorithms.{name}" for name in (*OF_ENVIRONMENTS, *OF_LANGUAGE)}
    ]


def test_the_engine_mentions_neither_environments_nor_language():
    said = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted((ROOT / "dataflow").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if KINDS.search(line)
    ]
    assert said == []
