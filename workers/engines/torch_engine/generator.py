"""Our own generation as a `GenerationEngine`, over the network that the torch engine evaluates.

The families of `backbone` are decoded by `decode`, on GPUs by `decode_on_device`; others through
the Hugging Face forward.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ....algorithms.roles.language import Turn, TurnRequest, Turns
from ....algorithms.roles.language_tables import Sampling
from ....dataflow.errors import ConfigError, PenstockError, WorkerError
from ....dataflow.runtime.call_context import call_in_flight
from ...models.architecture import quiet_transformers
from ...models.tokenizer import TokenizerSpec
from ...rollout.generation_engine import BegunRows, EndedRows, GenerationEngine, check_stop
from ...rollout.response_sampler import ResponseSampler, TurnSampler
from ...rollout.sampling import SampleStreams
from ...training.host_memory import HostCopy, give_back_freed
from .attention import attend_cache
from .decode import Batch, decode
from .device_decode import KeptBatch, TurnBatch, decode_on_device, rows_in_memory
from .network import LeanNetwork, TorchNetwork
from .packing import ALIGN

_ROWS_ALIKE = "penstock_rows_alike"

T = TypeVar("T")


@dataclass(frozen=True)
class _Read:
    """A model's caches for some texts, and the logits of the next token."""

    caches: list[Any]
    logits: Tensor
    # i64[n]; tokens of each text, and of the longest, with which the others are padded on the left.
    # None if they are equally long
    length: Tensor | None = None
    longest: int = 0

    def placed(self, text: Tensor, num_more: int) -> dict[str, Tensor]:
        """Arguments of a forward of one more token per row, which some others precede."""
        if self.length is None:
            return {}
        end = self.longest + num_more + 1
        before = torch.arange(end, device=text.device) - (self.longest - self.length[text, None])
        return {"attention_mask": before >= 0, "position_ids": before[:, -1:]}

    def of(self, text: Tensor) -> tuple[Any, Tensor]:
        """Return a cache of their own, and logits, for rows that go on from texts: i64[n]."""
        if len(text) == 1 < len(self.caches):
            own = _Read([self.caches[int(text)]], self.logits[text])
            return own.of(torch.zeros_like(text))
        cache = copy.copy(self.caches[0])
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for index, layer in enumerate(cache.layers):
            layers = [part.layers[index] for part in self.caches]
            layer.keys = torch.cat([part.keys for part in layers])[text]
            layer.values = torch.cat([part.values for part in layers])[text]
        return cache, self.logits[text]


def decode_plain(
    module: Any, sampler: ResponseSampler, max_rows: int, *, padded: bool | None = None
) -> Iterator[Tensor]:
    """Sample the responses that are open; see `decode.decode`.

    On a CPU those of one length are computed together, and rounded as each alone. On a device, or
    if `padded`, others are padded on the left: a batch takes as many launches whatever its size.
    """
    as_one = module.device.type != "cpu" if padded is None else padded
    waiting = torch.nonzero(sampler.open)[:, 0]
    if not len(waiting):
        return
    texts, text = sampler.texts(waiting)
    length = (texts >= 0).sum(1)[text]
    alike = [waiting[length == size] for size in length.unique().tolist()]
    for some in [torch.cat(alike)] if as_one else alike:
        for part in some.split(max_rows):
            rows = part.sort().values
            for _ in _sample(module, sampler, rows, as_one):  # from beginning to end
                yield rows[:0]
            yield rows


def _sample(module: Any, sampler: ResponseSampler, rows: Tensor, padded: bool) -> Iterator[None]:
    """Sample some responses: i64[n], ascending; pauses in flight."""
    texts, text = sampler.texts(rows)
    text, device = text.to(module.device), module.device
    read, rows = (_read_padded if padded else _read)(module, texts), rows.to(device)
    with _rows_alike(module, padded) as unit:
        for place, live in _batches(torch.arange(len(rows), device=device), unit):
            cache, logits = read.of(text[place])
            for step in itertools.count():
                sampled, live = sampler.sample(logits, rows[place], live)
                if not bool(live.any()):
                    break
                if call_in_flight():
                    yield
                placed = read.placed(text[place], step)
                logits = _forward(module, sampled[:, None], placed, past_key_values=cache)[0]


