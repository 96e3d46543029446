"""Responses as they end: what an engine that samples many at once tells while it does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .responses import Responses


@dataclass(frozen=True)
class Ended:
    """Some responses to which this call adds nothing more.

    Attributes:
        rows: i64[n]; which, ascending. None, if only `at_least` has grown.
        responses: All that was sampled of each of them, in this call and before.
        at_least: What every response still to come has at its end: at least so many tokens.
    """

    rows: Tensor
    responses: Responses
    at_least: int

    def put_into(self, responses: Responses) -> None:
        """Fill these rows in where those of all rows are."""
        rows, new = self.rows, self.responses
        responses.token[rows], responses.logprob[rows] = new.token, new.logprob
        responses.length[rows], responses.finished[rows] = new.length, new.finished
        responses.versions[rows] = new.versions


def collected(steps: Iterable[Ended], num_rows: int, max_new: int) -> Responses:
    """All responses, in the order of their rows, once the last has ended.

    Args:
        steps: What `GenerationEngine.stream` gives.
        num_rows: Responses.
        max_new: Longest response.
    """
    responses = Responses.none_yet(num_rows, max_new)
    for ended in steps:
        ended.put_into(responses)
    return responses


@dataclass(frozen=True)
class Begun:
    """What earlier calls have sampled of some responses, and how far this one may take them.

    Attributes:
        token: i64[rows, max_new]; -1 after what there is.
        logprob: f32[rows, max_new]; 0 after it.
        ended: bool[rows]; nothing more is sampled of these.
        most_new: Tokens by which this call may lengthen a response: the same for all, or i64[rows].
    """

    token: Tensor
    logprob: Tensor
    ended: Tensor
    most_new: int | Tensor
