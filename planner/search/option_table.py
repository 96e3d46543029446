"""The options of real models: each legal layout of a call group on a mesh, its seconds and bytes.

Joins the models of time and memory into what the search chooses between. A call group's calls that
share weights share a layout, because the weights stay where they are; micro-batches are each call's
own.

What is tried for a layout's sizes: the engine's ZeRO stages, activations kept or computed again,
the fastest micro-batch that fits and the one that needs least, and for models whose weights no
other takes, waiting in host memory. Of all that, only what the engine of each call runs
(`EngineModel.why_not`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...dataflow.errors import PlanError
from ..cost.calibration import Constants
from ..cost.engine_model import EngineModel, RoleEngines
from ..cost.memory import Parts, rows_at_once
from ..cost.time_model import TimeModel, move_time, offload_time
from ..cost.time_parts import CallTime
from ..inputs.calls import Call
from ..inputs.cluster import Mesh
from ..inputs.layout import Layout, legal_layouts
from .options import CallNode, Option, dominant

# in how many waves a generation's rows may run, where their cache does not fit at once
_WAVES = (1, 2, 4, 8)
_MICRO_BATCHES = (1, 2, 4, 8, 16)  # sequences per rank that are tried
_SLACK = 0.01  # share of a device's memory by which sizes must differ to matter


class CallPlan(NamedTuple):
    """One call in one layout: what the option is made of, for the plan to show."""

    layout: Layout
    time: CallTime
    move_s: float  # moving weights into the layout, or from host memory
    transient: Parts

    @property
    def duration_s(self) -> float:
        return self.time.total_s + self.move_s


def call_nodes(calls: Sequence[Call]) -> tuple[CallNode, ...]:
    return tuple(
        CallNode(
            name=call.name,
            call_group=call.call_group,
            after=call.after,
            role=call.role,
            reads_older=call.kind == "generate",
            trains=call.kind == "train",
        )
        for call in calls
    )


class ModelTable:
    def __init__(
        self,
        calls: Sequence[Call],
        constants: Constants,
        *,
        engines: RoleEngines = RoleEngines(),
        others: Mapping[str, RoleEngines] | None = None,
        max_cp: int = 1,
        tp_across_nodes: bool = False,
        pins: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self._calls: dict[str, list[Call]] = {}
        for call in calls:
            self._calls.setdefault(call.call_group, []).append(call)
        self._constants = constants
        self._engines, self._others = engines, dict(others or {})
        self._times = {
            own: TimeModel(constants, own)
            for pair in (engines, *self._others.values())
            for own in (pair.train, pair.rollout)
            if own is not None
        }
        self._max_cp = max_cp
        self._tp_across_nodes = tp_across_nodes
        self.pins = pins or {}
        self._known: dict[tuple[str, tuple[int, ...], bool], tuple[Option, ...]] = {}
        self._meshes: dict[tuple[int, ...], Mesh] = {}

    def options(self, call_group: str, mesh: Mesh, *, with_source: bool) -> Sequence[Option]:
        key = (call_group, mesh.counts, with_source)
        if key not in self._known:
            mesh = self._meshes.setdefault(mesh.counts, mesh)
            ways = self._ways(call_group, mesh, with_source)
            found = [_option(held, plans) for held, plans in ways]
            slack = int(_SLACK * mesh.memory_bytes)
            fit = [option for option in found if option.least_bytes <= mesh.memory_bytes]
            options = dominant(fit, slack_bytes=slack)
            # If nothing fits, the smallest: the refusal then says how much is lacking.
            if not options:
                ways = self._ways(call_group, mesh, with_source, fitting=False)
                every = sorted((_option(*way) for way in ways), key=lambda o: o.least_bytes)
                options = tuple(every[:1])
            self._known[key] = options
        return self._known[key]

    def variant(
        self,
        calls: Sequence[Call] | None = None,
        pins: Mapping[str, Mapping[str, object]] | None = None,
    ) -> ModelTable:
        return ModelTable(
            [call for calls in self._calls.values() for call in calls] if calls is None else calls,
            self._constants,
            engines=self._engines,
            others=self._others,
            max_cp=self._max_cp,
            tp_across_nodes=self._tp_across_nodes,
            pins=self.pins if pins is None else pins,
        )

    def explain(
        self, call_group: str, mesh: Mesh, option: Option, *, with_source: bool
    ) -> tuple[Mapping[str, Parts], dict[str, CallPlan]]:
        calls = self._calls[call_group]
        ways = self._ways(call_group, mesh, with_source, only=option.layouts, fitting=False)
        for resident, plans in ways:
            same = all(plans[n].duration_s == s for n, s in option.durations_s.items())
            if same and resident == option.resident_bytes:
                holds = self._holds(calls, plans[calls[0].name].layout, with_source)
                return holds, plans
        raise PlanError(f"'{call_group}' has no such option on this mesh")

    def engine_of(self, call: Call) -> EngineModel:
        return self._others.get(call.role, self._engines).runs(call.kind)

    def _apart(self, call: Call) -> bool:
        return self._others.get(call.role, self._engines).apart(call.kind)

    # --- ways to run a call group

    def _ways(
        self,
        call_group: str,
        mesh: Mesh,
        with_source: bool,
        only: Mapping[str, Layout] | None = None,
        fitting: bool = True,
    ) -> Iterator[tuple[int, dict[str, CallPlan]]]:
        calls = self._calls[call_group]
        for layout in self._layouts(calls, mesh, only):
            held = sum(parts.total for parts in self._holds(calls, layout, with_source).values())
            if layout.offload and only is None:
                # To move a little out and in again costs time, and makes room for nothing.
                resident = self.engine_of(calls[0]).memory.resident(calls[0], layout).total
                pinned = any("offload" in self.pins.get(call.name, {}) for call in calls)
                if resident <= _SLACK * mesh.memory_bytes and not pinned:
                    continue
            if fitting and held > mesh.memory_bytes:
                continue
            room = mesh.memory_bytes - held if fitting else None
            sized = {1: layout}
            per_call = [self._plans(call, sized, mesh, room, with_source, only) for call in calls]
            for count in range(max(map(len, per_call)) if all(per_call) else 0):
                chosen = [plans[min(count, len(plans) - 1)] for plans in per_call]
                yield held, {c.name: plan for c, plan in zip(calls, chosen, strict=True)}

    def _layouts(
        self, calls: Sequence[Call], mesh: Mesh, only: Mapping[str, Layout] | None
    ) -> Iterator[Layout]:
        if only is not None:
            yield only[calls[0].name].model_copy(update={"micro_batch": 1})
            return
        trained = any(call.kind == "train" for call in calls)
        pinned = [self.pins.get(call.name, {}).get("cp") for call in calls]
        sizes = legal_layouts(
            calls[0].model,
            mesh.num_devices,
            node_size=mesh.node_size,
            max_cp=max([self._max_cp, *(cp for cp in pinned if isinstance(cp, int))]),
            tp_across_nodes=self._tp_across_nodes,
        )
        for size in sizes:
            for changes in self._variants(size, calls, trained, mesh):
                layout = size.model_copy(update=changes)
                if all(self._allowed(call, layout) for call in calls):
                    yield layout

    def _variants(
        self, size: Layout, calls: Sequence[Call], trained: bool, mesh: Mesh
    ) -> Iterator[dict[str, object]]:
        engine = self.engine_of(next((call for call in calls if call.kind != "generate"), calls[0]))
        cut = engine.sequence_parallel and size.tp > 1 and calls[0].kind != "generate"
        shares = size.dp * size.cp > 1 and (trained or engine.shards_frozen)
        may_offload = self._may_offload(calls, mesh)
        for zero in engine.zero_stages if shares else (0,):
            for again in (False, True) if trained else (False,):
                for offload in (False, True) if may_offload else (False,):
                    yield {
                        "sequence_parallel": cut,
                        "zero": zero,
                        "checkpointing": again,
                        "offload": offload,
                    }

    def _may_offload(self, calls: Sequence[Call], mesh: Mesh) -> bool:
        # It may not if it generates, or another does so with its weights. A CPU's memory is its
        # host's, so there it is for those who pin it.
        role, *others = {call.role for call in calls}
        if others or f"{role}.generate" in self._calls:
            return False
        if any(call.leader or call.kind == "generate" for call in calls):
            return False
        pinned = any(self.pins.get(call.name, {}).get("offload") for call in calls)
        return pinned or not mesh.is_cpu

    def _allowed(self, call: Call, layout: Layout) -> bool:
        pinned = self.pins.get(call.name, {})
        kept = all(
            getattr(layout, key) == value for key, value in pinned.items() if key != "micro_batch"
        )
        return kept and self.engine_of(call).why_not(layout, call.kind, call.model) is None

    def _holds(
        self, calls: Sequence[Call], layout: Layout, with_source: bool
    ) -> Mapping[str, Parts]:
        # A generation beside its trainer borrows the weights. A frozen role that one engine
        # evaluates and another samples from is there twice.
        held: dict[str, Parts] = {}
        if layout.offload or (with_source and calls[0].kind == "generate"):
            return held
        apart = [call for call in calls if self._apart(call)]
        for own in (apart, [call for call in calls if call not in apart]):
            ordered = sorted(own, key=lambda call: call.kind != "train")
            for first in {call.role: call for call in reversed(ordered)}.values():
                name = first.role if first.leader else first.call_group
                parts = self.engine_of(first).memory.resident(first, layout)
                held[name] = held.get(name, Parts()).plus(parts)
        return held

    def _plans(
        self,
        call: Call,
        sized: dict[int, Layout],
        mesh: Mesh,
        room: int | None,
        with_source: bool,
        only: Mapping[str, Layout] | None,
    ) -> list[CallPlan]:
        layout, engine = sized[1], self.engine_of(call)
        if call.kind == "generate":
            return list(self._generations(call, layout, mesh, with_source))
        times, load_s = self._times[engine], 0.0
        if layout.offload:
            held = engine.memory.resident(call, layout).total
            load_s = (2 if call.trained else 1) * offload_time(held, mesh)
        wanted = [only[call.name].micro_batch] if only else self._micro_batches(call, layout)
        found: list[tuple[float, int, CallPlan]] = []
        for size in wanted:
            if size not in sized:
                sized[size] = layout.model_copy(update={"micro_batch": size})
            held_then = engine.memory.transient(call, sized[size], on_cpu=mesh.is_cpu)
            if layout.offload:
                held_then = held_then.plus(engine.memory.resident(call, layout))
            num_bytes = held_then.total
            if room is None or num_bytes <= room:
                time = times.call_time(call, sized[size], mesh)
                plan = CallPlan(sized[size], time, load_s, held_then)
                found.append((plan.duration_s, num_bytes, plan))
        if not found:
            return []
        fastest = min(found, key=lambda one: one[:2])
        smallest = min(found, key=lambda one: (one[1], one[0]))
        return [fastest[2], smallest[2]] if smallest[1] < fastest[1] else [fastest[2]]

    def micro_batch_tokens(self, call: Call, layout: Layout) -> int:
        rows = layout.micro_batch * call.tokens_longest
        return self.engine_of(call).packs_tokens or -(-rows // layout.cp)

    def _micro_batches(self, call: Call, layout: Layout) -> list[int]:
        packed = self.engine_of(call).packs_tokens
        if packed is not None:
            # Its memory does not follow from the count of rows.
            return [max(1, int(packed / call.tokens_mean))]
        pinned = self.pins.get(call.name, {}).get("micro_batch")
        if isinstance(pinned, int):
            return [pinned]
        rows = -(-call.num_sequences * call.passes // call.updates // layout.dp)
        return [size for size in _MICRO_BATCHES if size == 1 or size <= rows]

    def _generations(
        self, call: Call, layout: Layout, mesh: Mesh, with_source: bool
    ) -> Iterator[CallPlan]:
        move_s, engine = 0.0, self.engine_of(call)
        times = self._times[engine]
        borrows = with_source and (self._apart(call) or not engine.generates_in_place)
        if call.trained and (borrows or not with_source):
            size = call.model.sent_bytes(call.head)
            move_s += move_time(size / (layout.tp * layout.pp), mesh, self._constants)
        all_rows = rows_at_once(call, layout)
        for waves in _WAVES:
            rows = -(-all_rows // waves)
            if waves > 1 and rows == -(-all_rows // (waves // 2)):
                return
            room = None if waves == 1 else (rows + 0.5) * times.kv_bytes_per_row(call, layout)
            time = times.call_time(call, layout, mesh, kv_bytes=room)
            held = engine.memory.transient(
                call, layout, on_cpu=mesh.is_cpu, borrows=borrows, rows=rows
            )
            yield CallPlan(layout, time, move_s, held)


def _option(resident: int, plans: Mapping[str, CallPlan]) -> Option:
    return Option(
        {name: plan.duration_s for name, plan in plans.items()},
        resident,
        {name: plan.transient.total for name, plan in plans.items()},
        {name: plan.layout for name, plan in plans.items()},
    )
