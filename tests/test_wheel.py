"""The package as others install it: what is in it, what it is called, and that it runs far away."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from .launch.cli.test_run import GRPO, only_run, summary_of
from .test_layout import PACKAGES, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_COPIED = (".*", "__pycache__", "build", "*.egg-info", "tests", "docs", "benchmarks")


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Of a folder's names; a package may be called `runs`, as the outputs at the top are."""
    top = ("runs",) if Path(folder) == ROOT else ()
    return shutil.ignore_patterns(*NOT_COPIED, *top)(folder, names)


def _installed_files() -> set[str]:
    """What of the tree belongs into a wheel: every file of the packages."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*"))
    files = [path for path in found if path.is_file() and path.suffix != ".pyc"]
    top = [ROOT / "__init__.py", ROOT / "py.typed"]
    return {f"penstock/{path.relative_to(ROOT).as_posix()}" for path in (*files, *top)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy of the tree, where building may leave what it likes."""
    made = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, made / "tree", ignore=_left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--no-index", "--wheel-dir", str(made)]
    _run([*command, str(made / "tree")])
    (built,) = made.glob("*.whl")
    return built


def _run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command from `/` without the checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        command,
        cwd="/",
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    assert wheel.name.startswith(f"penstock_rl-{PROJECT['version']}-")
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if not name.split("/")[0].endswith("dist-info")}
    assert names == _installed_files()


@pytest.mark.slow
def test_an_installed_wheel_runs_far_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """What it depends on is that of these tests: it is found beside, and installed nowhere."""
    home = tmp_path / "venv"
    _run([sys.executable, "-m", "venv", "--without-pip", str(home)])
    python = str(home / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    _run([*pip, "install", "--no-deps", "--no-index", str(wheel)])
    (packages,) = home.glob("lib/python*/site-packages")
    # A folder that such a file names is searched, but the files of its kind in it, by which this
    # checkout may be installed there, are not read.
    (packages / "beside.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    asked = "import penstock; from importlib.metadata import version; "
    asked += "print(penstock.__file__, version('penstock-rl') == penstock.__version__)"
    assert _run([python, "-c", asked]).stdout == f"{packages / 'penstock' / '__init__.py'} True\n"
    _run([str(home / "bin" / "penstock"), "run", *GRPO, f"runs={tmp_path / 'runs'}"])
    assert summary_of(only_run(tmp_path / "runs"))["num_steps"] == 4


def test_who_is_told_to_install_something_is_told_what_there_is() -> None:
    """The distribution has another name than the package, and each extra that is named exists."""
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts += [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    named = [
        (path.name, *found)
        for path in texts
        for found in re.findall(r"\b(penstock[\w-]*)\[([\w{},-]+)\]", path.read_text())
    ]
    assert len(named) > 5
    extras = {*PROJECT["optional-dependencies"], "{extra}", "{kind}"}
    wrong = [
        item for item in named if item[1] != PROJECT["name"] or not {*item[2].split(",")} <= extras
    ]
    assert wrong == []
    assert PROJECT["name"] == "penstock-rl"
