"""ReMax: the baseline of a response is the score of the greedy response to the same prompt.

Li et al., "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning
Large Language Models", 2023. The greedy response comes from the same weights, and is neither
trained on nor part of any statistic.
"""

from __future__ import annotations

from dataclasses import replace

from ...dataflow.options import Fraction, NonNegativeFloat, PositiveFloat, option_class
from ..losses.tokens import ClippedPolicyLoss
from ..ops.advantages import KLPlacement, paired_baseline, remax_advantage
from ..ops.kl import kl_estimate
from ..options import PolicyUpdates, reference_logprob, reported_kl, train_policy
from ..roles import PerSample, PerToken, Policy, Prompts, Reward, Rollout, Sampling, TrainMetrics


@option_class
class ReMax(PolicyUpdates):
    """Options of ReMax."""

    kl_coef: NonNegativeFloat = 0.05
    """Reward taken per nat of KL to the reference; with 0 there is no reference."""
    kl_placement: KLPlacement = "own_token"
    """KL subtracted from an advantage: the token's, or also that of all after it (return-to-go)."""
    difference_clip: PositiveFloat | None = 5.0
    """Bound on the size of the score's difference to the greedy one."""
    discount: Fraction = 1.0
    """gamma, per token."""
    loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """The policy's loss; for one update on fresh rollouts its gradient is REINFORCE's."""

    @property
    def greedy(self) -> Sampling:
        """Sampling of the response to compare with."""
        return replace(self.sampling, num_samples=1, temperature=0.0)

    def advantage(
        self,
        roll: Rollout,
        score: PerSample,
        greedy: Rollout,
        greedy_score: PerSample,
        ref_logprob: PerToken | None,
    ) -> PerToken:
        """Advantage of each sample over the greedy one, less the KL to the reference."""
        kl = None
        if ref_logprob is not None:
            kl = kl_estimate(roll.mask, logprob=roll.behavior_logprob, ref_logprob=ref_logprob)
        return remax_advantage(
            score,
            roll.mask,
            greedy_score=paired_baseline(
                roll.prompt_id, baseline=greedy_score, baseline_prompt_id=greedy.prompt_id
            ),
            kl=kl,
            kl_coef=self.kl_coef,
            kl_placement=self.kl_placement,
            difference_clip=self.difference_clip,
            discount=self.discount,
        )


def remax_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: ReMax
) -> tuple[TrainMetrics, PerSample | None]:
    """Sample, score against the greedy response, and train; reports the KL as well."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    greedy = actor.generate(prompts.prompt, prompts.prompt_id, cfg.greedy)
    greedy_score = reward.score(greedy.tokens, greedy.mask, greedy.prompt_id)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    advantage = cfg.advantage(roll, score, greedy, greedy_score, ref_logprob)
    return (
        train_policy(actor, roll, advantage, cfg.loss, cfg),
        reported_kl(roll, ref_logprob),
    )
