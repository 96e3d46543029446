"""Requests with checkable instructions: suites, what is apart from what, and scores."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.instruction_task import (
    HELD_OUT_TOPICS,
    REQUESTS,
    SEEN,
    TRAIN_TOPICS,
    UNSEEN,
    InstructionKind,
    InstructionTaskSpec,
)
from penstock.workers.data.task import Task, fingerprint
from penstock.workers.verifiers.instructions.instructions import Instruction, follows

TASK = InstructionTaskSpec().build()

ANSWERS = {
    "quoted": ('"Tea is hot."', 'Tea is "hot".'),
    "no commas": ("Tea is hot.", "Tea, hot."),
    "few words": ("Tea is hot.", "one two three four five six seven eight nine ten " * 2),
    "title": ("<<Tea>> It is hot.", "Tea: it is hot."),
    "placeholder": ("Tea is [name].", "Tea is (name)."),
    "question mark": ("Is tea hot?", "Tea is hot."),
    "section": ("{section_spliter} 1\nTea is hot.", "Tea is hot."),
    "no repeats": ("Tea is hot.", "Tea is hot and so is coffee."),
    "two keywords": ("Tea, {keywords[0]}, {keywords[1]}.", "Tea, {keywords[0]}."),
    "forbidden word": ("Tea.", "Tea, {forbidden_words[0]}, hot."),
    "rare letter": ("Te{letter}a", "Tea."),
    "missing letter": ("Tea.", "Te{letter}a"),
    "postscript": ("Tea is hot.\nP.S. Very hot.", "Tea is hot."),
    "highlight": ("Tea is *hot*.", "Tea is hot."),
    "few letters": ("Tea is hot.", "Tea is very hot. " * 9),
    "word twice": ("{keyword} tea {keyword}", "{keyword} tea"),
    "no full stop": ("Tea is hot", "Tea is hot."),
    "last word": ("Tea is hot {last_word}.", "Tea {last_word} is hot."),
}
"""InstructionKind -> an answer that keeps the instruction, and one that breaks it."""


def test_the_two_suites_are_all_that_is_held_out() -> None:
    assert isinstance(TASK, Task)
    suites = {name: list(indices) for name, indices in TASK.suites().items()}
    assert {name: len(indices) for name, indices in suites.items()} == {
        "seen_kinds": 240,
        "unseen_kinds": 480,
    }
    assert sorted(i for indices in suites.values() for i in indices) == list(TASK.held_out)
    assert "unseen_kinds" not in InstructionTaskSpec(num_unseen=0).build().suites()


def test_kinds_and_topics_of_training_are_apart_from_what_is_held_out() -> None:
    assert len(TRAIN_TOPICS) == 160
    assert len(set(TRAIN_TOPICS) | set(HELD_OUT_TOPICS)) == 240
    names = [(kind.name, kind.check) for kind in (*SEEN, *UNSEEN)]
    assert not {name for name, _ in names[: len(SEEN)]} & {name for name, _ in names[len(SEEN) :]}
    trained = {_asked(TASK.prompt_text(i)) for i in TASK.train}
    assert trained <= {request.format(topic=t) for request in REQUESTS for t in TRAIN_TOPICS}
    held_out = {_asked(TASK.prompt_text(i)) for i in TASK.held_out}
    assert not trained & held_out
    prompts = {TASK.prompt_text(i) for i in (*TASK.train, *TASK.held_out)}
    assert len(prompts) == len(TASK.train) + len(TASK.held_out)


def _asked(prompt: str) -> str:
    return prompt[: prompt.index(".") + 1]


def test_kinds_take_turns() -> None:
    for kinds, indices in ((SEEN, TASK.train), (UNSEEN, TASK.suites()["unseen_kinds"])):
        counts = Counter(TASK.where(i).partition(", ")[2] for i in indices)
        assert set(counts) == {kind.name for kind in kinds}
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("kind", [*SEEN, *UNSEEN], ids=lambda kind: kind.name)
def test_every_instruction_can_be_asked_for_kept_and_broken(kind: InstructionKind) -> None:
    assert len(set(kind.phrasings)) >= 3
    kept, broken = ANSWERS[kind.name]
    for values in product(*kind.options.values()):
        options = dict(zip(kind.options, values, strict=True))
        instruction = Instruction(name=kind.check, options=options)
        assert all("{" not in phrasing.format(**options) for phrasing in kind.phrasings)
        assert follows(kept.format(**options), instruction), options
        assert not follows(broken.format(**options), instruction), options


def test_an_answer_of_four_words_is_no_sentence() -> None:
    index = next(i for i in TASK.train if TASK.where(i).endswith("no commas"))
    assert TASK.score(index, "Tea is a drink") == 0
    assert TASK.score(index, "Tea is a warm drink") == 1
    assert TASK.score(index, "Tea, as everybody knows, is warm") == 0


def test_the_seed_alone_makes_the_prompts() -> None:
    assert fingerprint(InstructionTaskSpec().build()) == fingerprint(TASK)
    assert fingerprint(InstructionTaskSpec(seed=1).build()) != fingerprint(TASK)
    longer = InstructionTaskSpec(num_train=1010).build()
    assert longer.prompt_text(0) == TASK.prompt_text(0)
    assert longer.prompt_text(longer.held_out[0]) == TASK.prompt_text(TASK.held_out[0])


def test_more_than_there_are_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        InstructionTaskSpec(num_held_out=10**6).build()
    assert "different prompts of this part (seen_kinds), and 1000000 are asked for" in str(
        caught.value
    )
