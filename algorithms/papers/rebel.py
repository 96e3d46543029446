"""REBEL: regress the difference of two responses' rewards on that of their log-ratios.

Gao et al., "REBEL: Reinforcement Learning via Regressing Relative Rewards", 2024. Log-ratios are to
the policy the step begins with, which sampled; the KL to the reference is in the score.
"""

from __future__ import annotations

from ...dataflow.options import PositiveInt, option_class
from ..losses.sequence import RebelLoss
from ..options import PairUpdates, score_less_kl, train_on_pairs
from ..roles import Policy, Prompts, Reward, Sampling, TrainMetrics


@option_class
class Rebel(PairUpdates):
    """Options of REBEL."""

    sampling: Sampling = Sampling(num_samples=2, temperature=0.7, max_new_tokens=53)
    """Sampling of the responses, two per prompt."""
    loss: RebelLoss = RebelLoss(report_entropy=True)
    """The regression and its step size."""
    epochs: PositiveInt = 4
    """Passes over each step's rollouts; with one update nothing but its gradient is regressed."""


def rebel_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: Rebel
) -> TrainMetrics:
    """Sample two responses per prompt, score them, and regress the difference."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    score = score_less_kl(score, roll, ref, cfg.kl_coef, cfg.sampling.temperature)
    return train_on_pairs(actor, roll, score, cfg.loss, cfg)
