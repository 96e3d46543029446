"""Responses that are sampled in segments: rows that go on, rows that begin, and what comes of them.

`Unfinished` is both what a call goes on with and, with no token yet, what it begins. Groups that
were begun earlier come first, and every group keeps its place among the others until it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...algorithms.roles.language import Rollout, Sampling, Unfinished
from .ended import Begun
from .responses import Responses, to_rollout


def new_groups(prompt: Tensor, prompt_id: Tensor, step: int, num_samples: int) -> Unfinished:
    """Groups of which nothing has been sampled.

    Args:
        prompt: i64[P, T], right padded with -1.
        prompt_id: i64[P].
        step: The step whose prompts they are.
        num_samples: Responses to each.
    """
    none = Responses.none_yet(len(prompt) * num_samples, 0)
    return Unfinished(
        prompt=prompt.cpu(),
        prompt_id=prompt_id.cpu(),
        began=torch.full((len(prompt),), step, dtype=torch.int64),
        response=none.token,
        behavior_logprob=none.logprob,
        version=none.token,
        ended=none.finished,
        finished=none.finished,
    )


def joined(parts: Sequence[Unfinished]) -> Unfinished:
    """The groups of all parts, one after another."""
    columns: dict[str, Tensor] = {}
    for field in fields(Unfinished):
        pieces: list[Tensor] = [getattr(part, field.name).cpu() for part in parts]
        if pieces[0].dim() == 2:
            width = max(piece.shape[1] for piece in pieces)
            fill = 0 if pieces[0].is_floating_point() else -1
            pieces = [pad(piece, (0, width - piece.shape[1]), value=fill) for piece in pieces]
        columns[field.name] = torch.cat(pieces)
    return Unfinished(**columns)


def num_tokens(groups: Unfinished) -> Tensor:
    """Tokens that there are of each response: i64[rows]."""
    return (groups.response >= 0).sum(1)


def as_begun(groups: Unfinished, sampling: Sampling, length: int) -> Begun:
    """What an engine needs to go on.

    Args:
        groups: With what there is of them.
        sampling: How they are sampled.
        length: By how much a response may grow.

    Raises:
        ValueError: If they were begun with another number of samples or longer responses.
    """
    rows, wanted = len(groups.response), len(groups.prompt) * sampling.num_samples
    longest = int(num_tokens(groups).max()) if rows else 0
    if rows != wanted or longest > sampling.max_new_tokens:
        raise ValueError(
            f"{len(groups.prompt)} groups go on with {rows} responses of up to {longest} tokens, "
            f"and are to be sampled with num_samples={sampling.num_samples} and "
            f"max_new_tokens={sampling.max_new_tokens}; let a run end its groups as it began them"
        )
    more = (0, sampling.max_new_tokens - groups.response.shape[1])
    return Begun(
        pad(groups.response, more, value=-1),
        pad(groups.behavior_logprob, more),
        groups.ended,
        length,
    )


def grown(groups: Unfinished, responses: Responses, sampling: Sampling) -> Unfinished:
    """The groups after a segment.

    Args:
        groups: Before it.
        responses: All that there is of each response after it.
        sampling: How they are sampled.
    """
    limits = [sampling.longest_response(n) for n in (groups.prompt >= 0).sum(1).tolist()]
    limit = torch.tensor(limits, dtype=torch.int64).repeat_interleave(sampling.num_samples)
    width = int(responses.length.max()) if len(limit) else 0
    token = responses.token[:, :width]
    before = pad(groups.version, (0, width - groups.version.shape[1]), value=-1)
    is_new = (token >= 0) & (before < 0)
    return Unfinished(
        prompt=groups.prompt,
        prompt_id=groups.prompt_id,
        began=groups.began,
        response=token,
        behavior_logprob=responses.logprob[:, :width],
        version=torch.where(is_new, responses.versions[:, :width], before),
        ended=groups.ended | responses.finished | (responses.length >= limit),
        finished=responses.finished,
    )


def parted(groups: Unfinished) -> tuple[Unfinished, Unfinished]:
    """The groups all of whose responses have ended, and the others."""
    num_samples = len(groups.ended) // max(len(groups.prompt), 1)
    whole = groups.ended.view(len(groups.prompt), num_samples).all(1)
    return _chosen(groups, whole), _chosen(groups, ~whole)


def _chosen(groups: Unfinished, kept: Tensor) -> Unfinished:
    """Some groups, as bool[P] says."""
    rows = kept.repeat_interleave(len(groups.ended) // max(len(kept), 1))
    per_prompt = ("prompt", "prompt_id", "began")
    return Unfinished(
        **{
            field.name: getattr(groups, field.name)[kept if field.name in per_prompt else rows]
            for field in fields(groups)
        }
    )


def as_rollout(groups: Unfinished) -> tuple[Rollout, Responses]:
    """Groups that are whole as what `generate` returns, and their responses alone."""
    responses = Responses(
        groups.response,
        groups.behavior_logprob,
        num_tokens(groups),
        groups.finished,
        groups.version,
    )
    num_samples = len(groups.ended) // max(len(groups.prompt), 1)
    prompt_id = groups.prompt_id.repeat_interleave(num_samples)
    return to_rollout(groups.prompt, prompt_id, responses), responses
