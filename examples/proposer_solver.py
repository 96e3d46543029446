"""Two policies that train each other: one poses sums, the other solves them.

The proposer gets the beginning of a sum, "3+4-", and writes its last number. Its reward is highest
for sums that the solver gets right half of the time, and negative for what is no number. The solver
is rewarded for right answers. Both learn by comparing samples with others of their group: sums with
the same beginning, and answers to the same sum. No data says what a good sum is.

Run it here: `penstock run --config-dir configs algorithm=proposer_solver`.
"""

from __future__ import annotations

import re
from functools import cache

import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.advantages import broadcast_over_tokens, group_advantage
from penstock.algorithms.options import PolicyUpdates, check_groups, train_policy
from penstock.algorithms.roles import (
    PerSample,
    Policy,
    PromptId,
    Prompts,
    Rollout,
    SampleFlag,
    Sampling,
    TokenIds,
    TokenMask,
    TrainMetrics,
)
from penstock.dataflow import op
from penstock.dataflow.options import option_class
from penstock.workers.models.tokenizer import Tokenizer, TokenizerSpec, pad_rows

ALPHABET = "+-0123456789="
"""The characters of the task `chain_sum`, whose tokens `tokenizer: task` numbers in this order."""


@option_class
class Player(PolicyUpdates):
    """How one of the two policies samples and trains."""

    sampling: Sampling = Sampling(num_samples=4, max_new_tokens=5)
    """How responses are sampled; `num_samples` is the size of a group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self)


@option_class
class ProposerSolver:
    """Options of the step."""

    posing: Player = Player(sampling=Sampling(num_samples=4, max_new_tokens=3))
    """How sums are written, several to each beginning, and how the proposer trains."""
    solving: Player = Player(sampling=Sampling(num_samples=4, max_new_tokens=5))
    """How sums are answered, several times each, and how the solver trains."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """Of both."""
    fine: float = 1.0
    """What the proposer loses for writing no number."""


@cache
def tokenizer() -> Tokenizer:
    """The run's own: made once per process."""
    return TokenizerSpec(alphabet=ALPHABET).build()


@op(scope="row", makes_rows=True)
def beginnings(prompts: Prompts) -> Prompts:
    """The prompts without their last number: "3+4-2=" becomes "3+4-"."""
    texts = [re.sub(r"\d+=$", "", text) for text in tokenizer().decode_rows(prompts.prompt)]
    return Prompts(
        prompt=pad_rows(tokenizer().encode(text) for text in texts), prompt_id=prompts.prompt_id
    )


@op(scope="row")
def is_number(tokens: TokenIds, mask: TokenMask) -> SampleFlag:
    """Whether a response is a number of one or two digits."""
    written = tokenizer().decode_responses(tokens, mask)
    return torch.tensor([re.fullmatch(r"\d{1,2}", text) is not None for text in written]).bool()


@op(scope="batch", makes_rows=True)
def sums(posed: Rollout, valid: SampleFlag) -> Prompts:
    """Each posed sum as a prompt, numbered as the proposer's rows; 0 stands for what is no number.

    Every row becomes a prompt, so that there are as many whatever the proposer writes.
    """
    tail = tokenizer().decode_responses(posed.tokens, posed.mask)
    head = tokenizer().decode_rows(posed.tokens.masked_fill(posed.mask, -1))
    texts = [
        f"{start}{end if good else 0}="
        for start, end, good in zip(head, tail, valid.tolist(), strict=True)
    ]
    return Prompts(
        prompt=pad_rows(tokenizer().encode(text) for text in texts),
        prompt_id=torch.arange(len(texts)),
    )


@op(scope="row")
def is_right(tokens: TokenIds, mask: TokenMask) -> PerSample:
    """1 where a response is what its sum comes to, else 0."""
    answers = tokenizer().decode_responses(tokens, mask)
    problems = tokenizer().decode_rows(tokens.masked_fill(mask, -1))
    return torch.tensor(
        [
            float(answer == str(sum(int(term) for term in re.findall(r"[+-]?\d+", problem))))
            for answer, problem in zip(answers, problems, strict=True)
        ]
    )


@op(scope="batch")
def interest(valid: SampleFlag, *, right: PerSample, solved_id: PromptId, fine: float) -> PerSample:
    """What sums are worth: 1 if half of the answers are right, 0 if all or none are.

    Args:
        valid: bool[sums]; others are worth `-fine`.
        right: f32[answers], 1 for a right one.
        solved_id: i64[answers], the sum of each, as `sums` numbers them.
        fine: See `ProposerSolver`.
    """
    count = torch.bincount(solved_id, minlength=len(valid))
    share = torch.bincount(solved_id, weights=right.double(), minlength=len(valid)) / count
    return torch.where(valid, 1 - (2 * share - 1).abs(), -fine).float()


def proposer_solver_step(
    prompts: Prompts, solver: Policy, proposer: Policy, cfg: ProposerSolver
) -> tuple[TrainMetrics, TrainMetrics, PerSample, PerSample]:
    """Pose, solve, and train both; reports how much was right, and what the sums were worth."""
    start = beginnings(prompts)
    posed = proposer.generate(start.prompt, start.prompt_id, cfg.posing.sampling)
    valid = is_number(posed.tokens, posed.mask)
    problems = sums(posed, valid)
    solved = solver.generate(problems.prompt, problems.prompt_id, cfg.solving.sampling)
    right = is_right(solved.tokens, solved.mask)
    worth = interest(valid, right=right, solved_id=solved.prompt_id, fine=cfg.fine)
    return (
        train_policy(solver, solved, compared(right, solved), cfg.loss, cfg.solving),
        train_policy(proposer, posed, compared(worth, posed), cfg.loss, cfg.posing),
        right,
        worth,
    )


def compared(score: PerSample, roll: Rollout) -> torch.Tensor:
    """The score less its group's mean, for every token."""
    advantage = group_advantage(score, roll.prompt_id, divide_by_std=False)
    return broadcast_over_tokens(advantage, roll.mask)
