"""Proximal policy optimization with a critic, and the KL to a reference in the reward.

Schulman et al., 2017, as applied by Huang et al., "The N+ Implementation Details of RLHF with PPO",
2024, whose numbers are the defaults. One default differs: the score is added on a response's last
token; `score_slot="after_last"` adds it one slot later, as they do. Start the critic from the
reward model, and the policy and reference from SFT.

What is clipped: the probability ratio, by `policy_loss` (`eps_low`, `eps_high`, `dual_clip`); the
change of a value, by `value_loss` (`eps`); the score, by `score_clip`.

A response that was cut off counts as ended, and only its score may change. With `no_eos="zero"` the
value of its final state, after the last token, stands for what would have followed.
"""

from __future__ import annotations

from ..dataflow.options import (
    FiniteFloat,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    option_class,
)
from .losses.tokens import ClippedPolicyLoss, ClippedValueLoss
from .ops.advantages import whiten
from .ops.final_state import bootstrap_of, with_final_state
from .ops.groups import scored_tokens
from .ops.kl import KLEstimator, NoEos, ScoreSlot, kl_shaped_reward
from .ops.reductions import Variance, WeightedBy
from .ops.returns import GaeTargets, Masking, gae
from .options import PolicyUpdates, reference_logprob, reported_kl, scored_rows, train_policy
from .roles import (
    PerSample,
    PerToken,
    Policy,
    Prompts,
    Reward,
    Rollout,
    Sampling,
    TokenMask,
    TrainMetrics,
    ValueBatch,
    ValueModel,
)


@option_class
class PPO(PolicyUpdates):
    """Options of PPO."""

    sampling: Sampling = Sampling(temperature=0.7, max_new_tokens=53)
    """Sampling of the responses."""
    epochs: PositiveInt = 4
    """Passes over each step's rollouts."""
    whiten_rewards: bool = False
    """Scale token rewards to variance 1 over the batch, keeping their mean."""
    whiten_advantages: bool = True
    """Shift advantages to mean 0 and scale them to variance 1 over the batch."""
    whitening_variance: Variance = "biased"
    """Whether whitening divides by n ("biased") or n - 1 ("unbiased")."""
    whitening_eps: NonNegativeFloat = 1e-8
    """Added to the variance."""
    whitening_weighted_by: WeightedBy = "token"
    """Whether every token weighs the same in these statistics, or every response ("row")."""
    discount: Fraction = 1.0
    """gamma, per token."""
    gae_lambda: Fraction = 0.95
    """lambda of the advantage estimate; 0 trusts the critic fully, 1 not at all."""
    gae_masking: Masking = "transparent"
    """Tokens inside a response that the policy did not sample: they do nothing ("transparent"), or
    count as steps without reward ("zeroed")."""
    kl_coef: NonNegativeFloat = 0.05
    """Reward taken per nat of KL to the reference; with 0 there is no reference."""
    kl_estimator: KLEstimator = "k1"
    """Estimator of the KL."""
    score_clip: PositiveFloat | None = None
    """Bound on the size of a score."""
    score_slot: ScoreSlot = "last_token"
    """Slot where the score is added: the "last_token", or "after_last", on the state after it."""
    no_eos: NoEos = "replace"
    """Treatment of the score of a response that was cut off: "replace" it, "subtract" from it,
    set it to "zero" and bootstrap from the value of the final state, or "none"."""
    no_eos_score: FiniteFloat = -1.0
    """The score that "replace" gives such a response."""
    no_eos_penalty: NonNegativeFloat = 1.0
    """Amount that "subtract" takes from its score."""
    policy_loss: ClippedPolicyLoss = ClippedPolicyLoss(report_entropy=True)
    """The actor's loss, which clips the probability ratio."""
    value_loss: ClippedValueLoss = ClippedValueLoss(coef=0.1)
    """The critic's loss, which clips the change of a value."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_eos == "zero" and self.score_slot == "after_last":
            raise ValueError(
                "no_eos 'zero' expects what the critic says after the last token, and score_slot "
                "'after_last' puts the score there; choose one of them"
            )


def ppo_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, reward: Reward, cfg: PPO
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """Sample, score, estimate advantages, and train actor and critic; reports the KL as well."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    roll, states = critic_states(roll, cfg)
    value = critic.value(roll.tokens, states)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    shaped = token_rewards(score, roll, ref_logprob, cfg)
    scored, states = scored_states(roll, states, score, cfg)
    target = gae_targets(scored, states, cfg, reward=shaped, value=value)
    advantage = whitened_advantage(target.advantage, scored.mask, cfg)
    return (
        train_policy(actor, scored, advantage, cfg.policy_loss, cfg),
        train_critic(critic, scored, states, cfg, value=value, target=target.value_target),
        reported_kl(roll, ref_logprob),
    )


