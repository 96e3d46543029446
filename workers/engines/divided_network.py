"""A model that is divided over the processes of a data-parallel rank: what engines do alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...dataflow.errors import PlanError
from ...dataflow.runtime.worker_protocol import WorkerContext
from ...planner.resharding.sharding import Box, Pattern, Sharding, Slice, StoredParam, volume
from ..training.checkpoint_files import HoldsWeights, gather_weights
from ..training.data_parallel import RankGroup, sum_over
from ..training.host_memory import sent
from ..training.network import M, Outputs
from ..training.token_logprob import entropy_of_sums, exponential_sums, finite_

_AT_ONCE = 1 << 26
"""Most logits that exist in float32 at once: 256 MiB, so that many rows need few kernels."""


_BY_ROWS = re.compile(r"(.*\.)?(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.(weight|bias)")
_BY_COLUMNS = re.compile(r"(.*\.)?(o_proj|down_proj)\.weight")


def tensor_cut(name: str) -> int | None:
    """Return the dimension in which tensor parallelism cuts a parameter of Llama, Qwen2 or Qwen3.

    None if every process has all of it.
    """
    if _BY_ROWS.fullmatch(name):
        return 0
    return 1 if _BY_COLUMNS.fullmatch(name) else None


def held_box(
    name: str, shape: tuple[int, ...], shard: int, shards: int, place: int, tensor: int
) -> Box:
    """Return the part of a parameter that one process holds; may be empty."""
    box = [(0, size) for size in shape]
    cut = tensor_cut(name) if tensor > 1 else None
    if cut is not None:
        width = shape[cut] // tensor
        box[cut] = (place * width, (place + 1) * width)
    start, stop = box[0]
    # As `torch.chunk` cuts: all pieces equal, the last ones smaller or empty.
    size = -(-(stop - start) // shards)
    begin = start + shard * size
    box[0] = (min(begin, stop), min(begin + size, stop))
    return tuple(box)


def divided_sharding(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    shards: int = 1,
    tensor: int,
    replicas: int = 1,
    first: int = 0,
    dtype: str,
) -> Sharding:
    """Return which process of a group stores what of Llama, Qwen2 or Qwen3.

    Processes are numbered from `first` on, tensor place fastest, then shard, then rank.
    """
    patterns: dict[Pattern, int] = {}
    params: list[StoredParam] = []
    for name, shape in shapes.items():
        slices: list[Slice] = []
        for process in range(replicas * shards * tensor):
            beside, place = divmod(process, tensor)
            box = held_box(name, shape, beside % shards, shards, place, tensor)
            if volume(box):
                slices.append(Slice(first + process, box, (0,) * len(shape)))
        index = patterns.setdefault(tuple(slices), len(patterns))
        params.append(StoredParam(name, shape, index, name, tuple(range(len(shape)))))
    devices = tuple(range(first, first + replicas * shards * tensor))
    return Sharding(devices, tuple(params), tuple(patterns), dtype)


def undivided(config: Any, tensor: int) -> str | None:
    """Name a size of a Hugging Face config that tensor parallelism does not divide, with it."""
    sizes = {
        "words": config.vocab_size,
        "query heads": config.num_attention_heads,
        "key heads": config.num_key_value_heads,
        "feed-forward units": config.intermediate_size,
    }
    return next((f"{size} {what}" for what, size in sizes.items() if size % tensor), None)


def vocabulary_logprob(
    logits: Tensor, target: Tensor, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of each distribution.

    Process r of `group` holds words `r * V` to `(r + 1) * V`. Every process gets the same result
    and computes its own words' gradient, as if it alone went backward through the result.

    Shapes: `logits` f[n, V], this process's words; `target` i64[n], or i64[n, m] for m words of
    each distribution, in the whole vocabulary. Returns f32 of the shape of `target`, and f32[n].
    """
    words = target if target.ndim > 1 else target[:, None]
    both: tuple[Tensor, Tensor] = _Statistics.apply(logits, words, temperature, group)  # type: ignore[assignment]
    return both[0].view(target.shape), both[1]


