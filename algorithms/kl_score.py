"""The KL to a reference as part of a response's score."""

from __future__ import annotations

from .kl import response_kl
from .rewards import kl_penalized_score
from .roles import PerSample, Policy, Rollout

__all__ = ["score_less_kl"]


def score_less_kl(
    score: PerSample, roll: Rollout, ref: Policy, kl_coef: float, temperature: float
) -> PerSample:
    """The score minus `kl_coef` times the response's summed KL to `ref`.

    With `kl_coef` 0 it is the score itself, and the reference is not asked: a graph recorded so
    has no such role.
    """
    if kl_coef == 0:
        return score
    ref_logprob = ref.logprob(roll.tokens, roll.mask, temperature=temperature)
    kl = response_kl(roll.mask, logprob=roll.behavior_logprob, ref_logprob=ref_logprob)
    return kl_penalized_score(score, kl=kl, kl_coef=kl_coef)
