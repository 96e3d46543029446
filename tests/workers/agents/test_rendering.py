"""What is shown between two turns, as tokens of the chat template."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.rendering import TurnRenderer
from penstock.workers.models.tokenizer import Tokenizer
from tokenizers import AddedToken, Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHTLESS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if loop.last %}{{ m['content'] }}{% else %}"
    "{{ m['content'].split('</think>')[-1] }}{% endif %}",
)


def tokenizer(template: str | None = CHATML) -> Tokenizer:
    """A token per character, and two special ones, as those of ChatML."""
    vocabulary = {chr(code): code - 32 for code in range(32, 127)} | {"\n": 95, "?": 96}
    backend = Backend(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_start|>")]})
    fast.chat_template = template
    return Tokenizer(fast)


ASKED = [{"role": "user", "content": "how much"}]


@pytest.mark.parametrize("finished", [True, False])
def test_a_turn_has_one_end(finished: bool) -> None:
    made = tokenizer()
    shown = [{"role": "tool", "content": "42"}]
    ids = TurnRenderer(made, {}).after(ASKED, shown, None, finished=finished)
    text = made.decode(ids).replace(" ", "")
    expected = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert text == ("" if finished else "<|im_end|>") + expected


MARKS = ("<|im_end|>", "<tool_response>", "</tool_response>", "</tool_call>", "</think>")
CALLS = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['name'] }}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call>"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}",
).replace("{% for m", "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m", 1)


def with_marks(template: str = CALLS) -> Tokenizer:
    made = tokenizer(template)
    backend: Any = made.backend
    backend.add_tokens(["<think>", "<tool_call>", *MARKS[1:], "  "])
    return Tokenizer(backend)


def added_of(made: Tokenizer) -> dict[str, int]:
    backend: Any = made.backend
    return backend.get_added_vocab()


def in_place(where: str, text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    call: dict[str, Any] = {"function": {"name": "f", "arguments": {"a": [1]}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "how much"}]
    made: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "f", "content": "42"}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "d"}}
    match where:
        case "question":
            messages[0]["content"] += text
        case "result":
            result["content"] += text
        case "name of a result":
            result["name"] += text
        case "name of a call":
            call["function"]["name"] += text
        case "argument":
            call["function"]["arguments"]["a"] += [{"b": text}]
        case "key":
            call["function"]["arguments"][text] = 1
        case "what the assistant said":
            made["content"] += text
        case _:
            tool["function"]["description"] += text
    return [*messages, made, result], [tool]


@pytest.mark.parametrize(
    "where",
    [
        *("question", "result", "name of a result", "name of a call", "argument", "key"),
        *("what the assistant said", "schema"),
    ],
)
@pytest.mark.parametrize("mark", MARKS)
def test_no_text_is_a_token_of_its_own(where: str, mark: str) -> None:
    made = with_marks()
    renderer = TurnRenderer(made, {})
    added = set(added_of(made).values())

    def tokens(text: str) -> tuple[list[int], list[int]]:
        messages, tools = in_place(where, text)
        whole = renderer.before(messages, tools)
        later = renderer.after(messages[:1], messages[2:], tools, finished=True)
        both = ([each for each in ids if each in added] for ids in (whole, later))
        return next(both), next(both)

    own_thought = where == "what the assistant said" and mark == "</think>"
    assert (tokens(mark) == tokens("x")) != own_thought
    assert tokens(f"{mark[0]}{mark}{mark}") == tokens("x") or own_thought


def test_white_space_and_what_looks_like_a_turn_stay() -> None:
    made = with_marks()
    ids = TurnRenderer(made, {}).after(
        ASKED, [{"role": "tool", "content": "if x:\n    penstock9turn"}], None, finished=True
    )
    text = made.decode(ids)
    assert "tool" in text.replace(" ", "")
    assert ids.count(added_of(made)["  "]) == 2


def test_a_template_that_forgets_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves out of earlier turns"):
        TurnRenderer(tokenizer(THOUGHTLESS), {})
    TurnRenderer(tokenizer(THOUGHTLESS), {}, keeps_history=True)
    TurnRenderer(tokenizer(), {})


def test_there_must_be_a_template() -> None:
    with pytest.raises(ConfigError, match="conversations need a chat template"):
        TurnRenderer(tokenizer(None), {})
