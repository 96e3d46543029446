"""DAPO: GRPO with a higher upper clip, dynamic sampling, a mean over tokens, and overlong shaping.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025. A step trains on
the first `per_step.prompts / filling.max_rounds` groups that are neither all right nor all wrong;
see `dynamic_sampling`. The filter looks at correctness, the advantage at the shaped reward.
"""

from __future__ import annotations

from typing import Literal

from ..dataflow.options import Int, PositiveInt, option_class
from .grpo import GRPO
from .losses import ClippedPolicyLoss
from .ops.advantages import broadcast_over_tokens, group_advantage
from .ops.dynamic_sampling import DynamicSampling, sample_until_full
from .ops.rewards import is_correct, overlong_penalty, response_length, signed_score, weighted_score
from .options.policy_updates import train_policy
from .roles import PerSample, Policy, Prompts, Reward, Rollout, Sampling, TrainMetrics


@option_class
class DAPO(GRPO):
    """Options of DAPO."""

    sampling: Sampling = Sampling(num_samples=16, max_new_tokens=20480)
    """How responses are sampled; `num_samples` is the size of a group."""
    filling: DynamicSampling = DynamicSampling()
    """Which groups are kept, and how long more are sampled."""
    signed: bool = True
    """Reward a correct response with 1 and another with -1, in place of the verifier's score."""
    overlong: Literal["piecewise", "linear", "none"] = "piecewise"
    """Penalty for a response in its last `overlong_cache` tokens, capped at 1 or not. To leave
    responses that were cut off out of the loss, use "none" and `filling.finished_only`."""
    overlong_cache: Int = 4096
    """Tokens over which the penalty grows."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(eps_high=0.28, report_entropy=True)
    """Clipping, wider upwards; the mean is over tokens."""
    num_minibatches: PositiveInt = 16
    """Optimizer steps per pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.overlong_cache <= self.sampling.max_new_tokens:
            raise ValueError(
                f"overlong_cache is {self.overlong_cache}; expected at least 1 and at most "
                f"{self.sampling.max_new_tokens:g}"
            )


def dapo_step(
    prompts: Prompts, actor: Policy, reward: Reward, cfg: DAPO
) -> tuple[TrainMetrics, PerSample]:
    """Sample until enough groups are mixed, and train on them; reports the first round's share."""
    roll, mixed = sample_until_full(prompts, actor, reward, cfg.sampling, cfg.filling)
    score = shaped_score(roll.score, roll, cfg)
    advantage = group_advantage(
        score,
        roll.prompt_id,
        divide_by_std=cfg.divide_by_std,
        variance=cfg.std_variance,
        eps=cfg.std_eps,
    )
    per_token = broadcast_over_tokens(advantage, roll.mask)
    return train_policy(actor, roll, per_token, cfg.loss, cfg), mixed


def shaped_score(score: PerSample, roll: Rollout, cfg: DAPO) -> PerSample:
    """A verifier's score as plus or minus 1, less the penalty for a response that is too long."""
    if cfg.signed:
        score = signed_score(is_correct(score, threshold=cfg.filling.correct_score))
    if cfg.overlong == "none":
        return score
    penalty = overlong_penalty(
        response_length(roll.mask),
        max_length=cfg.sampling.max_new_tokens,
        cache=cfg.overlong_cache,
        form=cfg.overlong,
    )
    return weighted_score(score, other=penalty)
