"""Rewards: from verdicts, judges' scores and process scores to what an algorithm is given.

Pure functions of columns. Nothing here scores a text: workers do (`Reward.score`); these functions
combine, bound and place what they say. Penalties are added to a score; they are negative or 0.
Scores of a process reward model stand in a column over tokens (or over steps), and a boolean column
of the same shape says where a step ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ..roles.language_tables import PerSample, PerToken, PromptId, TokenMask
from .groups import Groups, floating
from .reductions import check_token_columns, unknown, zero_where_masked_out

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
    """Penalty of a response that is too long: 0 up to `max_length - cache` tokens, then linear.

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
        raise unknown("form", form, OverlongForm)
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


@op(scope="row")
def constrained_score(
    score: PerSample, passed: PerSample, *, violation_score: float = 0.0
) -> PerSample:
    """The score where the constraints hold, else `violation_score`; nan where it is unknown.

    Args:
        score: f32[rows].
        passed: f32[rows], above 0.5 where all constraints hold.
        violation_score: What a violation is worth. To choose among samples use -inf, as 0 would
            win over negative scores.

    Returns:
        f32[rows]. A `passed` of nan stays nan, for the optimizer to refuse.
    """
    score = floating(score)
    shaped = torch.where(passed > 0.5, score, torch.full_like(score, violation_score))
    return torch.where(passed.isnan(), torch.nan, shaped)


def weighted_sum(scores: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """The sum of named scores, each times its weight (1 where none is given): f32[rows].

    Raises:
        ValueError: If there is no score, or a weight names none of them.
    """
    unknown = [name for name in weights if name not in scores]
    if unknown or not scores:
        raise ValueError(
            f"weights are given for {', '.join(unknown) or 'nothing'}, scores are: "
            f"{', '.join(scores) or 'none'}; every weight needs a score of its name"
        )
    first = next(iter(scores.values()))
    total = torch.zeros_like(first)
    for name, score in scores.items():
        total = total + weights.get(name, 1.0) * score
    return total


@op(scope="row")
def clipped_step_reward(
    step_score: PerToken, step_end: TokenMask, *, threshold: float = 0.5
) -> PerToken:
    """Clip: `min(score - threshold, 0)` at every step's end, so that no step adds reward.

    Without a bound, more steps mean more reward, and a policy learns to repeat itself. Gao et al.,
    "On Designing Effective RL Reward at Training Time for LLM Reasoning", 2024.

    Args:
        step_score: f32[rows, T], a process reward model's scores.
        step_end: bool[rows, T], True where a step ends.
        threshold: What a step must score to lose nothing; near the model's mean score.

    Returns:
        f32[rows, T]; 0 where no step ends.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(step_end, step_score=step_score)
    return zero_where_masked_out((step_score - threshold).clamp(max=0), step_end)


@op(scope="row")
def delta_step_reward(step_score: PerToken, step_end: TokenMask) -> PerToken:
    """Delta: a step's score minus the next step's, the last but one as it is, and the last 0.

    The sum from a step on telescopes to that step's own score, so what a response can collect does
    not grow with its number of steps. Gao et al., 2024 (see `clipped_step_reward`).

    Args:
        step_score: f32[rows, K].
        step_end: bool[rows, K]; positions between step ends are skipped over.

    Returns:
        f32[rows, K]; 0 where no step ends, and for a row of a single step.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(step_end, step_score=step_score)
    score = zero_where_masked_out(step_score, step_end)
    place = torch.arange(step_end.shape[1], device=score.device).expand(step_end.shape)
    later = torch.where(step_end, place, step_end.shape[1])
    # At each position, the first step end at or after it; shifted by one, strictly after it.
    first = later.flip(1).cummin(dim=1).values.flip(1) if step_end.shape[1] else later
    beyond = torch.full_like(first[:, :1], step_end.shape[1])
    following = torch.cat([first[:, 1:], beyond], dim=1)[:, : step_end.shape[1]]
    exists = following < step_end.shape[1]
    following = following.clamp(max=max(step_end.shape[1] - 1, 0))
    follows_last = ~exists.gather(1, following)
    step_after = torch.where(follows_last, 0.0, score.gather(1, following))
    return torch.where(step_end & exists, score - step_after, torch.zeros_like(score))


@op(scope="row")
def process_shaped_reward(
    token_reward: PerToken,
    mask: TokenMask,
    *,
    step_score: PerToken,
    step_end: TokenMask,
    coef: float = 0.02,
    clip: float | None = 0.5,
    delta: bool = True,
) -> PerToken:
    """Token rewards with `coef` times the step rewards added where steps end.

    Step rewards are by Clip, by Delta, by both (Clip first), or as the model scored them.

    Args:
        token_reward: f32[rows, T], such as `kl_shaped_reward` of a verifier's score.
        mask: bool[rows, T].
        step_score: f32[rows, T].
        step_end: bool[rows, T]; only sampled tokens count.
        coef: Weight of the step rewards (alpha); 0.02 is the paper's order.
        clip: Clip's threshold; None goes without Clip.
        delta: Whether to take differences of adjacent steps.

    Returns:
        f32[rows, T].

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(mask, token_reward=token_reward, step_score=step_score)
    ends = step_end & mask
    reward = zero_where_masked_out(step_score, ends)
    if clip is not None:
        reward = clipped_step_reward(reward, ends, threshold=clip)
    if delta:
        reward = delta_step_reward(reward, ends)
    return zero_where_masked_out(token_reward + coef * reward, mask)


@op(scope="row")
def known_throughout(score: PerSample, step_score: PerToken, step_end: TokenMask) -> PerSample:
    """Return the score of a response, nan also where one of its steps has no score: f32[rows]."""
    return torch.where((step_score.isnan() & step_end).any(dim=1), torch.nan, floating(score))


@op(scope="row")
def weighted_score(score: PerSample, *, other: PerSample, other_weight: float = 1.0) -> PerSample:
    """`score + other_weight * other`: f32[rows]; for two `Reward` roles of one step.

    A single role that combines any number of rewards is the worker `mixture`.
    """
    return score + other_weight * other


@op(scope="row")
def calibrated_score(score: PerSample, *, baseline_score: PerSample) -> PerSample:
    """`sigmoid(score - baseline_score)`: how likely a response beats the baseline's.

    It puts reward models of different scales into (0, 1). Xu et al., "The Perfect Blend: Redefining
    RLHF with Mixture of Judges", 2024.

    Args:
        score: f32[rows].
        baseline_score: f32[rows], of the baseline response to the same prompt.

    Returns:
        f32[rows].
    """
    return torch.sigmoid(score - baseline_score)
