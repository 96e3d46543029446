"""Conversations: the tokens of the template, who said them, and what cannot be rendered."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.chat import ChatOptions, PromptEncoder
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.row_task import RowTask
from penstock.workers.data.sources import DemonstrationSource, PairSource, PromptSource
from penstock.workers.data.task import fingerprint
from penstock.workers.models.tokenizer import Tokenizer, TokenizerSpec
from tokenizers.processors import TemplateProcessing

from .chat_tokenizers import CHATML, STRICT, WITH_TOOLS, chat_tokenizer

USER = {"role": "user", "content": "What is <|im_end|> for?\n "}
SYSTEM = {"role": "system", "content": "You are terse."}
ANSWER = {"role": "assistant", "content": "It ends a turn."}
AGAIN = {"role": "user", "content": "And é?"}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
]
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "name": "add", "content": '{"sum": 3}'}

CONVERSATIONS: list[tuple[str, dict[str, Any]]] = [
    (CHATML, {"prompt": [USER]}),
    (CHATML, {"prompt": [SYSTEM, USER, ANSWER, AGAIN]}),
    (CHATML, {"prompt": [USER, ANSWER, RESULT]}),
    (WITH_TOOLS, {"prompt": [SYSTEM, USER], "tools": TOOLS}),
    (WITH_TOOLS, {"prompt": [USER, CALL, RESULT], "tools": json.dumps(TOOLS)}),
    (WITH_TOOLS, {"prompt": [USER]}),
    (STRICT, {"prompt": [USER, ANSWER, AGAIN]}),
]


def file_task(folder: Path, *rows: Any, **options: Any) -> RowTask:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {"answer_field": None, "max_bad_fraction": 1.0}
    given |= {"tools_field": "tools", **options}
    return FileTaskSpec(path=str(path), **given).build()


@pytest.mark.parametrize("kwargs", [{}, {"thinking": True}], ids=["plain", "variable"])
@pytest.mark.parametrize(("template", "row"), CONVERSATIONS)
def test_the_tokens_are_those_of_the_template(
    tmp_path: Path, template: str, row: dict[str, Any], kwargs: dict[str, Any]
) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", template)
    task = file_task(tmp_path, row)
    source = PromptSource(
        task, tokenizer, batch_size=1, seed=0, chat=ChatOptions(template_kwargs=kwargs)
    )
    wanted = tokenizer.backend.apply_chat_template(
        row["prompt"],
        tools=TOOLS if "tools" in row else None,  # pyright: ignore[reportArgumentType]
        add_generation_prompt=True,
        return_dict=False,
        **kwargs,
    )
    assert source.batch(0).prompt.tolist() == [wanted]
    assert source.longest == len(wanted)


def test_a_text_becomes_a_message_if_asked(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", CHATML)
    task = file_task(tmp_path, {"prompt": "Hello"})
    (plain,) = PromptEncoder(task, tokenizer, ChatOptions()).encode([0])
    assert plain == tokenizer.encode("Hello")
    (wrapped,) = PromptEncoder(task, tokenizer, ChatOptions(wrap=True)).encode([0])
    message = {"role": "user", "content": "Hello"}
    assert wrapped == tokenizer.backend.apply_chat_template(
        [message], add_generation_prompt=True, return_dict=False
    )


BEGINNINGS = {"none": "", "its own": "<bos>", "with an end": "<bos>|<eos>"}


@pytest.mark.parametrize("begins", BEGINNINGS)
def test_a_sequence_begins_once_whoever_spells_it(tmp_path: Path, begins: str) -> None:
    """Texts begin as by the tokenizer's own call, conversations as by the template."""
    tokenizer = chat_tokenizer(tmp_path / "model", WITH_TOOLS)
    before, _, after = BEGINNINGS[begins].partition("|")
    if before:
        backend: Any = tokenizer.backend
        backend.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{before} $A {after}".strip(), special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
        backend.save_pretrained(str(tmp_path / "begins"))
        tokenizer = TokenizerSpec(kind="folder", folder=str(tmp_path / "begins")).build()
    rows = [{"prompt": one, "answer": "yes"} for one in ("hi there", "<bos>hi there", [AGAIN])]
    task = file_task(tmp_path, *rows, answer_field="answer")
    given: dict[str, Any] = {"task": task, "tokenizer": tokenizer, "batch_size": 3, "seed": 0}
    batches = [
        PromptSource(**given).batch(0).prompt,
        DemonstrationSource(**given).batch(0).tokens,
        PairSource(**given).batch(0).tokens,
    ]
    for tokens in batches:
        for row in tokens.tolist():
            text = tokenizer.decode([token for token in row if token >= 0])
            spelled = text.startswith(("<bos>[user]", "<bos>hi")) or bool(before)
            assert (row.count(1), row[0] == 1) == (int(spelled), spelled)
    answered = batches[1].tolist()
    assert all(row.count(tokenizer.eos_id) == 1 for row in answered), "one end, of the answer"


