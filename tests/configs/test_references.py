"""YAML files of users that are too large, expand too much or hold no plain data are refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from penstock.configs.references import load_yaml
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.hydra_app import compose

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(9)
)
REFUSED: dict[str, tuple[str, str]] = {
    "aliases nine deep": (BOMB, "has more than 100,000 values, each alias counted"),
    "aliases nine deep in a key": ("\n ".join(["task:", *BOMB.splitlines()]), "100,000 values"),
    "20 MB of comments": (
        "# " + "x" * 20_000_000 + "\nseed: 1\n",
        "bytes; a configuration has at most 250,000",
    ),
    "a list in itself": ("a: &a [*a]\n", "a value contains itself"),
    "bytes": ("a: 1\nb: !!binary aGVsbG8=\n", "line 2: a value of the kind binary"),
    "a set": ("a: !!set {x, y}\n", "line 1: a value of the kind set"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_without_bounds_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, said = REFUSED[name]
    path = tmp_path / "conf" / "experiment" / "big.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# @package _global_\n" + text.replace("line 2", "line 3"))
    monkeypatch.chdir(tmp_path)
    compose("run", [])  # imports
    began_s = time.monotonic()
    for read in (
        lambda: load_yaml(path),
        lambda: compose("run", ["--config-dir", "conf", "experiment=big"]),
    ):
        with pytest.raises(ConfigError) as raised:
            read()
        text = str(raised.value)
        assert "big.yaml" in text
        assert said.split("line ")[0] in text
        assert said.rpartition("line ")[2][3:] in text
    assert time.monotonic() - began_s < 5


def test_usual_yaml_is_read(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("a: &a {b: 1, c: [2, 3.5, true, null]}\nd: {<<: *a, e: *a}\nf: 2024-01-01\n")
    found = load_yaml(path)
    assert found["d"]["e"] == found["a"] == {"b": 1, "c": [2, 3.5, True, None]}
    assert found["d"]["b"] == 1
