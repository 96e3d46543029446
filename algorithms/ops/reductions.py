"""Sums and means over masked tokens: the only place where a token column becomes a number.

Columns are `[rows, T]` over whole sequences, so masked positions come first (the prompt), last (the
padding) and may lie in the middle (tool output). What stands there is never read: it is replaced,
not multiplied by zero, so that infinities and nans cannot leak.

A loss is aggregated by one of four modes (o_b: the masked tokens of row b, B: the rows that have
any):

| mode                  | value                        |
|-----------------------|------------------------------|
| `token-mean`          | sum of all l / sum of all o  |
| `seq-mean-token-sum`  | sum_b sum_t l / B            |
| `seq-mean-token-mean` | sum_b (sum_t l / o_b) / B    |
| `constant`            | sum of all l / (B * length)  |

The denominators are *totals* over the global minibatch. They add up over rows, so a loss can be
computed in any number of micro-batches, on any number of ranks, and come out the same.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "constant"]
"""Reduction of a token loss to a number; see the table at the top of this module."""

Variance = Literal["biased", "unbiased"]
"""Divide squared deviations by n ("biased") or by n - 1 ("unbiased")."""

WeightedBy = Literal["token", "row"]
"""Whether statistics weigh every token alike, so that long rows count more, or every row."""


def unknown(what: str, value: object, choices: Any) -> ValueError:
    """The error of a value that is none of a `Literal`'s, as a step in Python may give it."""
    *others, last = map(repr, get_args(choices))
    return ValueError(f"{what} {value!r} is unknown; choose {', '.join(others)} or {last}")


