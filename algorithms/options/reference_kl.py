"""Token rewards as options of an algorithm: a score, less the KL to a reference."""

from __future__ import annotations

from dataclasses import dataclass

from ...dataflow.option_checks import check_range
from ..ops.kl import KLEstimator, NoEos, ScoreSlot, kl_shaped_reward
from ..roles.language import PerSample, PerToken, Rollout

__all__ = ["KLReward"]


@dataclass(frozen=True, kw_only=True)
class KLReward:
    """How a score and the KL to a reference become a reward per token; see `kl_shaped_reward`."""

    kl_coef: float = 0.05
    """Reward taken per nat of KL to the reference; with 0 there is no reference."""
    kl_estimator: KLEstimator = "k1"
    """Which estimate of the KL."""
    score_clip: float | None = None
    """Bound on the size of a score."""
    score_slot: ScoreSlot = "last_token"
    """Where the score is paid: on the "last_token", or "after_last", on the state after it."""
    no_eos: NoEos = "replace"
    """What happens to the score of a response that was cut off: "replace" it, "subtract" from it,
    set it to "zero" and expect what the critic says after the last token, or "none"."""
    no_eos_score: float = -1.0
    """The score that "replace" gives such a response."""
    no_eos_penalty: float = 1.0
    """What "subtract" takes from its score."""

    def __post_init__(self) -> None:
        check_range(self, "kl_coef", "no_eos_penalty", at_least=0)
        check_range(self, "no_eos_score")
        check_range(self, "score_clip", above=0)

    def token_reward(
        self,
        roll: Rollout,
        score: PerSample,
        ref_logprob: PerToken | None,
        *,
        kl_coef: float | None = None,
        no_eos: NoEos | None = None,
    ) -> PerToken:
        """The reward of every sampled token of a rollout; what is given goes before the options.

        Without a `ref_logprob` there is no KL to take off.
        """
        return kl_shaped_reward(
            score,
            roll.mask,
            logprob=roll.behavior_logprob,
            ref_logprob=roll.behavior_logprob if ref_logprob is None else ref_logprob,
            kl_coef=self.kl_coef if kl_coef is None else kl_coef,
            finished=roll.finished,
            kl_estimator=self.kl_estimator,
            score_slot=self.score_slot,
            score_clip=self.score_clip,
            no_eos=no_eos or self.no_eos,
            no_eos_score=self.no_eos_score,
            no_eos_penalty=self.no_eos_penalty,
        )
