"""Operands of the formulas of time: a call and a machine as plain numbers, and the answer.

Reading a pydantic model or a property costs more than a formula here, and a search evaluates
hundreds of thousands; so what depends on the call alone or on the mesh alone is worked out once.
"""

from __future__ import annotations

from typing import NamedTuple

from ..inputs.calls import Call, CallKind
from ..inputs.cluster import Mesh
from .calibration import Constants
from .engine_model import ANY, EngineModel, least_shared


class CallTime(NamedTuple):
    """Seconds of one call, by what they are spent on. The parts add up to `total_s`.

    In a forward or train call the parts are those of the busiest rank without waiting, and
    `bubble_s` is the waiting. In a generation `prefill_s` is everything done for the prompts, and
    the other parts are decoding.
    """

    fixed_s: float = 0.0  # dispatch, gathering rows
    prefill_s: float = 0.0  # computing the prompts
    matmul_s: float = 0.0  # products with weights; while decoding mostly reading them
    # scores and weighted sums; while decoding mostly reading the key-value cache
    attention_s: float = 0.0
    # waiting for kernels to be launched, where that takes longer than running them
    launch_s: float = 0.0
    tp_comm_s: float = 0.0  # collectives between tensor-parallel ranks
    cp_comm_s: float = 0.0  # keys and values between context-parallel ranks
    ep_comm_s: float = 0.0  # tokens to their experts and back
    p2p_s: float = 0.0  # handing over between pipeline stages
    bubble_s: float = 0.0  # stages that wait while the pipeline fills and drains
    grad_sync_s: float = 0.0  # summing gradients over the ranks that hold the same weights
    weight_gather_s: float = 0.0  # gathering weights that ZeRO has cut
    optimizer_s: float = 0.0  # the optimizer's step: reading and writing its states

    @property
    def total_s(self) -> float:
        return sum(self)

    def parts(self) -> dict[str, float]:
        named = zip(self._fields, self, strict=True)
        return {name.removesuffix("_s"): seconds for name, seconds in named if seconds}


class MachineRates(NamedTuple):
    """A mesh with constants and a dtype, as numbers: what a program reaches."""

    flops_per_s: float  # matrix products of one device
    attention_flops_per_s: float  # attention of one device
    memory_bytes_per_s: float  # device memory
    read_bytes_per_s: float  # device memory, of what products read: weights, keys and values
    host_bytes_per_s: float  # to and from host memory, per device
    launch_s: float  # kernels of one layer's forward pass
    call_s: float  # any call
    update_s: float  # any optimizer step
    micro_batch_s: float  # the host, of a micro-batch beside its layers
    generate_s: float  # any generation
    # a layer's kernels in a replayed decode step, and those around the layers; None if there are
    # no graphs
    replay_s: float | None
    sample_s: float
    backward: float  # passes of a backward pass
    # whether kernels are launched, and weights read, while others compute; a CPU does one after the
    # other
    overlaps: bool
    links: Links

    @staticmethod
    def of(mesh: Mesh, constants: Constants, dtype: str) -> MachineRates:
        peak, attention = mesh.flops(dtype), constants.attention_efficiency
        memory, read = constants.memory_efficiency, constants.read_efficiency
        return MachineRates(
            peak * constants.matmul_efficiency,
            peak * (constants.matmul_efficiency if attention is None else attention),
            mesh.memory_bytes_per_s * memory,
            mesh.memory_bytes_per_s * (memory if read is None else read),
            mesh.host_bytes_per_s,
            constants.launch_s,
            constants.call_s,
            constants.update_s,
            constants.micro_batch_s,
            constants.generate_s,
            constants.replay_s,
            constants.sample_s,
            constants.backward,
            not mesh.is_cpu,
            links_of(mesh, constants),
        )

    def both_s(self, compute_s: float, read_s: float) -> float:
        return max(compute_s, read_s) if self.overlaps else compute_s + read_s

    def product_s(self, flops: float, read_bytes: float) -> float:
        return self.both_s(flops / self.flops_per_s, read_bytes / self.read_bytes_per_s)

    def waits_s(self, launch_s: float, busy_s: float) -> float:
        return max(launch_s - busy_s, 0.0) if self.overlaps else launch_s