def _read(module: Any, texts: Tensor) -> _Read:
    """Read texts of one length, each of them alone."""
    outs = [_forward(module, part, {}) for part in texts.split(1)]
    return _Read([cache for _, cache in outs], torch.cat([logits for logits, _ in outs]))


def _read_padded(module: Any, texts: Tensor) -> _Read:
    length, longest = (texts >= 0).sum(1), texts.shape[1]
    if bool((length == longest).all()):
        logits, cache = _forward(module, texts.to(module.device), {})
        return _Read([cache], logits)
    before = torch.arange(longest) - (longest - length[:, None])
    moved = texts.gather(1, before % longest).clamp(min=0)
    placed = {"attention_mask": before >= 0, "position_ids": before.clamp(min=0)}
    there = {name: tensor.to(module.device) for name, tensor in placed.items()}
    logits, cache = _forward(module, moved.to(module.device), there)
    return _Read([cache], logits, length.to(module.device), longest)


def _forward(
    module: Any, tokens: Tensor, placed: Mapping[str, Tensor], **given: Any
) -> tuple[Tensor, Any]:
    """Logits after the last of some tokens, and the cache with them."""
    known = inspect.signature(module.forward).parameters  # some read positions off the mask
    placed = {name: tensor for name, tensor in placed.items() if name in known}
    out = module(input_ids=tokens, use_cache=True, **placed, **given)
    return out.logits[:, -1], out.past_key_values


def _batches(rows: Tensor, unit: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of each batch, i64[n], and which to sample; spare ones repeat the first."""
    for part in rows.split(1) if unit == 1 else [rows]:
        spare = 0 if unit is None else -len(part) % unit
        place = torch.arange(len(part) + spare, device=rows.device)
        yield torch.cat([part, part[:1].expand(spare)]), place < len(part)


@contextmanager
def _rows_alike(module: Any, padded: bool) -> Generator[int | None]:
    """Have a model compute the rows of a batch alike; gives the unit of such batches' sizes."""
    if padded:
        yield None
        return
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_ROWS_ALIKE, _attend)
    AttentionMaskInterface.register(_ROWS_ALIKE, sdpa_mask)
    before = module.config._attn_implementation
    if before != "sdpa":  # it computes something else besides, as sinks
        yield 1
        return
    with quiet_transformers():  # it logs if a model's attention cannot be chosen
        module.set_attn_implementation(_ROWS_ALIKE)
    try:
        chosen = module.config._attn_implementation == _ROWS_ALIKE
        experts = any("experts" in name for name in module.config.to_dict())
        yield ALIGN if chosen and not experts else 1
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
    """Compute Hugging Face's `sdpa` for one query per row: [M, 1, H, E] from [M, H, 1, E]."""
    bias = torch.zeros(len(query), 1, key.shape[2])
    if attention_mask is not None:
        bias = bias.masked_fill(~attention_mask[:, 0], -math.inf)
    scale = rest.get("scaling") or query.shape[-1] ** -0.5
    mixed = attend_cache(query[:, :, 0], key, value, bias, scale)
    return mixed.view(len(query), 1, query.shape[1], -1), None


def waits_for(device: torch.device) -> bool:
    """Whether conversations look at every token: a CPU has nothing to do meanwhile."""
    return device.type == "cpu"


@dataclass(frozen=True)
class _Answered(Generic[T]):
    """The end of conversations that the first process holds."""

    answer: T


@dataclass(frozen=True)
class _Failed:
    """The error that ended them, as text."""

    text: str


