"""Layouts and devices of every call, against looking at all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
from penstock.planner.cost.calibration import GPU_DEFAULTS
from penstock.planner.cost.engine_model import ANY
from penstock.planner.cost.memory import (
    Parts,
    resident_parts,
    rows_at_once,
    transient_parts,
    weight_bytes,
)
from penstock.planner.cost.time_model import TimeModel, move_time
from penstock.planner.inputs.calls import Call, Lengths
from penstock.planner.inputs.cluster import ClusterSpec, Mesh
from penstock.planner.inputs.layout import Layout, legal_layouts
from penstock.planner.search import option_table
from penstock.planner.search.option_table import ModelTable, call_nodes
from penstock.planner.search.options import Option
from penstock.planner.search.search import search

from ..shapes import llama, model_of
from .brute_force import all_plans
from .tables import cluster_of, device

TIMES = TimeModel(GPU_DEFAULTS, ANY)
Way = tuple[float, int, Layout]
"""Seconds, bytes while it runs, layout."""


@dataclass(frozen=True)
class EveryOption:
    """Every choice of a layout for every call, one by one."""

    calls: Sequence[Call]
    lagged: bool

    def options(
        self, call_group: str, mesh: Mesh, *, beside: tuple[str, ...] = (), lagged: bool = False
    ) -> Sequence[Option]:
        calls = [c for name in (call_group, *beside) for c in self.calls if c.call_group == name]
        home, *readers = calls
        found: list[Option] = []
        for layout in self._layouts(home, mesh):
            held = resident_parts(_frozen(home), layout).total
            ways = [list(self._home(home, layout, mesh))]
            ways += [list(self._reads(call, layout, mesh)) for call in readers]
            for chosen in product(*ways):
                named = list(zip((c.name for c in calls), chosen, strict=True))
                found.append(
                    Option(
                        {name: seconds for name, (seconds, _, _) in named},
                        held,
                        {name: size for name, (_, size, _) in named},
                        {name: used for name, (_, _, used) in named},
                    )
                )
        return [option for option in found if option.least_bytes <= mesh.memory_bytes]

    def _layouts(self, call: Call, mesh: Mesh) -> Iterator[Layout]:
        trains = call.kind == "train"
        for size in legal_layouts(call.model, mesh.num_devices, node_size=mesh.node_size):
            cut = size.tp > 1 and call.kind != "generate"
            for zero in (1, 3) if trains and size.dp > 1 else (0,):
                for again in (False, True) if trains else (False,):
                    changes = {"sequence_parallel": cut, "zero": zero, "checkpointing": again}
                    yield size.model_copy(update=changes)

    def _home(self, call: Call, layout: Layout, mesh: Mesh) -> Iterator[Way]:
        moved = 1.0 if call.trained and call.kind != "train" else 0.0
        if call.kind == "generate":
            yield from _generations(call, layout, mesh, moved, borrows=False)
        else:
            yield from _computed(_frozen(call), layout, mesh, moved, held=0)

    def _reads(self, call: Call, home: Layout, mesh: Mesh) -> Iterator[Way]:
        if call.kind == "forward":
            yield from _computed(call, home, mesh, 0.0, held=0)
        for layout in self._layouts(call, mesh):
            if self.lagged and call.kind == "forward":
                return
            there = min(1 / home.tp, 1 / layout.tp) * min(1 / home.pp, 1 / layout.pp)
            there /= home.dp if home.zero == 3 else 1
            lacks = 1.0 if self.lagged else 1.0 - there * layout.tp * layout.pp
            if call.kind == "generate":
                yield from _generations(call, layout, mesh, lacks, borrows=True)
            else:
                held = weight_bytes(call.model, call.head, layout)
                yield from _computed(_frozen(call), layout, mesh, lacks, held=held)


def _frozen(call: Call) -> Call:
    return replace(call, trained=False) if call.kind == "forward" else call


def _moved_s(call: Call, layout: Layout, mesh: Mesh, lacks: float) -> float:
    size = lacks * call.model.sent_bytes(call.head) / (layout.tp * layout.pp)
    return move_time(size, mesh, GPU_DEFAULTS) if lacks > 1e-6 else 0.0


def _computed(call: Call, layout: Layout, mesh: Mesh, lacks: float, held: int) -> Iterator[Way]:
    rows = call.num_sequences * call.passes // call.updates // layout.dp
    for size in (1, 2, 4):
        if size == 1 or size <= rows:
            used = layout.model_copy(update={"micro_batch": size})
            seconds = TIMES.call_time(call, used, mesh).total_s
            adds = transient_parts(call, used).plus(Parts(weights=held)).total
            yield seconds + _moved_s(call, layout, mesh, lacks), adds, used


def _generations(
    call: Call, layout: Layout, mesh: Mesh, lacks: float, *, borrows: bool
) -> Iterator[Way]:
    seen: set[int] = set()
    for waves in (1, 2, 4, 8):
        rows = -(-rows_at_once(call, layout) // waves)
        if rows in seen:
            return
        seen.add(rows)
        room = (rows + 0.5) * TIMES.kv_bytes_per_row(call, layout) if waves > 1 else None
        seconds = TIMES.call_time(call, layout, mesh, kv_bytes=room).total_s
        adds = transient_parts(call, layout, borrows=borrows, rows=rows).total
        yield seconds + _moved_s(call, layout, mesh, lacks), adds, layout


SMALL = model_of("small", 512, 2, 2, 2, 1024)


def random_step(rng: random.Random) -> tuple[list[Call], ClusterSpec, int]:
    """A trained role with one or two readers, perhaps a frozen one, on one to four devices."""
    rows = rng.choice([2, 4])
    lengths = Lengths.constant(rng.choice([64, 2048])), Lengths.constant(rng.choice([8, 512]))

    def call(role: str, kind: str, trained: bool, after: tuple[str, ...] = ()) -> Call:
        name = f"{role}.{kind}"
        return Call(name, role, kind, SMALL, "vocabulary", trained, rows, *lengths, after=after)  # type: ignore[arg-type]

    generates = rng.random() < 0.7
    calls = [call("actor", "generate", True)] if generates else []
    first = tuple(one.name for one in calls)
    if not generates or rng.random() < 0.6:
        calls.append(call("actor", "forward", True, first))
    if rng.random() < 0.5:
        calls.append(call("ref", "forward", False, first))
    calls.append(call("actor", "train", True, tuple(one.name for one in calls)))
    nodes, size = rng.choice([(1, 2), (1, 4), (2, 1), (1, 3), (2, 2)])
    memory = int(rng.choice([0.7, 1.0, 1.5, 4.0]) * 10**9)
    return calls, cluster_of((nodes, size, device("a", memory))), rng.choice([0, 0, 1])


@pytest.mark.parametrize(
    "seed",
    [
        *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(3)],
        *[pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 40)],
    ],
)
def test_the_search_equals_every_layout_and_device_of_every_call(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(option_table, "_SLACK", 0.0)
    monkeypatch.setattr(option_table, "_MICRO_BATCHES", (1, 2, 4))

    def stays(*asked: object) -> bool:
        return False

    monkeypatch.setattr(ModelTable, "_may_offload", stays)
    calls, cluster, max_lag = random_step(random.Random(seed))
    nodes = call_nodes(calls)
    plans = all_plans(nodes, EveryOption(calls, max_lag > 0), cluster, max_lag)
    if not plans:
        pytest.skip("nothing fits")
    found = search(nodes, ModelTable(calls, GPU_DEFAULTS), cluster, max_lag=max_lag)
    # Norms are whole on every rank, which the shares here leave out.
    assert found.step_time_s == pytest.approx(plans[0].step_time_s, rel=1e-6)
    assert found.gap == 0.0


def test_a_call_stays_where_its_weights_are_unless_another_layout_is_worth_the_move() -> None:
    shape = llama(7)
    lengths = Lengths.constant(64), Lengths.constant(512)
    calls = [
        Call("a.generate", "a", "generate", shape, "vocabulary", True, 64, *lengths),
        Call("a.logprob", "a", "forward", shape, "vocabulary", True, 64, *lengths,
             after=("a.generate",)),
        Call("a.train", "a", "train", shape, "vocabulary", True, 64, *lengths,
             after=("a.logprob",)),
    ]  # fmt: skip
    mesh = Mesh(cluster_of((1, 8, device("a", 80 * 10**9))), (8,))
    table = ModelTable(calls, GPU_DEFAULTS)
    for option in table.options("a", mesh, beside=("a.generate", "a.logprob")):
        _, plans = table.explain("a", mesh, option, beside=("a.generate", "a.logprob"))
        train, reads = plans["a.train"].layout, plans["a.logprob"]
        same = reads.layout == train.model_copy(update={"micro_batch": reads.layout.micro_batch})
        assert same == (reads.move_s == 0.0 and reads.transient.weights == 0) or train.zero == 3
