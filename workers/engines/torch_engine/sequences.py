"""Packed sequences, as the host knows them: [prompts | own parts of rows | spare tokens].

Nothing here lies on a device. What attention needs is made of it: rectangles of token indices
(`rectangles.py`), or where a kernel for sequences of any length finds each (`varlen.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Runs of packed tokens one after another; together they are all of them.

    Attributes:
        start: i64[S]; where each begins.
        length: i64[S]; some may be empty.
        num_prompts: How many of the first are prompts that rows share; 0 if none are shared.
        prompt_start: i64[rows]; where the prompt of each row begins.
        prompt: i64[rows]; its length, 0 throughout if none are shared: a row then is one sequence.
        total: N. The last token is a spare one; padding points at it.
        width_unit: See `pack_rows`.
    """

    start: Tensor
    length: Tensor
    num_prompts: int
    prompt_start: Tensor
    prompt: Tensor
    total: int
    width_unit: int

    @property
    def before(self) -> tuple[Tensor, Tensor]:
        """i64[S] each: where the tokens begin that precede a sequence elsewhere, and how many."""
        start, count = torch.zeros_like(self.start), torch.zeros_like(self.length)
        rows = slice(self.num_prompts, self.num_prompts + len(self.prompt))
        start[rows], count[rows] = self.prompt_start, self.prompt
        return start, count

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the shared prompts, which are the first ones."""
        return int(self.length[: self.num_prompts].sum())


def shared_prompts(tokens: Tensor, prompt: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Which prompts are worth packing once: equal ones of consecutive rows.

    Args:
        tokens: i64[rows, T].
        prompt: i64[rows]; lengths of prompts.
        length: i64[rows]; what is computed of each row.

    Returns:
        i64[rows] each: the lengths, 0 throughout unless a fifth of the tokens is saved; and the
        number of the prompt.
    """
    width = int(prompt.max())
    inside = torch.arange(width) < prompt[:, None]
    text = tokens[:, :width].where(inside, -1)
    new = (text[1:] != text[:-1]).any(1) | (prompt[1:] != prompt[:-1])
    owner = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)])
    first = torch.cat([torch.ones(1, dtype=torch.bool), new])
    saved = int(prompt.sum() - prompt[first].sum())
    if saved * 5 < int(length.sum()):
        return torch.zeros_like(prompt), torch.zeros_like(owner)
    return prompt, owner
