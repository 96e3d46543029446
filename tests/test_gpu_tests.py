"""Every test that needs a GPU can be collected on the machine that has one: torch and transformers.

Nothing else that a run may use is installed there. A module of tests that imports it at its top
would be an error of collection, and hide all its tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKED = ("ray", "vllm", "megatron", "transformer_engine", "envpool", "trl")
START = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def files() -> list[str]:
    """Those in which a test is marked."""
    mark = re.compile(r"^\s*(@pytest\.mark\.gpu\b|pytestmark = .*mark\.gpu\b)", re.MULTILINE)
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if mark.search(path.read_text())]


def test_the_files_are_found() -> None:
    known = {
        "tests/workers/envs/actors/test_numpy_actor.py",
        "tests/workers/training/test_model_worker.py",
    }
    assert known <= set(files())


@pytest.mark.slow
def test_gpu_tests_are_collected_where_nothing_else_is_installed() -> None:
    words = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ran = subprocess.run(
        [sys.executable, "-c", START, *words, *files()],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    collected = {line.partition("::")[0] for line in ran.stdout.splitlines() if "::" in line}
    assert collected == set(files())
