"""Group sequence policy optimization: GRPO with the ratio, and its clip, of whole responses.

Zheng et al., "Group Sequence Policy Optimization", 2025. The ratio is the geometric mean over a
response's tokens, so clip ranges are a thousand times narrower than for tokens, and a clip stops
all tokens of a response. GSPO-token is `loss.ratio_level="sequence_mean_token"`.
"""

from __future__ import annotations

from ..dataflow.options import PositiveInt, option_class
from .grpo import GRPO, grpo_step
from .losses.tokens import ClippedPolicyLoss
from .roles import Policy, Prompts, Reward, TrainMetrics


@option_class
class GSPO(GRPO):
    """Options of GSPO."""

    loss: ClippedPolicyLoss = ClippedPolicyLoss(
        ratio_level="sequence_mean",
        eps_low=3e-4,
        eps_high=4e-4,
        aggregation="seq-mean-token-mean",
        report_entropy=True,
    )
    """Clipping of whole responses; the mean is over responses."""
    num_minibatches: PositiveInt = 4
    """Optimizer steps per pass."""


def gspo_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: GSPO) -> TrainMetrics:
    """`grpo_step`, whose loss takes the ratio of whole responses."""
    return grpo_step(prompts, actor, reward, cfg)
