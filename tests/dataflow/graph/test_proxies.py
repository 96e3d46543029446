"""What a step may not do with a column, a role or a train result: each with our message."""
# ruff: noqa: E501 - messages stand here as they are printed

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from penstock.algorithms.losses import CrossEntropyLoss
from penstock.algorithms.roles import (
    Demonstrations,
    Policy,
    Prompts,
    Rollout,
    Sampling,
    TrainMetrics,
)
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.proxies import Column, nearest, table_type
from penstock.dataflow.graph.tracer import build

from ..refused import refused


@refused(
    """torch.mean was given the column 'actor.generate.behavior_logprob' (f32[sample, token~])
        'actor.generate.behavior_logprob' was produced at {1}
        call torch inside an @op function"""
)
def test_torch_functions_are_refused(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
    return torch.mean(roll.behavior_logprob)


@refused(
    """numpy was given the column 'prompts.prompt_id' (i64[prompt])
        'prompts.prompt_id' was produced at {0}
        call numpy inside an @op function"""
)
def test_numpy_is_refused(prompts: Prompts) -> object:
    return np.asarray(prompts.prompt_id)


@refused(
    """numpy.mean was given the column 'prompts.prompt_id' (i64[prompt])
        'prompts.prompt_id' was produced at {0}
        call numpy inside an @op function"""
)
def test_numpy_functions_are_refused_at_the_user_s_line(prompts: Prompts) -> object:
    column: Any = prompts.prompt_id
    return np.mean(column)


@refused(
    """an 'if', 'while', 'and', 'or' or 'not' looked at the column 'demos.mask' (bool[sample, token~])
        'demos.mask' was produced at {0}
        a step is recorded once and cannot branch on data; decide inside an @op function""",
    line=1,
)
def test_a_branch_is_refused(demos: Demonstrations) -> object:
    if demos.mask:
        return demos.tokens
    return None


@refused(
    """a loop or unpacking went over the column 'demos.tokens' (i64[sample, token~])
        'demos.tokens' was produced at {0}
        loop over rows inside an @op function"""
)
def test_a_loop_is_refused(demos: Demonstrations) -> object:
    return [row for row in demos.tokens]


@refused(
    """arithmetic or comparison was done on the column 'demos.tokens' (i64[sample, token~])
        'demos.tokens' was produced at {0}
        move it into an @op function and call that"""
)
def test_arithmetic_is_refused(demos: Demonstrations) -> object:
    return demos.tokens + 1


ARITHMETIC = "arithmetic or comparison was done on"


COLUMN_USES: list[tuple[Callable[[Any], object], str]] = [
    (lambda c: c == 1, ARITHMETIC),
    (lambda c: c != 1, ARITHMETIC),
    (lambda c: c < 1, ARITHMETIC),
    (lambda c: c >= 1, ARITHMETIC),
    (lambda c: 1 + c, ARITHMETIC),
    (lambda c: 2 - c, ARITHMETIC),
    (lambda c: c * c, ARITHMETIC),
    (lambda c: 1 / c, ARITHMETIC),
    (lambda c: 7 // c, ARITHMETIC),
    (lambda c: c % 2, ARITHMETIC),
    (lambda c: 7 % c, ARITHMETIC),
    (lambda c: divmod(c, 2), ARITHMETIC),
    (lambda c: c**2, ARITHMETIC),
    (lambda c: c << 1, ARITHMETIC),
    (lambda c: c @ c, ARITHMETIC),
    (lambda c: c & True, ARITHMETIC),
    (lambda c: -c, ARITHMETIC),
    (lambda c: +c, ARITHMETIC),
    (lambda c: ~c, ARITHMETIC),
    (abs, ARITHMETIC),
    (round, ARITHMETIC),
    (lambda c: sum([c]), ARITHMETIC),
    (lambda c: not c, "an 'if', 'while', 'and', 'or' or 'not' looked at"),
    (lambda c: [*c], "a loop or unpacking went over"),
    (lambda c: 3 in c, "'in' looked into"),
    (len, "len() was asked of"),
    (float, "float() was asked of"),
    (int, "int() was asked of"),
    (math.sqrt, "float() was asked of"),
    (lambda c: c[0], "an index was taken of"),
    (lambda c: "ab"[c], "something was indexed with"),
    (lambda c: c(), "a call was made of"),
    (lambda c: c.shape, "'.shape' was asked of"),
    (lambda c: c.mean(), "'.mean' was asked of"),
    (lambda c: f"{c:.2f}", "the format '.2f' was asked of"),
    (lambda c: torch.stack([c]), "torch.stack was given"),
    (lambda c: torch.ones(2) + c, "torch.add was given"),
    (lambda c: torch.ones(2) @ c, "torch.matmul was given"),
    (lambda c: np.ones(2) + c, "numpy.add was given"),
    (lambda c: np.float32(2) * c, "numpy.multiply was given"),
    (lambda c: np.exp(c), "numpy.exp was given"),
    (lambda c: np.array(c), "numpy was given"),
]


@pytest.mark.parametrize(("use", "what"), COLUMN_USES)
def test_nothing_but_a_call_may_use_a_column(use: Callable[[Any], object], what: str) -> None:
    def step(demos: Demonstrations) -> object:
        return use(demos.tokens)

    with pytest.raises(FlowError) as caught:
        build(step)
    assert caught.value.what == f"{what} the column 'demos.tokens' (i64[sample, token~])"
    assert caught.value.where.file == __file__


@refused(
    """an item was set in the column 'demos.tokens' (i64[sample, token~])
        'demos.tokens' was produced at {0}
        columns do not change; make a new one in an @op function"""
)
def test_setting_an_item_is_refused(demos: Demonstrations) -> None:
    demos.tokens[0] = 1


@refused(
    """table 'Rollout' has no column 'maks'
        'actor.generate' was called at {1}
        did you mean 'mask'?"""
)
def test_a_misspelt_column_is_refused(prompts: Prompts, actor: Policy) -> object:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
    return roll.maks  # pyright: ignore[reportAttributeAccessIssue]


@refused(
    """table 'Prompts' has no column 'answers'
        'prompts' was declared at {0}
        known: prompt, prompt_id"""
)
def test_a_column_a_source_does_not_have_is_refused_with_those_it_has(prompts: Prompts) -> object:
    return prompts.answers  # pyright: ignore[reportAttributeAccessIssue]


@refused(
    """role 'actor' is a Policy, which has no 'genrate'
        did you mean 'generate'?"""
)
def test_a_misspelt_method_is_refused(prompts: Prompts, actor: Policy) -> object:
    return actor.genrate(prompts.prompt)  # pyright: ignore[reportAttributeAccessIssue]


@refused(
    """the role 'actor' was called as if it were a function
        call one of its methods: converse, follow, generate, logprob, top_words, train"""
)
def test_calling_a_role_is_refused(prompts: Prompts, actor: Policy) -> object:
    return actor(prompts.prompt)  # pyright: ignore[reportCallIssue]


def train(demos: Demonstrations, actor: Policy) -> TrainMetrics:
    return actor.train(CrossEntropyLoss(), Demonstrations(tokens=demos.tokens, mask=demos.mask))


@refused(
    """'.metrics' was asked of the result of 'actor.train'
        'actor.train' was called at {2}
        a train call returns metrics after the step has run; return it from the step function and read them from the engine's results"""
)
def test_reading_metrics_in_the_step_is_refused(demos: Demonstrations, actor: Policy) -> object:
    batch = Demonstrations(tokens=demos.tokens, mask=demos.mask)
    trained = actor.train(CrossEntropyLoss(), batch)
    return trained.metrics["loss"]


RESULT_USES: list[tuple[Callable[[Any], object], str]] = [
    (lambda t: 1 if t else 2, "an 'if', 'while', 'and', 'or' or 'not' looked at"),
    (lambda t: [*t], "a loop or unpacking went over"),
    (lambda t: t["loss"], "an index was taken of"),
    (lambda t: t.loss, "'.loss' was asked of"),
]


@pytest.mark.parametrize(("use", "what"), RESULT_USES)
def test_a_train_result_cannot_be_looked_into(use: Callable[[Any], object], what: str) -> None:
    def step(demos: Demonstrations, actor: Policy) -> object:
        return use(train(demos, actor))

    with pytest.raises(FlowError) as caught:
        build(step)
    assert caught.value.what == f"{what} the result of 'actor.train'"


def test_a_stand_in_shows_what_it_stands_for() -> None:
    shown: list[str] = []

    def step(prompts: Prompts, demos: Demonstrations, actor: Policy) -> object:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
        trained = train(demos, actor)
        shown.extend(map(repr, (roll.mask, actor, actor.generate, trained)))
        shown.append(f"{roll.tokens}")
        assert table_type(roll) is Rollout
        assert isinstance(roll, Rollout)
        return roll.mask, trained

    build(step)
    assert shown == [
        "<column 'actor.generate.mask' bool[sample, token~]>",
        "<role 'actor'>",
        "<uncalled method 'actor.generate'>",
        "<result of 'actor.train'>",
        "<column 'actor.generate.tokens' i64[sample, token~]>",
    ]


def test_a_column_can_be_kept_in_a_set_or_dict() -> None:
    def step(demos: Demonstrations) -> object:
        kept: dict[object, str] = {demos.tokens: "tokens"}
        assert isinstance(demos.tokens, Column)
        assert kept[demos.tokens] == "tokens"
        return demos.tokens

    assert build(step).results == ("demos",)


def test_nearest_offers_one_close_name_or_all_known() -> None:
    assert nearest("maks", ["mask", "tokens"]) == "did you mean 'mask'?"
    assert nearest("zzz", ["tokens", "mask"]) == "known: mask, tokens"
    assert nearest("zzz", []) == "there are none"
