"""Reward shaping: lengths, penalties, and several rewards as one, per response.

All of it can be imported from `rewards`. Penalties are added to a score; they are negative or 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ..roles.language import PerSample, PromptId, TokenMask
from .groups import Groups, floating

OverlongForm = Literal["piecewise", "linear"]
"""Penalty of a response beyond the longest length: -1 ("piecewise"), or growing ("linear")."""


@op(scope="row")
def response_length(mask: TokenMask) -> PerSample:
    """Sampled tokens of each response: f32[rows] from bool[rows, T]."""
    return mask.sum(dim=1).float()


@op(scope="row")
def is_correct(score: PerSample, *, threshold: float = 1.0) -> PerSample:
    """Return 1 where `score >= threshold`, else 0, and nan for a row without a score: f32[rows]."""
    correct = (score >= threshold).to(floating(score))
    return torch.where(score.isnan(), torch.nan, correct)


def check_known(what: str, column: Tensor, *, finite: bool = False) -> None:
    """Refuse numbers that are none, where something is chosen by them.

    A comparison would make its choice all the same: it is False for nan, and `argmax` takes nan for
    the highest number.

    Args:
        what: What they are, for the message.
        column: [rows] or [rows, ...].
        finite: Refuse infinities as well, of which no share can be taken.

    Raises:
        FloatingPointError: If there is one; it names the first row.
    """
    unknown = ~column.isfinite() if finite else column.isnan()
    if bool(unknown.any()):
        first = unknown.nonzero()[0]
        raise FloatingPointError(
            f"the {what} of row {int(first[0])} is {float(column[tuple(first)])}, by which nothing "
            "can be chosen; give every row a number"
        )


@op(scope="row")
def signed_score(correct: PerSample) -> PerSample:
    """Return 1 for a correct response, -1 for a wrong one, nan for no score; see `is_correct`."""
    return 2 * floating(correct) - 1


@op(scope="row")
def overlong_penalty(
    length: PerSample, *, max_length: int, cache: int, form: OverlongForm = "piecewise"
) -> PerSample:
    """What a response loses for being too long: 0 up to `max_length - cache` tokens, then linear.

    In the last `cache` tokens `((max_length - cache) - length) / cache`, beyond `max_length` -1.
    Yu et al., "DAPO", 2025, equation 13. "linear" goes on falling beyond `max_length`.

    Args:
        length: [rows], sampled tokens of each response; integers or f32.
        max_length: Longest response that is not fully penalized, in tokens.
        cache: Tokens before that over which the penalty grows; at least 1.
        form: See `OverlongForm`.

    Returns:
        f32[rows], 0 or negative.

    Raises:
        ValueError: If `cache` is not in 1..`max_length`, or `form` is unknown.
    """
    if not 1 <= cache <= max_length:
        raise ValueError(
            f"cache is {cache}, but the soft zone must have between 1 and max_length={max_length} "
            "tokens; DAPO uses a fifth of max_length"
        )
    if form not in ("piecewise", "linear"):
        raise ValueError(f"form {form!r} is unknown; choose 'piecewise' or 'linear'")
    penalty = ((max_length - cache - floating(length)) / cache).clamp(max=0)
    return penalty.clamp(min=-1) if form == "piecewise" else penalty


@op(scope="group")
def length_reward(length: PerSample, prompt_id: PromptId, *, correct: PerSample) -> PerSample:
    """Preference for short responses among those of one prompt; wrong ones only lose by it.

    `0.5 - (length - shortest) / (longest - shortest)` within the group; a wrong response gets that
    or 0, whichever is less; 0 for all if the lengths are equal. Kimi Team, "Kimi k1.5", 2025,
    section 2.3.3.

    Args:
        length: [rows], sampled tokens of each response; integers or f32.
        prompt_id: i64[rows], the group of each row, in any order.
        correct: f32[rows], see `is_correct`; the lengths of rows where it is nan do not count.

    Returns:
        f32[rows], from -0.5 to 0.5; nan where `correct` is.

    Raises:
        ValueError: If shapes differ.
        FloatingPointError: If a length is nan.
    """
    if correct.shape != length.shape:
        raise ValueError(
            f"correct must have one entry per row, {list(length.shape)}, got {list(correct.shape)}"
        )
    check_known("length", length)
    correct = floating(correct)
    exact = torch.where(correct.isnan(), torch.nan, floating(length))
    groups = Groups(exact, prompt_id)
    low, high = groups.per_group_row(groups.lowest()), groups.per_group_row(groups.highest())
    spread = high - low
    share = (exact.double() - low) / torch.where(spread > 0, spread, 1.0)
    reward = torch.where(exact.isnan() | (spread > 0), 0.5 - share, 0.0)
    return torch.where(correct > 0.5, reward, reward.clamp(max=0)).to(exact)


@op(scope="row")
def kl_penalized_score(score: PerSample, *, kl: PerSample, kl_coef: float) -> PerSample:
    """`score - kl_coef * kl`: the KL to a reference as part of a response's score, not of a loss.

    Args:
        score: f32[rows].
        kl: f32[rows], summed over each response, in nats; see `kl.response_kl`.
        kl_coef: Score taken per nat.
    """
    return score - kl_coef * kl


def combine_rewards(rewards: Sequence[Tensor], *, weights: Sequence[float] | None = None) -> Tensor:
    """Weighted sum of several rewards, before anything is normalized.

    Args:
        rewards: Tensors f32[rows]; nan where a reward has nothing to say of a row.
        weights: One per reward; 1 each by default.

    Returns:
        f32[rows]; nan where no reward says anything (`group_advantage(missing="zero")` takes that).

    Raises:
        ValueError: If there are no rewards, or as many weights as rewards are not given.
    """
    weights = [1.0] * len(rewards) if weights is None else weights
    if not rewards or len(weights) != len(rewards):
        raise ValueError(
            f"got {len(rewards)} rewards and {len(weights)} weights; give at least one reward, and "
            "a weight for each"
        )
    table = torch.stack([w * reward for w, reward in zip(weights, rewards, strict=True)])
    said = ~table.isnan()
    return torch.where(said.any(dim=0), torch.where(said, table, 0.0).sum(dim=0), torch.nan)


def prompt_priority(success_rate: Tensor) -> Tensor:
    """How often to sample each prompt: in proportion to how often it fails, `1 - success_rate`.

    Kimi Team, "Kimi k1.5", 2025, section 2.3.4.

    Args:
        success_rate: f32[prompts], from 0 to 1.

    Returns:
        f32[prompts], adding up to 1; equal where every prompt always succeeds.

    Raises:
        FloatingPointError: If a rate is nan.
    """
    check_known("success rate", success_rate)
    weight = 1 - success_rate
    total = weight.sum()
    return torch.where(total > 0, weight / total, 1 / max(len(weight), 1))