def check_token_columns(mask: Tensor, **columns: Tensor) -> None:
    """Require a boolean `[rows, T]` mask and floating columns of its shape.

    Raises:
        ValueError: Naming the argument that does not fit and the shape it should have.
    """
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise ValueError(
            f"mask must be bool[rows, T], got {_describe(mask)}; it is True on trainable tokens "
            "(write mask.bool() if it holds zeros and ones)"
        )
    for name, column in columns.items():
        if column.shape != mask.shape or not column.is_floating_point():
            raise ValueError(
                f"{name} must be a floating tensor of the mask's shape {list(mask.shape)}, "
                f"got {_describe(column)}"
            )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def zero_where_masked_out(column: Tensor, mask: Tensor) -> Tensor:
    """The column with zeros where `mask` is False, whatever stood there; gradients are zero there.

    Args:
        column: f32[rows, T].
        mask: bool[rows, T].
    """
    return torch.where(mask, column, torch.zeros_like(column))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over all masked tokens, in double precision.

    Args:
        x: f32[rows, T].
        mask: bool[rows, T].

    Returns:
        f64 scalar.

    Raises:
        ValueError: If no token is masked in, or shapes differ.
    """
    check_token_columns(mask, x=x)
    return _tokens_of(x, mask).mean()


def masked_variance(x: Tensor, mask: Tensor, *, variance: Variance = "unbiased") -> Tensor:
    """Variance over all masked tokens, in two passes and double precision.

    Args:
        x: f32[rows, T].
        mask: bool[rows, T].
        variance: Divide by n ("biased") or n - 1 ("unbiased").

    Returns:
        f64 scalar.

    Raises:
        ValueError: If there are too few tokens: none, or one for the unbiased variance; or if
            `variance` is unknown.
    """
    check_token_columns(mask, x=x)
    correction = variance_correction(variance)
    tokens = _tokens_of(x, mask)
    if tokens.numel() <= correction:
        raise ValueError(
            "the unbiased variance of a single masked token does not exist; "
            "pass variance='biased' or give at least 2 tokens"
        )
    return tokens.var(correction=correction)


def mean_and_variance(
    x: Tensor, mask: Tensor, *, variance: Variance = "unbiased", weighted_by: WeightedBy = "token"
) -> tuple[Tensor, Tensor]:
    """Mean and variance over masked tokens, in two passes and double precision.

    Args:
        x: f32[rows, T].
        mask: bool[rows, T].
        variance: Divide by n ("biased") or n - 1 ("unbiased"), n tokens or rows.
        weighted_by: Whether every token weighs the same, or every row that has any: its tokens
            then share the row's weight.

    Returns:
        f64 scalars.

    Raises:
        ValueError: As `masked_variance`, or if `weighted_by` is unknown.
    """
    if weighted_by == "token":
        mean, spread = masked_mean(x, mask), masked_variance(x, mask, variance=variance)
        return _exact(_tokens_of(x, mask), mean, spread)
    if weighted_by != "row":
        raise unknown("weighted_by", weighted_by, WeightedBy)
    lengths = mask.sum(dim=1)
    rows = int((lengths > 0).sum())
    correction = variance_correction(variance)
    if rows <= correction:
        raise ValueError(
            f"{rows} rows have sampled tokens; the {variance} variance over rows needs at least "
            f"{correction + 1}"
        )
    share = (1 / lengths.clamp(min=1).double())[:, None].expand(mask.shape)[mask]
    tokens = _tokens_of(x, mask)
    mean = (tokens * share).sum() / rows
    return _exact(tokens, mean, ((tokens - mean).square() * share).sum() / (rows - correction))


def _exact(tokens: Tensor, mean: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """The same; of equal values each of them, and 0, where rounding gives them a variance."""
    equal = (tokens == tokens[0]).all()
    return torch.where(equal, tokens[0], mean), torch.where(equal, 0.0, spread)


def variance_correction(variance: Variance) -> int:
    """The number that is subtracted from n before squared deviations are divided by it.

    Raises:
        ValueError: If `variance` is unknown.
    """
    if variance not in ("biased", "unbiased"):
        raise unknown("variance", variance, Variance)
    return 1 if variance == "unbiased" else 0


def _tokens_of(x: Tensor, mask: Tensor) -> Tensor:
    """The masked tokens as f64[n]: gathering them first makes sums independent of the padding."""
    tokens = x[mask].double()
    if tokens.numel() == 0:
        raise ValueError(
            f"the mask is False on all of its {list(mask.shape)} positions; "
            "statistics need at least one token the policy sampled"
        )
    return tokens


def aggregation_totals(mask: Tensor) -> Tensor:
    """Totals that the denominators of every mode are made of; they add up over rows.

    Args:
        mask: bool[rows, T].

    Returns:
        f64[3]: masked tokens, rows with at least one of them, all rows.
    """
    lengths = mask.sum(dim=1)
    counts = [lengths.sum(), (lengths > 0).sum(), torch.full_like(lengths.sum(), len(mask))]
    return torch.stack(counts).double()


def aggregation_numerator(loss: Tensor, mask: Tensor, mode: Aggregation) -> Tensor:
    """The sum over rows that `mode` divides by a global denominator.

    Args:
        loss: f32[rows, T], differentiable.
        mask: bool[rows, T].
        mode: How tokens of one row are weighed against tokens of another.

    Returns:
        f32 scalar.

    Raises:
        ValueError: If the shapes differ or the mode is unknown.
    """
    check_token_columns(mask, loss=loss)
    # Half precision can neither count tokens nor add them up.
    kept = zero_where_masked_out(loss, mask).to(torch.promote_types(loss.dtype, torch.float32))
    if mode == "seq-mean-token-mean":
        return (kept.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).sum()
    if mode in ("token-mean", "seq-mean-token-sum", "constant"):
        return kept.sum()
    raise unknown("aggregation mode", mode, Aggregation)


def aggregation_denominator(
    totals: Tensor,
    mode: Aggregation,
    *,
    length: int | None = None,
    count_empty_rows: bool = False,
) -> Tensor:
    """The denominator of `mode`, given totals over all rows that count; 0 if there are none.

    Args:
        totals: f64[3] of `aggregation_totals`, or more numbers after those three.
        mode: How tokens of one row are weighed against tokens of another.
        length: Tokens per row of mode "constant": usually the longest response allowed.
        count_empty_rows: Count rows without a masked token among B.

    Returns:
        f64 scalar.

    Raises:
        ValueError: If mode is "constant" and `length` is missing or not positive.
    """
    if mode == "token-mean":
        return totals[0]
    rows = totals[2 if count_empty_rows else 1]
    if mode != "constant":
        return rows
    if length is None or length < 1:
        raise ValueError(
            "aggregation mode 'constant' divides by rows * length and needs length >= 1, "
            f"got {length}; pass the longest response in tokens"
        )
    return rows * length


def aggregate(
    loss: Tensor,
    mask: Tensor,
    *,
    mode: Aggregation = "token-mean",
    length: int | None = None,
    count_empty_rows: bool = False,
    totals: Tensor | None = None,
) -> Tensor:
    """Reduce a token loss to a number.

    Without `totals` it normalizes over the rows it is given. With totals of a larger minibatch it
    gives these rows' share of that minibatch's value: the shares of all micro-batches and ranks
    add up to it, and must not be divided again.

    Args:
        loss: f32[rows, T], differentiable; what stands at masked-out positions is ignored.
        mask: bool[rows, T].
        mode: See the table at the top of this module.
        length: Tokens per row of mode "constant".
        count_empty_rows: Count rows without a masked token among B. They add nothing either way.
        totals: f64[3], the sum of `aggregation_totals(mask)` over the global minibatch.

    Returns:
        f32 scalar; 0 if no token is masked in.

    Raises:
        ValueError: If the shapes differ, the mode is unknown or lacks its `length`.
    """
    numerator = aggregation_numerator(loss, mask, mode)
    denominator = aggregation_denominator(
        aggregation_totals(mask) if totals is None else totals,
        mode,
        length=length,
        count_empty_rows=count_empty_rows,
    )
    return numerator / denominator.clamp(min=1).to(numerator)
