"""PPO against an ensemble of three reward models, which are harder to fool than one.

Coste et al., "Reward Model Ensembles Help Mitigate Overoptimization", 2023. Train the members with
different seeds; their heads and the order of their data differ.
"""

from __future__ import annotations

from ..dataflow.options import option_class
from .ops.ensembles import Ensemble, EnsembleRule
from .ppo import PPO, ppo_step
from .roles import PerSample, Policy, Prompts, Reward, TrainMetrics, ValueModel


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
