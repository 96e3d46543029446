"""Demonstrations and pairs as conversations: the template's tokens, and who said which of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.chat import ChatOptions
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.row_task import RowTask
from penstock.workers.data.sources import DemonstrationSource, PairSource
from penstock.workers.models.tokenizer import Tokenizer

from .chat_tokenizers import CHATML, STRICT, WITH_TOOLS, chat_tokenizer

USER = {"role": "user", "content": "What is two and two?"}
ANSWER = {"role": "assistant", "content": "Four."}
AGAIN = {"role": "user", "content": "And three?"}
LAST = {"role": "assistant", "content": "Seven."}
WORSE = {"role": "assistant", "content": "Eight."}
WHOLE = [USER, ANSWER, AGAIN, LAST]

LATER = (
    "{% for message in messages %}[{{ message.role }}]{% if message.role == 'assistant' and not "
    "loop.last %}...{% else %}{{ message.content }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Shortens what the assistant said before, as templates do with thoughts."""


def file_task(folder: Path, *rows: Any, **options: Any) -> RowTask:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {"answer_field": None, "max_bad_fraction": 1.0, **options}
    return FileTaskSpec(path=str(path), **given).build()


def demonstrations(
    folder: Path, template: str, row: dict[str, Any], **options: Any
) -> tuple[Tokenizer, list[int], list[str]]:
    """The tokenizer, a row's tokens, and the texts of the pieces that are trained on."""
    tokenizer = chat_tokenizer(folder / "model", template)
    chat = ChatOptions(wrap=options.pop("wrap", False))
    task = file_task(folder, row, **options)
    source = DemonstrationSource(task, tokenizer, batch_size=1, seed=0, chat=chat)
    table = source.batch(0)
    ids, mask = table.tokens[0].tolist(), table.mask[0].tolist()
    pieces: list[list[int]] = [[]]
    for token, trained in zip(ids, mask, strict=True):
        if trained:
            pieces[-1].append(token)
        elif pieces[-1]:
            pieces.append([])
    return tokenizer, ids, [tokenizer.decode(piece) for piece in pieces if piece]


def template_tokens(tokenizer: Tokenizer, messages: Any) -> list[int]:
    return tokenizer.backend.apply_chat_template(messages, return_dict=False)  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (STRICT, "<|im_end|>"), (WITH_TOOLS, "<|im_end|>")],
    ids=["chatml", "strict", "marked"],
)
def test_all_that_the_assistant_says_is_trained_on(tmp_path: Path, template: str, end: str) -> None:
    row = {"messages": WHOLE}
    tokenizer, ids, said = demonstrations(tmp_path, template, row, messages_field="messages")
    assert ids == template_tokens(tokenizer, WHOLE)
    assert [text.strip() for text in said] == [f"Four.{end}", f"Seven.{end}"]


