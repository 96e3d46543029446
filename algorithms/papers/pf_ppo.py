"""PF-PPO: PPO on those responses whose scores can be relied on.

Shen and Zhang, "Policy Filtration in RLHF to Fine-Tune LLM for Code Generation", 2024. Actor and
critic both train on the responses that are kept.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ...dataflow.options import NonNegativeFloat, PositiveInt, option_class
from ..dapo import ScoredRollout, scored_part
from ..ops.distributions import uniforms
from ..ops.groups import floating, rows_by_prompt
from ..ops.reductions import unknown
from ..ops.rewards import check_known
from ..options import check_groups, reference_logprob, reported_kl, train_policy
from ..ppo import (
    PPO,
    critic_states,
    gae_targets,
    scored_states,
    token_rewards,
    train_critic,
    whitened_advantage,
)
from ..roles import PerSample, Policy, Prompts, Reward, Sampling, TrainMetrics, ValueModel
from ..roles.language_tables import Rollout

Strategy = Literal["best", "best_random", "best_worst", "power"]
"""Responses that are kept: the best; the best and others at random; the best and the worst; any,
in proportion to a power of the size of their scores."""


BEST_SHARE, OTHER_SHARE = 0.4, 0.1


def selection_weights(
    score: Tensor, group: Tensor, *, strategy: Strategy = "best_worst", power: float = 2.0
) -> Tensor:
    """Probabilities of choosing each response of a group; they add up to 1 in every group.

    | strategy      | before they are divided by their sum                               |
    |---------------|--------------------------------------------------------------------|
    | `best`        | 1 for the best, else 0                                             |
    | `best_random` | 0.4 for the best, else 0.1                                         |
    | `best_worst`  | 1 for the best and the worst, else 0                               |
    | `power`       | `abs(score)^power`; alike if all are 0                             |

    Responses that tie for the best, or the worst, count alike. One without a score gets nothing,
    unless no response of its group has one: then all count alike.

    Args:
        score: f32[rows].
        group: i64[rows]; all the same number to choose among the whole batch.
        strategy: See the table.
        power: The exponent of strategy "power".

    Returns:
        f32[rows].

    Raises:
        ValueError: If shapes differ or `strategy` is unknown.
        FloatingPointError: If a score is infinite and `strategy` is "power".
    """
    if score.shape != group.shape or score.ndim != 1:
        raise ValueError(
            f"score and group must both be [rows], got {list(score.shape)} and {list(group.shape)}"
        )
    score = floating(score)
    known = ~score.isnan()
    if strategy == "power":
        check_known("score", torch.where(known, score, 0.0), finite=True)
    weight = torch.zeros_like(score, dtype=torch.float64)
    for one in group.unique():
        own = (group == one) & known
        if bool(own.any()):
            weight[own] = _within(score[own].double(), strategy, power)
        else:
            weight[group == one] = 1 / (group == one).sum()
    return weight.to(score)


def _within(score: Tensor, strategy: Strategy, power: float) -> Tensor:
    best, worst = (score == score.max()).double(), (score == score.min()).double()
    match strategy:
        case "best":
            weight = best
        case "best_random":
            weight = torch.where(best > 0, BEST_SHARE, OTHER_SHARE).double()
        case "best_worst":
            weight = torch.maximum(best / best.sum(), worst / worst.sum())
        case "power":
            weight = score.abs() ** power
            weight = torch.where(weight.sum() > 0, weight, torch.ones_like(weight))
        case _:
            raise unknown("strategy", strategy, Strategy)
    return weight / weight.sum()


def draw_rows(weight: Tensor, count: int, offset: float) -> Tensor:
    """`count` rows in proportion to their weights, with repeats, as evenly as possible.

    Rows are laid end to end, the heaviest first, each as long as its share, and `count` points at
    equal distances are picked from them (systematic resampling).

    Args:
        weight: f32[rows], not negative.
        count: Rows to sample.
        offset: In [0, 1): where the first point lies within the first distance.

    Returns:
        i64[count], ascending; none if there are no rows to sample.

    Raises:
        FloatingPointError: If a weight is not finite.
    """
    check_known("weight", weight, finite=True)
    if not len(weight):
        return torch.zeros(0, dtype=torch.int64, device=weight.device)
    order = torch.argsort(weight, descending=True, stable=True)
    ends = weight[order].double().cumsum(0)
    points = (torch.arange(count, device=weight.device).double() + offset) / count * ends[-1]
    last = int((weight > 0).sum()) - 1  # rounding must not pick a row of weight 0
    picked = torch.searchsorted(ends, points, right=True).clamp(max=max(last, 0))
    return order[picked].sort().values


@op(scope="group", makes_rows=True)
def filtered_groups(
    roll: Rollout,
    score: PerSample,
    *,
    count: int,
    strategy: Strategy,
    power: float = 2.0,
) -> ScoredRollout:
    """Sample `count` responses of each prompt by `selection_weights`."""
    weight = selection_weights(score, roll.prompt_id, strategy=strategy, power=power)
    rows: list[Tensor] = []
    for _, members in rows_by_prompt(roll.prompt_id):
        offset = next(uniforms(0, *roll.tokens[members]))
        rows.append(members[draw_rows(weight[members], count, offset)])
    return scored_part(roll, score, torch.cat(rows) if rows else roll.prompt_id)


@op(scope="batch", makes_rows=True)
def filtered_batch(
    roll: Rollout,
    score: PerSample,
    *,
    count: int,
    strategy: Strategy,
    power: float = 2.0,
) -> ScoredRollout:
    """Sample as many responses of the whole batch as `count` for each prompt would be."""
    total = count * len(roll.prompt_id.unique())
    together = torch.zeros_like(roll.prompt_id)
    weight = selection_weights(score, together, strategy=strategy, power=power)
    return scored_part(roll, score, draw_rows(weight, total, next(uniforms(0, *roll.tokens))))


@option_class
class PFPPO(PPO):
    """Options of PF-PPO."""

    sampling: Sampling = Sampling(num_samples=5, temperature=0.7, max_new_tokens=53)
    """Sampling of the responses, before they are filtered."""
    strategy: Strategy = "best_worst"
    """Responses that are kept."""
    num_kept: PositiveInt = 2
    """Responses kept per prompt; of "best" one says all."""
    power: NonNegativeFloat = 2.0
    """Exponent by which strategy "power" prefers large scores."""
    filter_scope: Literal["prompt", "batch"] = "prompt"
    """Whether responses compete with those to the same prompt, or with the whole batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self)


def pf_ppo_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, reward: Reward, cfg: PFPPO
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """As `ppo_step`, with a filter after the scores: what is not kept is not trained on."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    choose = filtered_groups if cfg.filter_scope == "prompt" else filtered_batch
    kept = choose(roll, score, count=cfg.num_kept, strategy=cfg.strategy, power=cfg.power)
    roll, states = critic_states(kept, cfg)
    value = critic.value(roll.tokens, states)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    shaped = token_rewards(kept.score, roll, ref_logprob, cfg)
    scored, states = scored_states(roll, states, kept.score, cfg)
    target = gae_targets(scored, states, cfg, reward=shaped, value=value)
    advantage = whitened_advantage(target.advantage, scored.mask, cfg)
    return (
        train_policy(actor, scored, advantage, cfg.policy_loss, cfg),
        train_critic(critic, scored, states, cfg, value=value, target=target.value_target),
        reported_kl(roll, ref_logprob),
    )
