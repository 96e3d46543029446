"""Time of forward and train calls: a roofline, collectives, a pipeline of micro-batches.

A stage's time per micro-batch is that of its layers, their collectives and the hand-over to the
next stage. m micro-batches through p stages take m + p - 1 of these (Narayanan et al., "Efficient
large-scale language model training on GPU clusters using Megatron-LM", 2021, section 2.2); the
backward pass costs `Constants.backward` forward passes, about two, and with checkpointing a forward
pass is done again. A head has three or four products of its own. Nothing
is taken to overlap: neither gathers with computation nor the gradients' sum with the backward pass.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from ..inputs.layout import Layout
from .time_parts import (
    CallTime,
    MachineRates,
    Work,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    point_to_point_s,
)

_GRADIENT_BYTES = 4  # of a gradient: float32, whatever the weights are in


class LayerTime(NamedTuple):
    """Seconds of one layer's forward pass on one rank."""

    matmul: float
    attention: float
    launch: float
    tp_comm: float
    cp_comm: float
    ep_comm: float


class _Passes(NamedTuple):
    # products, attention and launches; of a train call without the backward pass, in which
    # `Machine.backward` of them are done
    compute: float
    collectives: int  # all-reduces of tensor parallelism, all-to-alls of experts
    # gathers of keys and values; the backward pass scatters their gradients, and gathers again if
    # it computes again
    keys: int
    hand_overs: int


_FORWARD = _Passes(compute=1, collectives=1, keys=1, hand_overs=1)
_TRAIN = _Passes(compute=1, collectives=2, keys=2, hand_overs=2)
_TRAIN_AGAIN = _Passes(compute=2, collectives=3, keys=3, hand_overs=2)


def layer_time(
    work: Work, layout: Layout, machine: MachineRates, tokens: float, squares: float
) -> LayerTime:
    """Time of a layer's forward pass over `tokens`; `squares` adds up the squared row lengths."""
    tp, cp, ep, links = layout.tp, layout.cp, layout.ep, machine.links
    read = (work.dense_layer_params + work.expert_layer_params / ep) * work.dtype_bytes / tp
    matmul = machine.product_s(tokens * work.layer_flops / tp, read)
    attention = squares * work.square_flops / tp / machine.attention_flops_per_s
    launch = machine.waits_s(machine.launch_s, matmul + attention)
    sent = tokens * work.hidden_size * work.dtype_bytes
    tp_comm = 2.0 * all_reduce_s(links, sent, tp) if tp > 1 else 0.0
    cp_comm = ep_comm = 0.0
    if cp > 1:
        keys = tokens * max(work.key_heads / tp, 1.0) * work.kv_layer_bytes
        cp_comm = all_gather_s(links, keys * cp, cp, tp)
    if ep > 1:
        # Of every tensor-parallel rank, under sequence parallelism too: each has all tokens then,
        # gathered for the layer, and sends them to its part of their experts.
        ep_comm = 2.0 * all_to_all_s(links, sent * work.experts_per_token, ep, tp * cp)
    return LayerTime(matmul, attention, launch, tp_comm, cp_comm, ep_comm)


def head_matmul_s(work: Work, layout: Layout, machine: MachineRates, tokens: float) -> float:
    weights = work.head_columns * work.hidden_size / layout.tp
    return machine.product_s(2.0 * tokens * weights, weights * work.dtype_bytes)


def hand_over_s(work: Work, layout: Layout, machine: MachineRates, tokens: float) -> float:
    """From one pipeline stage to the next; nothing without a pipeline."""
    if layout.pp == 1:
        return 0.0
    sent = tokens * work.hidden_size * work.dtype_bytes
    if layout.sequence_parallel:
        sent /= layout.tp
    return point_to_point_s(machine.links, sent, layout.num_devices)


def pipeline_time(work: Work, layout: Layout, machine: MachineRates) -> CallTime:
    # It is the same for every ZeRO stage, and whether the model waits in host memory.
    if work.kind == "forward":
        return _pipeline(work, layout, machine, _rows(work, layout), _FORWARD)
    passes = _TRAIN_AGAIN if layout.checkpointing else _TRAIN
    passes = passes._replace(compute=passes.compute + machine.backward)
    update = _pipeline(work, layout, machine, _rows(work, layout), passes)
    return CallTime(*[work.updates * part for part in update])


def forward_time(work: Work, layout: Layout, machine: MachineRates, pipeline: CallTime) -> CallTime:
    gather = 0.0
    if layout.zero >= 2:  # with stage 2 what is gathered is kept until the call ends
        times = 1 if layout.zero == 2 else _num_micro_batches(_rows(work, layout), layout)
        gather = times * gather_s(work, layout, machine)
    return pipeline._replace(fixed_s=machine.call_s, weight_gather_s=gather)


def train_time(work: Work, layout: Layout, machine: MachineRates, pipeline: CallTime) -> CallTime:
    """A train call: all its updates. The arguments are those of `forward_time`."""
    sync, gather = _update_comm(work, layout, machine)
    step = optimizer_bytes(work, layout) / machine.memory_bytes_per_s
    return pipeline._replace(
        fixed_s=machine.call_s + work.updates * machine.update_s,
        grad_sync_s=work.updates * sync,
        weight_gather_s=work.updates * gather,
        optimizer_s=work.updates * step,
    )