def test_marks_of_the_template_are_used_as_they_are(tmp_path: Path) -> None:
    call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    result = {"role": "tool", "content": "7"}
    whole = [USER, call, result, LAST]
    row = {"messages": whole}
    tokenizer, ids, said = demonstrations(tmp_path, WITH_TOOLS, row, messages_field="messages")
    both: Any = tokenizer.backend.apply_chat_template(
        whole, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == both["input_ids"]
    assert said == ['[{"name": "add"}]<|im_end|>', "Seven.<|im_end|>"]
    marked = [i for i, mark in zip(ids, both["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == "".join(said)


def test_lengths_are_those_that_the_limits_are_compared_with(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", CHATML)
    task = file_task(tmp_path, {"messages": WHOLE}, messages_field="messages")

    def said(prompt: int | None = None, response: int | None = None) -> str:
        source = DemonstrationSource(
            *(task, tokenizer),
            batch_size=1,
            seed=0,
            max_prompt_tokens=prompt,
            max_response_tokens=response,
        )
        return source.statistics

    prompt, response = (int(found) for found in re.findall(r"max (\d+)", said()))
    assert said(prompt, response) == said()
    with pytest.raises(ConfigError, match=f"over-long prompt: {prompt} tokens, limit"):
        said(prompt=prompt - 1)
    with pytest.raises(ConfigError, match=f"from the assistant's .*: {response} tokens, limit"):
        said(response=response - 1)


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS], ids=["chatml", "marked"])
@pytest.mark.parametrize("completion", [[LAST], LAST["content"]], ids=["messages", "text"])
def test_of_a_completion_only_that_is_trained_on(
    tmp_path: Path, template: str, completion: Any
) -> None:
    row = {"prompt": WHOLE[:-1], "completion": completion}
    tokenizer, ids, said = demonstrations(tmp_path, template, row, response_field="completion")
    assert ids == template_tokens(tokenizer, WHOLE)
    assert said == ["Seven.<|im_end|>"]


def test_texts_are_rendered_as_one_exchange_if_asked(tmp_path: Path) -> None:
    row = {"prompt": USER["content"], "answer": ANSWER["content"]}
    tokenizer, ids, said = demonstrations(tmp_path, CHATML, row, answer_field="answer", wrap=True)
    assert ids == template_tokens(tokenizer, [USER, ANSWER])
    assert said == ["Four.<|im_end|>"]


def test_a_conversation_that_is_rendered_in_another_way_later_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        demonstrations(tmp_path, LATER, {"messages": WHOLE}, messages_field="messages")
    assert (
        "rows.jsonl:1: turns cannot be told apart: the end of message 2 is rendered in another way "
        "when the conversation goes on\n"
    ) in str(caught.value)


PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt": [USER], "chosen": [LAST], "rejected": [WORSE]}, {}),
    ({"prompt": [USER], "chosen": "Seven.", "rejected": "Eight."}, {}),
    ({"chosen": [USER, LAST], "rejected": [USER, WORSE]}, {"prompt_field": None}),
]


@pytest.mark.parametrize(("row", "options"), PAIRS, ids=["explicit", "texts", "implicit"])
def test_pairs_are_two_endings_of_one_conversation(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any]
) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", CHATML)
    fields = {"chosen_field": "chosen", "rejected_field": "rejected", **options}
    task = file_task(tmp_path, row, **fields)
    assert task.pair_texts(0) == ("Seven.", "Eight.")
    pairs = PairSource(task, tokenizer, batch_size=1, seed=0).batch(0)
    for ids, mask, reply in zip(pairs.tokens, pairs.mask, (LAST, WORSE), strict=True):
        assert ids[ids >= 0].tolist() == template_tokens(tokenizer, [USER, reply])
        assert tokenizer.decode(ids[mask].tolist()) == f"{reply['content']}<|im_end|>"


def test_the_prompt_of_two_texts_is_what_both_begin_with(tmp_path: Path) -> None:
    row = {"chosen": "The sky is blue.", "rejected": "The sky is brown."}
    fields = {"prompt_field": None, "chosen_field": "chosen", "rejected_field": "rejected"}
    task = file_task(tmp_path, row, **fields)
    assert task.prompt_text(0) == "The sky is b"
    assert task.pair_texts(0) == ("lue.", "rown.")
    other = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    task = file_task(tmp_path, other, **fields)
    assert (task.prompt_text(0), task.pair_texts(0)) == ("The sky is", (" blue.", " green."))


PAIR = {"chosen_field": "chosen", "rejected_field": "rejected"}
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"messages": [USER]},
        {"messages_field": "messages"},
        "no answer in 'messages': the last message is not the assistant's",
    ),
    (
        {"messages": "Hello"},
        {"messages_field": "messages"},
        "wrong type of 'messages': expected a list of messages, got text",
    ),
    (
        {"messages": [ANSWER]},
        {"messages_field": "messages"},
        "no prompt in 'messages': nothing is asked",
    ),
    (
        {"prompt": "Hello", "answer": [ANSWER]},
        {"response_field": "answer"},
        "wrong type of 'answer': the prompt is a text, and this is a list of messages",
    ),
    (
        {"prompt": [USER], "chosen": [LAST], "rejected": [AGAIN]},
        PAIR,
        "no answer in 'rejected': the last message is not the assistant's",
    ),
    (
        {"prompt": [USER], "chosen": [LAST], "rejected": [LAST]},
        PAIR,
        "equal pair: 'chosen' and 'rejected' are the same",
    ),
    (
        {"chosen": "blue", "rejected": "green"},
        {**PAIR, "prompt_field": None},
        "no prompt: the two responses have no beginning in common",
    ),
    (
        {"chosen": "It is", "rejected": "It is blue"},
        {**PAIR, "prompt_field": None},
        "empty chosen: all of 'chosen' is the prompt",
    ),
]


@pytest.mark.parametrize(("row", "options", "said"), BAD)
def test_parts_that_do_not_fit_are_reported(
    tmp_path: Path, row: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        file_task(tmp_path, row, **options)
    assert f"rows.jsonl:1: {said}\n" in str(caught.value)


def test_fields_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        file_task(tmp_path, {}, prompt_field=None)
    assert str(caught.value) == (
        f"'{tmp_path}/rows.jsonl': prompt_field is null, and nothing else says what is asked\n"
        "    give prompt_field, messages_field, or chosen_field and rejected_field"
    )
    with pytest.raises(ConfigError) as caught:
        file_task(tmp_path, {}, messages_field="messages", response_field="answer")
    assert str(caught.value) == (
        f"'{tmp_path}/rows.jsonl': messages_field holds the responses already\n"
        "    leave out response_field, chosen_field and rejected_field, or messages_field"
    )
