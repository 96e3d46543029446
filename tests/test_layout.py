"""Rules about the tree itself: sizes, names, documentation, what an import may pull in."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("dataflow", "algorithms", "planner", "workers", "configs", "launch")
FOLDERS = (*PACKAGES, "examples", "benchmarks", "tests")
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
MAX_INHERITANCE_DEPTH = 2
MAX_MODULES_IN_A_FOLDER = 26
MAX_RECIPES = 50
SMALL_FILE_LINES = 45
MAX_SMALL_FILES = 14

# In two halves, so that this file is not one that it finds.
REGISTRY_HOSTS = tuple(
    name + suffix
    for name, suffix in (
        ("pypi", ".org"),
        ("pythonhosted", ".org"),
        ("npmjs", ".org"),
        ("yarnpkg", ".com"),
        ("download.pytorch", ".org"),
        ("deb.debian", ".org"),
        ("crates", ".io"),
        ("conda.anaconda", ".org"),
    )
)


def _sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, less the docstring: documenting a formula costs nothing."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def _tracked_files() -> list[Path]:
    """Files git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git working tree")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_files_are_within_their_budget() -> None:
    sizes = {_name(path): len(path.read_text().splitlines()) for path in _sources(*FOLDERS)}
    assert sizes, "no source file found: the rules of this file would hold for nothing"
    assert {name: lines for name, lines in sizes.items() if lines > MAX_FILE_LINES} == {}


@pytest.mark.slow
def test_functions_are_within_their_budget() -> None:
    too_long = {
        f"{_name(path)}:{function.lineno} {function.name}": _code_lines(function)
        for path in _sources(*FOLDERS)
        for function in _functions(path)
        if _code_lines(function) > MAX_FUNCTION_LINES
    }
    assert too_long == {}


def test_folders_can_be_taken_in_at_a_glance() -> None:
    counts = Counter(_name(path.parent) for path in _sources(*PACKAGES))
    full = {
        folder: count - 1  # the package's own `__init__`
        for folder, count in counts.items()
        if count - 1 > (MAX_RECIPES if folder == "algorithms" else MAX_MODULES_IN_A_FOLDER)
    }
    assert full == {}


def test_few_files_are_too_small_to_be_one() -> None:
    """Those of `algorithms` are recipes, which are as short as they are."""
    sizes = {
        _name(path): len(path.read_text().splitlines())
        for path in _sources(*(set(PACKAGES) - {"algorithms"}))
        if path.name != "__init__.py"
    }
    small = [name for name, lines in sizes.items() if lines < SMALL_FILE_LINES]
    assert len(small) <= MAX_SMALL_FILES, small


def test_every_folder_says_what_lives_in_it_and_what_does_not() -> None:
    vague = [
        _name(path)
        for path in _sources(*PACKAGES)
        if path.name == "__init__.py"
        and len(re.findall(r"\.(?=\s|$)", ast.get_docstring(ast.parse(path.read_text())) or "")) < 2
    ]
    assert vague == []


@pytest.mark.slow
def test_a_public_class_name_stands_for_one_thing() -> None:
    found: dict[str, list[str]] = {}
    for path in _sources(*PACKAGES):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(_name(path))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def _imports(path: Path) -> Iterator[str]:
    """Modules of ours that a module names, deferred and for type checking alike."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            named = [*base, *(node.module or "").split(".")] if node.module else [*base]
            for alias in node.names:
                inner = ROOT.joinpath(*named, alias.name)
                is_module = inner.with_suffix(".py").is_file() or inner.is_dir()
                yield ".".join([*named, alias.name] if is_module else named)


@pytest.mark.slow
def test_no_module_imports_itself_by_a_circle() -> None:
    graph: nx.DiGraph[str] = nx.DiGraph()
    for path in _sources(*PACKAGES):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        graph.add_edges_from((module, other) for other in _imports(path))
    assert graph.number_of_edges() > 1000
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert circles == []


def test_no_module_is_called_utils() -> None:
    vague = {"utils", "util", "helpers", "misc", "common"}
    assert [_name(path) for path in _sources(*FOLDERS) if path.stem in vague] == []


@pytest.mark.slow
def test_every_module_of_the_package_says_what_it_owns() -> None:
    silent = [
        _name(path)
        for path in [ROOT / "__init__.py", *_sources(*PACKAGES, "examples", "benchmarks")]
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def _base_names(node: ast.ClassDef) -> Iterator[str]:
    for base in node.bases:
        expression = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(expression, ast.Name):
            yield expression.id
        elif isinstance(expression, ast.Attribute):
            yield expression.attr


def _depth(name: str, bases: dict[str, set[str]]) -> int:
    """Count the steps from a class to its furthest ancestor of ours that has behavior.

    `Worker` and `Task` have defaults alone, and `Role` nothing of its own.
    """
    without = {"Role", "Worker", "Task"}
    ours = [base for base in bases[name] if base in {*bases} - without]
    return max((1 + _depth(base, bases) for base in ours), default=0)


@pytest.mark.slow
def test_inheritance_is_shallow() -> None:
    bases: dict[str, set[str]] = {}
    for path in _sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases.setdefault(node.name, set()).update(set(_base_names(node)) - {node.name})
    assert "Role" in bases
    deep = {name: depth for name in bases if (depth := _depth(name, bases)) > MAX_INHERITANCE_DEPTH}
    # A process's part of a `LeanNetwork`, which differs from it in its head alone.
    assert deep == {"TensorParallelNetwork": 3}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_listed_for_installation(package: str) -> None:
    """A folder missing from pyproject.toml works in a checkout and is absent from a wheel."""
    declared = (ROOT / "pyproject.toml").read_text()
    folders = {path.parent.relative_to(ROOT) for path in _sources(package)}
    for folder in folders:
        assert f'"penstock.{".".join(folder.parts)}"' in declared


@pytest.mark.slow
def test_importing_dataflow_does_not_import_what_only_runs_need() -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "import penstock.dataflow as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "heavy = ('ray', 'transformers', 'hydra', 'datasets', 'vllm', 'megatron', 'tensorboard')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    assert (ran.stdout.strip(), ran.stderr) == ("[]", "")


@pytest.mark.slow
def test_importing_dataflow_alone_does_not_import_torch() -> None:
    code = (
        "import sys, penstock.dataflow as package\n"
        "before = 'torch' in sys.modules\n"
        "names = [name for name in package.__all__ if getattr(package, name).__name__ != name]\n"
        "print(before, 'ray' in sys.modules, names, set(package.__all__) <= set(dir(package)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False
    )
    assert (ran.stdout.strip(), ran.stderr) == ("False False [] True", "")


def test_a_name_that_dataflow_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Engin'"):
        exec("from penstock.dataflow import Engin")


def test_no_file_names_a_package_registry() -> None:
    named = {
        (_name(path), host)
        for path in _tracked_files()
        for host in REGISTRY_HOSTS
        if host.encode() in path.read_bytes()
    }
    assert named == set()


def test_no_file_is_a_stray_binary_or_a_large_one() -> None:
    """What is committed is text or a picture of a few hundred kilobytes."""
    sizes = {_name(path): path.stat().st_size for path in _tracked_files()}
    assert {name: size for name, size in sizes.items() if size > 1_000_000} == {}
