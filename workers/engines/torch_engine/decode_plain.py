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
from ...rollout.response_sampler import ResponseSampler
from ...rollout.responses import Responses
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


def decode_plain(module: Any, sampler: ResponseSampler) -> Responses:
    """Sample the responses of `sampler`; see `decode.decode`."""
    num_samples, max_new = sampler.num_samples, sampler.max_new
    reads = _reads(module, sampler.prompt)
    with _rows_alike(module) as unit:
        for read in reads:
            sample = torch.arange(num_samples, device=sampler.prompt.device)
            of_prompts = (read.prompts[:, None] * num_samples + sample).view(-1)
            for row, live in _batches(of_prompts, unit):
                cache, logits = read.of(row // num_samples)
                for t in range(max_new):
                    sampled, live = sampler.sample(logits, row, live, t)
                    if t + 1 == max_new or not bool(live.any()):
                        break
                    out = module(input_ids=sampled[:, None], past_key_values=cache, use_cache=True)
                    logits = out.logits[:, -1]
    return sampler.responses()


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
