"""PPO for old rollouts, whose critic and advantages V-trace corrects: IMPALA's targets for tokens.

Espeholt et al., "IMPALA", 2018. Decoupled PPO weighs each token by how much likelier today's
weights are to sample it than those that did; V-trace weighs so as well what is carried back from
later tokens, so that the critic learns the values of today's policy. The loss's ratio is against
today's weights, before the update. Run it with `schedule=one_step_off` or a larger
`schedule.max_lag`; on fresh rollouts, and with bounds of 1 or more, it is PPO.
"""

from __future__ import annotations

from ...dataflow.graph.tracer import op
from ...dataflow.options import PositiveFloat, option_class
from ..ops.reductions import zero_where_masked_out
from ..ops.returns import GaeTargets, vtrace
from ..ops.rollout_correction import with_rollout_logprob
from ..options import learned_rows, reference_logprob, reported_kl, train_on
from ..ppo import (
    PPO,
    bootstrap_value,
    critic_states,
    rewarded_states,
    scored_states,
    token_rewards,
    train_critic,
    whitened_advantage,
    whitened_reward,
)
from ..roles import (
    PerSample,
    PerToken,
    Policy,
    PolicyBatch,
    Prompts,
    Reward,
    Rollout,
    TokenMask,
    TrainMetrics,
    ValueModel,
)


@op(scope="row")
def of_sampled(logprob: PerToken, mask: TokenMask) -> PerToken:
    """f32[rows, T], 0 where nothing was sampled: a state after the last token has ratio 1."""
    return zero_where_masked_out(logprob, mask)


@option_class
class VtracePPO(PPO):
    """Options of PPO with V-trace."""

    rho_bar: PositiveFloat | None = 1.0
    """Bound on the ratio of a token's own error, and of its advantage; None for no bound."""
    c_bar: PositiveFloat | None = 1.0
    """Bound on the ratio by which later errors are carried back; None for no bound."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correction is not None:
            raise ValueError(
                "V-trace corrects for the weights that sampled by itself; leave correction out, or "
                "take decoupled_ppo_step, which has nothing else"
            )
        if self.gae_masking != "transparent":
            raise ValueError(
                f"gae_masking is '{self.gae_masking}', but V-trace passes over what was not "
                "sampled; leave it at 'transparent'"
            )


def vtrace_ppo_step(
    prompts: Prompts, actor: Policy, critic: ValueModel, ref: Policy, reward: Reward, cfg: VtracePPO
) -> tuple[TrainMetrics, TrainMetrics, PerSample | None]:
    """As `ppo_step`, with today's log-probabilities, and targets by V-trace."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    roll, states = critic_states(roll, cfg)
    value = critic.value(roll.tokens, states)
    now = actor.logprob(roll.tokens, roll.mask, temperature=cfg.sampling.temperature)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    shaped = token_rewards(score, roll, ref_logprob, cfg)
    scored, states = scored_states(roll, states, score, cfg)
    target = vtrace_targets(scored, states, cfg, reward=shaped, value=value, logprob=now)
    advantage = whitened_advantage(target.advantage, scored.mask, cfg)
    batch = PolicyBatch(
        tokens=roll.tokens,
        mask=learned_rows(scored, cfg).mask,
        behavior_logprob=now,
        advantage=advantage,
    )
    return (
        train_on(actor, cfg.policy_loss, with_rollout_logprob(batch, roll.behavior_logprob), cfg),
        train_critic(critic, scored, states, cfg, value=value, target=target.value_target),
        reported_kl(roll, ref_logprob),
    )


def vtrace_targets(
    roll: Rollout,
    states: TokenMask,
    cfg: VtracePPO,
    *,
    reward: PerToken,
    value: PerToken,
    logprob: PerToken,
) -> GaeTargets:
    """As `gae_targets`; `logprob` is of the weights to be trained."""
    steps = rewarded_states(roll, states, cfg)
    return vtrace(
        steps,
        reward=whitened_reward(reward, steps, cfg),
        value=value,
        logprob=of_sampled(logprob, roll.mask),
        behavior_logprob=of_sampled(roll.behavior_logprob, roll.mask),
        bootstrap_value=bootstrap_value(roll, states, value, cfg),
        discount=cfg.discount,
        lam=cfg.gae_lambda,
        rho_bar=cfg.rho_bar,
        c_bar=cfg.c_bar,
        policy_rho_bar=cfg.rho_bar,
    )
