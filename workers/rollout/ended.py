"""Responses as they end: what an engine that samples many at once tells while it does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .responses import Responses

__all__ = ["Begun", "Ended", "collected"]


@dataclass(frozen=True)
class Ended:
    """Some responses to which this call adds nothing more.

    Attributes:
        rows: i64[n]; which, ascending.
        responses: All that was sampled of each of them, in this call and before.
        at_least: What every response still to come has at its end: at least so many tokens.
    """

    rows: Tensor
    responses: Responses
    at_least: int


@dataclass(frozen=True)
class Begun:
    """What earlier calls have sampled of some responses, and how far this one may take them.

    Attributes:
        token: i64[rows, max_new]; -1 after what there is.
        logprob: f32[rows, max_new]; 0 after it.
        ended: bool[rows]; nothing more is sampled of these.
        most_new: Tokens by which this call may lengthen a response.
    """

    token: Tensor
    logprob: Tensor
    ended: Tensor
    most_new: int


def collected(stream: Iterable[Ended], max_new: int) -> Responses:
    """All responses of a stream, in the order of their rows.

    Args:
        stream: Gives every row once.
        max_new: Longest response, the width of the columns.
    """
    parts = list(stream)
    none = torch.zeros(0, dtype=torch.int64)
    empty = Responses(none.view(0, max_new), torch.zeros(0, max_new), none, none.bool())
    order = torch.cat([none, *(part.rows for part in parts)]).argsort()
    given = [empty, *(part.responses for part in parts)]
    return Responses(
        torch.cat([one.token for one in given])[order],
        torch.cat([one.logprob for one in given])[order],
        torch.cat([one.length for one in given])[order],
        torch.cat([one.finished for one in given])[order],
    )
