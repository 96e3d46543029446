"""Tables of language-model RL: what is filled in by itself, and what travels between steps."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from penstock.algorithms.dapo import joined, kept_groups
from penstock.algorithms.ops.final_state import with_final_state
from penstock.algorithms.papers.pf_ppo import filtered_groups
from penstock.algorithms.roles import PerSample, Policy, Prompts, Rollout, Sampling, Unfinished
from penstock.dataflow.errors import FlowError
from penstock.dataflow.graph.axes import Spec, spec_of
from penstock.dataflow.graph.check import hints_of
from penstock.dataflow.graph.tracer import build, op
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.columns import Packed, lengths_of, pack, unpack
from torch import Tensor

# --- versions of tokens


def rollout(**columns: Tensor) -> Rollout:
    """Two rows of one group, the first of them shorter."""
    tokens = torch.tensor([[5, 6, 8, 2, -1, -1], [5, 6, 9, 4, 7, 3]])
    mask = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1]]).bool()
    return Rollout(
        prompt_id=torch.tensor([17, 17]),
        tokens=tokens,
        mask=mask,
        behavior_logprob=torch.zeros(tokens.shape),
        finished=torch.tensor([True, False]),
        **columns,
    )


def test_tokens_are_of_the_version_of_the_call_that_makes_the_table():
    assert rollout().version.tolist() == [[0, 0, 0, 0, -1, -1], [0] * 6]
    with call_scope(9, 0, version=4, lag=1):
        version = rollout().version
    assert version.tolist() == [[0, 0, 4, 4, -1, -1], [0, 0, 4, 4, 0, 4]]
    assert version.dtype == torch.int64


def test_versions_are_as_long_as_tokens_whichever_says_how_long_rows_are():
    """As `Spec.padding` has it: an integer column says by itself where each row ends."""
    roll = rollout()
    assert lengths_of(roll.version).tolist() == lengths_of(roll.tokens).tolist()


def test_versions_that_are_given_are_kept():
    version = torch.tensor([[0, 0, 3, 4, -1, -1], [0, 0, 3, 4, 0, 4]])
    with call_scope(9, 0, version=8):
        roll = rollout(version=version)
        assert roll.version is version
        assert replace(roll, mask=~roll.mask).version is version


def test_ops_pass_versions_on():
    version = torch.tensor([[0, 0, 3, 4, -1, -1], [0, 0, 3, 4, 0, 4]])
    roll, score = rollout(version=version), torch.tensor([0.0, 1.0])
    longer = with_final_state(roll)
    assert longer.version.tolist() == [[0, 0, 3, 4, 0, -1, -1], [0, 0, 3, 4, 0, 4, 0]]
    assert lengths_of(longer.version).tolist() == lengths_of(longer.tokens).tolist()
    kept = kept_groups(roll, score=score, mixed=torch.tensor([0.0, 1.0]))
    assert kept.version.tolist() == version[1:].tolist()
    short = replace(
        kept_groups(roll, score=score, mixed=torch.ones(2)),
        **{name: getattr(roll, name)[:, :4] for name in ("tokens", "mask", "behavior_logprob")},
        version=version[:, :4],
    )
    assert joined(short, kept).version.tolist() == [
        [0, 0, 3, 4, -1, -1],
        [0, 0, 3, 4, -1, -1],
        [0, 0, 3, 4, 0, 4],
    ]
    best = filtered_groups(roll, score, count=1, strategy="best")
    assert best.version.tolist() == version[1:].tolist()


@op(scope="row")
def lengths(roll: Rollout) -> PerSample:
    return roll.mask.sum(1).float()


def test_a_rollout_made_of_columns_must_be_given_versions():
    def step(prompts: Prompts, actor: Policy, given: bool) -> PerSample:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
        columns: dict[str, Any] = {f.name: getattr(roll, f.name) for f in fields(Rollout)}
        if not given:
            del columns["version"]
        return lengths(Rollout(**columns))

    columns = dict(build(step, given=True)["lengths"].inputs)
    assert str(columns["roll.version"]) == "actor.generate.version"
    with pytest.raises(FlowError, match=r"input 'roll.version': expected i64\[sample, token~\]"):
        build(step, given=False)


# --- what goes on in a later step


def packed(table: Any) -> dict[str, tuple[Packed, Spec]]:
    """A table's columns as they are stored: ids over the same axes say how long rows are."""
    specs = {name: spec_of(hint) for name, hint in hints_of(type(table)).items()}
    rows: dict[Any, Tensor] = {}
    for name, spec in specs.items():
        assert spec is not None
        if spec.ragged_axis is not None and spec.dtype.value == "i64":
            rows.setdefault(spec.axes, lengths_of(getattr(table, name)))
    return {
        name: (pack(name, getattr(table, name), spec, rows.get(spec.axes)), spec)
        for name, spec in specs.items()
        if spec is not None
    }


def unfinished(response: Tensor, num_prompts: int) -> Unfinished:
    """Groups with these tokens, the first of which has ended."""
    rows, sampled = len(response), response >= 0
    return Unfinished(
        prompt=torch.tensor([[7, 8, 9], [5, 6, -1]])[:num_prompts],
        prompt_id=torch.tensor([17, 4])[:num_prompts],
        began=torch.tensor([3, 5])[:num_prompts],
        response=response,
        behavior_logprob=torch.rand(response.shape) * sampled,
        version=torch.randint(0, 9, response.shape).where(sampled, -1),
        ended=torch.arange(rows) == 0,
        finished=torch.arange(rows) == 0,
    )


@pytest.mark.parametrize(
    ("response", "num_prompts"),
    [
        (torch.tensor([[8, 2, -1], [9, 4, 7], [1, -1, -1], [-1, -1, -1]]), 2),
        (torch.tensor([[-1, -1], [3, 4]]), 1),
        (torch.full((4, 0), -1), 2),
    ],
)
def test_what_goes_on_is_the_same_when_it_has_been_stored(response: Tensor, num_prompts: int):
    """A response without any token is still there."""
    table = unfinished(response, num_prompts)
    for name, (column, spec) in packed(table).items():
        expected = getattr(table, name)
        again = unpack(column, spec.dtype)
        assert column.num_rows == len(expected)
        assert again.tolist() == expected.tolist()
