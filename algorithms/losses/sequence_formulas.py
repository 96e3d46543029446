"""The formulas of losses that take a whole response as one action, per response or per pair.

`sequence_logprob` is the log-probability of a whole response, the sum over its tokens; see
`sequence_sum`. As with `token_formulas`, `losses` exports what a worker trains with.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from ..ops.reductions import check_token_columns, zero_where_masked_out

EtaForm = Literal["paper", "scaled"]
"""`(difference / eta - reward difference)^2`, or that times `eta^2`, as in the authors' code."""


LOG_RATIO_CLAMP = 20.0


def sequence_sum(column: Tensor, mask: Tensor) -> Tensor:
    """Sum over the sampled tokens of each response: f32[rows] from f32[rows, T]."""
    check_token_columns(mask, column=column)
    return zero_where_masked_out(column, mask).sum(dim=1)


def rebel_loss(
    *,
    sequence_logprob: Tensor,
    behavior_sequence_logprob: Tensor,
    score: Tensor,
    eta: float = 1.0,
    form: EtaForm = "paper",
) -> Tensor:
    """`((log_ratio_1 - log_ratio_2) / eta - (score_1 - score_2))^2` per pair of responses.

    Relative rewards as a regression on log-probabilities. Gao et al., "REBEL: Reinforcement
    Learning via Regressing Relative Rewards", 2024, algorithm 1.

    Args:
        sequence_logprob: f32[pairs, 2], differentiable.
        behavior_sequence_logprob: f32[pairs, 2], under the policy the iteration began with.
        score: f32[pairs, 2]; only differences within a pair matter.
        eta: Step size; larger moves the policy further.
        form: See `EtaForm`.

    Returns:
        f32[pairs], to be minimized.

    Raises:
        ValueError: If `form` is unknown.
    """
    log_ratio = sequence_logprob - behavior_sequence_logprob
    predicted = log_ratio[..., 0] - log_ratio[..., 1]
    wanted = score[..., 0] - score[..., 1]
    if form == "paper":
        return (predicted / eta - wanted).square()
    if form == "scaled":
        return (predicted - eta * wanted).square()
    raise ValueError(f"form {form!r} is unknown; choose 'paper' or 'scaled'")
