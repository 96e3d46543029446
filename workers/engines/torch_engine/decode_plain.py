"""Generation through the Hugging Face forward, for architectures `decode.py` does not know.

Prompts of equal length go together, so no architecture needs to understand padding. Sampling uses
the same random numbers as the fast path.

A sample's tokens and log-probabilities do not depend, bit for bit, on the rows that share its batch
here either. On the CPU every prompt is read alone; responses are sampled in batches of one length
and a multiple of 16 rows; and then attention is two batched products and a softmax, as in
`decode.py`. What an expert of a mixture multiplies depends on all rows of a batch, so such a model
samples one response at a time, and so does one whose attention cannot be chosen. On CUDA all go
together: there only equal batches are promised to give equal bits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from ...models.architecture import quiet_transformers
from ...rollout.responses import Responses
from ...rollout.sampling import sample_token
from .attention import attend_cache

__all__ = ["decode_plain"]

_ALIGN = 16  # rows; see `decode`
_ROWS_ALIKE = "penstock_rows_alike"


@dataclass(frozen=True)
class _Read:
    """What a model made of prompts of one length: which they are, their caches, the next logits."""

    prompts: Tensor
    caches: list[Any]
    logits: Tensor

    def of(self, owner: Tensor) -> tuple[Any, Tensor]:
        """A cache of their own, and logits, for rows that answer the prompts `owner`."""
        place = torch.searchsorted(self.prompts, owner)
        if len(place) == 1 < len(self.caches):
            own = _Read(self.prompts[place], [self.caches[int(place)]], self.logits[place])
            return own.of(owner)
        cache = copy.deepcopy(self.caches[0])
        for index, layer in enumerate(cache.layers):
            layers = [part.layers[index] for part in self.caches]
            layer.keys = torch.cat([part.keys for part in layers])[place]
            layer.values = torch.cat([part.values for part in layers])[place]
        return cache, self.logits[place]


def decode_plain(
    module: Any,
    prompt: Tensor,
    num_samples: int,
    uniform: Tensor,
    *,
    temperature: float,
    eos_token_id: int,
) -> Responses:
    """Sample `num_samples` responses per prompt; arguments as in `decode.decode`."""
    rows, max_new = uniform.shape
    device = uniform.device
    token = torch.full((rows, max_new), -1, dtype=torch.int64, device=device)
    logprob = torch.zeros((rows, max_new), dtype=torch.float32, device=device)
    reads = _reads(module, prompt)
    with _rows_alike(module) as unit:
        for read in reads:
            sample = torch.arange(num_samples, device=device)
            of_prompts = (read.prompts[:, None] * num_samples + sample).view(-1)
            for row, live in _batches(of_prompts, unit):
                cache, logits = read.of(row // num_samples)
                for t in range(max_new):
                    sampled, sampled_logprob = sample_token(logits, uniform[row, t], temperature)
                    token[row[live], t] = sampled[live]
                    logprob[row[live], t] = sampled_logprob[live]
                    live = live & (sampled != eos_token_id)
                    if t + 1 == max_new or not bool(live.any()):
                        break
                    out = module(input_ids=sampled[:, None], past_key_values=cache, use_cache=True)
                    logits = out.logits[:, -1]
    count = (token >= 0).sum(1)
    ends = token.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0] == eos_token_id
    return Responses(token, logprob, count, ends)


def _reads(module: Any, prompt: Tensor) -> list[_Read]:
    """Read prompts, those of one length after another: on the CPU each of them alone."""
    lengths = (prompt >= 0).sum(1)
    reads: list[_Read] = []
    for length in lengths.unique().tolist():
        prompts = torch.nonzero(lengths == length)[:, 0]
        parts = prompts.split(1) if prompt.device.type == "cpu" else [prompts]
        outs = [module(input_ids=prompt[part, :length], use_cache=True) for part in parts]
        logits = torch.cat([out.logits[:, -1] for out in outs])
        reads.append(_Read(prompts, [out.past_key_values for out in outs], logits))
    return reads


def _batches(rows: Tensor, unit: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers of each batch, i64[n], and which are to be sampled; spare ones repeat the first.

    Args:
        rows: i64[n].
        unit: 1 makes a batch of each row, more one batch of a multiple of it, None one of all.
    """
    for part in rows.split(1) if unit == 1 else [rows]:
        spare = 0 if unit is None else -len(part) % unit
        place = torch.arange(len(part) + spare, device=rows.device)
        yield torch.cat([part, part[:1].expand(spare)]), place < len(part)


@contextmanager
def _rows_alike(module: Any) -> Generator[int | None]:
    """Have a model compute the rows of a batch alike; gives the unit of such batches' sizes."""
    if module.device.type != "cpu":
        yield None
        return
    AttentionInterface.register(_ROWS_ALIKE, _attend)
    AttentionMaskInterface.register(_ROWS_ALIKE, sdpa_mask)
    before = module.config._attn_implementation
    with quiet_transformers():  # which says so where a model's attention cannot be chosen
        module.set_attn_implementation(_ROWS_ALIKE)
    try:
        chosen = module.config._attn_implementation == _ROWS_ALIKE
        experts = any("experts" in name for name in module.config.to_dict())
        yield _ALIGN if chosen and not experts else 1
    finally:
        with quiet_transformers():
            module.set_attn_implementation(before)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What Hugging Face's `sdpa` computes, of one query per row: [M, 1, H, E] from [M, H, 1, E]."""
    bias = torch.zeros(len(query), 1, key.shape[2])
    if attention_mask is not None:
        bias = bias.masked_fill(~attention_mask[:, 0], -math.inf)
    scale = rest.get("scaling") or query.shape[-1] ** -0.5
    mixed = attend_cache(query[:, :, 0], key, value, bias, scale)
    return mixed.view(len(query), 1, query.shape[1], -1), None
