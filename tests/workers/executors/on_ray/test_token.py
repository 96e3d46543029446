"""A Ray that asks for a token is joined with it, and refused in one sentence without."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.executors.on_ray.executor import connect_ray

from .two_nodes import ray_folder

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef0123456789abcdef"

HEAD = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster()
cluster.add_node(num_cpus=1, include_dashboard=False, temp_dir=sys.argv[1])
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.shutdown()
"""

JOIN = """
from penstock.dataflow.errors import ConfigError
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray
try:
    connect_ray()
    print("joined")
    shutdown_ray()
except ConfigError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_folder() as folder:
        head = subprocess.Popen(
            [sys.executable, "-c", HEAD, folder],
            env={**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert head.stdout is not None
        yield head.stdout.readline().strip()
        head.communicate("\n", timeout=60)


PROFILE = "import sys; from penstock.launch.main import main; sys.exit(main(['profile']))"


def join(address: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", JOIN],
        env={**os.environ, "RAY_ADDRESS": address, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_protected_cluster(address: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    assert join(address, RAY_AUTH_TOKEN_PATH=str(tmp_path / "token")) == "joined\n"
    fix = "    set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token\n"
    asks = f"the Ray of RAY_ADDRESS={address} asks for its token, and was given "
    home = str(tmp_path)  # where no token is
    assert join(address, HOME=home) == f"{asks}none\n{fix}"
    assert join(address, RAY_AUTH_TOKEN=TOKEN[::-1]) == f"{asks}another one\n{fix}"
    assert join(address, RAY_AUTH_MODE="token", HOME=home) == f"{asks}none\n{fix}"


@pytest.mark.nightly
def test_a_protected_cluster_is_not_measured_without_its_token(
    address: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROFILE],
        env={**os.environ, "RAY_ADDRESS": address, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.endswith(
        f"penstock: the Ray of RAY_ADDRESS={address} asks for its token, and was given none\n"
        "    set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token\n"
    )


def test_an_address_at_which_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ConfigError) as raised:
        connect_ray()
    assert str(raised.value) == (
        "RAY_ADDRESS is 127.0.0.1:9, where nothing answers: [Errno 111] Connection refused\n"
        "    start Ray there with `ray start --head`, or unset RAY_ADDRESS to start one on this "
        "machine"
    )
