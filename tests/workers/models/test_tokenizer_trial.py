"""A process with limits refuses tokenizers and chat templates that are bombs, in time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.models import tokenizer_trial
from penstock.workers.models.tokenizer import Tokenizer, TokenizerSpec
from penstock.workers.models.tokenizer_trial import check_tokenizer
from tokenizers import Regex, normalizers

from ..data.chat_tokenizers import CHATML, STRICT, WITH_TOOLS, chat_folder

pytestmark = pytest.mark.slow

DOUBLED = (
    "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
)
BOMBS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a %}{% endfor %}"
    "{% endfor %}",
    "times": "{{ 'x' * 10**9 }}{{ 'x' * 10**9 }}{{ 'x' * 10**9 }}",
    "format": "{{ '%1000000000d' % 5 }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "doubling": DOUBLED + "{{ n.t }}",
    "doubling in silence": DOUBLED,
    "with each message": "{% set n = namespace(t='x') %}{% for m in messages %}"
    "{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "power": "{{ 10 ** (10 ** 10) }}",
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_trial, "_LIMIT_S", 4.0)


def refused(folder: Path) -> str:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        check_tokenizer(folder)
    assert time.monotonic() - began < 20
    return str(caught.value)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_without_a_bound_is_refused(tmp_path: Path, bomb: str) -> None:
    said = refused(chat_folder(tmp_path, BOMBS[bomb]))
    assert said.startswith(f"model folder '{tmp_path}' cannot be used: ")
    assert "chat template" in said
    assert said.endswith("that the model's publisher gives")


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_tokenizer_that_makes_much_of_little_is_refused(tmp_path: Path, rounds: int) -> None:
    backend: Any = TokenizerSpec(kind="byte").build().backend
    every: list[Any] = [normalizers.Replace(Regex("e"), "e" * 5000)] * rounds
    backend.backend_tokenizer.normalizer = normalizers.Sequence(every)
    backend.save_pretrained(str(tmp_path))
    assert "tokenizer" in refused(tmp_path)


def word_folder(folder: Path, **ids: int) -> Path:
    TokenizerSpec(alphabet="ab").build().save(folder)
    file = folder / "tokenizer.json"
    found = json.loads(file.read_text())
    found["model"]["vocab"] |= ids
    file.write_text(json.dumps(found))
    return folder


def test_ids_beyond_all_bounds_are_refused(tmp_path: Path) -> None:
    spec = TokenizerSpec(kind="folder", folder=str(word_folder(tmp_path, b=2**31)))
    with pytest.raises(ConfigError, match="gives 'b' the id 2147483648; expected one below"):
        spec.build()


def test_two_words_with_one_id_are_refused(tmp_path: Path) -> None:
    assert "gives two words one id" in refused(word_folder(tmp_path, b=4))


def test_a_vocabulary_may_have_gaps_between_its_ids(tmp_path: Path) -> None:
    spec = TokenizerSpec(kind="folder", folder=str(word_folder(tmp_path, b=20)))
    tokenizer: Tokenizer = spec.build()
    assert tokenizer.vocab_size == 21
    assert tokenizer.decode(tokenizer.encode("ab")).replace(" ", "") == "ab"


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS, STRICT, "{{ nothing.at.all }}", None])
def test_templates_that_need_little_pass(tmp_path: Path, template: str | None) -> None:
    check_tokenizer(chat_folder(tmp_path, template))
