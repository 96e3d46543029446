"""Time of a call in a layout on a mesh, and of moving weights.

Generation is prompts once, then one token after another. A decode step reads every weight and every
row's keys and values, waits for the launches of its kernels where they take longer (on a CPU it
waits for all of them, and in a replayed graph each kernel for the one before), and adds the latency
of two all-reduces per layer. With a pipeline the rows go round in as many groups as there are
stages, and a token takes a full round. Rows that do not fit into the key-value cache at once run in
waves.
"""

from __future__ import annotations

from ...dataflow.errors import PlanError
from ..inputs.calls import Call
from ..inputs.cluster import Mesh
from ..inputs.layout import Layout
from .calibration import Constants
from .engine_model import ANY, EngineModel
from .time_parts import (
    CallTime,
    MachineRates,
    Work,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    links_of,
)
from .time_train import (
    forward_time,
    gather_s,
    hand_over_s,
    head_matmul_s,
    layer_time,
    pipeline_time,
    train_time,
)


def kv_bytes_per_token(work: Work, layout: Layout) -> float:
    """Key-value cache of one token on one device. Key heads are cut over tp, never below one."""
    layers = -(-work.num_layers // layout.pp)
    return layers * max(work.key_heads / layout.tp, 1.0) * work.kv_layer_bytes / layout.cp


def kv_bytes_per_row(work: Work, layout: Layout) -> float:
    return kv_bytes_per_token(work, layout) * work.tokens


def rows_at_once(work: Work, layout: Layout, kv_bytes: float) -> int:
    """Rows whose keys and values fit on one data-parallel rank, at their mean final length."""
    rows = kv_bytes / kv_bytes_per_row(work, layout)
    return int(rows * (1.0 + 1e-9))  # a budget worked out for n rows must hold n


def generate_time(
    work: Work, layout: Layout, machine: MachineRates, kv_bytes: float | None = None
) -> CallTime:
    """Time of generating all rows of a call, in as many waves as its key-value cache demands.

    Raises:
        PlanError: If `kv_bytes`, the cache's bytes per device, hold not even one row.
    """
    rows = -(-work.rows // layout.dp)
    waves = 1
    if kv_bytes is not None:
        at_once = rows_at_once(work, layout, kv_bytes)
        if at_once < 1:
            row = kv_bytes_per_row(work, layout)
            raise PlanError(
                f"a key-value cache of {kv_bytes:.3g} bytes per device holds no row of "
                f"{work.tokens:.0f} tokens, which needs {row:.3g}; cut the heads or layers over "
                "more devices, or leave more memory to the cache"
            )
        waves = -(-rows // at_once)
    prompts = max(-(-rows // work.samples) / waves, 1.0)
    prefill = _prefill_s(work, layout, machine, prompts)
    parts = _decode(work, layout, machine, rows / waves)
    return CallTime(
        fixed_s=machine.call_s + machine.generate_s,
        prefill_s=waves * prefill,
        matmul_s=waves * parts[0],
        attention_s=waves * parts[1],
        launch_s=waves * parts[2],
        tp_comm_s=waves * parts[3],
        cp_comm_s=waves * parts[4],
        ep_comm_s=waves * parts[5],
        p2p_s=waves * parts[6],
        weight_gather_s=waves * parts[7],
    )


def _prefill_s(work: Work, layout: Layout, machine: MachineRates, prompts: float) -> float:
    groups = min(float(layout.pp), prompts)
    size = prompts / groups
    tokens = size * work.prompt / layout.cp
    squares = size * work.prompt_square / layout.cp
    layers = -(-work.num_layers // layout.pp)
    stage = layers * sum(layer_time(work, layout, machine, tokens, squares))
    stage += hand_over_s(work, layout, machine, tokens)
    head = head_matmul_s(work, layout, machine, size * work.samples)
    head += machine.waits_s(machine.launch_s, head)
    gather = gather_s(work, layout, machine) if layout.zero == 3 else 0.0
    return (groups + layout.pp - 1) * stage + groups * head + gather


def _decode(work: Work, layout: Layout, machine: MachineRates, rows: float) -> list[float]:
    sums = [0.0] * 8
    for steps, share, context in work.decode:
        running = max(rows * share, 1.0)
        groups = min(float(layout.pp), running)
        size = running / groups
        stage = _stage(work, layout, machine, size, context)
        head = _head(work, layout, machine, size)
        # A token goes round all stages; the last one has the head too, and is the slowest.
        for part in range(8):
            sums[part] += steps * (layout.pp * stage[part] + groups * head[part])
    return sums


def _stage(
    work: Work, layout: Layout, machine: MachineRates, rows: float, context: float
) -> tuple[float, ...]:
    tp, cp, ep, links = layout.tp, layout.cp, layout.ep, machine.links
    layers = -(-work.num_layers // layout.pp)
    experts = work.expert_layer_params / ep
    if experts:
        missed = (1.0 - work.experts_per_token / work.num_experts) ** (rows * ep)
        experts *= 1.0 - missed
    read = (work.dense_layer_params + experts) * work.dtype_bytes / tp
    matmul = layers * machine.product_s(rows * work.layer_flops / tp, read)
    attended = rows * context / cp
    attention = machine.both_s(
        attended * kv_bytes_per_token(work, layout) * cp / machine.read_bytes_per_s,
        layers * attended * work.context_flops / tp / machine.attention_flops_per_s,
    )
    launch = machine.waits_s(layers * machine.launch_s, matmul + attention)
    if machine.replay_s is not None:
        launch = layers * machine.replay_s
    sent = rows * work.hidden_size * work.dtype_bytes
    tp_comm = layers * 2.0 * all_reduce_s(links, sent, tp) if tp > 1 else 0.0
    cp_comm = layers * all_reduce_s(links, sent / tp, cp, tp) if cp > 1 else 0.0
    ep_comm = 0.0
    if ep > 1:
        routed = sent * work.experts_per_token
        ep_comm = layers * 2.0 * all_to_all_s(links, routed, ep, tp * cp)
    p2p = hand_over_s(work, layout, machine, rows)
    gather = gather_s(work, layout, machine) if layout.zero == 3 else 0.0
    return matmul, attention, launch, tp_comm, cp_comm, ep_comm, p2p, gather


def _head(work: Work, layout: Layout, machine: MachineRates, rows: float) -> tuple[float, ...]:
    matmul = head_matmul_s(work, layout, machine, rows)
    launch = machine.waits_s(machine.launch_s, matmul)
    if machine.replay_s is not None:
        launch = machine.sample_s
    tp_comm = 0.0
    if layout.tp > 1:
        embedded = rows * work.hidden_size * work.dtype_bytes
        logits = rows * work.head_columns * work.dtype_bytes
        tp_comm = all_reduce_s(machine.links, embedded, layout.tp)
        tp_comm += all_gather_s(machine.links, logits, layout.tp)
    return matmul, 0.0, launch, tp_comm, 0.0, 0.0, 0.0, 0.0


class TimeModel:
    """Predicts calls; keeps the numbers of each call and each mesh it has seen.

    Calls and meshes are told apart by identity, so build each once and pass the same object. Ask
    for everything on a mesh before another one: what layouts have in common is kept for one mesh.
    """

    def __init__(self, constants: Constants, engine: EngineModel = ANY) -> None:
        self.constants = constants
        self._engine = engine
        self._works: dict[tuple[int, bool], tuple[Call, Work]] = {}
        self._same: dict[Work, Work] = {}
        # Of the mesh that was asked for last.
        self._mesh: Mesh | None = None
        self._here: dict[int, tuple[Work, MachineRates]] = {}
        self._kept: dict[tuple[float | None, ...], CallTime] = {}

    def call_time(
        self, call: Call, layout: Layout, mesh: Mesh, *, kv_bytes: float | None = None
    ) -> CallTime:
        """Predicted time of one call in a layout on a mesh, by part, with measured corrections."""
        if self._mesh is not mesh:
            self._mesh = mesh
            self._here.clear()
            self._kept.clear()
        known = self._here.get(id(call))
        if known is None:
            machine = MachineRates.of(mesh, self.constants, call.model.dtype)
            known = self._here[id(call)] = (self._work(call, on_cpu=mesh.is_cpu), machine)
        work, machine = known
        # A forward pass and a generation are the same whatever training has chosen, but for
        # gathered weights; a pipeline of training is the same for every ZeRO stage.
        train = work.kind == "train"
        key = (id(work), layout.tp, layout.pp, layout.dp, layout.cp, layout.ep,
               layout.sequence_parallel, layout.micro_batch, kv_bytes,
               layout.checkpointing if train else max(layout.zero, 1))  # fmt: skip
        found = self._kept.get(key)
        if found is None:
            if work.kind == "generate":
                found = generate_time(work, layout, machine, kv_bytes)
            else:
                found = pipeline_time(work, layout, machine)
            if work.kind == "forward":
                found = forward_time(work, layout, machine, found)
            self._kept[key] = found
        found = train_time(work, layout, machine, found) if train else found
        factor = self.constants.corrections.get(work.kind, 1.0)
        return found if factor == 1.0 else CallTime(*[factor * part for part in found])

    def kv_bytes_per_row(self, call: Call, layout: Layout) -> float:
        return kv_bytes_per_row(self._work(call), layout)

    def tokens_per_row(self, call: Call) -> float:
        """Tokens that a GPU computes of a row on average, where others may share its prompt."""
        return self._work(call, on_cpu=False).tokens

    def _work(self, call: Call, *, on_cpu: bool = True) -> Work:
        known = self._works.get((id(call), on_cpu))
        if known is None:
            work = Work.of(call, self._engine, on_cpu=on_cpu)
            # Calls that differ by name alone share what is kept.
            known = self._works[id(call), on_cpu] = (call, self._same.setdefault(work, work))
        return known[1]


def offload_time(num_bytes: float, mesh: Mesh) -> float:
    """Seconds to move `num_bytes` of each device to its host's memory, or back."""
    return num_bytes / mesh.host_bytes_per_s


def move_time(num_bytes: float, mesh: Mesh, constants: Constants) -> float:
    """Seconds until every device of a mesh has received the weights it lacks."""
    if num_bytes <= 0:
        return 0.0
    links = links_of(mesh, constants)
    if mesh.num_devices <= mesh.node_size:
        return num_bytes / links.within_bytes_per_s + links.within_hop_s
    return num_bytes / links.between_bytes_per_s + links.between_hop_s
