"""Divergences from a teacher: numbers, TRL's loss and its gradient, and what k words see of all."""

from __future__ import annotations

import math

import pytest
import torch
from penstock.algorithms.distillation import Distillation, with_demonstrations
from penstock.algorithms.losses import DistillationLoss, complete_distribution
from penstock.algorithms.losses.distillation import Rest
from penstock.algorithms.roles import Demonstrations, DistillationBatch, PolicyOutput, Sampling
from torch import Tensor

ROWS, WIDTH, VOCAB = 5, 7, 11
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
LENGTH = torch.tensor([7, 4, 2, 7, 5])
MASK = (torch.arange(WIDTH) >= 2) & (torch.arange(WIDTH) < LENGTH[:, None])  # row 2 has no token
TOKENS = torch.where(torch.arange(WIDTH) < LENGTH[:, None], 3, -1)


def logits(seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(ROWS, WIDTH, VOCAB, generator=torch.Generator().manual_seed(seed))


STUDENT, TEACHER = logits(0), logits(1)


def trl_loss(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """`GKDTrainer.generalized_jsd_loss` over full logits, its KLs written out; mean over tokens."""
    s = torch.log_softmax(student / temperature, -1)
    t = torch.log_softmax(teacher / temperature, -1)
    if beta == 0:
        divergence = t.exp() * (t - s)
    elif beta == 1:
        divergence = s.exp() * (s - t)
    else:
        parts = [s + math.log1p(-beta), t + math.log(beta)]
        m = torch.logsumexp(torch.stack(parts), dim=0)
        divergence = beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)
    return divergence[MASK].sum() / MASK.sum()


def asked(
    student: Tensor, teacher: Tensor, num_words: int, temperature: float = 1.0
) -> tuple[PolicyOutput, DistillationBatch]:
    """What a student and a teacher say, with garbage where the mask is False."""
    own = torch.log_softmax(student / temperature, -1)
    best = torch.log_softmax(teacher / temperature, -1).topk(num_words)
    garbage = torch.where(MASK, 0.0, torch.nan)[..., None]
    batch = DistillationBatch(
        tokens=TOKENS,
        mask=MASK,
        words=torch.where(MASK[..., None], best.indices, -1),
        teacher_logprob=best.values + garbage,
    )
    return PolicyOutput(own[..., 0], word_logprob=own.gather(2, best.indices)), batch


def ours(
    student: Tensor, teacher: Tensor, loss: DistillationLoss, num_words: int = VOCAB,
    temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    output, batch = asked(student, teacher, num_words, temperature)
    return loss(output, batch, loss.totals(batch)).total


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rest", ["one_word", "left_out"])
@pytest.mark.parametrize("beta", BETAS)
def test_with_the_whole_vocabulary_it_is_trls_loss(
    beta: float, rest: Rest, temperature: float
) -> None:
    """In float32: the loss and its gradient on every logit."""
    student = STUDENT.clone().requires_grad_()
    expected = trl_loss(student, TEACHER, beta, temperature)
    (slope,) = torch.autograd.grad(expected, student)
    loss = DistillationLoss(beta=beta, rest=rest)
    found = ours(student, TEACHER, loss, temperature=temperature)
    (grad,) = torch.autograd.grad(found, student)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(grad, slope, atol=1e-5, rtol=0)
    assert float(slope.abs().max()) > 1e-3


@pytest.mark.parametrize("beta", BETAS)
def test_fewer_words_see_no_more_than_all(beta: float) -> None:
    """Words taken together tell two distributions apart no better than one by one."""
    loss = DistillationLoss(beta=beta)
    seen = [float(ours(STUDENT, TEACHER, loss, num_words)) for num_words in (1, 3, 6, 10, VOCAB)]
    assert seen == sorted(seen)
    assert 0 < seen[0] < 0.9 * seen[-1]


def test_worked_example() -> None:
    """Teacher (0.7, 0.2, 0.1), student (0.5, 0.25, 0.25), of which two words are named."""
    teacher, student = torch.tensor([0.7, 0.2]).log(), torch.tensor([0.5, 0.25]).log()
    whole = complete_distribution(student, "one_word")
    torch.testing.assert_close(whole.exp(), torch.tensor([0.5, 0.25, 0.25]))
    part = complete_distribution(student, "left_out")
    torch.testing.assert_close(part.exp(), torch.tensor([2 / 3, 1 / 3]))
    mask = torch.tensor([[False, True]])
    batch = DistillationBatch(
        tokens=torch.tensor([[4, 5]]),
        mask=mask,
        words=torch.tensor([[[-1, -1], [5, 6]]]),
        teacher_logprob=torch.stack([torch.zeros(2), teacher])[None],
    )
    output = PolicyOutput(
        torch.zeros(1, 2), word_logprob=torch.stack([torch.zeros(2), student])[None]
    )
    loss = DistillationLoss()
    metrics = loss(output, batch, loss.totals(batch)).metrics
    found = {name: float(total / weight) for name, (total, weight) in metrics.items()}
    reverse = 0.5 * math.log(5 / 7) + 0.25 * math.log(5 / 4) + 0.25 * math.log(5 / 2)
    forward = 0.7 * math.log(7 / 5) + 0.2 * math.log(4 / 5) + 0.1 * math.log(2 / 5)
    assert found == pytest.approx(
        {
            "divergence": reverse,
            "reverse_kl": reverse,
            "forward_kl": forward,
            "teacher_share": 0.9,
            "student_share": 0.75,
        },
        abs=1e-6,
    )


def test_a_certain_teacher_makes_nothing_infinite() -> None:
    """Its other words have no probability in float32, and the student's have some."""
    certain = torch.where(torch.arange(VOCAB) == 4, 60.0, 0.0).expand(ROWS, WIDTH, VOCAB)
    student = STUDENT.clone().requires_grad_()
    for beta in BETAS:
        found = ours(student, certain, DistillationLoss(beta=beta), num_words=1)
        (grad,) = torch.autograd.grad(found, student)
        assert found.isfinite()
        assert grad.isfinite().all()
        assert grad[MASK][:, 4].max() < 0  # towards what the teacher says


def test_a_worker_that_gives_no_words_is_named() -> None:
    output, batch = asked(STUDENT, TEACHER, 2)
    loss = DistillationLoss()
    with pytest.raises(ValueError, match="forward pass gave no") as raised:
        loss(PolicyOutput(output.logprob), batch, loss.totals(batch))
    assert str(raised.value) == (
        "the forward pass gave no log-probabilities of the batch's words; a worker must compute "
        "PolicyOutput.word_logprob where a batch has a column 'words'"
    )


def test_options_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"^beta is 1.5; expected"):
        DistillationLoss(beta=1.5)
    with pytest.raises(ValueError, match=r"^num_words is 0; expected at least 1$"):
        Distillation(num_words=0)
    with pytest.raises(ValueError, match=r"^sampling.temperature is 0, which always gives"):
        Distillation(sampling=Sampling(temperature=0))
    with pytest.raises(ValueError, match="rest 'forgotten'") as raised:
        complete_distribution(torch.zeros(2), "forgotten")  # pyright: ignore[reportArgumentType]
    assert str(raised.value) == "rest 'forgotten' is unknown; choose 'one_word' or 'left_out'"


def test_demonstrations_follow_sampled_responses() -> None:
    demos = Demonstrations(
        tokens=torch.tensor([[7, 8, 9]]), mask=torch.tensor([[False, True, True]])
    )
    rows = with_demonstrations(torch.tensor([[1, 2]]), torch.tensor([[False, True]]), demos)
    assert rows.tokens.tolist() == [[1, 2, -1], [7, 8, 9]]
    assert rows.mask.tolist() == [[False, True, False], [False, True, True]]
