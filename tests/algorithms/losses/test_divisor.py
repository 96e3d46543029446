"""Losses whose rows come in pieces: undivided sums, divided once, are the loss of the whole.

Every loss of the package is either one of these, or in `WHOLE` with its reason.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import penstock.algorithms
import pytest
import torch
from hypothesis import given, settings
from penstock.algorithms.dqn import TemporalDifferenceLoss
from penstock.algorithms.losses import ClippedPolicyLoss, ClippedValueLoss, DistillationLoss
from penstock.algorithms.losses.actor_critic import ActorCriticLoss, ActorLoss, CriticLoss
from penstock.algorithms.roles import DistillationBatch, PolicyOutput, ValueOutput
from penstock.algorithms.roles.environment import ActorCriticBatch, QBatch
from penstock.dataflow.graph.role import Loss, LossSum
from torch import Tensor

from ..samples import LOSSES, OUTPUTS, SEEDS, Data, batch_of, sample

Rows = Callable[[Data], Any]
Says = Callable[[Data, Tensor], Any]


def told(data: Data) -> Any:
    """A teacher's view of three words in the place of each token."""
    columns = data.columns
    teacher = torch.stack([columns["ref_logprob"] - shift for shift in (1.0, 1.5, 3.0)], dim=-1)
    return DistillationBatch(
        tokens=columns["tokens"],
        mask=columns["mask"],
        words=columns["tokens"][..., None].expand(*columns["tokens"].shape, 3),
        teacher_logprob=teacher,
    )


def steps(data: Data) -> Any:
    """Steps of environments; what no loss reads is the mask."""
    names = [field.name for field in dataclasses.fields(ActorCriticBatch)]
    read = {name: data.columns.get(name, data.columns["mask"]) for name in names}
    return ActorCriticBatch(**read)


def sampled(data: Data) -> Any:
    columns = data.columns
    mask, target = columns["mask"], columns["value_target"]
    return QBatch(obs=mask, action=mask, mask=mask, value_target=target)


def words(data: Data, said: Tensor) -> PolicyOutput:
    shifts = torch.tensor([1.2, 1.3, 2.5], dtype=said.dtype)
    return PolicyOutput(said, word_logprob=said[..., None] - shifts)


OTHERS: dict[str, tuple[Loss[Any, Any], Rows, type, Says]] = {
    "distillation": (DistillationLoss(beta=0.3), told, PolicyOutput, words),
    "dqn": (TemporalDifferenceLoss(), sampled, ValueOutput, lambda _, said: ValueOutput(said)),
    "actor": (
        ActorLoss(normalize_advantages=False, policy=ClippedPolicyLoss(entropy_coef=0.1)),
        steps,
        PolicyOutput,
        lambda data, said: PolicyOutput(said, torch.where(data.columns["mask"], said, 0).square()),
    ),
}
WHOLE: dict[type, Loss[Any, Any]] = {
    ClippedValueLoss: ClippedValueLoss(),  # a metric of the whole batch's moments
    CriticLoss: CriticLoss(),  # the same
    ActorCriticLoss: ActorCriticLoss(normalize_advantages=False),  # the same
    ActorLoss: ActorLoss(),  # advantages are normalized by moments
}


def entry(name: str) -> tuple[Loss[Any, Any], Rows, type, Says]:
    """A loss, its batch of some rows, what kind of output it reads, and that output."""
    if name in OTHERS:
        return OTHERS[name]
    loss, kind = LOSSES[name]
    output = OUTPUTS.get(kind, PolicyOutput)
    return loss, lambda data: batch_of(kind, data), output, lambda _, said: output(said)


DIVIDED = [n for n, (loss, _) in LOSSES.items() if type(loss) not in WHOLE] + list(OTHERS)


