"""`make release`: in a copy of this tree, what it writes, and what it refuses."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from penstock import __version__

ROOT = Path(__file__).parents[2]
NEXT = ".".join([*__version__.split(".")[:2], str(int(__version__.split(".")[2]) + 1)])
LEFT_OUT = shutil.ignore_patterns("__pycache__")
NOT_OURS = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "runs", ".*_cache", ".hyp*")
"""At the top alone: there are packages that are called like folders of outputs."""


def left_out(folder: str, names: list[str]) -> set[str]:
    return NOT_OURS(folder, names) if Path(folder) == ROOT else LEFT_OUT(folder, names)


pytestmark = pytest.mark.slow


def git(tree: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=it", "-c", "user.email=it@localhost", *words]
    ran = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of its own with one commit, which every test leaves as it was."""
    tree = tmp_path_factory.mktemp("release") / "penstock"
    shutil.copytree(ROOT, tree, ignore=left_out)
    git(tree, "init", "--quiet")
    git(tree, "config", "user.name", "it")
    git(tree, "config", "user.email", "it@localhost")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "-m", "before")
    return tree


def release(tree: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ".ci/release.py", version]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("", "VERSION: expected a version such as 0.2.0, got ''"),
        ("1.0", "VERSION: expected a version such as 0.2.0, got '1.0'"),
        (__version__, f"VERSION: {__version__} is not newer than {__version__}"),
        ("0.0.9", f"VERSION: 0.0.9 is not newer than {__version__}"),
    ],
)
def test_a_wrong_version_is_refused(tree: Path, version: str, message: str) -> None:
    ran = release(tree, version)
    assert (ran.returncode, ran.stderr) == (1, f"make release: {message}\n")
    assert git(tree, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("README.md", "", "more\n", "the tree has changes that are not committed"),
        ("CITATION.cff", f"version: {__version__}", "version: 0.0.1",
         "the version is not the same every"),
        ("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n## Before\n",
         "has nothing under Unr"),
    ],
)  # fmt: skip
def test_a_tree_that_is_not_ready_is_refused(
    tree: Path, name: str, old: str, new: str, message: str
) -> None:
    path = tree / name
    before = path.read_text()
    path.write_text(before.replace(old, new, 1) if old else before + new)
    try:
        ran = release(tree, NEXT)
    finally:
        path.write_text(before)
    assert ran.returncode == 1
    assert message in ran.stderr
    assert git(tree, "tag") == ""


def test_a_release_is_built_checked_and_tagged(tree: Path) -> None:
    ran = release(tree, NEXT)
    assert ran.returncode == 0, ran.stderr
    assert git(tree, "tag") == f"v{NEXT}"
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "show", "--format=%s", "--name-only", "HEAD").split() == [
        *("Release", NEXT, "CHANGELOG.md", "CITATION.cff", "__init__.py", "pyproject.toml")
    ]
    changelog = (tree / "CHANGELOG.md").read_text()
    assert re.search(
        rf"## Unreleased\n\n## {re.escape(NEXT)} \(\d{{4}}-\d\d-\d\d\)\n\n### ", changelog
    )
    (wheel,) = (tree / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "penstock/launch/watch/static/index.html" in names
    assert not any(name.startswith("penstock/tests") for name in names)
    again = release(tree, NEXT + "0")
    assert "CHANGELOG.md has nothing under Unreleased" in again.stderr
