"""The calculator: expressions, calls, errors, final answers, and rows to imitate."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.workers.agents.environment import BadCall, Reply, ToolCall
from penstock.workers.agents.tasks.calculator import (
    BadExpression,
    CalculatorEnvironment,
    CalculatorTaskSpec,
    evaluate,
)
from penstock.workers.agents.tasks.generated_task import play
from penstock.workers.data.chat import TURNS
from penstock.workers.data.sources import DemonstrationSource
from penstock.workers.data.task import task_alphabet
from penstock.workers.models.tokenizer import TokenizerSpec


def said(text: str, turn: int = 0) -> Reply:
    return Reply(turn, text, text)


def test_a_conversation() -> None:
    played = play(CalculatorEnvironment(2612, 4), 0, ["[83*47]", "[3901-1289]", "2612"])
    assert [m["content"] for m in played.messages] == [
        *("[83*47]", "3901", "[3901-1289]", "2612", "2612")
    ]
    assert [m["role"] for m in played.messages] == [
        *("assistant", "tool", "assistant", "tool", "assistant")
    ]
    assert (played.reward, played.done) == (1.0, True)
    assert played.counts == {"tool_calls": 2.0, "tool_errors": 0.0, "bad_calls": 0.0}


@pytest.mark.parametrize(
    ("text", "reward"),
    [("2612", 1), ("It is 2612.", 1), ("-2612", 0), ("12612", 0), ("2612 3", 0), ("", 0)],
)
def test_final_answers(text: str, reward: float) -> None:
    result = CalculatorEnvironment(2612, 4).step(said(text))
    assert (result.reward, result.done) == (reward, True)


def test_calls_that_were_parsed_are_answered_in_order() -> None:
    calls = (
        ToolCall("calculator", {"expression": "2*3"}),
        ToolCall("calculator", {"expression": "1//0"}),
        ToolCall("browser", {"expression": "1"}),
        ToolCall("calculator", {"formula": "1"}),
        BadCall("{", "no JSON"),
    )
    result = CalculatorEnvironment(6, 4).step(Reply(0, "...", "", calls))
    assert [message["content"] for message in result.messages] == [
        "6",
        "error: division by zero",
        "error: no such tool",
        "error: bad call",
        "error: no JSON",
    ]
    assert result.counts == {"tool_calls": 2.0, "tool_errors": 1.0, "bad_calls": 3.0}
    assert not result.done


def test_brackets_within_a_text_are_no_call() -> None:
    assert CalculatorEnvironment(6, 4).step(said("I say [1+1] is 6")).done
    two = CalculatorEnvironment(6, 4).step(said("[1+1] [2+2]"))
    assert [message["content"] for message in two.messages] == ["2", "4"]


def test_the_last_turn_must_be_an_answer() -> None:
    environment = CalculatorEnvironment(2, 2)
    assert not environment.step(said("[1+1]")).done
    last = environment.step(said("[1+1]", turn=1))
    assert (last.reward, last.done, last.messages) == (0.0, True, ())


def test_expressions_are_as_long_as_was_asked_for() -> None:
    spec = CalculatorTaskSpec(
        min_terms=3, max_terms=4, min_digits=1, max_digits=2, operators="+*", num_train=200
    )
    task = spec.build()
    for index in task.train:
        terms = re.split(r"[+*]", task.prompt_text(index))
        assert 3 <= len(terms) <= 4
        assert all(1 <= len(term) <= 2 and term != "0" for term in terms)
        assert (task.answer_text(index) or "").endswith(str(evaluate(task.prompt_text(index))))


def test_a_template_says_what_to_do() -> None:
    spec = CalculatorTaskSpec(num_train=2, num_held_out=0, prompt_template="{expression}=? Call!")
    assert spec.build().prompt_text(0).endswith("=? Call!")


def test_rows_to_imitate_train_the_turns_of_the_assistant_with_their_ends() -> None:
    task = CalculatorTaskSpec(num_train=16, num_held_out=4).build()
    tokenizer = TokenizerSpec(alphabet=task_alphabet(task), chat_template=TURNS).build()
    source = DemonstrationSource(task, tokenizer, batch_size=16, seed=0)
    batch = source.batch(0)
    seen: set[str] = set()
    for tokens, mask in zip(batch.tokens.tolist(), batch.mask.tolist(), strict=True):
        pieces: list[tuple[bool, str]] = []
        for token, trained in zip(tokens, mask, strict=True):
            text = tokenizer.decode([token]) if token >= 0 else ""
            if pieces and pieces[-1][0] == trained:
                text = pieces.pop()[1] + text
            pieces.append((trained, text))
        prompt = pieces[0][1].removesuffix("\n")
        seen.add(prompt)
        value = str(evaluate(prompt))
        assert [piece for piece in pieces if piece[1]] == [
            (False, f"{prompt}\n"),
            (True, f"[{prompt}]<eos>"),
            (False, f"{value}\n"),
            (True, f"{value}<eos>"),
        ]
    assert seen == {task.prompt_text(index) for index in task.train}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("83*47-1289", 2612),
        (" 12 * 7 ", 84),
        ("-(3-5)*+2", 4),
        ("7//2", 3),
        ("-7//2", -4),
        ("2*(3+4)", 14),
        ("999999999999999", 999999999999999),
    ],
)
def test_values(text: str, value: int) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("1+" * 40 + "1", "too long"),
        ("__import__('os')", "bad character"),
        ("1.5+2", "bad character"),
        ("1e9", "bad character"),
        ("\u0661+1", "bad character"),
        ("1_000", "bad character"),
        ("1+1\n+1", "bad character"),
        ("1+", "syntax"),
        ("(1", "syntax"),
        ("007", "syntax"),
        ("1 2", "syntax"),
        ("()", "bad operator"),
        ("9**9", "bad operator"),
        ("1/2", "bad operator"),
        ("1(2)", "bad operator"),
        ("1//0", "division by zero"),
        ("5//(2-2)", "division by zero"),
        ("9999999999999999", "too large"),
        ("99999999*99999999", "too large"),
    ],
)
def test_what_is_refused(text: str, why: str) -> None:
    with pytest.raises(BadExpression) as refused:
        evaluate(text)
    assert str(refused.value) == why


@given(st.text("0123456789+-*/() ", max_size=70))
def test_any_text_has_a_value_or_a_reason(text: str) -> None:
    try:
        value = evaluate(text)
    except BadExpression:
        return
    assert abs(value) <= 10**15
