"""Group relative policy optimisation: a sample is as good as it beats its group; no critic.

Shao et al., "DeepSeekMath", 2024, section 4, without the KL term: `reference_grpo` adds it, and the
reference model it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dataflow.ranges import check_range
from .advantages import broadcast_over_tokens, group_advantage
from .losses import ClippedPolicyLoss
from .reductions import Variance
from .roles import Policy, PolicyBatch, Prompts, Reward, Sampling, TrainMetrics
from .rollout_correction import RolloutCorrection, corrected

__all__ = ["GRPO", "grpo_step"]


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Options of GRPO."""

    sampling: Sampling = Sampling(num_samples=64, max_new_tokens=1024)
    """How responses are drawn; `num_samples` is the size of a group."""
    divide_by_std: bool = True
    """Divide by the group's standard deviation; False is Dr. GRPO's advantage."""
    std_variance: Variance = "unbiased"
    """Whether that deviation divides by n - 1 ("unbiased") or n ("biased")."""
    std_eps: float = 1e-6
    """Added to the standard deviation."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(
        aggregation="seq-mean-token-mean", report_entropy=True
    )
    """Clipping, and how tokens and rows are weighed."""
    correction: RolloutCorrection | None = None
    """Importance weights for an engine that samples with other numbers than the trainer's; None
    takes the engine's log-probabilities as they are."""
    epochs: int = 1
    """Passes over each step's rollouts."""
    num_minibatches: int = 1
    """Optimizer steps per pass."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        check_range(self, "std_eps", at_least=0)
        check_range(self, "epochs", "num_minibatches", at_least=1)
        if self.sampling.num_samples < 2:
            raise ValueError(
                f"sampling.num_samples is {self.sampling.num_samples}, but GRPO compares samples "
                "of one prompt with each other; set it to 2 or more"
            )


def grpo_step(prompts: Prompts, actor: Policy, reward: Reward, cfg: GRPO) -> TrainMetrics:
    """Sample groups of responses, score them, and train on how each compares with its group."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    advantage = group_advantage(
        score,
        roll.prompt_id,
        divide_by_std=cfg.divide_by_std,
        variance=cfg.std_variance,
        eps=cfg.std_eps,
    )
    behavior_logprob, per_token = corrected(
        actor,
        roll,
        broadcast_over_tokens(advantage, roll.mask),
        cfg.correction,
        cfg.sampling.temperature,
    )
    batch = PolicyBatch(
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=behavior_logprob,
        advantage=per_token,
    )
    return actor.train(
        cfg.loss,
        batch,
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
        temperature=cfg.sampling.temperature,
    )
