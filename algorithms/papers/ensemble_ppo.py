"""PPO against an ensemble of three reward models, which are harder to fool than one.

Coste et al., "Reward Model Ensembles Help Mitigate Overoptimization", 2023. Train the members with
different seeds; their heads and the order of their data differ.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ...dataflow.options import NonNegativeFloat, option_class
from ..ops.groups import floating
from ..ops.reductions import Variance, variance_correction
from ..ppo import PPO, ppo_step
from ..roles import PerSample, Policy, Prompts, Reward, TrainMetrics, ValueModel
from ..roles.language_tables import PromptId, TokenIds, TokenMask

Combination = Literal["mean", "worst_case", "uncertainty_weighted"]
"""Score of an ensemble: its members' mean, their least score, or the mean less their variance."""


@option_class
class EnsembleRule:
    """Rule that makes one score of the members' scores."""

    combination: Combination = "uncertainty_weighted"
    """See `Combination`."""
    uncertainty_coef: NonNegativeFloat = 0.1
    """Taken from the mean per unit of variance; 0.1 for training, 0.5 for picking one of n."""
    variance: Variance = "unbiased"
    """Whether that variance divides by n - 1 ("unbiased") or n ("biased")."""


def ensemble_score(
    scores: Tensor,
    *,
    combination: Combination = "mean",
    uncertainty_coef: float = 0.1,
    variance: Variance = "unbiased",
) -> Tensor:
    """One score per response from those of several members.

    Args:
        scores: f32[members, rows].
        combination: See `Combination`.
        uncertainty_coef: What a unit of variance takes from the mean.
        variance: Whether the variance divides by n - 1 or n.

    Returns:
        f32[rows].

    Raises:
        ValueError: If a choice is unknown, or there are too few members for the variance.
    """
    if scores.ndim != 2 or not len(scores):
        raise ValueError(f"scores must be [members, rows], got {list(scores.shape)}")
    scores = floating(scores)
    match combination:
        case "mean":
            return scores.mean(dim=0)
        case "worst_case":
            return scores.amin(dim=0)
        case "uncertainty_weighted":
            correction = variance_correction(variance)
            if len(scores) <= correction:
                raise ValueError("the unbiased variance needs at least 2 members; choose 'biased'")
            if not scores.numel():
                return scores[0]  # torch warns of the variance of no rows
            spread = scores.double().var(dim=0, correction=correction).to(scores)
            return scores.mean(dim=0) - uncertainty_coef * spread
        case _:
            raise ValueError(
                f"combination {combination!r} is unknown; choose 'mean', 'worst_case' or "
                "'uncertainty_weighted'"
            )


@op(scope="row")
def joined_score(
    first: PerSample,
    second: PerSample,
    third: PerSample | None = None,
    fourth: PerSample | None = None,
    fifth: PerSample | None = None,
    *,
    rule: EnsembleRule,
) -> PerSample:
    """`ensemble_score` of two to five columns."""
    given = [score for score in (first, second, third, fourth, fifth) if score is not None]
    return ensemble_score(
        torch.stack(given),
        combination=rule.combination,
        uncertainty_coef=rule.uncertainty_coef,
        variance=rule.variance,
    )


class Ensemble(Reward):
    """Two to five rewards that a step asks as if they were one."""

    def __init__(self, *members: Reward, rule: EnsembleRule) -> None:
        if not 2 <= len(members) <= 5:
            raise ValueError(f"an ensemble has 2 to 5 members, got {len(members)}")
        self.members = members
        self.rule = rule

    def score(self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId) -> PerSample:
        """Ask every member, and join what they say."""
        scores = [member.score(tokens, mask, prompt_id) for member in self.members]
        return joined_score(*scores, rule=self.rule)


@option_class
class EnsemblePPO(PPO):
    """Options of PPO, and how the members' scores become one."""

    ensemble: EnsembleRule = EnsembleRule()
    """Mean, worst case, or mean less disagreement."""


def ensemble_ppo_step(
    prompts: Prompts,
    actor: Policy,
    critic: ValueModel,
    ref: Policy,
    reward: Reward,
    reward_b: Reward,
    reward_c: Reward,
    cfg: EnsemblePPO,
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """`ppo_step` with three rewards for one."""
    members = Ensemble(reward, reward_b, reward_c, rule=cfg.ensemble)
    return ppo_step(prompts, actor, critic, ref, members, cfg)
