"""Sources: purity in (seed, step), epochs, tables, over-long rows, wrong answers, errors."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.orders import epoch_order
from penstock.workers.data.reasoning_task import ReasoningTaskSpec
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.data.sources import (
    DemonstrationSource,
    PairSource,
    PromptSource,
    ScoredPairSource,
    wrong_answer,
)
from penstock.workers.data.task import fingerprint, task_alphabet
from penstock.workers.models.tokenizer import TokenizerSpec

from ...copies import copies_end, fork

TASK = ReasoningTaskSpec(
    name="chain_sum",
    config={"max_terms": 3, "max_digits": 1},
    prompt_template="{expression}=",
    strip_spaces=True,
    num_train=50,
    num_held_out=20,
).build()
TOKENIZER = TokenizerSpec(alphabet=task_alphabet(TASK)).build()


class _Forks:
    """Another task, which goes on twice from every method that is called."""

    def __init__(self, task: Any) -> None:
        self._task = task

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._task, name)
        if not callable(found):
            return found

        def twice(*given: Any) -> Any:
            fork()
            return found(*given)

        return twice


@pytest.mark.slow
def test_a_task_that_forks_does_not_double_the_run() -> None:
    small = dataclasses.replace(TASK.spec, num_train=2, num_held_out=1).build()
    task: Any = _Forks(small)
    with copies_end():
        assert fingerprint(task) == fingerprint(small)
    with copies_end():
        assert task_alphabet(task) == task_alphabet(small)
    for kind in (PromptSource, DemonstrationSource, PairSource, ScoredPairSource):
        with copies_end():
            kind(task, TOKENIZER, batch_size=2, seed=0).batch(0)


def test_the_order_of_an_epoch_is_fixed_for_good() -> None:
    assert epoch_order(8, 0, 0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert epoch_order(8, 0, 1).tolist() == [7, 4, 2, 6, 5, 0, 1, 3]
    assert epoch_order(8, 1, 0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]


@given(st.integers(1, 300), st.integers(-(2**63), 2**63), st.integers(0, 2**40))
def test_the_order_of_an_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_rows, seed, epoch)
    epoch_order.cache_clear()
    assert np.array_equal(order, epoch_order(num_rows, seed, epoch))
    assert sorted(order.tolist()) == list(range(num_rows))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=4), st.integers(0, 99))
def test_a_step_depends_on_seed_and_step_alone(steps: list[int], seed: int) -> None:
    used = PromptSource(TASK, TOKENIZER, batch_size=7, seed=seed)
    for step in steps:
        epoch_order.cache_clear()
        fresh = PromptSource(TASK, TOKENIZER, batch_size=7, seed=seed).batch(step)
        again = used.batch(step)
        assert torch.equal(again.prompt, fresh.prompt)
        assert torch.equal(again.prompt_id, fresh.prompt_id)


@given(st.integers(1, 50), st.integers(0, 5))
@settings(max_examples=20)
def test_an_epoch_visits_each_problem_once(batch_size: int, epoch: int) -> None:
    source = PromptSource(TASK, TOKENIZER, batch_size=batch_size, seed=3)
    per_epoch = source.steps_per_epoch
    assert per_epoch == 50 // batch_size
    steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    seen = [index for step in steps for index in source.batch(step).prompt_id.tolist()]
    assert len(set(seen)) == len(seen) == per_epoch * batch_size
    assert set(seen) <= set(TASK.train)


def test_prompts_are_the_problems_their_ids_name() -> None:
    source = PromptSource(TASK, TOKENIZER, batch_size=5, seed=0)
    for table in (source.batch(4), source.held_out(5)):
        texts = TOKENIZER.decode_rows(table.prompt)
        assert texts == [TASK.prompt_text(index) for index in table.prompt_id.tolist()]
        assert table.prompt.dtype == table.prompt_id.dtype == torch.int64
        assert (table.prompt >= 0).sum(1).tolist() == [len(text) for text in texts]


def test_held_out_prompts_are_the_first_ones_and_never_trained() -> None:
    source = PromptSource(TASK, TOKENIZER, batch_size=5, seed=0)
    assert source.held_out().prompt_id.tolist() == list(TASK.held_out)
    assert source.held_out(3).prompt_id.tolist() == list(TASK.held_out)[:3]


def test_demonstrations_train_the_answer_and_its_end() -> None:
    table = DemonstrationSource(TASK, TOKENIZER, batch_size=6, seed=0).batch(2)
    answers = TOKENIZER.decode_responses(table.tokens, table.mask)
    whole = TOKENIZER.decode_rows(table.tokens)
    for row, (answer, text) in enumerate(zip(answers, whole, strict=True)):
        prompt = text.removesuffix(f"{answer}<eos>")
        index = [TASK.prompt_text(i) for i in TASK.train].index(prompt)
        assert answer == TASK.answer_text(index)
        assert table.mask[row].sum() == len(answer) + 1
        assert not table.mask[row][table.tokens[row] < 0].any()
    assert table.mask.dtype == torch.bool


def test_pairs_share_the_prompt_and_the_worse_answer_is_wrong() -> None:
    source = PairSource(TASK, TOKENIZER, batch_size=25, seed=0)
    table = source.batch(0)
    assert table.chosen.tolist() == [True, False] * 25
    ids = table.pair_id.tolist()
    assert ids[::2] == ids[1::2]
    assert set(Counter(ids).values()) == {2}
    responses = TOKENIZER.decode_responses(table.tokens, table.mask)
    for index, response, chosen in zip(ids, responses, table.chosen.tolist(), strict=True):
        assert (TASK.score(index, response) == 1.0) == chosen


def test_made_up_answers_are_pure_in_seed_and_step_and_change_with_the_epoch() -> None:
    source = PairSource(TASK, TOKENIZER, batch_size=50, seed=0)
    assert torch.equal(source.batch(1).tokens, source.batch(1).tokens)

    def worse(step: int) -> dict[int, str]:
        table = source.batch(step)
        texts = TOKENIZER.decode_responses(table.tokens, table.mask)
        return dict(zip(table.pair_id.tolist()[1::2], texts[1::2], strict=True))

    assert worse(0) != worse(1)


def test_made_up_answers_keep_to_the_limit_and_the_alphabet() -> None:
    source = PairSource(
        TASK, TOKENIZER, batch_size=25, seed=0, max_response_tokens=3, max_bad_fraction=0.9
    )
    table = source.batch(0)
    assert table.mask.sum(1).max() <= 3
    assert TOKENIZER.backend.unk_token_id not in table.tokens


def _file(folder: Path, rows: list[dict[str, str]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_that_do_not_fit_are_reported_with_file_and_line(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
    rows[2]["prompt"] = "1" * 20
    rows[4]["prompt"] = "1+é="
    rows[6]["answer"] = "7" * 9
    path = _file(tmp_path, rows)
    task = FileTaskSpec(path=path).build()
    tokenizer = TokenizerSpec().build()
    source = DemonstrationSource(
        task,
        tokenizer,
        batch_size=2,
        seed=0,
        max_prompt_tokens=8,
        max_response_tokens=4,
        max_bad_fraction=0.5,
    )
    assert str(source.report) == (
        "demonstrations of task 'rows': 6 of 9 rows kept, 3 left out\n"
        "    1 x over-long prompt\n"
        "    1 x prompt outside the alphabet\n"
        "    1 x over-long response\n"
        f"    {path}:3: over-long prompt: 20 tokens, limit 8\n"
        f"    {path}:5: prompt outside the alphabet: the tokenizer cannot express 'é'\n"
        f"    {path}:7: over-long response: 10 tokens, limit 4"
    )
    texts = [text for step in range(3) for text in tokenizer.decode_rows(source.batch(step).tokens)]
    assert sorted(texts) == [f"{i}+1={i + 1}<eos>" for i in (0, 1, 3, 5, 7, 8)]


def test_errors() -> None:
    with pytest.raises(ConfigError) as large:
        PromptSource(TASK, TOKENIZER, batch_size=51, seed=0)
    assert str(large.value) == (
        "batch_size is 51 prompts per step, but task 'chain_sum' has only 50\n"
        "    lower batch_size to 50 or less, or give more problems"
    )
    with pytest.raises(ConfigError) as none:
        PairSource(TASK, TOKENIZER, batch_size=0, seed=0)
    assert str(none.value) == "batch_size is 0\n    use at least 1 preference pair per step"
    source = PromptSource(TASK, TOKENIZER, batch_size=1, seed=0)
    with pytest.raises(ConfigError) as many:
        source.held_out(21)
    assert str(many.value) == (
        "21 held-out prompts are asked for, but task 'chain_sum' holds out 20\n"
        "    ask for 1 to 20, or hold out more (num_held_out)"
    )
    with pytest.raises(ValueError, match="step must be at least 0"):
        source.batch(-1)
    task = ReasoningTaskSpec(name="propositional_logic", num_train=3, num_held_out=1).build()
    with pytest.raises(ConfigError) as answers:
        DemonstrationSource(task, TOKENIZER, batch_size=1, seed=0)
    assert str(answers.value) == (
        "task 'propositional_logic' has no answers to make demonstrations of\n"
        "    choose another task, name the column of answers (task.answer_field), or leave out the "
        "stage that needs them, such as ~algorithm.before.sft"
    )


@settings(max_examples=40)
@given(st.integers(-(10**6), 10**6), st.integers(-99, 99), st.integers(0, 10**6))
def test_a_wrong_number_is_another_number(answer: int, other: int, seed: int) -> None:
    made = wrong_answer(str(answer), str(other), random.Random(seed))
    assert made == wrong_answer(str(answer), str(other), random.Random(seed))
    try:
        assert int(made) != answer
    except ValueError:
        assert made != str(answer)


@settings(max_examples=40)
@given(st.text("ab 1é", min_size=1, max_size=8).filter(str.strip), st.integers(0, 10**6))
def test_a_wrong_text_is_another_text(answer: str, seed: int) -> None:
    assert wrong_answer(answer, answer, random.Random(seed)).strip() != answer.strip()


def test_mistakes_are_of_many_kinds() -> None:
    made = {wrong_answer("42", "7", random.Random(seed)) for seed in range(400)}
    assert {"7", "43", "41", "-42", "4", "2", "442", "24"} <= made
    assert len(made) > 20


def test_what_is_never_accepted_becomes_the_empty_text() -> None:
    assert wrong_answer("42", "7", random.Random(0), lambda _: False) == ""
