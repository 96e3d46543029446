"""Verifiers by name: exact match, math-verify, users' functions, and what is wrong with them."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.isolation.child import verdict
from penstock.workers.isolation.sandbox import announce_sandbox, best_kind
from penstock.workers.verifiers.reward_function import make_reward
from penstock.workers.verifiers.verifiers import (
    exact_match,
    load_verifier,
    math_verify,
    reference_of,
)


def half(prompt: str, response: str, answer: str | None) -> float:
    return 0.5


def test_exact_match() -> None:
    assert exact_match("", " 42\n", "42") == 1.0
    assert exact_match("", "42.0", "42") == 0.0
    with pytest.raises(ValueError, match="needs an answer"):
        exact_match("", "42", None)


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("so it is 42.", "42", 1.0),
        ("$0.5$", "1/2", 1.0),
        (r"$\boxed{\frac{2}{4}}$", r"\frac{1}{2}", 1.0),
        ("$1+x^2$", "$x^2+1$", 1.0),
        ("$x$", "x", 1.0),
        ("41", "42", 0.0),
        ("", "42", 0.0),
        ("\\frac{{{", "42", 0.0),
        ("\x00 $$$ \ud7ff 1/0", "42", 0.0),
    ],
)
def test_math_verify(response: str, answer: str, score: float) -> None:
    assert math_verify("", response, answer) == score


def test_math_verify_refuses_an_answer_that_is_none() -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        math_verify("", "1", "$$")
    with pytest.raises(ValueError, match="needs an answer"):
        math_verify("", "1", None)


def test_functions_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "calls = []\ndef count(prompt, response, answer, *, scale=2.0):\n"
        "    calls.append(response)\n    return scale * len(calls)\n"
    )
    by_path = load_verifier(f"{tmp_path}/my_rewards.py:count")
    assert (by_path("", "", ""), by_path("", "", "")) == (2.0, 4.0)
    assert load_verifier(f"{tmp_path}/my_rewards.py:count") is by_path
    monkeypatch.syspath_prepend(tmp_path)
    assert load_verifier("my_rewards:count")("", "", "") == 2.0
    assert load_verifier("exact_match") is exact_match
    del sys.modules["my_rewards"]


def test_functions_have_references(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference_of(half) == f"{__name__}:half"
    assert reference_of(exact_match) == "penstock.workers.verifiers.verifiers:exact_match"
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", "script.py", raising=False)
    monkeypatch.setattr(main, "half", half, raising=False)
    monkeypatch.setattr(half, "__module__", "__main__")
    assert reference_of(half) == f"{Path('script.py').resolve()}:half"


def test_functions_without_a_name_are_refused() -> None:
    def inner(prompt: str, response: str, answer: str | None) -> float:
        return 1.0

    for function in (inner, functools.partial(half)):
        with pytest.raises(ConfigError) as caught:
            reference_of(function)
        first, second = str(caught.value).split("\n")
        assert first.endswith("cannot be found by name in another process")
        assert second == (
            "    define it at the top of a module, or set reward_in_process=true to run it in the "
            "worker itself, without a time limit"
        )


def _message(reference: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_verifier(reference)
    return str(caught.value)


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _message("math_verfy") == (
        "there is no reward 'math_verfy'; did you mean 'math_verify'?\n"
        "    use code_tests, exact_match, instructions, math_verify, module:function or "
        "path.py:function"
    )
    assert _message("none.py:f") == (
        "reward 'none.py:f': there is no file none.py\n"
        "    give the path of a Python file, from the folder the run is started in"
    )
    (tmp_path / "a.py").write_text("def score(response):\n    return 1\n\nlimit = 3\n")
    signature = (
        "    a reward is a function whose parameters name what it reads, such as prompt, response, "
        "answer or a column of the data, and that returns a number"
    )
    assert _message("a.py:scor") == (
        f"reward 'a.py:scor': a.py has no 'scor'; did you mean 'score'?\n{signature}"
    )
    assert _message("a.py:limit") == f"reward 'a.py:limit' is a int, not a function\n{signature}"
    fix = "    fix the module; it is imported before the run starts"
    assert _message("no_such_module:f") == (
        "reward 'no_such_module:f': importing no_such_module fails "
        f"ModuleNotFoundError: No module named 'no_such_module'\n{fix}"
    )
    (tmp_path / "b.py").write_text("import math\n\nx = 1 / 0\n")
    for _ in range(2):
        assert _message("b.py:f") == (
            "reward 'b.py:f': importing b.py fails "
            f"at b.py:3: ZeroDivisionError: division by zero\n{fix}"
        )
    (tmp_path / "d.py").write_text("import sys\n\nsys.exit(0)\n")
    for _ in range(2):
        assert _message("d.py:f") == (
            "reward 'd.py:f': importing d.py fails "
            f"at d.py:3: it calls sys.exit(0), which is for programs alone\n{fix}"
        )
    (tmp_path / "e.py").write_text("raise GeneratorExit\n")
    assert _message("e.py:f") == (
        f"reward 'e.py:f': importing e.py fails at e.py:1: GeneratorExit: \n{fix}"
    )
    (tmp_path / "c.py").write_text("def f(:\n")
    assert "SyntaxError: invalid syntax (c.py, line 1)" in _message("c.py:f")


def test_options_of_a_verifier_are_checked_when_it_is_loaded() -> None:
    score = load_verifier("instructions", {"score": "sum"})
    assert score("", "a", '[{"id": "punctuation:no_comma", "weight": 3}]') == 3
    with pytest.raises(ConfigError, match="reward 'code_tests' takes .*'memory'"):
        load_verifier("code_tests", {"memory": 3})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run_asserts": 3}, "'run_asserts' is 3: Input should be a valid boolean\n"),
        ({"score": "some"}, "'score' is 'some': Input should be 'all' or 'share'\n"),
        ({"memory_mb": 1.5}, "'memory_mb' is 1.5: Input should be a valid integer"),
        ({"memory_mb": 0}, "memory_mb is 0; expected at least 64\n"),
        ({"time_s": float("inf")}, "time_s is inf; expected a finite number\n"),
    ],
)
def test_values_of_options_are_checked_too(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_verifier("code_tests", options)
    assert str(caught.value).startswith(f"reward 'code_tests': option {said}")


def test_values_fit_the_annotations_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n"
        "def f(prompt, response, answer, *, words: tuple[str, ...] = (), n: 'No' = 0, **more):\n"
        "    return len(words)\n"
        "def g(prompt, response, answer, file: Path = 0, words: tuple[str, ...] = ()):\n"
        "    return len(words)\n"
    )
    options: dict[str, Any] = {"file": "a.txt", "words": ["a", "b"]}
    for name in "fg":  # an annotation of the first names what is not there
        assert load_verifier(f"{tmp_path}/own.py:{name}", options)("", "", "") == 2
    with pytest.raises(ConfigError, match="option 'words' is 3: Input should be a valid"):
        load_verifier(f"{tmp_path}/own.py:g", {**options, "words": 3})


def test_an_error_shows_the_users_lines_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def f(prompt, response, answer):\n    return g()\n"
        "def g():\n    raise KeyError('x')\n")  # fmt: skip
    failing = load_verifier(f"{tmp_path}/own.py:f")
    assert verdict(failing, ("", "", "")) == {
        "error": f"{tmp_path}/own.py:2\n    return g()\n"
        f"{tmp_path}/own.py:4\n    raise KeyError('x')\nKeyError: 'x'\n"
    }
    assert verdict(exact_match, ("", "", None)) == {
        "error": "ValueError: exact_match needs an answer to compare with\n"
    }


def test_a_sandbox_is_checked_and_announced_where_programs_will_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    announce_sandbox.cache_clear()
    load_verifier("code_tests")  # where a task is read
    assert capsys.readouterr().err == ""
    for _ in range(2):
        load_verifier("code_tests", {"minimum": "limits"})
    assert capsys.readouterr().err == f"penstock: sandbox: {best_kind().name}\n"
    for load in (load_verifier, make_reward):
        with pytest.raises(ConfigError, match="minimum=none is no kind of sandbox"):
            load("code_tests", {"minimum": "none"})
