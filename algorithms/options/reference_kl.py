"""The KL to a frozen reference, where a step has one: asked for, taken off a score, reported."""

from __future__ import annotations

from ..ops.kl import response_kl
from ..ops.rewards import kl_penalized_score
from ..roles.language import PerSample, PerToken, Policy, Rollout


def reference_logprob(
    ref: Policy, roll: Rollout, kl_coef: float, temperature: float
) -> PerToken | None:
    """The reference's log-probability of every sampled token.

    With `kl_coef` 0 the reference is not asked, and this is None: a graph recorded so has no such
    role.
    """
    if kl_coef == 0:
        return None
    return ref.logprob(roll.tokens, roll.mask, temperature=temperature)


def reported_kl(roll: Rollout, ref_logprob: PerToken | None) -> PerSample | None:
    """Each response's summed KL to the reference, for the log; None where there is none."""
    if ref_logprob is None:
        return None
    return response_kl(roll.mask, logprob=roll.behavior_logprob, ref_logprob=ref_logprob)


def score_less_kl(
    score: PerSample, roll: Rollout, ref: Policy, kl_coef: float, temperature: float
) -> PerSample:
    """The score minus `kl_coef` times the response's summed KL; see `reference_logprob`."""
    kl = reported_kl(roll, reference_logprob(ref, roll, kl_coef, temperature))
    return score if kl is None else kl_penalized_score(score, kl=kl, kl_coef=kl_coef)
