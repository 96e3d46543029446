"""REINFORCE++: returns to go, normalized over the whole batch; and its variant with a baseline.

Hu, "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models", 2025. Plain:
the KL to the reference is in every token's reward. With baseline: the group's mean is taken off
first, and the KL is a k2 term of the loss. Both normalize over all sampled tokens of the batch.
"""

from __future__ import annotations

from ..dataflow.options import FiniteFloat, Fraction, NonNegativeFloat, PositiveFloat, option_class
from .losses.tokens import ClippedPolicyLoss, ReferenceKLPolicyLoss
from .ops.advantages import broadcast_over_tokens, group_advantage, whiten
from .ops.kl import KLEstimator, NoEos, kl_shaped_reward
from .ops.reductions import Variance
from .ops.returns import return_to_go
from .options import PolicyUpdates, check_groups, reference_logprob, scored_rows, train_policy
from .roles import Policy, Prompts, Reward, Sampling, TrainMetrics


@option_class
class ReinforcePP(PolicyUpdates):
    """Options of REINFORCE++."""

    sampling: Sampling = Sampling(max_new_tokens=1024)
    """Sampling of the responses."""
    kl_coef: NonNegativeFloat = 0.01
    """Reward taken per nat of KL to the reference; with 0 there is no reference."""
    kl_estimator: KLEstimator = "k1"
    """Estimator of the KL."""
    score_clip: PositiveFloat | None = None
    """Bound on the size of a score."""
    no_eos: NoEos = "replace"
    """Treatment of the score of a response that was cut off: "replace" it, "subtract" from it,
    or "none"."""
    no_eos_score: FiniteFloat = -1.0
    """The score that "replace" gives such a response."""
    no_eos_penalty: NonNegativeFloat = 1.0
    """Amount that "subtract" takes from its score."""
    discount: Fraction = 1.0
    """gamma, per token."""
    whitening_variance: Variance = "unbiased"
    """Whether normalizing divides by n - 1 ("unbiased") or n ("biased")."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """Clipping; the mean is over tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_eos == "zero":
            raise ValueError("no_eos 'zero' needs a critic; use PPO")


def reinforce_pp_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: ReinforcePP
) -> TrainMetrics:
    """Sample, score, and train on normalized returns to go."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    shaped = kl_shaped_reward(
        score,
        roll.mask,
        logprob=roll.behavior_logprob,
        ref_logprob=roll.behavior_logprob if ref_logprob is None else ref_logprob,
        kl_coef=cfg.kl_coef,
        finished=roll.finished,
        kl_estimator=cfg.kl_estimator,
        score_clip=cfg.score_clip,
        no_eos=cfg.no_eos,
        no_eos_score=cfg.no_eos_score,
        no_eos_penalty=cfg.no_eos_penalty,
    )
    roll = scored_rows(roll, score)
    to_go = return_to_go(shaped, roll.mask, discount=cfg.discount)
    advantage = whiten(to_go, roll.mask, variance=cfg.whitening_variance)
    return train_policy(actor, roll, advantage, cfg.loss, cfg)


@option_class
class ReinforcePPBaseline(PolicyUpdates):
    """Options of REINFORCE++ with a baseline."""

    sampling: Sampling = Sampling(num_samples=8, max_new_tokens=1024)
    """Sampling of the responses; `num_samples` is the size of a group."""
    whitening_variance: Variance = "unbiased"
    """Whether normalizing divides by n - 1 ("unbiased") or n ("biased")."""
    loss: ReferenceKLPolicyLoss = ReferenceKLPolicyLoss(
        policy=ClippedPolicyLoss(report_entropy=True), kl_coef=0.01, kl_estimator="k2"
    )
    """Clipping, and the KL term; the mean is over tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self)


def reinforce_pp_baseline_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: ReinforcePPBaseline
) -> TrainMetrics:
    """Sample groups, score, and train on scores less their group's mean, normalized."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    centered = group_advantage(score, roll.prompt_id, divide_by_std=False)
    ref_logprob = ref.logprob(roll.tokens, roll.mask, temperature=cfg.sampling.temperature)
    roll = scored_rows(roll, score)
    per_token = broadcast_over_tokens(centered, roll.mask)
    advantage = whiten(per_token, roll.mask, variance=cfg.whitening_variance)
    return train_policy(actor, roll, advantage, cfg.loss, cfg, ref_logprob=ref_logprob)
