"""What the tests of transfers share: model shapes, random shardings, and carrying plans out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from penstock.planner.inputs.layout import Layout, legal_layouts
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.resharding.plan_transfer import Move, TransferPlan, window
from penstock.planner.resharding.sharding import Box, Sharding, Slice, StoredParam, rank_of, shard
from penstock.planner.resharding.storage import concatenate, interleave_qkv

from .shapes import model_of

Array = NDArray[np.int64]
UNWRITTEN = -1


TINY = model_of("tiny", 6, 2, 4, 2, 8, head_dim=2, vocab_size=12)


def strided_generation(train: Layout, generate: Layout, devices: Sequence[int]) -> list[int]:
    """Devices in the order of generation ranks, by HybridFlow's grouping (section 5.3).

    Generation tensor-parallel groups consist of training ranks at a stride of `train.tp /
    generate.tp`, and generation pipelines of stages at a stride of `train.pp / generate.pp`; the
    ranks between become data-parallel replicas of each other. So each device generates with what
    it trained.
    """
    tp_stride, pp_stride = train.tp // generate.tp, train.pp // generate.pp

    def place(index: int) -> tuple[int, tuple[int, ...], int]:
        rank = rank_of(index, train)
        replica = (rank.dp, rank.cp, rank.pp % pp_stride, rank.tp % tp_stride)
        return rank.pp // pp_stride, replica, rank.tp // tp_stride

    # Generation ranks run tp fastest, then replicas, then stages.
    return [devices[i] for i in sorted(range(len(devices)), key=place)]


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    """Small models of every kind: grouped queries, biases, tied heads, mixtures."""
    key_heads = draw(st.sampled_from([1, 2, 4]))
    experts = draw(st.sampled_from([0, 0, 2, 4]))
    return ModelShape(
        name="random",
        hidden_size=draw(st.integers(1, 7)),
        num_layers=draw(st.sampled_from([1, 2, 3, 4])),
        num_heads=key_heads * draw(st.sampled_from([1, 2, 3])),
        num_key_heads=key_heads,
        head_dim=draw(st.integers(1, 3)),
        intermediate_size=12,
        vocab_size=24,
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        num_experts=experts,
        experts_per_token=min(experts, 1),
        shared_expert_size=draw(st.sampled_from([0, 12])) if experts else 0,
    )


@st.composite
def shardings(
    draw: st.DrawFn, model: ModelShape, head: str, num_devices: int, cluster_size: int
) -> Sharding:
    """A legal layout of a model on random devices, stored in some engine's way."""
    legal = list(legal_layouts(model, num_devices, node_size=num_devices, max_cp=2))
    layout = draw(st.sampled_from(legal))
    layout = layout.model_copy(update={"zero": draw(st.sampled_from([0, 3]))})
    ids = st.lists(
        st.integers(0, cluster_size - 1), min_size=num_devices, max_size=num_devices, unique=True
    )
    made = shard(model, layout, draw(ids), head="scalar" if head == "scalar" else "vocabulary")
    return store(made, draw(st.sampled_from(STORAGES)), layout, model)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Sharding, Sharding]:
    """One model in two layouts; devices are the same, overlap or are disjoint as it falls."""
    model = draw(models())
    head = draw(st.sampled_from(["vocabulary", "scalar"]))
    sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
    source = draw(shardings(model, head, draw(sizes), 12))
    destination = draw(shardings(model, head, draw(sizes), 12))
    if draw(st.booleans()) and len(source.devices) == len(destination.devices):
        destination = destination.on(source.devices)
    return source, destination


STORAGES = ("separate", "fused", "interleaved", "transposed")


