"""OpenMP's threads wait the same way on the command line and from Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from penstock.launch.openmp import spin_briefly

_SCRIPT = """
import os, sys

class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, AtTorch())
"""
_WAYS = {
    "command": "from penstock.launch.main import main; main(['run', '--dry-run'])",
    "penstock.run": "import penstock; penstock.run",
    "import run": "from penstock import run",
    "penstock.open_run": "import penstock; penstock.open_run",
    "penstock.plan": "import penstock; penstock.plan('algorithm=ppo')",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize(
    ("given", "found"), [({}, "1000 None"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None PASSIVE")]
)
def test_the_spin_count_is_set_before_torch_is_imported(
    way: str, given: dict[str, str], found: str
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    said = subprocess.run(
        [sys.executable, "-c", _SCRIPT + _WAYS[way]],
        env={**environment, **given},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said.stdout.strip() == found


def test_a_spin_count_set_after_torch_holds_for_new_processes_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setitem(sys.modules, "torch", sys)
    with pytest.warns(UserWarning, match=r"^torch was imported before penstock.run was looked up"):
        spin_briefly()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    spin_briefly()  # once
