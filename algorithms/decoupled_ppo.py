"""Decoupled PPO: an update is bounded around today's weights, not around those that sampled.

Hilton et al., "Batch size-invariance for policy optimization", 2021; Fu et al., "AReaL", 2025. The
loss's ratio is against the trainer's weights before the update (the proximal policy); how these
differ from the weights that sampled is a bounded factor on every token's loss. Run it with
`schedule=one_step_off` or a larger `schedule.max_lag`.
"""

from __future__ import annotations

from dataclasses import dataclass

from .ops.rollout_correction import RolloutCorrection
from .ppo import PPO, ppo_step
from .roles import PerSample, Policy, Prompts, Reward, TrainMetrics, ValueModel

__all__ = ["DecoupledPPO", "decoupled_ppo_step"]


@dataclass(frozen=True, kw_only=True)
class DecoupledPPO(PPO):
    """Options of decoupled PPO."""

    correction: RolloutCorrection | None = RolloutCorrection(cap=5.0)
    """The factor's bounds; "token_mask" leaves tokens above the cap out and still counts them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correction is None:
            raise ValueError(
                "without a correction the ratio is against the weights that sampled, which is "
                "ppo_step; set correction, with cap=None for factors without a bound"
            )


def decoupled_ppo_step(
    prompts: Prompts,
    actor: Policy,
    critic: ValueModel,
    ref: Policy,
    reward: Reward,
    cfg: DecoupledPPO,
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """`ppo_step`, whose correction brings in one forward pass of the actor for today's weights."""
    return ppo_step(prompts, actor, critic, ref, reward, cfg)
