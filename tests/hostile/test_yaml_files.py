"""YAML files of the user's own, found by `--config-dir`, that cannot be read or composed."""

from __future__ import annotations

import pytest

from .conftest import Refused

FILES: dict[str, str | bytes] = {
    "not UTF-8": b"architecture:\n  model_type: qwen\xed\xa0\x80\n",
    "zero bytes": b"\0\0",
    "no YAML": "architecture: [[[\n",
    "unknown alias": "init_seed: *x\n",
    "runs code": "!!python/object/apply:os.system ['true']\n",
    "a list": "- 1\n- 2\n",
    "a list in itself": "&a [*a]\n",
    "empty": "",
    "numbers as keys": "1: 2\nnull: 3\n",
    "a date as a seed": "init_seed: 2024-01-01\n",
    "defaults are a number": "defaults:\n- 3\n",
    "half a surrogate pair": 'tokenizer: {kind: char, alphabet: "a\\ud800"}\n',
    "the same key twice": "init_seed: 1\ninit_seed: 2\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_an_option_of_ones_own(name: str, refused: Refused) -> None:
    words = ["run", "model=mine", "--config-dir", "yaml"]
    refused(words, {"yaml/model/mine.yaml": FILES[name]})
