"""Generation through the Hugging Face forward, for architectures `decode.py` does not know.

Texts of equal length, a prompt and what there is of its response, go together, so no architecture
needs to understand padding. Sampling uses the same random numbers as the fast path.

A sample's tokens and log-probabilities do not depend, bit for bit, on the rows that share its batch
here either. On the CPU every text is read alone; responses are sampled in batches of one length
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

from ....dataflow.runtime.call_context import call_in_flight
from ...models.architecture import quiet_transformers
from ...rollout.response_sampler import ResponseSampler
from .attention import attend_cache

_ALIGN = 16  # rows; see `decode`
_ROWS_ALIKE = "penstock_rows_alike"


@dataclass(frozen=True)
class _Read:
    """What a model made of texts of one length: their caches, the next logits."""

    caches: list[Any]
    logits: Tensor

    def of(self, text: Tensor) -> tuple[Any, Tensor]:
        """A cache of their own, and logits, for rows that go on from texts: i64[n]."""
        if len(text) == 1 < len(self.caches):
            own = _Read([self.caches[int(text)]], self.logits[text])
            return own.of(torch.zeros_like(text))
        cache = copy.deepcopy(self.caches[0])
        for index, layer in enumerate(cache.layers):
            layers = [part.layers[index] for part in self.caches]
            layer.keys = torch.cat([part.keys for part in layers])[text]
            layer.values = torch.cat([part.values for part in layers])[text]
        return cache, self.logits[text]


def decode_plain(module: Any, sampler: ResponseSampler, max_rows: int) -> Iterator[Tensor]:
    """Sample the responses that are open; see `decode.decode`.

    Rows whose texts have one length are sampled from beginning to end before any others.
    """
    waiting = torch.nonzero(sampler.open)[:, 0]
    if not len(waiting):
        return
    texts, text = sampler.texts(waiting)
    length = (texts >= 0).sum(1)[text]
    for size in length.unique().tolist():
        for rows in waiting[length == size].split(max_rows):
            for _ in _sample(module, sampler, rows):
                yield rows[:0]
            yield rows


def _sample(module: Any, sampler: ResponseSampler, rows: Tensor) -> Iterator[None]:
    """Sample responses whose texts have one length: i64[n], ascending; pauses in flight."""
    texts, text = (given.to(module.device) for given in sampler.texts(rows))
    read, rows = _read(module, texts), rows.to(module.device)
    with _rows_alike(module) as unit:
        for place, live in _batches(torch.arange(len(rows), device=rows.device), unit):
            cache, logits = read.of(text[place])
            while True:
                sampled, live = sampler.sample(logits, rows[place], live)
                if not bool(live.any()):
                    break
                if call_in_flight():
                    yield
                out = module(input_ids=sampled[:, None], past_key_values=cache, use_cache=True)
                logits = out.logits[:, -1]


def _read(module: Any, texts: Tensor) -> _Read:
    """Read texts of one length: on the CPU each of them alone."""
    parts = texts.split(1) if texts.device.type == "cpu" else [texts]
    outs = [module(input_ids=part, use_cache=True) for part in parts]
    logits = torch.cat([out.logits[:, -1] for out in outs])
    return _Read([out.past_key_values for out in outs], logits)


def _batches(rows: Tensor, unit: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of each batch, i64[n], and which are to be sampled; spare ones repeat the first.

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
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

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
