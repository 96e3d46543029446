"""PPO against an ensemble of three reward models, which are harder to fool than one.

Coste et al., "Reward Model Ensembles Help Mitigate Overoptimization", 2023. Train the members with
different seeds; their heads and the order of their data differ.
"""

from __future__ import annotations

from typing import Literal

import torch

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
    """One score per response, f32[rows], from those of two to five members, f32[rows] each."""
    given = [score for score in (first, second, third, fourth, fifth) if score is not None]
    scores = floating(torch.stack(given))
    match rule.combination:
        case "mean":
            return scores.mean(dim=0)
        case "worst_case":
            return scores.amin(dim=0)
        case "uncertainty_weighted":
            if not scores.numel():
                return scores[0]  # torch warns of the variance of no rows
            spread = scores.double().var(dim=0, correction=variance_correction(rule.variance))
            return scores.mean(dim=0) - rule.uncertainty_coef * spread.to(scores)


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
