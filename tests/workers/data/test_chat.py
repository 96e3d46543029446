"""Prompts that are conversations: the template's own tokens, and what cannot be rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.chat import ChatOptions, PromptEncoder
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.row_task import RowTask
from penstock.workers.data.sources import DemonstrationSource, PairSource, PromptSource
from penstock.workers.data.task import fingerprint
from penstock.workers.models.tokenizer import TokenizerSpec
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


def test_what_the_template_says_is_reported(tmp_path: Path) -> None:
    assert _refused(tmp_path, STRICT, {"prompt": [SYSTEM, USER]}) == (
        "prompts of task 'rows': 0 of 1 rows kept, 1 left out\n"
        "    1 x the chat template fails\n"
        f"    {tmp_path}/rows.jsonl:1: the chat template fails: TemplateError: Roles must "
        "alternate user/assistant\n"
        "    no row is left to use; fix the rows above"
    )


def test_a_role_that_the_template_leaves_out_is_reported(tmp_path: Path) -> None:
    assert _refused(tmp_path, STRICT, {"prompt": [USER, RESULT]}) == (
        "prompts of task 'rows': 0 of 1 rows kept, 1 left out\n"
        "    1 x role unknown to the chat template\n"
        f"    {tmp_path}/rows.jsonl:1: role unknown to the chat template: it leaves out what "
        "'tool' says\n"
        "    no row is left to use; fix the rows above"
    )


def test_over_long_conversations_are_reported_as_texts_are(tmp_path: Path) -> None:
    said = _refused(tmp_path, STRICT, {"prompt": [USER]}, max_prompt_tokens=5)
    assert "rows.jsonl:1: over-long prompt: 32 tokens, limit 5\n" in said


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


def test_a_prompt_that_ends_with_an_answer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        file_task(tmp_path, {"prompt": [USER, ANSWER]})
    assert (
        "rows.jsonl:1: no prompt in 'prompt': the last message is the assistant's, not one to "
        "answer\n"
    ) in str(caught.value)