class Work(NamedTuple):
    """A call as numbers. Sizes of layers are those of one layer on one device without any split."""

    kind: CallKind
    rows: int
    samples: int  # rows that share a prompt
    passes: int
    updates: int
    hidden_size: int
    num_layers: int
    key_heads: int
    num_experts: int
    experts_per_token: int
    dtype_bytes: int
    tokens: float  # mean length of a row
    tokens_square: float  # mean square of the length of a row
    reads: float  # tokens of a row that the head computes in forward and train calls
    head_products: tuple[int, int]  # of `EngineModel`
    draws_minibatches: bool  # whether ranks have unequal numbers of an update's rows
    prompt: float  # mean length of a prompt, or of what is computed before the first new token
    prompt_square: float
    # `(steps, share of rows still running, mean context in these steps)`; the first token comes
    # from the prefill, so the steps are one fewer than the tokens
    decode: tuple[tuple[float, float, float], ...]
    layer_flops: float  # operations of one token's forward pass through the weights of a layer
    # operations of a layer's attention per squared length (half of all pairs are causal)
    square_flops: float
    # operations of a layer's attention for a new token, per token of its context
    context_flops: float
    dense_layer_params: int  # attention, router and norms; of a dense model the feed-forward too
    expert_layer_params: int  # experts of a layer; 0 for a dense model
    adapter_params: int  # weights that are trained instead of all others; 0 if those are
    embedding_params: int
    head_params: int  # weights a head has of its own
    head_columns: int  # outputs of the head: the vocabulary, or 1
    kv_layer_bytes: int  # key-value cache of one token in one layer and one key head

    @staticmethod
    def of(call: Call, engine: EngineModel = ANY, *, on_cpu: bool = True) -> Work:
        share = _prompts_per_row(call, on_cpu=on_cpu) if engine.shares_prompts else 1.0
        model, head = call.model, call.head
        mixture = model.num_experts > 0
        experts = model.expert_params * model.num_experts
        attended = model.num_heads * model.head_dim
        prompt, response = call.prompt, call.response
        prefilled = _prefilled(call)
        return Work(
            kind=call.kind,
            rows=call.rows_at_once,
            samples=call.samples_per_prompt,
            passes=call.passes,
            updates=call.updates,
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            key_heads=model.num_key_heads,
            num_experts=model.num_experts,
            experts_per_token=model.experts_per_token,
            dtype_bytes=model.dtype_bytes,
            tokens=share * prompt.mean + response.mean,
            tokens_square=share * prompt.mean_square
            + 2 * prompt.mean * response.mean
            + response.mean_square,
            reads=response.mean + (0.0 if engine.reads_responses else share * prompt.mean),
            head_products=engine.head_products,
            draws_minibatches=engine.draws_minibatches,
            prompt=prefilled[0],
            prompt_square=prefilled[1],
            decode=_decode_bins(call),
            layer_flops=2.0 * model.active_layer_params,
            square_flops=2.0 * attended,
            context_flops=4.0 * attended,
            dense_layer_params=model.layer_params - (experts if mixture else 0),
            expert_layer_params=experts,
            adapter_params=model.adapter_params,
            embedding_params=model.embedding_params,
            head_params=model.head_params(head),
            head_columns=model.vocab_size if head == "vocabulary" else 1,
            kv_layer_bytes=2 * model.head_dim * model.dtype_bytes,
        )


def _prompts_per_row(call: Call, *, on_cpu: bool) -> float:
    # Distinct prompts of a minibatch per row of it, if rows are sampled at random.
    # Of a prompt with n rows, of which each is sampled with probability p, some row is sampled with
    # probability 1 - (1 - p)^n. Prompts are shared only where that saves enough of the tokens.
    rows = call.samples_per_prompt
    if call.kind == "generate" or rows == 1:
        return 1.0
    sampled = min(1.0, call.passes / call.updates)
    share = (1.0 - (1.0 - sampled) ** rows) / (rows * sampled)
    saved = (1.0 - share) * call.prompt.mean
    return share if saved >= least_shared(on_cpu=on_cpu) * call.tokens_mean else 1.0


