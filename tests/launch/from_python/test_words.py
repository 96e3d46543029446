"""Values of Python as words of a command line: Hydra reads back what was given."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.hydra_app import with_escapes
from penstock.launch.from_python.run import as_words


def read_back(word: str) -> tuple[str, Any]:
    (found,) = OverridesParser.create().parse_overrides([with_escapes(word)])
    return found.key_or_group, found.value()


PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cs"]))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)


@given(value=NUMBERS | st.booleans() | st.none() | st.lists(NUMBERS | st.booleans()))
def test_numbers_and_lists_are_read_back(value: Any) -> None:
    (word,) = as_words("run", [], {"a": value})
    key, found = read_back(word)
    assert (key, found) == ("a", value)


@given(text=PLAIN.filter(lambda text: "${" not in text))
def test_any_text_is_read_back(text: str) -> None:
    (word,) = as_words("run", [], {"a": text})
    found = read_back(word)[1]
    assert (found if isinstance(found, str) else found.text) == text


def test_a_mapping_gives_the_keys_below() -> None:
    keys = {"algorithm": {"num_steps": 20, "cfg": {"sampling": {"temperature": 0.5}}, "before": {}}}
    assert as_words("run", ["algorithm=grpo"], {**keys, "runs": Path("some where")}) == [
        "algorithm=grpo",
        "algorithm.num_steps=20",
        "algorithm.cfg.sampling.temperature=0.5",
        "algorithm.before={}",
        "runs='some where'",
    ]


def test_a_mapping_in_a_list_is_read_back() -> None:
    value = [{"role": "user", "parts": [{"text": "a, 'b'"}, {}], "of": {"n": 1, "no": None}}]
    assert read_back(*as_words("run", [], {"a": value})) == ("a", value)
    for name in ("true", "NULL", "a b", 3):
        with pytest.raises(ConfigError, match="in a mapping inside a list, got"):
            as_words("run", [], {"a": [{name: 1}]})


def own_step() -> None:
    """A function at the top of a module."""


def test_a_function_is_named_by_its_module() -> None:
    (word,) = as_words("run", [], {"algorithm": {"step": own_step}})
    assert word == f"algorithm.step='{__name__}:own_step'"


def test_a_function_that_no_name_leads_to_is_refused() -> None:
    def inner() -> None: ...

    with pytest.raises(ConfigError) as raised:
        as_words("run", [], {"algorithm": {"step": inner}})
    assert str(raised.value) == (
        "'algorithm.step': test_a_function_that_no_name_leads_to_is_refused.<locals>.inner cannot "
        "be found by its name\n    define it at the top of a module or of the notebook, and give "
        "what stands there under its name"
    )


ITSELF: dict[str, Any] = {"task": {"config": {}}}
ITSELF["task"]["config"]["self"] = ITSELF
START: dict[str, Any] = {"b": 1}
DEEP = reduce(lambda inner, _: {"a": inner, "b": 1}, range(10_000), START)


@pytest.mark.parametrize(
    ("words", "keys", "said"),
    [
        ([], {"task": DEEP}, "'task' is nested too deeply, or contains itself"),
        ([], {"task": ITSELF}, "'task' is nested too deeply, or contains itself"),
        ([], {"task": {"x": [ITSELF]}}, "'task' is nested too deeply, or contains itself"),
        ([], {"seed": 10**5000}, "'seed': a number has too many digits"),
        (["--multirun"], {},
         "penstock.run: '--multirun' is an option of the terminal's\n    call penstock.run once "
         "for each combination: for seed in range(3): ..."),
        (["--help"], {},
         "penstock.run: '--help' is an option of the terminal's\n    use it in a terminal: "
         "penstock run --help"),
        (["--dry-run"], {},
         "penstock.run: '--dry-run' is an option of the terminal's\n    use it in a terminal, "
         "with the words of the run: penstock run --dry-run WORDS"),
        ([3], {},
         "penstock.run: expected words such as 'algorithm=ppo', got 3\n    give other values by "
         "their keys: seed=1"),
        ([], {"seed": {1, 2}},
         "'seed': expected a number, a text, a list, a mapping, a function or a class, got a set"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_refused(words: Any, keys: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        as_words("run", words, keys)
    assert str(raised.value) == said
