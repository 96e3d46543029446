"""Generation through the Hugging Face forward, for architectures `decode.py` does not know.

Prompts of equal length go together, so no architecture needs to understand padding. Every
prompt is computed once and its cache repeated for its samples. Draws use the same random numbers
as the fast path, but bits may depend on the batch here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...rollout.sampling import draw
from .decode import Responses

__all__ = ["decode_plain"]


def decode_plain(
    module: Any,
    prompt: Tensor,
    num_samples: int,
    uniform: Tensor,
    *,
    temperature: float,
    eos_token_id: int,
) -> Responses:
    """Draw `num_samples` responses per prompt; arguments as in `decode.decode`."""
    rows, max_new = uniform.shape
    device = uniform.device
    token = torch.full((rows, max_new), -1, dtype=torch.int64, device=device)
    logprob = torch.zeros((rows, max_new), dtype=torch.float32, device=device)
    lengths = (prompt >= 0).sum(1)
    for length in lengths.unique().tolist():
        prompts = torch.nonzero(lengths == length)[:, 0]
        at = (prompts[:, None] * num_samples + torch.arange(num_samples, device=device)).view(-1)
        out = module(input_ids=prompt[prompts, :length], use_cache=True)
        cache = out.past_key_values
        cache.batch_repeat_interleave(num_samples)
        logits = out.logits[:, -1].repeat_interleave(num_samples, 0)
        live = torch.ones(len(at), dtype=torch.bool, device=device)
        for t in range(max_new):
            drawn, drawn_logprob = draw(logits, uniform[at, t], temperature)
            token[at[live], t] = drawn[live]
            logprob[at[live], t] = drawn_logprob[live]
            live = live & (drawn != eos_token_id)
            if t + 1 == max_new or not bool(live.any()):
                break
            out = module(input_ids=drawn[:, None], past_key_values=cache, use_cache=True)
            logits = out.logits[:, -1]
    count = (token >= 0).sum(1)
    ends = token.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0] == eos_token_id
    return Responses(token, logprob, count, ends)
