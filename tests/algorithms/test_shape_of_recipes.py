"""Rules about the recipes: how many there are, and how far their options are from their steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.inputs.record import load_step, step_cfg

from .configured import NAMES, composed

RECIPES = Path(__file__).parents[2] / "algorithms"


def test_there_are_at_most_50_recipes() -> None:
    assert 0 < len(list(RECIPES.glob("*.py"))) <= 50


@pytest.mark.parametrize("name", NAMES)
def test_options_inherit_from_at_most_one_class(name: str) -> None:
    algorithm = composed(name).algorithm
    cfg: Any = step_cfg(load_step(algorithm.step, "step"), algorithm.cfg, "cfg")["cfg"]
    options = [kind for kind in type(cfg).__mro__ if dataclasses.is_dataclass(kind)]
    assert len(options) <= 2