def vocabulary_top(
    logits: Tensor, num_words: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the likeliest words, most likely first; no gradient passes.

    Shapes: `logits` f32[n, V], as in `vocabulary_logprob`. Returns log-probabilities and words,
    f32[n, num_words] and i64[n, num_words], the same in every process.
    """
    width = logits.shape[1]
    best, words = logits.topk(min(num_words, width))
    total = logits.logsumexp(-1, keepdim=True)
    if group is None or group.size() == 1:
        return best - total, words
    words += group.rank() * width
    every: list[Tensor] = []
    for column in (best, words, total):
        parts = [torch.empty_like(column) for _ in range(group.size())]
        dist.all_gather(parts, column.contiguous(), group)
        every.append(torch.cat(parts, 1))
    best, chosen = every[0].topk(num_words)
    return best - every[2].logsumexp(-1, keepdim=True), every[1].gather(1, chosen)


class _Statistics(torch.autograd.Function):
    """With p = softmax(l): d logprob / dl = [target] - p, d entropy / dl = -p (log p + H).

    l are the logits over the temperature, targets i64[n, m]. Of the logits `_AT_ONCE` are looked at
    together, in float32, and looked at again going backward: what is kept is as large as they are,
    in their precision, and no larger.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        alone = group is None or group.size() == 1
        num_words = logits.shape[1]
        # Dividing keeps the order, so the largest can be divided afterwards.
        largest = _wide(logits.amax(-1)) / temperature
        if not alone:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        local = target - (0 if group is None else group.rank()) * num_words
        here = (local >= 0) & (local < num_words)
        column = local.clamp(0, num_words - 1)
        sums = largest.new_empty(2 + target.shape[1], len(logits))
        for rows in _rows(logits):
            shifted = _shifted(logits[rows], temperature, largest[rows])
            sums[2:, rows] = shifted.gather(1, column[rows]).where(here[rows], 0.0).t()
            sums[:2, rows] = torch.stack(exponential_sums(shifted, weighted=True))
        if not alone:
            dist.all_reduce(sums, group=group)
        total, weighted, *found = sums.unbind()
        entropy = entropy_of_sums(total, weighted)
        ctx.save_for_backward(logits, largest, total, entropy, column, here)
        ctx.temperature = temperature
        return torch.stack(found, 1) - total.log()[:, None], entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, largest, total, entropy, column, here = ctx.saved_tensors
        to_logprob, to_entropy = grads
        grad = torch.empty_like(logits)
        for rows in _rows(logits):
            logprob = _shifted(logits[rows], ctx.temperature, largest[rows])
            chance = logprob.exp().div_(total[rows, None])
            logprob -= total[rows].log()[:, None]
            factor = finite_(logprob).add_(entropy[rows, None]).mul_(to_entropy[rows, None])
            factor += to_logprob[rows].sum(1, keepdim=True)
            part = chance.neg_().mul_(factor)
            part.scatter_add_(1, column[rows], to_logprob[rows] * here[rows])
            grad[rows] = part.div_(ctx.temperature)
        return grad, None, None, None


def _shifted(logits: Tensor, temperature: float, largest: Tensor) -> Tensor:
    return (_wide(logits) / temperature).sub_(largest[:, None])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rows(logits: Tensor) -> Iterator[slice]:
    size = max(1, _AT_ONCE // max(1, logits.shape[1]))
    for begin in range(0, len(logits), size):
        yield slice(begin, begin + size)


def join_processes(context: WorkerContext) -> None:
    """Require torch.distributed's default group; one process alone gets a group of itself."""
    cuda = torch.device(context.device).type == "cuda"
    if cuda:
        torch.cuda.set_device(context.device)  # libraries ask for "the current device"
    if dist.is_initialized():
        return
    assert context.num_processes == 1, "the executor starts torch.distributed in larger groups"
    in_memory: Any = dist
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=in_memory.HashStore(), rank=0, world_size=1)


def check_order(processes: Sequence[int]) -> None:
    """Refuse processes of a view (`WorkerContext.places`) that torch.distributed would reorder.

    Raises:
        PlanError: If it would: it numbers a group's processes as those around them are.
    """
    if [*processes] != sorted(processes):
        raise PlanError(
            f"processes {list(processes)} are to divide a model in this order\n    name the "
            "devices of a rank in ascending order of the processes around them"
        )


def sum_parts(parts: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Add tensors up over processes, in place and together."""
    if parts:
        sums = torch.cat([part.reshape(-1) for part in parts])
        sum_over(sums, group)
        for part, total in zip(parts, sums.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))


def recompute_layers(layers: Iterable[nn.Module]) -> None:
    """Have training keep what goes into each layer; call it before anything else wraps them."""
    for layer in layers:
        # There is no dropout, so no random state need be kept.
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        layer.forward = partial(checkpoint, layer.forward, **options)


_IMPOSSIBLE = -1e30
"""A logit whose probability is 0, and finite, so that 0 times it is 0."""


def known_logits(logits: Tensor, num_words: int | None, group: dist.ProcessGroup | None) -> Tensor:
    """A process's logits, with words beyond the first `num_words` set to `_IMPOSSIBLE`."""
    width = logits.shape[1]
    first = 0 if group is None else group.rank() * width
    if num_words is None or first + width <= num_words:
        return logits
    beyond = torch.arange(first, first + width, device=logits.device) >= num_words
    return logits.masked_fill(beyond, _IMPOSSIBLE)


def gathered_module(network: HoldsWeights, first: Callable[[], nn.Module]) -> nn.Module | None:
    """See `LanguageNetwork.whole_module`: what processes hold, gathered into `first`."""
    weights = gather_weights(network, 0)  # process 0 is where transformers writes files
    if not weights:
        return None
    module = first()
    found = module.load_state_dict(weights, strict=False)  # it has buffers besides
    assert not found.unexpected_keys, found.unexpected_keys
    assert dict(module.named_parameters()).keys() <= weights.keys(), "some are missing"
    return module


class DividedNetwork:
    """The part of a `LanguageNetwork` that follows from its being divided.

    Right-padded rows are multiplied as they are, so rows of similar length go together.
    """

    is_divided = True
    sort_by_length = True
    shares_prompts = False
    num_words: int | None = None
    context: WorkerContext
    device: torch.device
    rank_layout: Sharding
    rows: RankGroup  # The processes of a rank that share out its micro-batches
    vocabulary_group: dist.ProcessGroup | None  # Those that share the vocabulary; None for this one

    def tensors(self, buffer: Tensor | None = None) -> dict[str, Tensor]:
        raise NotImplementedError

    def outputs(self, tokens: Tensor, reads: Tensor, shared: Tensor | None = None) -> Outputs:
        raise NotImplementedError

    def whole_module(self, first: Callable[[], nn.Module]) -> nn.Module | None:
        return gathered_module(self, first)

    def save_adapter(self, folder: Path, base: str | None) -> None:
        """There are none."""

    def weights_changed(self) -> None:
        """Nothing is derived from them."""

    def frozen_weights(self) -> tuple[Sharding, dict[str, Tensor]] | None:
        return None

    def micro_batch_limit(self, limit: int, num_tokens: int) -> int:
        # No process is left idle without need.
        return max(1, min(limit, -(-num_tokens // self.rows.num_ranks)))

    def together(self, result: Tensor) -> Tensor:
        return self.rows.sum_(result)

    def share(self, parts: Sequence[M]) -> list[M | None]:
        """Every n-th micro-batch, for n processes; None where only others have one."""
        rank, size = self.rows.rank, self.rows.num_ranks
        mine: list[M | None] = [*parts[rank::size]]
        return mine + [None] * (-(-len(parts) // size) - len(mine))

    def idle(self) -> Tensor:
        """A zero from one token, for a rank without rows: its collectives must still run."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        anchor = self.outputs(token, sent(torch.ones(1, 1, dtype=torch.bool), self.device)).anchor
        assert anchor is not None
        return anchor

    def token_logprob(
        self, outputs: Outputs, target: Tensor, temperature: float, *, needs_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprob, entropy = vocabulary_logprob(
            known_logits(outputs.values, self.num_words, self.vocabulary_group),
            target,
            temperature,
            self.vocabulary_group,
        )
        return logprob, entropy if needs_entropy else None

    def top_words(
        self, outputs: Outputs, num_words: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logits = outputs.values.float() / temperature
        known = known_logits(logits, self.num_words, self.vocabulary_group)
        return vocabulary_top(known, num_words, self.vocabulary_group)