def _decode_bins(call: Call) -> tuple[tuple[float, float, float], ...]:
    bins: list[tuple[float, float, float]] = []
    at_first = call.stretches[0].rows
    for s in call.stretches:
        begin = max(s.begin, 1)  # the first token comes from the prefill
        if s.end > begin:
            context = call.prompt.mean + s.before + (begin + s.end) / 2
            bins.append((s.end - begin, s.rows / at_first, context))
    return tuple(bins)


def _prefilled(call: Call) -> tuple[float, float]:
    # Tokens of a prompt, and their square; a row that goes on counts with what it has.
    # Both are per `samples_per_prompt` of the rows that run, so that all rows together have what a
    # generation computes before the first new token.
    prompt = call.prompt
    if not call.begun_before:
        return prompt.mean, prompt.mean_square
    tokens, square = prompt.mean, prompt.mean_square
    for begun in call.begun_before:
        rows = call.samples_per_prompt * begun.rows
        tokens += rows * (prompt.mean + begun.tokens)
        square += rows * (prompt.mean_square + 2 * prompt.mean * begun.tokens + begun.tokens**2)
    return tokens / call.stretches[0].rows, square / call.stretches[0].rows


# A hop costs a latency and bytes over bandwidth (alpha-beta). A group that lies in one node is one
# ring; a group over several nodes works in two levels, a ring inside each node and rings between
# nodes in which every device carries its share, so that a node's bytes cross the network once and
# all of its ports are busy. Hockney, "The communication challenge for MPP", 1994; ring volumes as
# in Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
# 2005.
class Links(NamedTuple):
    """Rates of a mesh's links in a program. `stride` below is the distance of neighboring ranks.

    Ranks are devices 0, stride, 2 stride, ... of a block, so a node holds `node_size // stride` of
    them.
    """

    node_size: int  # devices that share a node
    within_bytes_per_s: float  # inside a node, per device and direction, as reached
    between_bytes_per_s: float  # between nodes, per device and direction, as reached
    within_hop_s: float  # latency of a hop inside a node
    between_hop_s: float  # latency of a hop between nodes
    within_stage_s: float  # latency of a hand-over between pipeline stages inside a node
    between_stage_s: float  # latency of a hand-over between pipeline stages on different nodes


def links_of(mesh: Mesh, constants: Constants) -> Links:
    within, between = mesh.within, mesh.between
    return Links(
        mesh.node_size,
        within.bytes_per_s * constants.network_efficiency,
        between.bytes_per_s * constants.network_efficiency,
        within.latency_s + constants.hop_s,
        between.latency_s + constants.hop_s,
        within.latency_s + constants.stage_s,
        between.latency_s + constants.stage_s,
    )


def all_gather_s(links: Links, num_bytes: float, ranks: int, stride: int = 1) -> float:
    """Every rank has 1/ranks of `num_bytes` and ends with all of them."""
    if ranks == 1:
        return 0.0
    local = min(max(links.node_size // stride, 1), ranks)
    time = (local - 1) * (num_bytes / local / links.within_bytes_per_s + links.within_hop_s)
    if local < ranks:
        nodes = -(-ranks // local)
        share = num_bytes / local / nodes
        time += (nodes - 1) * (share / links.between_bytes_per_s + links.between_hop_s)
    return time


def all_reduce_s(links: Links, num_bytes: float, ranks: int, stride: int = 1) -> float:
    """Every rank has `num_bytes` and ends with their sum: a reduce-scatter and a gather."""
    return 2.0 * all_gather_s(links, num_bytes, ranks, stride)


def all_to_all_s(links: Links, num_bytes: float, ranks: int, stride: int = 1) -> float:
    """Every rank sends `num_bytes` in equal parts, one to each rank, itself included."""
    if ranks == 1:
        return 0.0
    local = min(max(links.node_size // stride, 1), ranks)
    part = num_bytes / ranks
    time = (local - 1) * (part / links.within_bytes_per_s + links.within_hop_s)
    return time + (ranks - local) * (part / links.between_bytes_per_s + links.between_hop_s)


def point_to_point_s(links: Links, num_bytes: float, block: int) -> float:
    """Hand `num_bytes` to the next pipeline stage, all stages together being `block` devices.

    Stages move in step, so one boundary between nodes sets the pace for all.
    """
    if block <= links.node_size:
        return num_bytes / links.within_bytes_per_s + links.within_stage_s
    return num_bytes / links.between_bytes_per_s + links.between_stage_s