def test_our_own_tokenizers_begin_with_nothing() -> None:
    for kind in ("char", "byte"):
        tokenizer = TokenizerSpec(kind=kind).build()
        assert tokenizer.begun(tokenizer.encode("1+2=")) == tokenizer.encode("1+2=")


def test_verifiers_read_what_the_user_said_last(tmp_path: Path) -> None:
    task = file_task(tmp_path, {"prompt": [SYSTEM, USER, ANSWER, AGAIN]}, {"prompt": "Hello"})
    assert [task.prompt_text(i) for i in task.train] == ["And é?", "Hello"]
    assert task.verifier_call(0, "it")[0] == "And é?"
    assert task.messages(0) == [SYSTEM, USER, ANSWER, AGAIN]
    assert task.messages(1) is None


def test_conversations_that_differ_early_are_different_prompts(tmp_path: Path) -> None:
    first, second = {"prompt": [USER, ANSWER, AGAIN]}, {"prompt": [SYSTEM, USER, ANSWER, AGAIN]}
    task = file_task(tmp_path, first, second, num_held_out=1)
    assert (len(task.train), len(task.held_out)) == (1, 1)
    assert fingerprint(file_task(tmp_path, first)) != fingerprint(file_task(tmp_path, second))


def _refused(folder: Path, template: str, *rows: Any, **options: Any) -> str:
    tokenizer = chat_tokenizer(folder / "model", template)
    with pytest.raises(ConfigError) as caught:
        PromptSource(file_task(folder, *rows), tokenizer, batch_size=1, seed=0, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "reason", "why"),
    [
        (
            [SYSTEM, USER],
            "the chat template fails",
            "TemplateError: Roles must alternate user/assistant",
        ),
        ([USER, RESULT], "role unknown to the chat template", "it leaves out what 'tool' says"),
    ],
)
def test_what_the_template_cannot_render_is_reported(
    tmp_path: Path, prompt: Any, reason: str, why: str
) -> None:
    assert _refused(tmp_path, STRICT, {"prompt": prompt}) == (
        "prompts of task 'rows': 0 of 1 rows kept, 1 left out\n"
        f"    1 x {reason}\n"
        f"    {tmp_path}/rows.jsonl:1: {reason}: {why}\n"
        "    no row is left to use; fix the rows above"
    )


def test_a_template_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert _refused(tmp_path, "{% for m in %}", {"prompt": [USER]}) == (
        f"the chat template of the tokenizer '{tmp_path}/model' cannot be read, line 1: Expected "
        "an expression, got 'end of statement block'\n"
        "    fix it, or take the one that came with the model"
    )


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", None)
    fix = (
        "    take an instruct model, put its chat_template.jinja into the model's folder, or give "
        "prompts as text"
    )
    with pytest.raises(ConfigError) as caught:
        PromptSource(file_task(tmp_path, {"prompt": [USER]}), tokenizer, batch_size=1, seed=0)
    assert str(caught.value) == (
        "task 'rows': its prompts are conversations, but the tokenizer "
        f"'{tmp_path}/model' has no chat template\n{fix}"
    )
    with pytest.raises(ConfigError) as caught:
        PromptEncoder(
            file_task(tmp_path, {"prompt": "x"}), tokenizer, ChatOptions(wrap=True)
        ).encode([0])
    assert str(caught.value) == (
        f"task 'rows': task.chat is true, but the tokenizer '{tmp_path}/model' has no chat "
        f"template\n{fix}"
    )


def test_arguments_that_are_set_here_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        ChatOptions(template_kwargs={"tokenize": False})
    assert str(caught.value) == (
        "'task.chat_template_kwargs.tokenize' is set by us\n"
        "    give variables of the template alone, such as enable_thinking"
    )


BAD = {
    "[]": "expected a list of messages, got an empty list",
    '["Hello"]': "message 1 is text, not an object",
    '[{"content": "Hello"}]': (
        "message 1 has the role None; roles are system, developer, user, assistant, tool"
    ),
    '[{"role": "human", "content": "Hello"}]': (
        "message 1 has the role 'human'; roles are system, developer, user, assistant, tool"
    ),
    '[{"role": "user"}]': "message 1 has no content",
    '[{"role": "user", "content": ["Hello"]}]': "the content of message 1 is a list, not text",
}