def critic_states(roll: Rollout, cfg: PPO) -> tuple[Rollout, TokenMask]:
    """The rollout, and the states a critic is asked about: one more per row if need be."""
    if cfg.no_eos != "zero" and cfg.score_slot != "after_last":
        return roll, roll.mask
    lengthened = with_final_state(roll)
    return lengthened, lengthened.states


def scored_states(
    roll: Rollout, states: TokenMask, score: PerSample, cfg: PPO
) -> tuple[Rollout, TokenMask]:
    """Return both with empty masks on rows without a score; see `scored_tokens`."""
    kept = scored_tokens(states, score) if cfg.score_slot == "after_last" else states
    return scored_rows(roll, score), kept


def rewarded_states(roll: Rollout, states: TokenMask, cfg: PPO) -> TokenMask:
    """The states that are rewarded: those that advantages are of and critics are trained on."""
    return states if cfg.score_slot == "after_last" else roll.mask


def token_rewards(
    score: PerSample,
    roll: Rollout,
    ref_logprob: PerToken | None,
    cfg: PPO,
    *,
    kl_coef: float | None = None,
    no_eos: NoEos | None = None,
) -> PerToken:
    """The score, clipped, and the KL to the reference as a reward of every token.

    Without a `ref_logprob` there is no KL to take off. `kl_coef` and `no_eos` go before `cfg`'s.
    """
    return kl_shaped_reward(
        score,
        roll.mask,
        logprob=roll.behavior_logprob,
        ref_logprob=roll.behavior_logprob if ref_logprob is None else ref_logprob,
        kl_coef=cfg.kl_coef if kl_coef is None else kl_coef,
        finished=roll.finished,
        kl_estimator=cfg.kl_estimator,
        score_slot=cfg.score_slot,
        score_clip=cfg.score_clip,
        no_eos=no_eos or cfg.no_eos,
        no_eos_score=cfg.no_eos_score,
        no_eos_penalty=cfg.no_eos_penalty,
    )


def gae_targets(
    roll: Rollout, states: TokenMask, cfg: PPO, *, reward: PerToken, value: PerToken
) -> GaeTargets:
    """Advantages, not whitened yet, and the critic's targets; see `gae`."""
    steps = rewarded_states(roll, states, cfg)
    final_value = bootstrap_value(roll, states, value, cfg)
    return gae(
        steps,
        reward=whitened_reward(reward, steps, cfg),
        value=value,
        bootstrap_value=final_value,
        discount=cfg.discount,
        lam=cfg.gae_lambda,
        masking=cfg.gae_masking,
    )


def bootstrap_value(
    roll: Rollout, states: TokenMask, value: PerToken, cfg: PPO
) -> PerSample | None:
    """The value of the final state of responses that were cut off; None if they count as ended."""
    if cfg.no_eos != "zero":
        return None
    return bootstrap_of(value, roll.mask, states, roll.finished)


def whitened_reward(reward: PerToken, steps: TokenMask, cfg: PPO) -> PerToken:
    """Token rewards of variance 1 with the mean they had, if the options ask for it."""
    return _whitened(reward, steps, cfg, shift_mean=False) if cfg.whiten_rewards else reward


def whitened_advantage(advantage: PerToken, mask: TokenMask, cfg: PPO) -> PerToken:
    """Advantages of mean 0 and variance 1, if the options ask for it."""
    return _whitened(advantage, mask, cfg, shift_mean=True) if cfg.whiten_advantages else advantage


def _whitened(column: PerToken, mask: TokenMask, cfg: PPO, *, shift_mean: bool) -> PerToken:
    return whiten(
        column,
        mask,
        variance=cfg.whitening_variance,
        eps=cfg.whitening_eps,
        weighted_by=cfg.whitening_weighted_by,
        shift_mean=shift_mean,
    )


def train_critic(
    critic: ValueModel,
    roll: Rollout,
    states: TokenMask,
    cfg: PPO,
    *,
    value: PerToken,
    target: PerToken,
) -> TrainMetrics:
    """Train a critic towards `target`; `value` is its own before the update."""
    batch = ValueBatch(
        tokens=roll.tokens,
        mask=rewarded_states(roll, states, cfg),
        old_value=value,
        value_target=target,
    )
    return critic.train(
        cfg.value_loss, batch, epochs=cfg.epochs, num_minibatches=cfg.num_minibatches
    )
