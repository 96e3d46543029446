"""A batch that comes in pieces is learned from as if it had come whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.algorithms.losses import BradleyTerryLoss, ClippedPolicyLoss, ClippedValueLoss
from penstock.algorithms.roles import PolicyBatch, PreferencePairs, ValueBatch
from penstock.dataflow.errors import ConfigError, StateError, WorkerError
from penstock.dataflow.runtime.call_context import Piece, call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import TorchRewardModelSpec, TorchValueSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.logprob_mismatch import MismatchError, MismatchLimits
from penstock.workers.training.microbatch import take_rows
from penstock.workers.training.optimizer import OptimizerSpec
from torch_models import architecture, make_batch, make_policy

LOSS = ClippedPolicyLoss(report_entropy=True, entropy_coef=0.01)
# See `test_trainer`: a larger eps keeps comparisons about gradients, not about what rounding left.
OPTIMIZER = OptimizerSpec(lr=1e-3, weight_decay=0.01, eps=1e-5, schedule="linear", total_calls=9)
THREE: Sequence[Sequence[int]] = ([20, 3, 11, 4], [], [*range(12, 20), 0, 1, 2, *range(5, 11), 21])
"""Rows of a batch of 24 in pieces; the last one gets the rest."""


@pytest.fixture(scope="module")
def batch() -> PolicyBatch:
    return make_batch(make_policy())


def cut(batch: Any) -> list[Any]:
    """The batch in pieces: in another order, and one without rows."""
    taken = {row for rows in THREE for row in rows}
    rest = [row for row in range(24) if row not in taken]
    return [take_rows(batch, torch.tensor(rows, dtype=torch.int64)) for rows in (*THREE, rest)]


def give(worker: Any, loss: Any, rows: Any, piece: Piece, step: int = 0, **options: Any):
    with call_scope(step, 0, 0, piece):
        return worker.train(loss, rows, **options).metrics


def give_all(worker: Any, loss: Any, pieces: Sequence[Any], step: int = 0, **options: Any):
    """The metrics, which come with the last piece."""
    for rows in pieces[:-1]:
        assert give(worker, loss, rows, "part", step, **options) == {}
    return give(worker, loss, pieces[-1], "last", step, **options)


def values(metrics: Any) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_tokens", [60, 8192])
@pytest.mark.parametrize(
    "loss",
    [LOSS, ClippedPolicyLoss(aggregation="constant", aggregation_length=20)],
    ids=["token-mean", "constant"],
)
def test_pieces_teach_what_the_whole_teaches(
    batch: PolicyBatch, micro_batch_tokens: int, loss: ClippedPolicyLoss
) -> None:
    whole = make_policy(optimizer=OPTIMIZER)
    streamed = make_policy(optimizer=OPTIMIZER, micro_batch_tokens=micro_batch_tokens)
    for step in range(3):
        expected = give(whole, loss, batch, "whole", step, temperature=0.9)
        before = streamed.weights_sha256()
        for rows in cut(batch)[:-1]:
            assert give(streamed, loss, rows, "part", step, temperature=0.9) == {}
        assert streamed.weights_sha256() == before
        found = give(streamed, loss, cut(batch)[-1], "last", step, temperature=0.9)
        assert values(found) == pytest.approx(values(expected), abs=1e-5, rel=1e-4)
        assert found["loss"].weight == found["tokens"].weight == 1
    torch.testing.assert_close(streamed.export_weights(), whole.export_weights(), atol=1e-6, rtol=0)


def test_pairs_in_pieces_teach_a_reward_model_the_same(batch: PolicyBatch) -> None:
    spec = TorchRewardModelSpec(
        model=ModelSpec(architecture=architecture("llama")), optimizer=OPTIMIZER
    )
    whole, streamed = (spec.build(WorkerContext("reward", seed=1)) for _ in range(2))
    pairs = PreferencePairs(
        pair_id=torch.arange(24) // 2,
        tokens=batch.tokens,
        mask=batch.mask,
        chosen=torch.arange(24) % 2 == 0,
    )
    ends = ((0, 6), (6, 6), (6, 16), (16, 24))
    pieces = [take_rows(pairs, torch.arange(*end)) for end in ends]
    expected = give(whole, BradleyTerryLoss(), pairs, "whole")
    found = give_all(streamed, BradleyTerryLoss(), pieces)
    assert found["accuracy"].weight == 12
    assert values(found) == pytest.approx(values(expected), abs=1e-5, rel=1e-4)
    torch.testing.assert_close(streamed.export_weights(), whole.export_weights(), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_pieces_give_the_same_bits_whatever_happens_between(
    batch: PolicyBatch, dtype: str
) -> None:
    """Evaluation, generation and a nap of the model in host memory."""
    options: dict[str, Any] = {"optimizer": OPTIMIZER, "dtype": dtype, "micro_batch_tokens": 100}
    first, second = make_policy(**options), make_policy(**options, offload=True)
    expected = give_all(first, LOSS, cut(batch))
    for rows in cut(batch)[:-1]:
        give(second, LOSS, rows, "part")
        second.logprob(batch.tokens, batch.mask)
        make_batch(second, num_prompts=2, new=3)
        second.sleep()
        second.wake()
    assert give(second, LOSS, cut(batch)[-1], "last") == expected
    assert second.weights_sha256() == first.weights_sha256()


def test_one_piece_begins_as_a_whole_batch_does(batch: PolicyBatch) -> None:
    """Without moments where each call restarts, and with frozen parameters left alone."""
    spec = dataclasses.replace(
        OPTIMIZER, restart_every_call=True, frozen=("model.embed_tokens.*",), weight_decay=0.1
    )
    whole, streamed = make_policy(optimizer=spec), make_policy(optimizer=spec)
    embedding = streamed.export_weights()["model.embed_tokens.weight"]
    for step in range(2):
        give(whole, LOSS, batch, "whole", step)
        give_all(streamed, LOSS, cut(batch), step)
    found = streamed.export_weights()
    assert torch.equal(found["model.embed_tokens.weight"], embedding)
    torch.testing.assert_close(found, whole.export_weights(), atol=1e-6, rtol=0)


# --- what is looked at before the step


def test_engines_are_compared_on_all_pieces(batch: PolicyBatch) -> None:
    """A difference in the first piece alone stops the step, and nothing has been changed."""
    limits = MismatchLimits(stop_above=0.01, every=2)
    policy = make_policy(optimizer=OPTIMIZER, mismatch=limits)
    before = policy.weights_sha256()
    first, *others = cut(batch)
    shifted = dataclasses.replace(first, behavior_logprob=first.behavior_logprob + 2.0 * first.mask)
    with pytest.raises(MismatchError, match="Nothing was updated"):
        give_all(policy, LOSS, [shifted, *others])
    assert policy.weights_sha256() == before
    found = give_all(policy, LOSS, [first, *others])
    assert found["rollout_k3"].weight == int(batch.mask.sum())
    assert "rollout_k3" not in give_all(policy, LOSS, cut(batch), step=1)


def test_a_number_that_is_none_in_any_piece_is_named(batch: PolicyBatch) -> None:
    policy = make_policy(optimizer=OPTIMIZER)
    before = policy.weights_sha256()
    first, *others = cut(batch)
    advantage = torch.where(first.mask, torch.nan, first.advantage)
    with pytest.raises(WorkerError) as error:
        give_all(policy, LOSS, [dataclasses.replace(first, advantage=advantage), *others], 4)
    assert str(error.value).startswith(
        "step 4: 'actor' cannot be trained on: the gradient norm is nan at optimizer step 1, "
        "which is not taken\n    not finite: column 'advantage' of its batch; gradients of "
    )
    assert policy.weights_sha256() == before


def test_pieces_without_any_row_are_refused_as_a_batch_without_is(batch: PolicyBatch) -> None:
    policy = make_policy(optimizer=OPTIMIZER)
    nothing = take_rows(batch, torch.arange(0))
    with pytest.raises(
        ValueError, match="the batch has no rows, and an optimizer step needs at least one"
    ):
        give(policy, LOSS, nothing, "whole")
    message = (
        r"^'actor' has nothing to train on: none of the 2 piece\(s\) of the batch has a row; an "
        "optimizer step needs at least one$"
    )
    with pytest.raises(ValueError, match=message):
        give_all(policy, LOSS, [nothing, nothing])


# --- what cannot be done in pieces, or while some wait


@pytest.mark.parametrize(("epochs", "num_minibatches"), [(2, 1), (1, 4)])
def test_several_steps_are_refused(batch: PolicyBatch, epochs: int, num_minibatches: int) -> None:
    policy = make_policy(optimizer=OPTIMIZER)
    with pytest.raises(ConfigError) as error:
        give(policy, LOSS, batch, "part", epochs=epochs, num_minibatches=num_minibatches)
    assert str(error.value) == (
        "role 'actor' is given its batch in pieces, which make one optimizer step together, but "
        f"trains with epochs={epochs} and num_minibatches={num_minibatches}\n"
        "    set both to 1, or have the step wait for the whole batch"
    )


def test_a_loss_that_needs_the_whole_batch_is_refused(batch: PolicyBatch) -> None:
    spec = TorchValueSpec(model=ModelSpec(architecture=architecture("llama")), optimizer=OPTIMIZER)
    critic = spec.build(WorkerContext("critic", seed=1))
    rows = ValueBatch(
        tokens=batch.tokens,
        mask=batch.mask,
        old_value=batch.advantage,
        value_target=batch.advantage,
    )
    with pytest.raises(ConfigError) as error:
        give(critic, ClippedValueLoss(), rows, "part")
    assert str(error.value) == (
        "role 'critic' is given its batch in pieces, but ClippedValueLoss has no divisor: it needs "
        "totals of the whole batch from the start, as normalized advantages do\n    have the step "
        "wait for the whole batch, or give the loss options without them"
    )


def test_nothing_else_is_done_while_pieces_wait(batch: PolicyBatch, tmp_path: Path) -> None:
    policy = make_policy(optimizer=OPTIMIZER)
    first, *others = cut(batch)
    give(policy, LOSS, first, "part", 3)
    message = (
        r"^'actor' has 1 piece\(s\) of the batch of call 0 of step 3 and waits for the last one, "
        "but %s$"
    )
    with pytest.raises(StateError, match=message % "it was given a whole batch"):
        give(policy, LOSS, batch, "whole", 4)
    with pytest.raises(StateError, match=message % "its state was to be saved"):
        policy.save_state(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(StateError, match=message % "it was given one of call 0 of step 4"):
        give(policy, LOSS, others[-1], "part", 4)


@pytest.mark.parametrize("restored", ["weights", "state"])
def test_other_weights_forget_the_pieces_of_those_before(
    batch: PolicyBatch, restored: str, tmp_path: Path
) -> None:
    policy, untouched = (make_policy(optimizer=OPTIMIZER) for _ in range(2))
    policy.save_state(tmp_path)
    give(policy, LOSS, cut(batch)[0], "part")
    if restored == "weights":
        policy.load_weights(policy.export_weights())
    else:
        policy.load_state(tmp_path)
    again, expected = give(policy, LOSS, batch, "whole"), give(untouched, LOSS, batch, "whole")
    assert again == expected
    assert policy.weights_sha256() == untouched.weights_sha256()


def test_a_piece_that_fails_takes_those_before_with_it(batch: PolicyBatch) -> None:
    policy = make_policy(optimizer=OPTIMIZER)
    untouched = make_policy(optimizer=OPTIMIZER)
    first, *_ = cut(batch)
    give(policy, LOSS, first, "part")
    unread = dataclasses.replace(first, mask=torch.ones_like(first.mask))
    with pytest.raises(ValueError, match="mask is True at a row's first token"):
        give(policy, LOSS, unread, "part")
    for each in (policy, untouched):
        give(each, LOSS, batch, "whole")
    assert policy.weights_sha256() == untouched.weights_sha256()