@pytest.mark.parametrize(("given", "said"), BAD.items())
def test_what_is_no_conversation_is_reported(tmp_path: Path, given: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        file_task(tmp_path, {"prompt": json.loads(given)})
    assert f"rows.jsonl:1: no conversation in 'prompt': {said}\n" in str(caught.value)


TWO = {"role": "user", "content": "What is two and two?"}
FOUR = {"role": "assistant", "content": "Four."}
THREE = {"role": "user", "content": "And three?"}
SEVEN = {"role": "assistant", "content": "Seven."}
EIGHT = {"role": "assistant", "content": "Eight."}
WHOLE = [TWO, FOUR, THREE, SEVEN]

LATER = (
    "{% for message in messages %}[{{ message.role }}]{% if message.role == 'assistant' and not "
    "loop.last %}...{% else %}{{ message.content }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Shortens what the assistant said before, as templates do with thoughts."""


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
    "template", [CHATML, STRICT, WITH_TOOLS], ids=["chatml", "strict", "marked"]
)
def test_all_that_the_assistant_says_is_trained_on(tmp_path: Path, template: str) -> None:
    row = {"messages": WHOLE}
    tokenizer, ids, said = demonstrations(tmp_path, template, row, messages_field="messages")
    assert ids == template_tokens(tokenizer, WHOLE)
    assert [text.strip() for text in said] == ["Four.<|im_end|>", "Seven.<|im_end|>"]


def test_marks_of_the_template_are_used_as_they_are(tmp_path: Path) -> None:
    call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    result = {"role": "tool", "content": "7"}
    whole = [TWO, call, result, SEVEN]
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
@pytest.mark.parametrize("completion", [[SEVEN], SEVEN["content"]], ids=["messages", "text"])
def test_of_a_completion_only_that_is_trained_on(
    tmp_path: Path, template: str, completion: Any
) -> None:
    row = {"prompt": WHOLE[:-1], "completion": completion}
    tokenizer, ids, said = demonstrations(tmp_path, template, row, response_field="completion")
    assert ids == template_tokens(tokenizer, WHOLE)
    assert said == ["Seven.<|im_end|>"]


def test_texts_are_rendered_as_one_exchange_if_asked(tmp_path: Path) -> None:
    row = {"prompt": TWO["content"], "answer": FOUR["content"]}
    tokenizer, ids, said = demonstrations(tmp_path, CHATML, row, answer_field="answer", wrap=True)
    assert ids == template_tokens(tokenizer, [TWO, FOUR])
    assert said == ["Four.<|im_end|>"]


def test_a_conversation_that_is_rendered_in_another_way_later_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        demonstrations(tmp_path, LATER, {"messages": WHOLE}, messages_field="messages")
    assert (
        "rows.jsonl:1: turns cannot be told apart: the end of message 2 is rendered in another way "
        "when the conversation goes on\n"
    ) in str(caught.value)


PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt": [TWO], "chosen": [SEVEN], "rejected": [EIGHT]}, {}),
    ({"prompt": [TWO], "chosen": "Seven.", "rejected": "Eight."}, {}),
    ({"chosen": [TWO, SEVEN], "rejected": [TWO, EIGHT]}, {"prompt_field": None}),
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
    for ids, mask, reply in zip(pairs.tokens, pairs.mask, (SEVEN, EIGHT), strict=True):
        assert ids[ids >= 0].tolist() == template_tokens(tokenizer, [TWO, reply])
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
ODD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"messages": [TWO]}, {"messages_field": "messages"},
     "no answer in 'messages': the last message is not the assistant's"),
    ({"prompt": [TWO, FOUR]}, {},
     "no prompt in 'prompt': the last message is the assistant's, not one to answer"),
    ({"messages": "Hello"}, {"messages_field": "messages"},
     "wrong type of 'messages': expected a list of messages, got text"),
    ({"messages": [FOUR]}, {"messages_field": "messages"},
     "no prompt in 'messages': nothing is asked"),
    ({"prompt": "Hello", "answer": [FOUR]}, {"response_field": "answer"},
     "wrong type of 'answer': the prompt is a text, and this is a list of messages"),
    ({"prompt": [TWO], "chosen": [SEVEN], "rejected": [THREE]}, PAIR,
     "no answer in 'rejected': the last message is not the assistant's"),
    ({"prompt": [TWO], "chosen": [SEVEN], "rejected": [SEVEN]}, PAIR,
     "equal pair: 'chosen' and 'rejected' are the same"),
    ({"chosen": "blue", "rejected": "green"}, {**PAIR, "prompt_field": None},
     "no prompt: the two responses have no beginning in common"),
    ({"chosen": "It is", "rejected": "It is blue"}, {**PAIR, "prompt_field": None},
     "empty chosen: all of 'chosen' is the prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "options", "said"), ODD)
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
