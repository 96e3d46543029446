"""Pairs of responses: finding their rows, choosing them by score, and mismatching them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ..roles.language_tables import PerSample, PromptId, Rollout, ScoredPairs, TokenIds, TokenMask
from .groups import rows_by_prompt
from .reductions import unknown

Ties = Literal["drop", "first"]
"""Treatment of a prompt whose responses all score the same: its pair is not trained on, or its
first response counts as the better one and its last as the worse."""


def pair_rows(pair_id: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers of the chosen and the rejected side, in the same order of pairs.

    Args:
        pair_id: i64[rows], what the two rows of a pair share.
        chosen: bool[rows].

    Returns:
        i64[pairs] each.

    Raises:
        ValueError: If a pair does not have exactly one row of each side.
    """
    pairs, index = torch.unique(pair_id, return_inverse=True)
    wins = torch.bincount(index[chosen], minlength=len(pairs))
    losses = torch.bincount(index[~chosen], minlength=len(pairs))
    wrong = ((wins != 1) | (losses != 1)).nonzero().flatten()
    if len(wrong):
        first = wrong[0]
        raise ValueError(
            f"pair {int(pairs[first])} has {int(wins[first])} chosen and {int(losses[first])} "
            "rejected rows; a pair needs exactly one of each, both in the same micro-batch"
        )
    order = torch.argsort(index)
    return order[chosen[order]], order[~chosen[order]]


@op(scope="group", makes_rows=True)
def best_and_worst(roll: Rollout, score: PerSample, *, ties: Ties = "drop") -> ScoredPairs:
    """The best and the worst response of each prompt, two rows each, the better one first.

    Of equal scores the first response counts as the best and the last as the worst, so a prompt's
    two rows are never the same one. A prompt with fewer than two scores gets an empty mask.
    Guo et al., "Direct Language Model Alignment from Online AI Feedback", 2024.

    Responses a, b, c of prompt 17 that score 0.5, 1 and 0 make the rows b and c, with
    `pair_id = [17, 17]`, `chosen = [T, F]` and `score = [1, 0]`.

    Args:
        roll: Responses, at least two per prompt; groups may be interleaved.
        score: f32[rows]; a response without a score is neither.
        ties: What a prompt gets whose scores are all equal; "drop" leaves its rows an empty mask,
            which losses on pairs do not count.

    Raises:
        ValueError: If a prompt has a single response or `ties` is unknown.
    """
    if ties not in ("drop", "first"):
        raise unknown("ties", ties, Ties)
    rows: list[int] = []
    for prompt, members in rows_by_prompt(roll.prompt_id):
        if len(members) < 2:
            raise ValueError(
                f"prompt {prompt} has a single response, and a pair needs two; set "
                "Sampling.num_samples to 2 or more"
            )
        scored = members[~score[members].isnan()]
        members = scored if len(scored) > 1 else members[[0, -1]]
        own = score[members]
        best = int(own.argmax())
        worst = len(own) - 1 - int(own.flip(0).argmin())
        rows += [int(members[best]), int(members[worst])]
    pair_scores = score[torch.tensor(rows, dtype=torch.int64)].reshape(-1, 2)
    dropped = pair_scores.isnan().any(dim=1)
    if ties == "drop":
        dropped |= pair_scores[:, 0] == pair_scores[:, 1]
    return pairs_of(roll, score, rows, dropped=dropped)


def pairs_of(roll: Rollout, score: Tensor, rows: list[int], *, dropped: Tensor) -> ScoredPairs:
    """Pairs of rows of a rollout, two after another, the chosen one first.

    Args:
        roll: Responses.
        score: f32[rows].
        rows: Row numbers, two per pair.
        dropped: bool[pairs], pairs whose rows get an empty mask.
    """
    kept = torch.tensor(rows, dtype=torch.int64, device=score.device)
    return ScoredPairs(
        pair_id=roll.prompt_id[kept],
        tokens=roll.tokens[kept],
        mask=roll.mask[kept] & ~dropped.repeat_interleave(2)[:, None],
        chosen=torch.arange(len(rows), device=score.device) % 2 == 0,
        score=score[kept],
    )


@dataclass(frozen=True, kw_only=True)
class Mismatched:
    """Prompts with responses to other prompts; `mask` is True on the responses."""

    tokens: TokenIds
    mask: TokenMask


@op(scope="batch", makes_rows=True)
def mismatched(tokens: TokenIds, mask: TokenMask, pair_id: PromptId) -> Mismatched:
    """Give each row's prompt the response of the next row, cyclically, that is of another pair.

    Ethayarajh et al., "KTO", 2024, section 4.2.

    Args:
        tokens: i64[rows, T]; a row's prompt is what comes before its first masked token.
        mask: bool[rows, T].
        pair_id: i64[rows].

    Raises:
        ValueError: If all rows are of one pair.
    """
    pairs: list[int] = pair_id.tolist()
    if not pairs:
        return Mismatched(tokens=tokens, mask=mask)
    if len(set(pairs)) == 1:
        raise ValueError(
            f"all rows are of pair {pairs[0]}, so none has a response to another prompt; give a "
            "step at least 2 pairs"
        )
    rows: list[Tensor] = []
    starts: list[int] = []
    for row, own in enumerate(pairs):
        other = next(
            place % len(pairs)
            for place in range(row + 1, row + len(pairs))
            if pairs[place % len(pairs)] != own
        )
        start = int(mask[row].int().argmax()) if mask[row].any() else int((tokens[row] >= 0).sum())
        rows.append(torch.cat([tokens[row, :start], tokens[other][mask[other]]]))
        starts.append(start)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    position = torch.arange(padded.shape[1], device=tokens.device)
    begin = torch.tensor(starts, device=tokens.device)[:, None]
    return Mismatched(tokens=padded, mask=(position >= begin) & (padded >= 0))
