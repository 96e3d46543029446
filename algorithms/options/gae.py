"""Advantages and value targets from a critic, as options of an algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from ...dataflow.option_checks import check_range
from ..ops.advantages import GaeTargets, Masking, gae, whiten
from ..ops.reductions import Variance, WeightedBy
from ..roles.language import PerSample, PerToken, TokenMask

__all__ = ["Estimates"]


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """How rewards and a critic's values become advantages, and how these are scaled."""

    whiten_rewards: bool = False
    """Scale token rewards to variance 1 over the batch, keeping their mean."""
    whiten_advantages: bool = True
    """Shift advantages to mean 0 and scale them to variance 1 over the batch."""
    whitening_variance: Variance = "biased"
    """Whether whitening divides by n ("biased") or n - 1 ("unbiased")."""
    whitening_eps: float = 1e-8
    """Added to the variance."""
    whitening_weighted_by: WeightedBy = "token"
    """Whether every token weighs the same in these statistics, or every response ("row")."""
    discount: float = 1.0
    """gamma, per token."""
    gae_lambda: float = 0.95
    """lambda of the advantage estimate; 0 trusts the critic fully, 1 not at all."""
    gae_masking: Masking = "transparent"
    """What tokens inside a response that the policy did not sample do: nothing ("transparent"), or
    count as steps without reward ("zeroed")."""

    def __post_init__(self) -> None:
        check_range(self, "discount", "gae_lambda", at_least=0, at_most=1)
        check_range(self, "whitening_eps", at_least=0)

    def estimated(
        self,
        steps: TokenMask,
        *,
        reward: PerToken,
        value: PerToken,
        bootstrap_value: PerSample | None = None,
    ) -> GaeTargets:
        """Advantages, not whitened, and what the critic should have said; see `gae`."""
        return gae(
            steps,
            reward=self.scaled_reward(reward, steps),
            value=value,
            bootstrap_value=bootstrap_value,
            discount=self.discount,
            lam=self.gae_lambda,
            masking=self.gae_masking,
        )

    def scaled_reward(self, reward: PerToken, steps: TokenMask) -> PerToken:
        """Token rewards as they are estimated from."""
        if not self.whiten_rewards:
            return reward
        return self._whitened(reward, steps, shift_mean=False)

    def scaled(self, advantage: PerToken, mask: TokenMask) -> PerToken:
        """Advantages as they are trained on."""
        if not self.whiten_advantages:
            return advantage
        return self._whitened(advantage, mask, shift_mean=True)

    def _whitened(self, column: PerToken, mask: TokenMask, *, shift_mean: bool) -> PerToken:
        return whiten(
            column,
            mask,
            variance=self.whitening_variance,
            eps=self.whitening_eps,
            weighted_by=self.whitening_weighted_by,
            shift_mean=shift_mean,
        )
