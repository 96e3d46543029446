"""Forms of rows of TRL, verl and OpenRLHF: columns, tokens, labels, packs, `task.map`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.ops.pairs import mismatched
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.row_task import RowTask
from penstock.workers.data.sources import (
    DemonstrationSource,
    FeedbackSource,
    PairSource,
    PromptSource,
    packed,
)
from penstock.workers.data.task import fingerprint
from penstock.workers.models.tokenizer import Tokenizer, TokenizerSpec

from .chat_tokenizers import CHATML, WITH_TOOLS, chat_tokenizer

ASKED = {"role": "user", "content": "Sky?"}
BLUE = {"role": "assistant", "content": "Blue."}
RED = {"role": "assistant", "content": "Red."}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [ASKED],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "TRL, language modeling": ({"text": "Sky"}, "text_field=text answer_field=null"),
    "TRL, prompts": ({"prompt": "Sky"}, "answer_field=null"),
    "TRL, completions": (
        {"prompt": "Sky", "completion": " is blue."},
        "response_field=completion answer_field=null",
    ),
    "TRL, chats": ({"messages": [ASKED, BLUE]}, "messages_field=messages answer_field=null"),
    "TRL, chats with tools": (
        {"messages": [ASKED, BLUE], "tools": [TOOL]},
        "messages_field=messages answer_field=null tools_field=tools",
    ),
    "TRL, explicit pairs": (
        {"prompt": [ASKED], "chosen": [BLUE], "rejected": [RED]},
        "chosen_field=chosen rejected_field=rejected answer_field=null",
    ),
    "TRL, implicit pairs": (
        {"chosen": [ASKED, BLUE], "rejected": [ASKED, RED], "score_chosen": 8.0},
        "prompt_field=null chosen_field=chosen rejected_field=rejected answer_field=null",
    ),
    "TRL, unpaired": (
        {"prompt": [ASKED], "completion": [BLUE], "label": True},
        "response_field=completion label_field=label answer_field=null",
    ),
    "TRL, tokens": (
        {"input_ids": [5, 6], "attention_mask": [1, 1], "messages": [ASKED, BLUE]},
        "tokens_field=input_ids answer_field=null",
    ),
    "verl": (VERL, "answer_field=reward_model.ground_truth"),
    "OpenRLHF, prompts": (
        {"context_messages": [ASKED], "dataset": "x"},
        "prompt_field=context_messages answer_field=null",
    ),
    "OpenRLHF, responses": (
        {"input": "Sky?", "output": "Blue."},
        "prompt_field=input response_field=output answer_field=null",
    ),
    "OpenRLHF, KTO": (
        {"prompt": "Sky?", "response": "Blue.", "label": 1},
        "response_field=response label_field=label answer_field=null",
    ),
    "GSM8K": ({"question": "Sky?", "answer": "Blue."}, "prompt_field=question"),
}


def _jsonl(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _task(folder: Path, *rows: dict[str, Any], **options: Any) -> RowTask:
    return FileTaskSpec(path=_jsonl(folder, *rows), **options).build()


def _forms_noted(task: RowTask) -> list[str]:
    notes = [note for note in task.report.notes if ": read by its columns: " in note]
    return [note.partition(": read by its columns: ")[2].replace("task.", "") for note in notes]


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_recognized_and_said_as_the_keys_that_would_name_it(
    tmp_path: Path, name: str
) -> None:
    row, keys = FORMS[name]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    of_parquet = FileTaskSpec(path=str(tmp_path / "rows.parquet")).build()
    of_json = _task(tmp_path, row)
    assert _forms_noted(of_json) == _forms_noted(of_parquet) == [keys]
    assert fingerprint(of_json) == fingerprint(of_parquet)
    named: dict[str, Any] = {
        key: None if value == "null" else value
        for key, _, value in (word.partition("=") for word in keys.split())
    }
    again = _task(tmp_path, row, **named)
    assert fingerprint(again) == fingerprint(of_json)
    assert not _forms_noted(again)


def test_the_default_form_and_named_fields_are_left_alone(tmp_path: Path) -> None:
    both = {"prompt": "Sky?", "answer": "Blue.", "completion": "Red."}
    assert not _forms_noted(task := _task(tmp_path, both))
    assert task.answer_text(0) == "Blue."
    ultra = {"prompt": "Sky?", "messages": [ASKED, BLUE], "chosen": [ASKED, BLUE]}
    ultra["rejected"] = [ASKED, RED]
    assert _task(tmp_path, ultra, messages_field="messages").messages(0) == [
        {"role": "user", "content": "Sky?"}
    ]
    fields: dict[str, Any] = {"chosen_field": "chosen", "rejected_field": "rejected"}
    pairs = _task(tmp_path, ultra, prompt_field=None, **fields)
    assert pairs.pair_texts(0) == ("Blue.", "Red.")
    implicit = {"chosen": [ASKED, BLUE], "rejected": [ASKED, RED]}
    assert _task(tmp_path, implicit, **fields).pair_texts(0) == ("Blue.", "Red.")
    with pytest.raises(ConfigError) as caught:
        _task(tmp_path, ultra)
    assert str(caught.value) == (
        f"'{tmp_path}/rows.jsonl' has the columns prompt, messages, chosen, rejected, which 2 "
        "forms of rows have\n    say which to read: task.messages_field=messages "
        "task.answer_field=null, or task.prompt_field=null task.chosen_field=chosen "
        "task.rejected_field=rejected task.answer_field=null"
    )
    alpaca = {"instruction": "Name it.", "input": "Sky", "output": "Blue."}
    with pytest.raises(ConfigError, match="missing field 'prompt': it has instruction, input, out"):
        _task(tmp_path, alpaca)


def test_an_answer_inside_an_object(tmp_path: Path) -> None:
    task = _task(
        tmp_path, VERL, {**VERL, "reward_model": {"ground_truth": None}}, VERL, max_bad_fraction=0.5
    )
    assert [task.reward_answer(index) for index in task.train] == ["72", "72"]
    assert task.score(0, "72") == 1.0
    assert dict(task.report.reasons) == {"missing field 'reward_model.ground_truth'": 1}


def _said(tokenizer: Tokenizer, tokens: Any, mask: Any) -> list[tuple[str, str]]:
    """Return all that each row says, and what of it is trained on."""
    rows = zip(tokens.tolist(), mask.tolist(), strict=True)
    return [
        (tokenizer.decode([t for t in ids if t >= 0]),
         tokenizer.decode([t for t, kept in zip(ids, marks, strict=True) if kept]))
        for ids, marks in rows
    ]  # fmt: skip


def test_texts_are_imitated_from_the_second_token_on(tmp_path: Path) -> None:
    task = _task(tmp_path, {"text": "ab"}, {"text": "c"}, {"text": "ab"}, num_held_out=1)
    assert len(task.train) + len(task.held_out) < 4  # equal texts are not in both
    tokenizer = TokenizerSpec(alphabet="abc").build()
    whole = _task(tmp_path, {"text": "ab"}, {"text": "c"})
    table = DemonstrationSource(whole, tokenizer, batch_size=2, seed=0).batch(0)
    said = _said(tokenizer, table.tokens, table.mask)
    assert sorted(said) == [("ab<eos>", "b<eos>"), ("c<eos>", "<eos>")]
    begun = chat_tokenizer(tmp_path / "model", CHATML)
    begun.backend.add_bos_token = True
    begins = begun.begun([5])[:-1]
    table = DemonstrationSource(whole, begun, batch_size=2, seed=0).batch(0)
    assert all(row[: len(begins)] == begins for row in table.tokens.tolist())
    with pytest.raises(ConfigError, match="empty prompt"):
        PromptSource(whole, tokenizer, batch_size=2, seed=0)


def test_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    ids = {"input_ids": [3, 4, 5, 6]}
    rows = [
        ids,
        {**ids, "labels": [-100, -100, 5, 6]},
        {**ids, "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 0, 1, 0]},
        {**ids, "attention_mask": [1, 1, 1, 0]},
        {**ids, "labels": [-100, -100, 5, 7]},
        {**ids, "completion_mask": [0, 1]},
        {**ids, "completion_mask": [1, 0, 0, 0]},
        {"input_ids": [3, 99]},
    ]
    task = _task(tmp_path, *rows, max_bad_fraction=0.9)
    assert dict(task.report.reasons) == {
        "wrong value of 'labels'": 1, "wrong length of 'completion_mask'": 1,
        "nothing to imitate": 1,
    }  # fmt: skip
    tokenizer = TokenizerSpec(alphabet="abcdef").build()
    source = DemonstrationSource(task, tokenizer, batch_size=4, seed=0, max_bad_fraction=0.5)
    assert dict(source.report.reasons) == {"a token outside the vocabulary": 1}
    table = source.batch(0)
    found = {
        (tuple(t for t in row if t >= 0), tuple(place for place, kept in enumerate(mask) if kept))
        for row, mask in zip(table.tokens.tolist(), table.mask.tolist(), strict=True)
    }
    assert found == {
        ((3, 4, 5, 6), (1, 2, 3)), ((3, 4, 5, 6), (2, 3)), ((3, 4, 5, 6), (2,)),
        ((3, 4, 5), (1, 2)),
    }  # fmt: skip


def test_labelled_responses_for_kto(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "completion": f"r{i}", "label": bool(i % 2)} for i in range(6)] + [
        {"prompt": "9", "completion": "r", "label": None}
    ]
    task = _task(tmp_path, *rows, max_bad_fraction=0.5)
    assert dict(task.report.reasons) == {"wrong type of 'label'": 1}
    tokenizer = TokenizerSpec(alphabet="r0123456789").build()
    source = FeedbackSource(task, tokenizer, batch_size=6, seed=0)
    table = source.batch(0)
    said = [text[0] for text, _ in _said(tokenizer, table.tokens, table.mask)]
    assert said == [str(index) for index in table.pair_id.tolist()]
    assert table.chosen.tolist() == [bool(int(one) % 2) for one in said]
    other = mismatched(table.tokens, table.mask, table.pair_id)
    swapped = [text[0] == text[2] for text, _ in _said(tokenizer, other.tokens, other.mask)]
    assert swapped == [False] * 6
    with pytest.raises(
        ConfigError, match="single responses with a label, and preference pairs are"
    ):
        PairSource(task, tokenizer, batch_size=2, seed=0)
    pairs = _task(tmp_path, {"prompt": "0", "chosen": "1", "rejected": "2"})
    both = FeedbackSource(pairs, tokenizer, batch_size=1, seed=0).batch(0)
    assert (both.chosen.tolist(), both.pair_id.tolist()) == ([True, False], [0, 0])


HISTORY = [ASKED, RED, {"role": "user", "content": "No."}]
LOSS_ON = {
    "response": "Blue.<|im_end|>",
    "completion": "Blue.<|im_end|>\n",
    "assistant": "Red.<|im_end|>Blue.<|im_end|>",
}


@pytest.mark.parametrize("loss_on", [*LOSS_ON, "all"])
def test_what_of_a_demonstration_is_imitated(tmp_path: Path, loss_on: Any) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", CHATML)
    row = {"prompt": HISTORY, "completion": [BLUE]}
    source = DemonstrationSource(
        _task(tmp_path, row), tokenizer, batch_size=1, seed=0, loss_on=loss_on
    )
    ((whole, trained),) = _said(tokenizer, source.batch(0).tokens, source.batch(0).mask)
    assert trained == LOSS_ON.get(loss_on, whole.removeprefix("<|im_start|>"))
    messages = _task(tmp_path, {"messages": [*HISTORY, BLUE]})
    of_whole = DemonstrationSource(messages, tokenizer, batch_size=1, seed=0, loss_on=loss_on)
    assert of_whole.batch(0).tokens.tolist() == source.batch(0).tokens.tolist()
    wanted = LOSS_ON["assistant"] if loss_on == "response" else trained
    assert _said(tokenizer, of_whole.batch(0).tokens, of_whole.batch(0).mask)[0][1] == wanted
    text = _task(tmp_path, {"prompt": "ab", "completion": "c"})
    plain = TokenizerSpec(alphabet="abc").build()
    table = DemonstrationSource(text, plain, batch_size=1, seed=0, loss_on=loss_on).batch(0)
    assert _said(plain, table.tokens, table.mask)[0][1] == (
        "bc<eos>" if loss_on == "all" else "c<eos>"
    )


def test_trained_turns_follow_the_marks_of_a_template(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", WITH_TOOLS)
    task = _task(tmp_path, {"prompt": HISTORY, "completion": [BLUE]})
    source = DemonstrationSource(task, tokenizer, batch_size=1, seed=0, loss_on="assistant")
    trained = _said(tokenizer, source.batch(0).tokens, source.batch(0).mask)[0][1]
    assert trained == "Red.<|im_end|>Blue.<|im_end|>"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 120))
def test_packs_hold_every_row_once_and_no_two_fit_together(lengths: list[int], most: int) -> None:
    packs = packed(dict(enumerate(lengths)), most)
    assert sorted(index for pack in packs for index in pack) == [*range(len(lengths))]
    filled = sorted(sum(lengths[index] for index in pack) for pack in packs)
    assert filled[-1] <= most
    assert len(filled) < 2 or filled[0] + filled[1] > most


def test_a_step_of_packs_has_whole_rows_with_the_masks_that_they_have_alone(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * n, "completion": "b" * n} for n in (1, 2, 3, 4, 5, 30)]
    task, tokenizer = _task(tmp_path, *rows), TokenizerSpec(alphabet="ab").build()
    given: dict[str, Any] = {"seed": 0, "max_bad_fraction": 0.5}
    source = DemonstrationSource(task, tokenizer, batch_size=1, pack_tokens=20, **given)
    assert dict(source.report.reasons) == {"over-long row for a pack": 1}
    assert [*source.report.notes] == [
        "demonstrations of task 'rows': 5 rows in 2 packs of up to 20 tokens, 87.5% full"
    ]
    alone = DemonstrationSource(task, tokenizer, batch_size=6, **given).batch(0)
    wanted = set(_said(tokenizer, alone.tokens, alone.mask))
    steps = [source.batch(step) for step in range(source.steps_per_epoch)]
    found = [one for table in steps for one in _said(tokenizer, table.tokens, table.mask)]
    assert len(found) == 5
    assert set(found) < wanted
    assert all(int((table.tokens >= 0).sum()) <= 20 for table in steps)
    assert not torch.equal(steps[0].tokens, steps[1].tokens)


MAPPED = """
def ask(row):
    if row["lang"] != "en":
        return None
    return {"prompt": row["q"] + "?", "answer": str(1 / row["n"])}
def two(row, other): return row
"""


def test_rows_go_through_a_function_before_they_are_checked(tmp_path: Path) -> None:
    (tmp_path / "maps.py").write_text(MAPPED)
    rows = [{"q": f"{n}", "lang": "de" if n == 2 else "en", "n": n} for n in range(5)]
    task = _task(tmp_path, *rows, map=f"{tmp_path}/maps.py:ask", max_bad_fraction=0.3)
    assert [task.prompt_text(i) for i in task.train] == ["1?", "3?", "4?"]
    assert task.report.examples == [
        f"{tmp_path}/rows.jsonl:1: task.map fails: at maps.py:5: ZeroDivisionError: division by "
        "zero"
    ]
    for wrong in (f"{tmp_path}/maps.py:nope", "maps"):
        with pytest.raises(ConfigError, match="'task.map': there is no function '"):
            _task(tmp_path, *rows, map=wrong)
    with pytest.raises(ConfigError, match=r"TypeError: two\(\) missing 1 required"):
        _task(tmp_path, *rows, map=f"{tmp_path}/maps.py:two")
