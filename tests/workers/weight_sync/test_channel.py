"""The weight channels there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from penstock.workers.weight_sync.channel import CHANNELS, DEFAULT_TRANSPORT, Transport

ROOT = Path(__file__).parents[3]


def test_every_name_that_the_configuration_takes_is_a_channel() -> None:
    assert tuple(CHANNELS) == get_args(Transport)
    assert DEFAULT_TRANSPORT in CHANNELS


@pytest.mark.parametrize("folder", ["dataflow", "launch", "planner", "configs", "workers"])
def test_nothing_but_the_registry_says_the_name_of_a_channel(folder: str) -> None:
    named = re.compile(rf"""["']({"|".join(CHANNELS)})["']""")
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if path.is_file()]
    found = [str(path.relative_to(ROOT)) for path in files if named.search(path.read_text())]
    assert found == (["workers/weight_sync/channel.py"] if folder == "workers" else [])
