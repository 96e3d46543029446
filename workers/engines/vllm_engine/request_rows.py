"""Rows of a call as requests to vLLM, and what comes of those as columns."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from ....algorithms.roles.language import Sampling
from ...rollout.ended import Begun, Ended
from ...rollout.responses import Responses
from ...rollout.sampling import SampleStreams
from .requests import Progress, Request, Sampled


def as_requests(
    prompt: Tensor,
    streams: SampleStreams,
    sampling: Sampling,
    begun: Begun | None,
    *,
    ends: Collection[int],
    completes: Callable[[int, int], bool] | None,
) -> tuple[dict[int, Request], dict[int, Sampled]]:
    """What is to be sampled, by row, and the responses to which nothing is to be added.

    Args:
        prompt: i64[P, T], right padded with -1.
        streams: The random numbers; a response that goes on has a seed of its own.
        sampling: How many responses, and how long.
        begun: What there is of them already.
        ends: Tokens that end a response.
        completes: Whether a response completes a stop string with its next token. It is told of all
            tokens that there are.
    """
    rows = [[token for token in row if token >= 0] for row in prompt.tolist()]
    rows = [row for row in rows for _ in range(sampling.num_samples)]
    if begun is None:
        before, is_over = [Sampled() for _ in rows], [False] * len(rows)
        most_new = [sampling.max_new_tokens] * len(rows)
    else:
        before = _before(begun, ends, completes)
        is_over = begun.ended.tolist()
        most_new = torch.as_tensor(begun.most_new).expand(len(rows)).tolist()
    seeds = streams.seeds([len(one.tokens) for one in before])
    requests: dict[int, Request] = {}
    over: dict[int, Sampled] = {}
    for row, (ids, one) in enumerate(zip(rows, before, strict=True)):
        rest = min(sampling.longest_response(len(ids)) - len(one.tokens), most_new[row])
        if is_over[row] or rest <= 0:
            over[row] = one
        else:
            requests[row] = Request(ids, seeds[row], rest, one)
    return requests, over


def _before(
    begun: Begun, ends: Collection[int], completes: Callable[[int, int], bool] | None
) -> list[Sampled]:
    """What there is of each response."""
    found: list[Sampled] = []
    for row, (tokens, logprobs) in enumerate(zip(begun.token, begun.logprob, strict=True)):
        length = int((tokens >= 0).sum())
        # Whose weights sampled them, who has begun them knows.
        one = Sampled(tokens[:length].tolist(), logprobs[:length].tolist(), [-1] * length)
        for token in one.tokens:  # of which the last says whether it is finished
            one.finished = token in ends or bool(completes and completes(row, token))
        found.append(one)
    return found


def as_columns(step: Progress, sampling: Sampling) -> Ended:
    """What ended in a step, padded to the longest allowed response."""
    rows = sorted(step.ended)
    responses = Responses.none_yet(len(rows), sampling.max_new_tokens)
    for place, one in enumerate(step.ended[row] for row in rows):
        length = len(one.tokens)
        responses.token[place, :length] = torch.tensor(one.tokens, dtype=torch.int64)
        if sampling.temperature > 0:  # a likeliest token is certain
            responses.logprob[place, :length] = torch.tensor(one.logprobs)
        responses.versions[place, :length] = torch.tensor(one.versions, dtype=torch.int64)
        responses.length[place] = length
        responses.finished[place] = one.finished
    return Ended(torch.tensor(rows, dtype=torch.int64), responses, step.at_least)