class TorchTurns:
    """`Turns` of a network of ours.

    Processes that divide the network have the same rows, and sample the same tokens: before each
    step the first of them tells the others what it was asked since the one before.
    """

    def __init__(
        self, network: LeanNetwork, sampler: TurnSampler, num_rows: int, max_rows: int
    ) -> None:
        self._sampler = sampler
        self._network = network
        self._waits = waits_for(network.device)
        self._most, longest = min(num_rows, max_rows), sampler.longest_text + 2
        if network.device.type == "cuda":
            fit = rows_in_memory(network.backbone, network.device, longest, self._most)
            self._most = network.agreed(fit)
        self._batch = (
            Batch(network, sampler, self._most)
            if self._waits
            else TurnBatch(network, sampler, self._most, longest)
        )
        self._num_to_come = num_rows
        self._waiting: deque[TurnRequest] = deque()
        self._slots: dict[int, int] = {}
        self._held: dict[int, list[int]] = {}
        # Turns asked for and rows released since the last step, in their order.
        self._events: list[TurnRequest | int] = []
        self._in_step = False
        # Tokens of texts that were computed, and that were not because the row held them.
        self.num_read = self.num_reused = 0

    @property
    def num_open(self) -> int:
        # Without conversations that wait until another is released.
        new = sum(request.row not in self._held for request in self._waiting)
        fitting = min(new, self._most - len(self._slots))
        return self._batch.num_live + len(self._waiting) - new + fitting

    def ask(self, request: TurnRequest) -> None:
        self._events.append(request)
        self._waiting.append(request)

    def step(self) -> list[Turn]:
        self._in_step = True
        self._network.from_first(self._events)
        self._events = []
        turns = self._step()
        self._in_step = False
        return turns

    def held(self, hold: Callable[[], T]) -> T:
        """See `GenerationEngine.held`."""
        network = self._network
        if network.is_first:
            try:
                answer = hold()
            except BaseException as error:
                # In the middle of a step the others wait for something else, or fail as well.
                if not self._in_step:
                    ours = isinstance(error, PenstockError)
                    network.from_first(_Failed(str(error) if ours else traceback.format_exc()))
                raise
            return network.from_first(_Answered(answer)).answer
        nothing: Any = None
        while not isinstance(told := network.from_first(nothing), _Answered | _Failed):
            for event in told:
                if isinstance(event, int):
                    self._let_go(event)
                else:
                    self._waiting.append(event)
            self._step()
        if isinstance(told, _Failed):
            raise WorkerError(told.text)
        return told.answer

    @torch.no_grad()
    def _step(self) -> list[Turn]:
        batch, slots = self._batch, self._enter()
        if isinstance(batch, TurnBatch):
            ended = batch.first_tokens(slots).tolist() if len(slots) else []
            if not ended and batch.num_live:
                ended = batch.advance().tolist()
            self._shrink()
            return [self._ended(row) for row in ended]
        sampled, live = self._sampler.sample(batch.logits, batch.row, batch.live)
        ended = batch.row[batch.live & ~live].tolist()
        if ended:
            batch.end(live)
        turns = [self._ended(row) for row in sorted(ended)]
        if batch.num_live:
            keep = self._shrink()
            batch.step(sampled if keep is None else sampled[keep])
        return turns

    def _shrink(self) -> Tensor | None:
        keep = None if self._num_to_come else self._batch.shrink()
        if keep is not None:
            place = {slot: new for new, slot in enumerate(keep.tolist())}
            self._slots = {row: place[slot] for row, slot in self._slots.items()}
        return keep

    def release(self, row: int) -> None:
        self._events.append(row)
        self._let_go(row)

    def _let_go(self, row: int) -> None:
        self._held.pop(row, None)
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._batch.hold(slot, held=False)

    def close(self) -> None:
        """See `Turns.close`: it holds nothing but memory."""

    def _enter(self) -> Tensor:
        """Begin turns that wait; the rows of the batch that texts were computed for, i64[n]."""
        new: list[TurnRequest] = []
        for request in [*self._waiting]:
            held = self._held.get(request.row)
            if held is None and len(self._slots) + len(new) >= self._most:
                continue
            self._waiting.remove(request)
            self._sampler.begin(request)
            self._num_to_come -= held is None
            if held is None or not self._goes_on(request, held):
                self._let_go(request.row)
                new.append(request)
        if not new:
            return torch.zeros(0, dtype=torch.int64)
        rows = torch.tensor(sorted(request.row for request in new))
        slots = self._batch.enter(rows)
        self._slots |= dict(zip(rows.tolist(), slots.tolist(), strict=True))
        for request in new:
            self._batch.hold(self._slots[request.row], held=True)
            self._held[request.row] = [*request.text]
            self.num_read += len(request.text)
        return slots

    def _goes_on(self, request: TurnRequest, held: list[int]) -> bool:
        """Whether a row can go on from what it holds; if so, it reads the rest."""
        position = self._batch.position(self._slots[request.row])
        known = sum(1 for _ in takewhile(bool, map(eq, request.text, held)))
        shown = list(request.text[position:])
        if known < position or not shown or len(shown) > position:
            return False
        self._sampler.read(request.row, shown)
        self._batch.resume(self._slots[request.row], len(request.text) + request.max_new_tokens)
        self._held[request.row] = [*request.text]
        self.num_reused += position
        self.num_read += len(shown)
        return True

    def _ended(self, row: int) -> Turn:
        self._sampler.open[row] = False
        turn = self._sampler.turn(row)
        self._held[row] += turn.token.tolist()
        return turn


