"""PF-PPO: PPO on those responses whose scores can be relied on.

Shen and Zhang, "Policy Filtration in RLHF to Fine-Tune LLM for Code Generation", 2024. Actor and
critic both train on the responses that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..dataflow.option_checks import check_range
from .ops.filtration import Strategy, filtered_batch, filtered_groups
from .ppo import PPO, learn
from .roles import PerSample, Policy, Prompts, Reward, Sampling, TrainMetrics, ValueModel

__all__ = ["PFPPO", "pf_ppo_step"]


@dataclass(frozen=True, kw_only=True)
class PFPPO(PPO):
    """Options of PF-PPO."""

    sampling: Sampling = Sampling(num_samples=5, temperature=0.7, max_new_tokens=53)
    """How responses are drawn, before they are filtered."""
    strategy: Strategy = "best_worst"
    """Which responses are kept."""
    num_kept: int = 2
    """Responses kept per prompt; of "best" one says all."""
    power: float = 2.0
    """How strategy "power" prefers large scores."""
    filter_scope: Literal["prompt", "batch"] = "prompt"
    """Whether responses compete with those to the same prompt, or with the whole batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_groups()
        check_range(self, "num_kept", at_least=1)
        check_range(self, "power", at_least=0)


def pf_ppo_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, reward: Reward, cfg: PFPPO
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """Sample, score, filter, and learn from what is kept as PPO does."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    choose = filtered_groups if cfg.filter_scope == "prompt" else filtered_batch
    kept = choose(roll, score, count=cfg.num_kept, strategy=cfg.strategy, power=cfg.power)
    return learn(kept, kept.score, actor, critic, ref, cfg)
