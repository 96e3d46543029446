"""What is said where EnvPool cannot make what is asked for."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.envs.pool import ask_envpool


@pytest.mark.parametrize(
    ("kind", "name", "options", "said"),
    [
        ("game", "Hx-v1", {}, "EnvPool has no game 'Hx-v1'; did you mean 'Hex-v1'?, or else"),
        ("environment", "CartPole-v1", {"gravity": 1}, "environment 'CartPole-v1' cannot be made "
         "by EnvPool: Config.__new__() got an unexpected keyword argument 'gravity'"),
    ],
)  # fmt: skip
def test_what_it_does_not_have_is_named(
    kind: str, name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        ask_envpool(kind, name, "make_spec", options, advice=", or else")


def test_it_may_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    said = (
        "backend=envpool needs the package envpool, which is not installed\n"
        "    pip install penstock-rl[envpool]"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        ask_envpool("game", "Hex-v1", "make_spec", {})


def test_what_it_makes_is_given_back() -> None:
    assert ask_envpool("game", "Hex-v1", "make_spec", {}).config.max_num_players == 2
