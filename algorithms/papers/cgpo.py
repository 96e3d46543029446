"""CGPO: a policy gradient on a calibrated reward, which is 0 for responses with a violation.

Xu et al., "The Perfect Blend: Redefining RLHF with Mixture of Judges", 2024: the optimizer CRPG.
Judges say whether a response keeps all constraints; the reward is how likely it beats the
reference's own response, less the farther it is from the reference. `codpo` and `crraft` are the
paper's two other optimizers. Its several tasks, each with judges and an optimizer of its own, are
several runs of these steps.

CODPO, constrained online DPO, sets the best response that passes all judges against the worst that
fails. A prompt of which no response passes is left out; where all pass, the worst is rejected.

CRRAFT, constrained reward-ranked fine-tuning, imitates each prompt's best response that passes. A
response counts as much as it is likely to beat the reference's own, which takes its place where no
response passes near enough to the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...dataflow.graph.tracer import op
from ...dataflow.options import PositiveFloat, PositiveInt, option_class
from ..losses.preference import DPOLoss
from ..losses.tokens import ReinforceLoss
from ..ops.advantages import broadcast_over_tokens, paired_baseline
from ..ops.groups import Groups, floating, rows_by_prompt
from ..ops.kl import response_kl
from ..ops.pairs import pairs_of
from ..ops.reductions import unknown
from ..ops.rewards import calibrated_score, check_known, constrained_score
from ..options import PolicyUpdates, check_groups, train_on, train_policy
from ..roles import (
    PerSample,
    Policy,
    PolicyBatch,
    Prompts,
    ReferencePairBatch,
    Reward,
    TrainMetrics,
)
from ..roles.language_tables import (
    BehaviorLogprob,
    PromptId,
    Rollout,
    Sampling,
    ScoredPairs,
    TokenIds,
    TokenMask,
)

MeanOver = Literal["batch", "passing", "prompt"]
"""Responses whose mean is taken off a constrained reward: all, those that pass, or all of the same
prompt."""


@op(scope="row")
def kl_allowance(kl: PerSample, *, kl_max: float) -> PerSample:
    """Factor of a response's reward by its KL to the reference: `max(1 - kl / kl_max, 0)`.

    Args:
        kl: f32[rows], of whole responses, in nats.
        kl_max: From which nothing is left.
    """
    return (1 - kl / kl_max).clamp(min=0)


@op(scope="row")
def constrained_reward(score: PerSample, *, passed: PerSample, allowance: PerSample) -> PerSample:
    """`score * allowance` where the constraints hold, else 0: f32[rows].

    Args:
        score: f32[rows], at least 0, such as `calibrated_score`.
        passed: f32[rows], above 0.5 where all constraints hold.
        allowance: f32[rows], see `kl_allowance`.
    """
    return constrained_score(score * allowance, passed)


@op(scope="batch")
def less_mean(
    reward: PerSample, prompt_id: PromptId, *, passed: PerSample, mean_over: MeanOver = "batch"
) -> PerSample:
    """A constrained reward minus a mean.

    Args:
        reward: f32[rows], see `constrained_reward`.
        prompt_id: i64[rows].
        passed: f32[rows], above 0.5 where all constraints hold.
        mean_over: See `MeanOver`; a prompt without a passing response counts in the first.

    Returns:
        f32[rows]; 0 where the reward is nan, because a judge or the reward has no score.

    Raises:
        ValueError: If `mean_over` is unknown.
    """
    reward = floating(reward)
    exact, known = reward.double(), ~reward.isnan()
    match mean_over:
        case "batch":
            mean = exact.nanmean() if len(exact) else exact.sum()
        case "passing":
            counted = (passed > 0.5) & known
            mean = torch.where(counted, exact, 0.0).sum() / counted.sum().clamp(min=1)
        case "prompt":
            groups = Groups(reward, prompt_id)
            mean = groups.per_group_row(groups.mean())
        case _:
            raise unknown("mean_over", mean_over, MeanOver)
    return torch.where(known, exact - mean, 0.0).to(reward)


@op(scope="group", makes_rows=True)
def passing_and_failing(roll: Rollout, score: PerSample, *, passed: PerSample) -> ScoredPairs:
    """Per prompt the best response that passes, and the worst that does not, two rows each.

    If none fails, the worst that passes is rejected. A prompt of which none passes, or that has a
    single response with score and verdict, gets an empty mask, which losses on pairs do not count.
    Of equal scores the first response is the best and the last the worst.

    Args:
        roll: Responses; groups may be interleaved.
        score: f32[rows]; a response without a score, or a verdict, is neither.
        passed: f32[rows], above 0.5 where all constraints hold.
    """
    score = floating(score)
    known = ~(score.isnan() | passed.isnan())
    rows: list[int] = []
    skipped: list[bool] = []
    for _, everyone in rows_by_prompt(roll.prompt_id):
        members = everyone[known[everyone]]
        if not len(members):
            rows += [int(everyone[0]), int(everyone[-1])]
            skipped.append(True)
            continue
        allowed = passed[members] > 0.5
        worst_of = ~allowed if bool((~allowed).any()) else allowed
        best = int(score[members].masked_fill(~allowed, -torch.inf).argmax())
        lowest = score[members].masked_fill(~worst_of, torch.inf).flip(0).argmin()
        worst = len(members) - 1 - int(lowest)
        rows += [int(members[best]), int(members[worst])]
        skipped.append(best == worst or not bool(allowed.any()))
    dropped = torch.tensor(skipped, dtype=torch.bool, device=score.device)
    return pairs_of(roll, score, rows, dropped=dropped)


@dataclass(frozen=True, kw_only=True)
class ChosenResponses:
    """One response per prompt to imitate, and how much each counts."""

    tokens: TokenIds
    mask: TokenMask
    behavior_logprob: BehaviorLogprob
    weight: PerSample


@op(scope="batch", makes_rows=True)
def best_passing(
    roll: Rollout,
    fallback: Rollout,
    *,
    score: PerSample,
    passed: PerSample,
    kl: PerSample,
    fallback_passed: PerSample,
    kl_max: float = math.inf,
    fallback_weight: float = 0.5,
) -> ChosenResponses:
    """Per prompt the best response that passes and stays near the reference, weighed by its score.

    Where there is none, the prompt's fallback, if that passes; otherwise an empty mask. A response
    without a score or a verdict is not chosen.

    Args:
        roll: Responses; groups may be interleaved.
        fallback: One response to each prompt, in any order.
        score: f32[rows], of the responses.
        passed: f32[rows], above 0.5 where all constraints hold.
        kl: f32[rows], to the reference, in nats per response.
        fallback_passed: f32[fallbacks].
        kl_max: Largest KL of a response that is chosen.
        fallback_weight: What a fallback counts; a score of it against itself is 0.5.

    Returns:
        One row per prompt, in the order prompts first come up.

    Raises:
        ValueError: If a prompt has no fallback.
        FloatingPointError: If the KL of a response that passes is nan.
    """
    check_known("KL", torch.where(passed > 0.5, kl, 0.0))
    score = floating(score)
    eligible = (passed > 0.5) & (kl <= kl_max) & ~score.isnan()
    instead = {prompt: row for row, prompt in enumerate(fallback.prompt_id.tolist())}
    rows: list[tuple[int, int, float]] = []  # which side, which of its rows, weight
    for prompt, members in rows_by_prompt(roll.prompt_id):
        if prompt not in instead:
            raise ValueError(f"prompt {prompt} has no fallback; sample one response to each prompt")
        if bool(eligible[members].any()):
            best = members[score[members].masked_fill(~eligible[members], -torch.inf).argmax()]
            rows.append((0, int(best), float(score[best])))
        else:
            allowed = bool(fallback_passed[instead[prompt]] > 0.5)
            rows.append((1, instead[prompt], fallback_weight if allowed else 0.0))
    weight = torch.tensor([weight for _, _, weight in rows], device=score.device).to(score)
    return _responses((roll, fallback), [(side, row) for side, row, _ in rows], weight)


def _responses(
    sides: tuple[Rollout, Rollout], rows: list[tuple[int, int]], weight: Tensor
) -> ChosenResponses:
    """Rows of two rollouts, each given as which side and which of its rows, side by side."""

    def column(name: str, fill: float) -> Tensor:
        if not rows:
            return getattr(sides[0], name)[:0]
        parts = [getattr(sides[side], name)[row] for side, row in rows]
        return pad_sequence(parts, batch_first=True, padding_value=fill)

    return ChosenResponses(
        tokens=column("tokens", -1),
        mask=column("mask", False) & (weight != 0)[:, None],
        behavior_logprob=column("behavior_logprob", 0.0),
        weight=weight,
    )


@option_class
class Constrained:
    """Options of such steps."""

    sampling: Sampling = Sampling(num_samples=4, max_new_tokens=1024)
    """Sampling of the responses; the baseline is the reference's likeliest one."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    kl_max: PositiveFloat = 10.0
    """KL to the reference, in nats per response, from which a response counts for nothing."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        check_groups(self)


@dataclass(frozen=True)
class Compared:
    """Responses compared with the reference's own, and the judges' verdicts on them."""

    roll: Rollout
    baseline: Rollout
    """The reference's likeliest response to each prompt."""
    score: PerSample
    """Probability that a response is better than the baseline."""
    passed: PerSample
    """1 where all constraints hold, else 0."""
    kl: PerSample