class TorchGenerator(GenerationEngine):
    """Samples from a network's own weights."""

    name = "the torch engine's generator"
    shares_turns = True

    def __init__(
        self,
        network: TorchNetwork,
        end_ids: Sequence[int],
        max_rows: int,
        tokenizer: TokenizerSpec | None = None,
        num_words: int | None = None,
    ) -> None:
        self.network = network
        self._end_ids = end_ids
        self._max_rows = max_rows
        self._tokenizer = tokenizer
        self._host_copy: HostCopy | None = None
        self._kept = KeptBatch()
        module: Any = network.module
        self._module = module
        self.shapes = {param.name: torch.Size(param.shape) for param in network.layout.params}
        # They lie where each token reads them; but processes would take them at different tokens.
        self.takes_weights = not network.is_divided
        self.dtype = network.layout.dtype
        self.num_positions: int | None = getattr(module.config, "max_position_embeddings", None)
        self.vocab_size = network.vocab_size
        self._num_words = min(num_words or self.vocab_size, self.vocab_size)

    @override
    def check(self, sampling: Sampling) -> None:
        check_stop(sampling, has_tokenizer=self._tokenizer is not None)

    @torch.no_grad()  # only while it computes, not while its caller does
    def stream(
        self,
        prompt: Tensor,
        streams: SampleStreams,
        sampling: Sampling,
        begun: BegunRows | None = None,
    ) -> Iterator[EndedRows]:
        """Sample responses; what this call adds nothing to comes first."""
        device = self.network.device
        sampler = ResponseSampler(
            prompt,
            streams.uniforms(sampling.max_new_tokens).to(device),
            sampling,
            end_ids=self._end_ids,
            vocab_size=self._num_words,
            tokenizer=self._tokenizer,
            begun=begun,
        )
        given = torch.nonzero(~sampler.open)[:, 0]
        if len(given):
            yield sampler.end(given)
        try:
            for rows in self._decode(sampler):
                yield sampler.end(rows)
        finally:
            give_back_freed(device)

    def _decode(self, sampler: ResponseSampler) -> Iterator[Tensor]:
        if isinstance(self.network, LeanNetwork):
            if self.network.device.type == "cpu":
                return decode(self.network, sampler, self._max_rows)
            return decode_on_device(self.network, sampler, self._max_rows, self._kept)
        return decode_plain(self._module, sampler, self._max_rows)

    @override
    def turns(self, sampling: Sampling, num_rows: int) -> TorchTurns:
        if not isinstance(self.network, LeanNetwork):
            raise ConfigError(
                f"conversations need a model that {self.name} decodes itself (Llama, Mistral, "
                f"Qwen2, Qwen3 or SmolLM3), and this is a {type(self._module).__name__}\n    set "
                "rollout=vllm"
            )
        self._kept.give_up()  # before it is counted how many rows have room
        sampler = TurnSampler(
            num_rows,
            sampling,
            end_ids=self._end_ids,
            vocab_size=self._num_words,
            device=self.network.device,
        )
        return TorchTurns(self.network, sampler, num_rows, self._max_rows)

    @override
    def held(self, turns: Turns, hold: Callable[[], T]) -> T:
        assert isinstance(turns, TorchTurns)
        return turns.held(hold)

    @override
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self.network.load(tensors)

    @override
    def sleep(self) -> int:
        if self._host_copy is not None:
            return 0
        self._host_copy = HostCopy(self.network.held_tensors())
        return self._host_copy.num_bytes

    @override
    def wake(self) -> None:
        kept, self._host_copy = self._host_copy, None
        if kept is not None:
            kept.restore()
