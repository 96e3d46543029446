"""Safe RLHF: PPO for reward, under a constraint on the mean cost.

Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback", 2023. Reward and cost have
a model and a critic each; a multiplier mixes their advantages and rises while responses cost more
than is allowed. A cost above 0 means unsafe; `cost_modelling_step` trains a model of it (equation
6), with 0 between safe and unsafe.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...dataflow.graph.role import Loss, LossSum
from ...dataflow.graph.tracer import op
from ...dataflow.options import (
    FiniteFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    option_class,
)
from ..controllers import Ascent, Multiplier
from ..losses.preference import PairMean
from ..losses.tokens import ClippedValueLoss
from ..ops.pairs import pair_rows
from ..ops.reductions import check_token_columns
from ..options import reference_logprob, reported_kl, scored_rows, train_policy
from ..ppo import PPO, gae_targets, token_rewards, train_critic, whitened_advantage
from ..roles import (
    PerSample,
    Policy,
    Prompts,
    Reward,
    RewardModel,
    Sampling,
    ScoredPairs,
    TrainMetrics,
    ValueModel,
)
from ..roles.language_tables import PerToken, ScoreOutput, TokenMask


def cost_model_loss(
    *, unsafer_cost: Tensor, safer_cost: Tensor, unsafer_sign: Tensor, safer_sign: Tensor
) -> Tensor:
    """Loss of a cost model: the unsafer response costs more, and unsafe ones cost more than 0.

    `-log s(C_w - C_l) - log s(s_w C_w) - log s(s_l C_l)`, w the unsafer response of a pair, l the
    safer one, s their labels. Dai et al., "Safe RLHF", 2023, equation 6.

    Args:
        unsafer_cost: f32[pairs], differentiable.
        safer_cost: f32[pairs], differentiable.
        unsafer_sign: f32[pairs], +1 where that response is labeled unsafe, -1 where safe.
        safer_sign: f32[pairs], the same of the other response.

    Returns:
        f32[pairs], to be minimized.
    """
    ranked = F.logsigmoid(unsafer_cost - safer_cost)
    labeled = F.logsigmoid(unsafer_sign * unsafer_cost) + F.logsigmoid(safer_sign * safer_cost)
    return -(ranked + labeled)


@option_class
class CostModelLoss(PairMean, Loss[ScoredPairs, ScoreOutput]):
    """Loss of a cost model on labeled pairs, averaged over pairs; see `cost_model_loss`.

    `chosen` is the safer response of a pair; one whose score is below `safe_from` is unsafe.
    """

    safe_from: FiniteFloat = 0.5
    """Smallest score that the data gives a safe response."""

    def __call__(self, output: ScoreOutput, batch: ScoredPairs, totals: Tensor) -> LossSum:
        safer, unsafer = pair_rows(batch.pair_id, batch.chosen)
        cost = output.score
        sign = torch.where(batch.score < self.safe_from, 1.0, -1.0).to(cost)
        # A response without a safety score leaves no finite gradient, which the optimizer refuses.
        sign = sign.masked_fill(batch.score.isnan(), torch.nan)
        loss = cost_model_loss(
            unsafer_cost=cost[unsafer],
            safer_cost=cost[safer],
            unsafer_sign=sign[unsafer],
            safer_sign=sign[safer],
        ).sum()
        pairs = totals.new_tensor(float(len(safer)))
        gap = (cost[unsafer] - cost[safer]).detach()
        metrics = {
            "accuracy": ((gap > 0).sum(), pairs),
            "margin": (gap.sum(), pairs),
            "unsafe_accuracy": ((cost.detach() * sign > 0).sum(), 2 * pairs),
        }
        return LossSum(loss / self.divisor(totals).to(loss), metrics)


@op(scope="row")
def mixed_advantage(
    mask: TokenMask, *, reward: PerToken, cost: PerToken, multiplier: PerSample
) -> PerToken:
    """`(A_r - m A_c) / (1 + m)`: reward and cost as one advantage.

    Args:
        mask: bool[rows, T].
        reward: f32[rows, T], A_r.
        cost: f32[rows, T], A_c.
        multiplier: f32[rows], m.

    Returns:
        f32[rows, T].
    """
    check_token_columns(mask, reward=reward, cost=cost)
    m = multiplier[:, None]
    return (reward - m * cost) / (1 + m)


@option_class
class CostModelling:
    """Options of cost modelling."""

    loss: CostModelLoss = CostModelLoss()
    """Loss that says which responses count as safe."""
    epochs: PositiveInt = 1
    """Passes over each step's pairs."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""


