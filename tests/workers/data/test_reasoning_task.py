"""Tasks of reasoning-gym: the real package, its verifiers, splits and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.reasoning_task import (
    EVALUATES_RESPONSES,
    ReasoningTaskSpec,
    reasoning_task_names,
)
from penstock.workers.data.task import Task, fingerprint, task_alphabet

SMALL: dict[str, Any] = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
SPEC = ReasoningTaskSpec(name="chain_sum", config=SMALL, num_train=300, num_held_out=100)

QUICK = ["gcd", "decimal_chain_sum", "letter_counting", "number_sorting", "word_sorting"]


@pytest.mark.parametrize("name", ["chain_sum", *QUICK])
def test_a_task_loads_and_its_own_answers_are_right(name: str) -> None:
    task = ReasoningTaskSpec(name=name, num_train=20, num_held_out=5).build()
    assert isinstance(task, Task)
    assert task.verifier is None
    for index in (*task.train, *task.held_out):
        answer = task.answer_text(index)
        assert answer is not None
        assert task.score(index, answer) == task.correct_score


def test_a_small_task_trains_on_what_is_there() -> None:
    config = {**SMALL, "max_terms": 2}
    task = ReasoningTaskSpec(name="chain_sum", config=config, num_held_out=50).build()
    assert (len(task.train), len(task.held_out)) == (150, 50)  # of 10,000 asked for
    assert not {task.prompt_text(i) for i in task.train} & {
        task.prompt_text(i) for i in task.held_out
    }


def test_the_held_out_problems_do_not_depend_on_the_number_of_training_problems() -> None:
    def held_out(num_train: int) -> list[str]:
        spec = ReasoningTaskSpec(
            name="chain_sum", config=SMALL, num_train=num_train, num_held_out=40
        )
        task = spec.build()
        return [task.prompt_text(index) for index in task.held_out]

    assert held_out(10) == held_out(500)


def test_the_template_and_stripping_shorten_the_prompt() -> None:
    task = ReasoningTaskSpec(
        name="chain_sum", config=SMALL, prompt_template="{expression} =", num_train=50
    ).build()
    short = ReasoningTaskSpec(
        name="chain_sum",
        config=SMALL,
        prompt_template="{expression}=",
        strip_spaces=True,
        num_train=50,
    ).build()
    assert task.prompt_text(0).replace(" ", "") == short.prompt_text(0)
    assert set(task_alphabet(short)) <= set("0123456789+-=")
    assert eval(short.prompt_text(0).rstrip("=")) == int(short.answer_text(0) or "")


def test_malformed_responses_score_without_a_crash() -> None:
    task = SPEC.build()
    for response in ("", "-", "1/0", "nan", "inf", "\x00", "[[", "9" * 5000, "é", "1e999999"):
        assert 0 <= task.score(0, response) < 1


@pytest.mark.slow
def test_the_same_spec_gives_the_same_problems_in_another_process() -> None:
    code = (
        "from penstock.workers.data.reasoning_task import ReasoningTaskSpec as S\n"
        "from penstock.workers.data.task import fingerprint\n"
        f"print(fingerprint(S(name='chain_sum', config={SMALL}, num_train=300, "
        "num_held_out=100).build()))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == fingerprint(SPEC.build()), done.stderr


def test_another_seed_gives_other_problems() -> None:
    other = ReasoningTaskSpec(
        name="chain_sum", config=SMALL, num_train=300, num_held_out=100, seed=10**6
    )
    assert fingerprint(other.build()) != fingerprint(SPEC.build())


def test_every_verifier_that_evaluates_responses_is_known() -> None:
    """Read from the installed package, so that a new version's additions are noticed."""
    import inspect

    from reasoning_gym.factory import DATASETS

    found: set[str] = set()
    for name in reasoning_task_names():
        source = inspect.getsource(DATASETS[name][0].score_answer)
        code = [line for line in source.splitlines() if not line.strip().startswith("#")]
        if any("eval(answer" in line or "parse_expr(answer" in line for line in code):
            found.add(name)
    assert found == EVALUATES_RESPONSES


def _message(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ReasoningTaskSpec(**options).build()
    return str(caught.value)


def test_an_unknown_name_offers_the_nearest() -> None:
    first, second = _message(name="chain_sun").split("\n")
    assert first == "reasoning-gym has no task 'chain_sun'; did you mean 'chain_sum'?"
    assert second.startswith(f"    it has {len(reasoning_task_names())}: ab, acre,")


def test_errors_about_settings() -> None:
    assert _message(name="chain_sum", config={"max_term": 3}) == (
        "task 'chain_sum' has no setting 'max_term'; did you mean 'max_terms'?\n"
        "    its settings are: min_terms, max_terms, min_digits, max_digits, allow_negation"
    )
    assert _message(name="chain_sum", config={"min_terms": 0}) == (
        "task 'chain_sum' refuses its settings {'min_terms': 0}: min_terms must be positive\n"
        "    its settings are: min_terms, max_terms, min_digits, max_digits, allow_negation"
    )
    assert _message(name="chain_sum", config={"size": 5}) == (
        "task 'chain_sum': config.size is set by us\n    use num_train and num_held_out"
    )
    assert _message(name="chain_sum", num_train=0) == (
        "task 'chain_sum': num_train=0 and num_held_out=512\n"
        "    num_train must be at least 1 and num_held_out at least 0"
    )


def test_errors_about_the_template() -> None:
    assert _message(name="chain_sum", prompt_template="{expresion}") == (
        "prompt_template '{expresion}': problems of 'chain_sum' have no field 'expresion'; "
        "did you mean 'expression'?\n    fields are: difficulty, expression, num_digits, "
        "num_terms, question, source_dataset, source_index"
    )
    assert _message(name="chain_sum", prompt_template="hello") == (
        "prompt_template 'hello' names no field of the problem, so all prompts would be the same\n"
        "    use {question}"
    )
    assert "cannot be read: " in _message(name="chain_sum", prompt_template="{question")


def test_too_few_distinct_problems() -> None:
    message = _message(name="chain_sum", config={"max_terms": 2, "max_digits": 1})
    first, second = message.split("\n")
    assert first.startswith(
        "task 'chain_sum' with {'max_terms': 2, 'max_digits': 1} gave only 200 distinct problems in"
    )
    assert first.endswith("samples; 512 are to be held out and at least 1 must be left to train on")
    assert second == (
        "    lower num_held_out, or widen the task's own settings (more digits, more terms)"
    )


def test_tasks_that_cannot_be_trusted_or_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _message(name="countdown") == (
        "the verifier of reasoning-gym's 'countdown' runs responses as Python code\n"
        "    set allow_eval=true to let it, in a process of its own but with your rights"
    )
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert _message(name="ransom_note") == (
        "reasoning-gym's 'ransom_note' generates other problems in every process, because it "
        "follows Python's hash seed\n    set PYTHONHASHSEED=0 in the environment"
    )
    assert _message(name="list_functions", num_train=20, num_held_out=5).startswith(
        "reasoning-gym's 'list_functions' gives other problems each time for the same seed"
    )
