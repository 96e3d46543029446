"""Running the command line inside the test process, from an empty working directory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import pytest
from penstock.launch.cli.sweep import Key, Sweep, Trial, draw_sweep
from penstock.launch.main import main

from ..ray_forks import forked_workers

__all__ = ["forked_workers"]


@dataclass(frozen=True)
class Said:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str


Penstock = Callable[..., Said]


@pytest.fixture(scope="session")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The files of fonts stay open once something has been drawn, of logarithmic axes as well."""
    key = Key("lr", low=0.001, high=1.0, log=True)
    for name, high in (("one.svg", 1.0), ("one.png", 1.0), ("within_a_decade.svg", 0.004)):
        trials = [Trial({"lr": lr}, objective=lr) for lr in (0.002, high)]
        sweep = Sweep("m", "maximize", 0, (), (key,), trials)
        draw_sweep(tmp_path_factory.mktemp("fonts") / name, sweep)


@pytest.fixture
def penstock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Generator[Penstock]:
    """Runs `penstock` with some words in `tmp_path`; modules imported from there are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def run(*words: str) -> Said:
        capsys.readouterr()
        try:
            code = main(list(words))
        except SystemExit as stop:  # argparse, for --help and unknown options
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    yield run
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