def sample_and_judge(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, judges: Reward, cfg: Constrained
) -> Compared:
    """Sample responses and the reference's own, score both, and ask the judges about the former."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    once = replace(cfg.sampling, num_samples=1, temperature=0.0)
    baseline = ref.generate(prompts.prompt, prompts.prompt_id, once)
    own = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    other = reward.score(baseline.tokens, baseline.mask, baseline.prompt_id)
    paired = paired_baseline(roll.prompt_id, baseline=other, baseline_prompt_id=baseline.prompt_id)
    ref_logprob = ref.logprob(roll.tokens, roll.mask, temperature=cfg.sampling.temperature)
    return Compared(
        roll=roll,
        baseline=baseline,
        score=calibrated_score(own, baseline_score=paired),
        passed=judges.score(roll.tokens, roll.mask, roll.prompt_id),
        kl=response_kl(roll.mask, logprob=roll.behavior_logprob, ref_logprob=ref_logprob),
    )


@option_class
class CGPO(Constrained, PolicyUpdates):
    """Options of CGPO."""

    mean_over: MeanOver = "batch"
    """Responses whose mean reward is the baseline: all of the batch, those that pass, or all of
    the same prompt."""
    loss: ReinforceLoss = ReinforceLoss(aggregation="seq-mean-token-sum", report_entropy=True)
    """The policy gradient of whole responses."""


def cgpo_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, judges: Reward, cfg: CGPO
) -> tuple[TrainMetrics, PerSample, PerSample]:
    """Sample, judge, and train on the rewards that remain; reports who passed, and the KL."""
    compared = sample_and_judge(prompts, actor, ref, reward, judges, cfg)
    roll = compared.roll
    rewarded = constrained_reward(
        compared.score,
        passed=compared.passed,
        allowance=kl_allowance(compared.kl, kl_max=cfg.kl_max),
    )
    advantage = less_mean(rewarded, roll.prompt_id, passed=compared.passed, mean_over=cfg.mean_over)
    per_token = broadcast_over_tokens(advantage, roll.mask)
    return train_policy(actor, roll, per_token, cfg.loss, cfg), compared.passed, compared.kl


@option_class
class CODPO(Constrained):
    """Options of constrained online DPO; `kl_max` is not read."""

    loss: DPOLoss = DPOLoss(sft_coef=1.0)
    """The loss of pairs; `sft_coef` weighs the likelihood of the response that passed."""


def codpo_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, judges: Reward, cfg: CODPO
) -> tuple[TrainMetrics, PerSample, PerSample]:
    """Sample, judge, pair, and train on the pairs; reports who passed, and the KL."""
    compared = sample_and_judge(prompts, actor, ref, reward, judges, cfg)
    pairs = passing_and_failing(compared.roll, compared.score, passed=compared.passed)
    batch = ReferencePairBatch(
        pair_id=pairs.pair_id,
        tokens=pairs.tokens,
        mask=pairs.mask,
        chosen=pairs.chosen,
        ref_logprob=ref.logprob(pairs.tokens, pairs.mask, temperature=cfg.sampling.temperature),
    )
    return train_on(actor, cfg.loss, batch, cfg), compared.passed, compared.kl


@option_class
class CRRAFT(Constrained):
    """Options of constrained reward-ranked fine-tuning."""

    loss: ReinforceLoss = ReinforceLoss(aggregation="seq-mean-token-sum", report_entropy=True)
    """The log-likelihood of whole responses, weighed by their score."""


def crraft_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, judges: Reward, cfg: CRRAFT
) -> tuple[TrainMetrics, PerSample, PerSample]:
    """Sample, judge, choose, and imitate; reports who passed, and the KL."""
    compared = sample_and_judge(prompts, actor, ref, reward, judges, cfg)
    other = compared.baseline
    rows = best_passing(
        compared.roll,
        other,
        score=compared.score,
        passed=compared.passed,
        kl=compared.kl,
        fallback_passed=judges.score(other.tokens, other.mask, other.prompt_id),
        kl_max=cfg.kl_max,
    )
    batch = PolicyBatch(
        tokens=rows.tokens,
        mask=rows.mask,
        behavior_logprob=rows.behavior_logprob,
        advantage=broadcast_over_tokens(rows.weight, rows.mask),
    )
    return train_on(actor, cfg.loss, batch, cfg), compared.passed, compared.kl
