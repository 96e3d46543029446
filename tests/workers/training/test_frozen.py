"""Frozen parameters never move: not by decay, not by moments, and they count in no norm."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_models import FROZEN, OPTIMIZER, load_batch, make_rows, train_policy
from penstock.dataflow.errors import ConfigError
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.training.optimizer import AdamW, OptimizerSpec
from safetensors.torch import save_file
from torch_models import make_policy

KEPT = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias")  # fmt: skip


def policy(frozen: tuple[str, ...] = FROZEN, **options: Any) -> PolicyWorker:
    return make_policy(optimizer=dataclasses.replace(OPTIMIZER, frozen=frozen), **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_frozen_stays_and_the_rest_learns(dtype: str) -> None:
    worker = policy(dtype=dtype)
    before = worker.export_weights()
    train_policy(worker, make_rows())
    after = worker.export_weights()
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == set(KEPT)


def test_it_counts_in_no_norm() -> None:
    """With one step, the squares of the parts' norms add up to that of the whole."""
    names = policy().export_weights()
    spec = OptimizerSpec(lr=0.0)
    others = tuple(name for name in names if name not in KEPT)
    whole, less, rest = (
        float(
            train_policy(
                make_policy(optimizer=dataclasses.replace(spec, frozen=frozen)),
                make_rows(),
                range(1),
            )["grad_norm"]
        )
        for frozen in ((), KEPT, others)
    )
    assert 0 < less < whole
    assert 0 < rest < whole


def test_moments_of_another_run_do_not_move_it(tmp_path: Path) -> None:
    save_file(make_rows(), tmp_path / "batch.safetensors")
    batch = load_batch(tmp_path)
    free = policy(())
    train_policy(free, batch)
    free.save_state(tmp_path / "state")
    before = free.export_weights()
    worker = policy()
    worker.load_state(tmp_path / "state")
    train_policy(worker, batch, range(2, 3))
    after = worker.export_weights()
    assert {name for name in before if torch.equal(before[name], after[name])} == set(KEPT)


@given(
    size=st.integers(1, 12), edges=st.sets(st.integers(0, 12)), decay=st.sampled_from([0.0, 0.1])
)
def test_any_spans_are_left_out(size: int, edges: set[int], decay: float) -> None:
    ends = sorted(edge for edge in edges if edge <= size)
    spans = [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=False) if a < b]
    frozen = {at for a, b in spans for at in range(a, b)}
    weights = torch.ones(size)
    optimizer = AdamW(weights, OptimizerSpec(weight_decay=decay, max_grad_norm=0.0))
    optimizer.freeze(spans)
    norm = optimizer.step(torch.ones(size), 0.1)
    assert norm == pytest.approx((size - len(frozen)) ** 0.5)
    assert {at for at in range(size) if weights[at] == 1} == frozen


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (
            ("model.embed_token.weight",),
            "'actor' is to keep 'model.embed_token.weight' frozen, which names none of its "
            "parameters; did you mean 'model.embed_tokens.weight'?\n    it has: "
            "model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, "
            "model.layers.0.self_attn.q_proj.bias, model.layers.0.self_attn.k_proj.weight, "
            "model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.v_proj.weight, ... "
            "(26 in all)",
        ),
        (
            ("*",),
            "'actor' is to keep all of its 26 parameters frozen, so there is nothing to train\n"
            "    leave some out, or do not train the role",
        ),
    ],
)
def test_patterns_that_make_no_sense_are_refused(frozen: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(frozen)
    assert str(caught.value) == message