def store(made: Sharding, how: str, layout: Layout, model: ModelShape) -> Sharding:
    """The same slices elsewhere in the engine's tensors."""
    if how == "fused":
        made = concatenate(made, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        return made if model.num_experts else _fuse_gate(made)
    if how == "interleaved" and layout.zero != 3:
        return interleave_qkv(made, model.head_dim)
    return transposed(made, "down_proj") if how == "transposed" else made


def transposed(made: Sharding, word: str) -> Sharding:
    """The matrices whose name contains `word` as [inputs, outputs]."""
    params, patterns = list(made.params), list(made.patterns)
    for i, param in enumerate(params):
        if word in param.name and param.dims == (0, 1):
            pattern = [replace(p, start=p.start[::-1]) for p in patterns[param.pattern]]
            params[i] = replace(param, pattern=len(patterns), dims=(1, 0))
            patterns.append(tuple(pattern))
    return Sharding(made.devices, tuple(params), tuple(patterns), made.dtype)


def _fuse_gate(made: Sharding) -> Sharding:
    return concatenate(made, ("gate_proj", "up_proj"), "gate_up_proj")


def logical_values(sharding: Sharding) -> Mapping[str, Array]:
    """A different number for every element of every parameter."""
    values: dict[str, Array] = {}
    first = 0
    for param in sharding.params:
        size = int(np.prod(param.shape))
        values[param.name] = np.arange(first, first + size).reshape(param.shape)
        first += size
    return values


class Tensors:
    """The tensors of an engine on every device, as a sharding describes them."""

    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding
        shapes: dict[tuple[int, str], list[int]] = {}
        for param, piece in _slices(sharding):
            shape = shapes.setdefault((piece.device, param.tensor), [0] * len(param.dims))
            for i, (dim, start) in enumerate(zip(param.dims, piece.start, strict=True)):
                length = piece.box[dim][1] - piece.box[dim][0]
                shape[i] = max(shape[i], start + length)
        self.values = {key: np.full(shape, UNWRITTEN) for key, shape in shapes.items()}

    def read(self, device: int, tensor: str, box: Box, dims: tuple[int, ...],
             start: tuple[int, ...]) -> Array:  # fmt: skip
        """A box in the order of the logical parameter's dimensions."""
        found = self.values[device, tensor][window(box, dims, start)]
        return found.transpose(np.argsort(dims))

    def write(self, device: int, tensor: str, box: Box, dims: tuple[int, ...],
              start: tuple[int, ...], values: Array) -> None:  # fmt: skip
        """Elements that nobody wrote before."""
        place = window(box, dims, start)
        assert (self.values[device, tensor][place] == UNWRITTEN).all(), "written twice"
        self.values[device, tensor][place] = values.transpose(dims)

    def fill(self, values: Mapping[str, Array]) -> None:
        """Load every slice from logical parameters."""
        for param, piece in _slices(self.sharding):
            part = values[param.name][tuple(slice(*span) for span in piece.box)]
            self.write(piece.device, param.tensor, piece.box, param.dims, piece.start, part)


def _slices(sharding: Sharding) -> list[tuple[StoredParam, Slice]]:
    return [(p, piece) for p in sharding.params for piece in sharding.patterns[p.pattern]]


@dataclass
class Delivery:
    """What carrying out a plan came to, in elements."""

    tensors: Tensors
    sent: Mapping[int, int]
    received: Mapping[int, int]
    most_staged: Mapping[int, int]


def carry_out(plan: TransferPlan, source: Sharding, destination: Sharding) -> Delivery:
    """Do all moves on small tensors, bucket by bucket."""
    before, after = Tensors(source), Tensors(destination)
    before.fill(logical_values(source))
    sent, received = defaultdict[int, int](int), defaultdict[int, int](int)
    most = defaultdict[int, int](int)
    for bucket in range(plan.num_buckets):
        staged = defaultdict[int, int](int)
        packed: set[tuple[int, int, int, Box]] = set()
        for index, move in _moves_of(plan, bucket):
            param = plan.params[index]
            values = before.read(move.source, param.source_tensor, move.box, param.source_dims,
                                 move.source_start)  # fmt: skip
            after.write(move.destination, param.destination_tensor, move.box,
                        param.destination_dims, move.destination_start, values)  # fmt: skip
            if not move.is_copy:
                sent[move.source] += values.size
                received[move.destination] += values.size
                staged[move.destination] += values.size
                key = (move.group, index, move.source, move.box)
                if key not in packed:
                    packed.add(key)
                    staged[move.source] += values.size
        for device, elements in staged.items():
            most[device] = max(most[device], elements)
    return Delivery(after, sent, received, most)


def _moves_of(plan: TransferPlan, bucket: int) -> Iterator[tuple[int, Move]]:
    """Every move of every parameter of a bucket."""
    for move in plan.moves:
        for index in plan.groups[move.group]:
            if plan.params[index].bucket == bucket:
                yield index, move


def lacking(source: Sharding, destination: Sharding) -> Mapping[int, int]:
    """Elements that each device needs and does not hold, counted one by one."""
    have, need = _elements(source), _elements(destination)
    return {where: len(elements - have.get(where, set())) for where, elements in need.items()}


def _elements(sharding: Sharding) -> Mapping[int, set[int]]:
    values = logical_values(sharding)
    held = defaultdict[int, set[int]](set)
    for param, piece in _slices(sharding):
        part = values[param.name][tuple(slice(*span) for span in piece.box)]
        held[piece.device].update(part.ravel().tolist())
    return held
