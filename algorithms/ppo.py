"""Proximal policy optimisation with a critic, and the KL to a reference in the reward.

Schulman et al., 2017, as applied by Huang et al., "The N+ Implementation Details of RLHF with PPO",
2024, whose numbers are the defaults. One difference: the score is paid on a response's last token,
not one slot later. Start the critic from the reward model, and the policy and reference from SFT.

A response that was cut off is treated as ended: nothing is expected after its last token, and only
its score may change (`PPO.no_eos`). There is no bootstrap value, because a critic's column holds
the value *before* each token and none after the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dataflow.ranges import check_range
from .advantages import gae, whiten
from .kl import NoEos, kl_shaped_reward, response_kl
from .losses import ClippedPolicyLoss, ClippedValueLoss
from .reductions import Variance
from .roles import (
    PerSample,
    Policy,
    PolicyBatch,
    Prompts,
    Reward,
    Sampling,
    TrainMetrics,
    ValueBatch,
    ValueModel,
)
from .rollout_correction import RolloutCorrection, corrected

__all__ = ["PPO", "ppo_step"]


@dataclass(frozen=True, kw_only=True)
class PPO:
    """Options of PPO."""

    sampling: Sampling = Sampling(temperature=0.7, max_new_tokens=53)
    """How responses are drawn."""
    kl_coef: float = 0.05
    """Reward taken per nat of KL to the reference."""
    score_clip: float | None = None
    """Bound on the size of a score."""
    no_eos: NoEos = "replace"
    """What happens to the score of a response that was cut off: "replace" it, "subtract" from it,
    or "none". "zero" would need a bootstrap value and is refused."""
    no_eos_score: float = -1.0
    """The score that "replace" gives such a response."""
    no_eos_penalty: float = 1.0
    """What "subtract" takes from its score."""
    whiten_rewards: bool = False
    """Scale token rewards to variance 1 over the batch, keeping their mean."""
    discount: float = 1.0
    """gamma, per token."""
    gae_lambda: float = 0.95
    """lambda of the advantage estimate; 0 trusts the critic fully, 1 not at all."""
    whitening_variance: Variance = "biased"
    """Whether whitening divides by n ("biased") or n - 1 ("unbiased")."""
    policy_loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """The actor's loss."""
    value_loss: ClippedValueLoss = ClippedValueLoss(coef=0.1)
    """The critic's loss."""
    correction: RolloutCorrection | None = None
    """Importance weights for an engine that samples with other numbers than the trainer's; None
    takes the engine's log-probabilities as they are."""
    epochs: int = 4
    """Passes over each step's rollouts."""
    num_minibatches: int = 1
    """Optimizer steps per pass."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        check_range(self, "kl_coef", "no_eos_penalty", at_least=0)
        check_range(self, "no_eos_score")
        check_range(self, "score_clip", above=0)
        check_range(self, "discount", "gae_lambda", at_least=0, at_most=1)
        check_range(self, "epochs", "num_minibatches", at_least=1)
        if self.no_eos == "zero":
            raise ValueError(
                "no_eos 'zero' leaves a response that was cut off without any score, which is "
                "right only if the critic's value after its last token is paid instead, and PPO "
                "has no such value; choose 'replace', 'subtract' or 'none'"
            )


def ppo_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, reward: Reward, cfg: PPO
) -> tuple[TrainMetrics, TrainMetrics, PerSample]:
    """Sample, score, estimate advantages, and train actor and critic; reports the KL as well."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    tokens, mask, temperature = roll.tokens, roll.mask, cfg.sampling.temperature
    score = reward.score(tokens, mask, roll.prompt_id)
    value = critic.value(tokens, mask)
    ref_logprob = ref.logprob(tokens, mask, temperature=temperature)
    shaped = kl_shaped_reward(
        score,
        mask,
        logprob=roll.behavior_logprob,
        ref_logprob=ref_logprob,
        kl_coef=cfg.kl_coef,
        finished=roll.finished,
        score_clip=cfg.score_clip,
        no_eos=cfg.no_eos,
        no_eos_score=cfg.no_eos_score,
        no_eos_penalty=cfg.no_eos_penalty,
    )
    if cfg.whiten_rewards:
        shaped = whiten(shaped, mask, variance=cfg.whitening_variance, shift_mean=False)
    target = gae(mask, reward=shaped, value=value, discount=cfg.discount, lam=cfg.gae_lambda)
    whitened = whiten(target.advantage, mask, variance=cfg.whitening_variance)
    behavior_logprob, advantage = corrected(actor, roll, whitened, cfg.correction, temperature)
    policy_batch = PolicyBatch(
        tokens=tokens, mask=mask, behavior_logprob=behavior_logprob, advantage=advantage
    )
    value_batch = ValueBatch(
        tokens=tokens, mask=mask, old_value=value, value_target=target.value_target
    )
    epochs, num_minibatches = cfg.epochs, cfg.num_minibatches
    return (
        actor.train(
            cfg.policy_loss,
            policy_batch,
            epochs=epochs,
            num_minibatches=num_minibatches,
            temperature=temperature,
        ),
        critic.train(cfg.value_loss, value_batch, epochs=epochs, num_minibatches=num_minibatches),
        response_kl(mask, logprob=roll.behavior_logprob, ref_logprob=ref_logprob),
    )
