"""Groups of rows: scores laid out as a table with one line per prompt, and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ...dataflow.graph.tracer import op
from ..roles.language_tables import PerSample, SampleFlag, TokenMask


def floating(column: Tensor) -> Tensor:
    """The column, in single precision if it holds integers or booleans.

    Verdicts and lengths come as such; a result that is cast back to them would lose its fractions.
    """
    return column if column.is_floating_point() else column.float()


def sum_rows(table: Tensor) -> Tensor:
    """Sums along rows, left to right.

    `sum` picks its order by the table's shape, so a group's bits would depend on which other groups
    are computed with it, and atomic adds on the device's timing.
    """
    return table.cumsum(dim=1)[:, -1]


def rows_by_prompt(prompt_id: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each prompt with its row numbers, in the order in which prompts first come up."""
    for prompt in dict.fromkeys(prompt_id.tolist()):
        yield prompt, (prompt_id == prompt).nonzero().flatten()


def stacked(one: Tensor, other: Tensor, fill: float) -> Tensor:
    """The rows of both, one after another, padded on the right to the width of the wider."""
    width = max(one.shape[1], other.shape[1])
    return torch.cat([F.pad(x, (0, width - x.shape[1]), value=fill) for x in (one, other)])


@op(scope="row")
def scored_tokens(mask: TokenMask, score: PerSample) -> TokenMask:
    """Return the mask with all False in rows that have no score: bool[rows, T].

    Critics, whitening and losses then leave such a row out like tokens that were not sampled.

    Args:
        mask: bool[rows, T].
        score: f32[rows]; nan where there is none.
    """
    return mask & ~score.isnan()[:, None]


@op(scope="row")
def finished_tokens(mask: TokenMask, finished: SampleFlag) -> TokenMask:
    """Return the mask with all False in rows that were cut off: bool[rows, T]."""
    return mask & finished[:, None]


class Groups:
    """Scores laid out as `[groups, widest group]`, whatever order the rows are in.

    Args:
        score: f32[rows]; integers and booleans are read as f32.
        prompt_id: i64[rows], the group of each row; groups may be interleaved and of any size.

    Attributes:
        sizes: i64[groups], rows with a score in each group.

    Raises:
        ValueError: If the shapes differ.
    """

    def __init__(self, score: Tensor, prompt_id: Tensor) -> None:
        if score.shape != prompt_id.shape or score.ndim != 1:
            raise ValueError(
                "score and prompt_id must both be [rows], got "
                f"{list(score.shape)} and {list(prompt_id.shape)}"
            )
        self._score = floating(score)
        self._prompt_id = prompt_id
        self._group = torch.unique(prompt_id, return_inverse=True)[1]
        rows = torch.bincount(self._group)
        order = torch.argsort(self._group, stable=True)
        starts = (rows.cumsum(0) - rows)[self._group[order]]
        rank = torch.arange(len(score), device=score.device) - starts
        self._place = torch.empty_like(self._group).scatter_(0, order, rank)
        widest = int(rows.max()) if len(score) else 1
        table = torch.zeros(len(rows), widest, dtype=torch.float64, device=score.device)
        self._rows = rows[self._group]
        self._absent = score.isnan()
        counted = torch.where(self._absent, 0.0, score.double())
        self._scores = table.index_put((self._group, self._place), counted)
        self._present = table.bool().index_put((self._group, self._place), ~self._absent)
        self.sizes = self._present.sum(dim=1)

    def highest(self) -> Tensor:
        """f64[groups]: each group's highest score."""
        return self._scores.masked_fill(~self._present, -torch.inf).amax(dim=1)

    def lowest(self) -> Tensor:
        """f64[groups]: each group's lowest score."""
        return self._scores.masked_fill(~self._present, torch.inf).amin(dim=1)

    def mean(self) -> Tensor:
        """f64[groups]: each group's mean score."""
        return sum_rows(self._scores) / self.sizes

    def log_mean_exp(self, scale: float) -> Tensor:
        """f64[groups]: `scale * log(mean(exp(score / scale)))` of each group."""
        scaled = (self._scores / scale).masked_fill(~self._present, -torch.inf)
        return scale * (torch.logsumexp(scaled, dim=1) - self.sizes.double().log())

    def centered(self) -> Tensor:
        """f64[groups, widest]: scores minus their group's mean; 0 where there is no row.

        A score that is not finite leaves no finite number in its group.
        """
        # A rounded mean of equal scores may miss them by one bit, which a division by the standard
        # deviation would blow up to 1. The difference of scores that are not finite is nan, not 0,
        # so those go on to the optimizer, which refuses them.
        differ = (self.highest() - self.lowest() != 0)[:, None]
        mean = self.mean()[:, None]
        return torch.where(self._present & differ, self._scores - mean, torch.zeros_like(mean))

    def per_group_row(self, value: Tensor) -> Tensor:
        """A number per group, f64[groups], given to each of its rows: f64[rows]."""
        return value[self._group]

    def per_row(self, table: Tensor) -> Tensor:
        """Back to f32[rows]; 0 for a row without a score.

        Raises:
            ValueError: If a group has one row. One of which only the others' scores are missing has
                nothing to be compared with either, but is no fault of the step's.
        """
        alone = (self._rows == 1) & ~self._absent
        if bool(alone.any()):
            raise ValueError(
                f"group {int(self._prompt_id[alone][0])} has a single sample, and a comparison "
                "within a group needs at least 2; set Sampling.num_samples to 2 or more"
            )
        return torch.where(self._absent, 0.0, table[self._group, self._place]).to(self._score)