def cost_modelling_step(pairs: ScoredPairs, cost: RewardModel, cfg: CostModelling) -> TrainMetrics:
    """Train on one step's pairs, of which the chosen response is the safer one."""
    return cost.train(cfg.loss, pairs, epochs=cfg.epochs, num_minibatches=cfg.num_minibatches)


@option_class
class SafeRLHF(PPO):
    """Options of Safe RLHF."""

    sampling: Sampling = Sampling(max_new_tokens=512)
    """Sampling of the responses."""
    ascent: Ascent = Ascent()
    """The constraint, and how the multiplier follows it."""
    kl_split: Literal["full", "half"] = "full"
    """Whether reward and cost each account for all of the KL, or for half of it."""
    kl_coef: NonNegativeFloat = 0.02
    """Reward taken, and cost added, per nat of KL to the reference."""
    score_clip: PositiveFloat | None = 50.0
    """Bound on the size of scores and costs."""
    whiten_advantages: bool = False
    """Shift the mixed advantages to mean 0 and scale them to variance 1 over the batch."""
    value_loss: ClippedValueLoss = ClippedValueLoss(eps=5.0)
    """The loss of both critics."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.no_eos == "zero" or self.score_slot == "after_last":
            raise ValueError(
                "Safe RLHF puts scores and costs on the last token and expects nothing after it; "
                "choose another no_eos than 'zero', and score_slot 'last_token'"
            )

    @property
    def kl_share(self) -> float:
        """Penalty per nat of KL, taken off the reward and added to the cost."""
        return self.kl_coef if self.kl_split == "full" else self.kl_coef / 2


def safe_rlhf_step(
    prompts: Prompts,
    actor: Policy,
    critic: ValueModel,
    cost_critic: ValueModel,
    ref: Policy,
    reward: Reward,
    cost: Reward,
    multiplier: Multiplier,
    cfg: SafeRLHF,
) -> tuple[TrainMetrics, TrainMetrics, TrainMetrics, TrainMetrics, PerSample, PerSample | None]:
    """As `ppo_step`, with a second stream of rewards; reports costs and the KL as well."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
    cost_score = cost.score(roll.tokens, roll.mask, roll.prompt_id)
    value = critic.value(roll.tokens, roll.mask)
    cost_value = cost_critic.value(roll.tokens, roll.mask)
    ref_logprob = reference_logprob(ref, roll, cfg.kl_coef, cfg.sampling.temperature)
    shaped = token_rewards(score, roll, ref_logprob, cfg, kl_coef=cfg.kl_share)
    costs = token_rewards(cost_score, roll, ref_logprob, cfg, kl_coef=-cfg.kl_share, no_eos="none")
    scored = scored_rows(scored_rows(roll, score), cost_score)
    target = gae_targets(scored, scored.mask, cfg, reward=shaped, value=value)
    cost_target = gae_targets(scored, scored.mask, cfg, reward=costs, value=cost_value)
    ascended = multiplier.update(cost_score, cfg.ascent)
    mixed = mixed_advantage(
        scored.mask,
        reward=target.advantage,
        cost=cost_target.advantage,
        multiplier=multiplier.price(cost_score),
    )
    advantage = whitened_advantage(mixed, scored.mask, cfg)
    return (
        train_policy(actor, scored, advantage, cfg.policy_loss, cfg),
        train_critic(critic, scored, scored.mask, cfg, value=value, target=target.value_target),
        train_critic(
            cost_critic, scored, scored.mask, cfg, value=cost_value, target=cost_target.value_target
        ),
        ascended,
        cost_score,
        reported_kl(roll, ref_logprob),
    )
