"""SALSA: PPO whose reference is the mean of two fine-tuned models.

Chegini et al., "SALSA: Soup-based Alignment Learning for Stronger Adaptation in RLHF", 2024. Such a
reference allows a policy to go further from where it started. The step is PPO's: what differs is
where `ref` starts, a mean of two earlier stages or folders (`algorithm.roles.ref.start`).
"""

from __future__ import annotations

from ...dataflow.options import option_class
from ..ppo import PPO, ppo_step
from ..roles import PerSample, Policy, Prompts, Reward, TrainMetrics, ValueModel


@option_class
class SALSA(PPO):
    """Options of PPO; the mean's weights are where `ref` starts."""


def salsa_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, reward: Reward, cfg: SALSA
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """`ppo_step`; `ref` is the mean of two models."""
    return ppo_step(prompts, actor, critic, ref, reward, cfg)
