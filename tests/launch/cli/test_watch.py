"""`penstock watch`: its words, its messages, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ..conftest import Penstock


def run_in(folder: Path, name: str) -> Path:
    """A run's folder of which nothing is known but that it is one."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "run.json").write_text("{}")
    return path


def test_help_says_what_it_takes(penstock: Penstock) -> None:
    said = penstock("watch", "--help")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("usage: penstock watch [RUN ...] [key=value ...]\n")
    for key in ("port", "runs"):
        assert f"  {key} " in said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prot=1"], "penstock watch: there is no key 'prot'; did you mean 'port'?"),
        (["port=x"], "'port': expected a whole number from 0 to 65535, got 'x'"),
        (["port=65536"], "'port': expected a whole number from 0 to 65535, got '65536'"),
        (["none"], "'none' is not the folder of a run: it has no run.json"),
        (["runs=nowhere"], "'nowhere' is no folder of runs"),
        ([], "'runs' is no folder of runs"),
    ],
)
def test_what_cannot_be_shown_is_said(penstock: Penstock, words: list[str], message: str) -> None:
    said = penstock("watch", *words)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"penstock: {message}")


def test_a_port_that_is_taken(penstock: Penstock, tmp_path: Path) -> None:
    run_in(tmp_path / "runs", "one")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = penstock("watch", f"port={port}")
    assert said.code == 2
    assert said.err == (
        f"penstock: 'port': 127.0.0.1:{port} cannot be used: Address already in use\n"
        "    give another one, or port=0 for any that is free\n"
    )


def test_it_serves_until_it_is_interrupted_and_needs_no_torch(tmp_path: Path) -> None:
    run_in(tmp_path / "runs", "one")
    code = (
        "import sys; from penstock.launch.main import main; code = main(sys.argv[1:]); "
        "print(sorted({'torch', 'transformers', 'hydra', 'pydantic'} & set(sys.modules))); "
        "sys.exit(code)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "watch", "one"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "penstock watch: one\n"
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(url, timeout=30) as answer:
                assert b"<title>penstock watch</title>" in answer.read()
            with urllib.request.urlopen(f"{url}api/runs", timeout=30) as answer:
                assert b'"key":"one"' in answer.read()
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")
    assert out == "penstock watch: ended\n[]\n"