def _rows(work: Work, layout: Layout) -> float:
    if work.kind == "forward":
        return -(-work.rows // layout.dp)
    if work.draws_minibatches:
        drawn = work.rows * work.passes / work.updates
        return max(_most_drawn(work.rows, drawn, layout.dp // layout.ep) / layout.ep, 1.0)
    return -(-work.rows * work.passes // (work.updates * layout.dp))


@lru_cache(maxsize=1 << 12)
def _most_drawn(rows: int, drawn: float, ranks: int) -> float:
    # The most that one rank has of rows drawn at random, where all have equally many to draw from.
    # Of `drawn` rows a rank has a hypergeometric number. The largest of several is its mean and as
    # many of its standard deviations as the largest of as many normal numbers is expected to be
    # (Blom, "Statistical estimates and transformed beta-variables", 1958).
    own = rows / ranks
    if ranks == 1 or rows == 1:
        return drawn
    share = 1.0 / ranks
    variance = drawn * share * (1.0 - share) * max(rows - drawn, 0.0) / (rows - 1)
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return min(math.ceil(own), max(drawn * share + largest * math.sqrt(variance), 1.0))


def _num_micro_batches(rows: float, layout: Layout) -> int:
    return math.ceil(rows / layout.micro_batch)


def _pipeline(
    work: Work, layout: Layout, machine: MachineRates, rows: float, passes: _Passes
) -> CallTime:
    size = min(layout.micro_batch, rows)
    count = rows / size
    tokens = size * work.tokens / layout.cp
    layer = layer_time(work, layout, machine, tokens, size * work.tokens_square / layout.cp)
    layers = -(-work.num_layers // layout.pp)
    # Weights below adapters have no gradient: one product less in the backward pass.
    fewer = 1.0 if work.adapter_params and work.kind == "train" else 0.0
    matmul = (passes.compute - fewer) * layers * layer.matmul
    attention = passes.compute * layers * layer.attention
    launch = passes.compute * layers * layer.launch
    tp_comm = passes.collectives * layers * layer.tp_comm
    cp_comm = passes.keys * layers * layer.cp_comm
    ep_comm = passes.collectives * layers * layer.ep_comm
    p2p = passes.hand_overs * hand_over_s(work, layout, machine, tokens)
    stage = matmul + attention + launch + tp_comm + cp_comm + ep_comm + p2p
    head = head_matmul_s(work, layout, machine, size * work.reads / layout.cp)
    head_passes = 1.0 if work.kind == "forward" else work.head_products[machine.overlaps] - fewer
    launch += head_passes * machine.waits_s(machine.launch_s, head)
    if machine.micro_batch_s:  # within a micro-batch the host runs ahead of a GPU
        launches = passes.compute * layers + head_passes
        host = launches * machine.launch_s + machine.micro_batch_s
        launch = max(launch, machine.waits_s(host, matmul + attention + head_passes * head))
    return CallTime(
        matmul_s=count * (matmul + head_passes * head),
        attention_s=count * attention,
        launch_s=count * launch,
        tp_comm_s=count * tp_comm,
        cp_comm_s=count * cp_comm,
        ep_comm_s=count * ep_comm,
        p2p_s=count * p2p,
        bubble_s=(layout.pp - 1) * stage,
    )


def _stage_params(work: Work, layout: Layout) -> tuple[float, float]:
    layers = -(-work.num_layers // layout.pp)
    ends = (work.embedding_params, work.head_params)
    end = sum(ends) if layout.pp == 1 else max(ends)
    dense = (layers * work.dense_layer_params + end) / layout.tp
    return dense, layers * work.expert_layer_params / layout.tp / layout.ep


def _trained_params(work: Work, layout: Layout) -> tuple[float, float]:
    if work.adapter_params:
        return work.adapter_params / layout.pp, 0.0
    return _stage_params(work, layout)


def gather_s(work: Work, layout: Layout, machine: MachineRates) -> float:
    """All weights of a stage, from the ranks that ZeRO has cut them over."""
    return _gathered_s(_stage_params(work, layout), work.dtype_bytes, layout, machine)


def _gathered_s(
    params: tuple[float, float], size: int, layout: Layout, machine: MachineRates
) -> float:
    dense, experts = params
    ranks, block = layout.dp * layout.cp, layout.tp
    time = all_gather_s(machine.links, dense * size, ranks, block)
    if experts:
        ranks //= layout.ep
        time += all_gather_s(machine.links, experts * size, ranks, block * layout.ep)
    return time


def _update_comm(work: Work, layout: Layout, machine: MachineRates) -> tuple[float, float]:
    # `(gradients' sum, weights' gathers)` of one update.
    # Gradients are summed in float32, as they are held (`memory.py`): that is what every engine
    # here does, and Megatron's default for weights of bfloat16. Weights travel in their own dtype.
    # A gather and a reduce-scatter take equally long; an all-reduce is both (Rajbhandari et al.,
    # "ZeRO", 2020, section 7).
    if layout.dp * layout.cp == 1:
        return 0.0, 0.0
    scatter = _gathered_s(_trained_params(work, layout), _GRADIENT_BYTES, layout, machine)
    if layout.zero == 0:
        return 2.0 * scatter, 0.0
    once = gather_s(work, layout, machine)
    if layout.zero == 1:
        return scatter, once
    count = _num_micro_batches(_rows(work, layout), layout)
    if layout.zero == 2:
        return count * scatter, once
    return count * scatter, 2.0 * count * once  # gathered for the forward and the backward pass


def optimizer_bytes(work: Work, layout: Layout) -> float:
    # Of each weight: the float32 master, both moments (read and written) and the gradient (read);
    # the copy in a 16-bit dtype is written too, but of adapters, which have none.
    dense, experts = _trained_params(work, layout)
    if layout.zero:
        ranks = layout.dp * layout.cp
        dense, experts = dense / ranks, experts / (ranks // layout.ep)
    copy = work.dtype_bytes if work.dtype_bytes < 4 and not work.adapter_params else 0
    return (dense + experts) * (3 * 2 * 4 + 4 + copy)