def pieces_of(loss: Loss[Any, Any], data: Data, seed: int) -> list[Tensor]:
    """Rows of four pieces, some of them perhaps empty; groups whole where the loss needs that."""
    rows = torch.arange(len(data.logprob))
    unit = data.columns["prompt_id"] - 40 if loss.unit == "group" else rows
    piece = torch.randint(0, 4, (len(rows),), generator=torch.Generator().manual_seed(seed))[unit]
    return [(piece == number).nonzero()[:, 0] for number in range(4)]


def applied(name: str, data: Data, said: Tensor, totals: Tensor) -> LossSum:
    loss, rows, _, says = entry(name)
    return loss(says(data, said), rows(data), totals)


def divisor(loss: Loss[Any, Any], totals: Tensor) -> Tensor:
    found = loss.divisor(totals)
    assert found is not None
    assert found > 0
    return found


@pytest.mark.parametrize("name", DIVIDED)
@settings(max_examples=5)
@given(seed=SEEDS)
def test_pieces_divided_once_are_the_whole(name: str, seed: int) -> None:
    """Value, gradient and metrics."""
    data = sample(seed)
    loss, rows, output, _ = entry(name)
    said = data.said(output).clone().requires_grad_()
    whole = applied(name, data, said, loss.totals(rows(data)))
    parts = [(data.take(taken), taken) for taken in pieces_of(loss, data, seed)]
    totals = torch.stack([loss.totals(rows(part)) for part, _ in parts]).sum(0)
    ones = torch.ones_like(totals)
    found = [applied(name, part, said[taken], ones) for part, taken in parts]
    share = divisor(loss, ones) / divisor(loss, totals)
    total = torch.stack([part.total for part in found]).sum() * share
    torch.testing.assert_close(total, whole.total)
    slopes = (torch.autograd.grad(value, said)[0] for value in (total, whole.total))
    torch.testing.assert_close(*slopes)
    for metric, (amount, weight) in whole.metrics.items():
        sums = [torch.stack([p.metrics[metric][at].double() for p in found]).sum() for at in (0, 1)]
        torch.testing.assert_close(sums, [amount.double(), weight.double()], msg=metric)


@pytest.mark.parametrize("name", DIVIDED)
@settings(max_examples=5)
@given(seed=SEEDS)
def test_dividing_is_all_that_totals_are_for(name: str, seed: int) -> None:
    """Whatever they are: none, a fraction, a million."""
    data = sample(seed)
    loss, rows, output, _ = entry(name)
    own = loss.totals(rows(data))
    ones, said = torch.ones_like(own), data.said(output)
    undivided = applied(name, data, said, ones)
    random = torch.Generator().manual_seed(seed)
    for scale in (0.0, 2.0, 1e6):
        totals = torch.rand(own.shape, generator=random, dtype=own.dtype) * scale
        found = applied(name, data, said, totals)
        torch.testing.assert_close(
            found.total * divisor(loss, totals), undivided.total * divisor(loss, ones)
        )
        for metric, pair in undivided.metrics.items():
            torch.testing.assert_close(found.metrics[metric], pair, msg=metric)


@pytest.mark.parametrize("loss", WHOLE.values(), ids=lambda loss: type(loss).__name__)
def test_a_loss_that_needs_the_whole_batch_says_so(loss: Loss[Any, Any]) -> None:
    assert loss.divisor(torch.ones(12)) is None


@pytest.mark.parametrize("name", DIVIDED)
def test_it_can_be_asked_before_there_is_a_batch(name: str) -> None:
    """By more ones than it has totals."""
    assert divisor(entry(name)[0], torch.ones(32)).shape == ()


def leaves(kind: type) -> Iterator[type]:
    """The package's classes below one that nothing in it derives from."""
    below = [c for c in kind.__subclasses__() if c.__module__.startswith("penstock.")]
    if not below:
        yield kind
    for child in below:
        yield from leaves(child)


def test_no_loss_of_the_package_is_left_out() -> None:
    package = penstock.algorithms
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
    looked_at = {type(entry(name)[0]) for name in DIVIDED} | WHOLE.keys()
    assert set(leaves(Loss)) == looked_at
