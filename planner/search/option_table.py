"""The options of real models: each legal layout of a call group on a mesh, its seconds and bytes.

Joins the models of time and memory into what the search chooses between. A verifier is a call group
with one option, that of the best number of processes. A call of a trained role
that does not train it is a call group of its own. Beside the one that trains (on the same devices)
it runs in the same layout, where the weights are, or in another one: then it holds a view, and what
each device lacks of it is gathered before the call. On other devices it has a copy, which each
training sends anew.

What is tried for a layout's sizes: the engine's ZeRO stages, activations kept or computed again,
every micro-batch that is faster than those that need less, and for models whose weights no other
takes, waiting in host memory. Of all that, only what the engine of each call runs
(`EngineModel.why_not`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ...dataflow.errors import PlanError
from ..cost.calibration import Constants
from ..cost.engine_model import EngineModel, RoleEngines, tokens_on_device
from ..cost.memory import Parts, rows_at_once
from ..cost.time_model import TimeModel, move_time, offload_time
from ..cost.time_parts import CallTime
from ..cost.verification import Verifier
from ..inputs.calls import Call
from ..inputs.cluster import Mesh
from ..inputs.layout import Layout, legal_layouts
from .options import CallNode, Option, dominant

_T = TypeVar("_T")

# in how many waves a generation's rows may run, where their cache does not fit at once
_WAVES = (1, 2, 4, 8)
_MICRO_BATCHES = (1, 2, 4, 8, 16)  # sequences per rank that are tried
_NOTHING = 1e-9  # a share of a model that is none
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
        verifiers: Sequence[Verifier] = (),
    ) -> None:
        self._calls: dict[str, list[Call]] = {}
        for call in calls:
            self._calls.setdefault(call.call_group, []).append(call)
        self._verifiers = {one.name: one for one in verifiers}
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
        # A view or a copy that only evaluates holds weights as a frozen model does.
        self._copies = {
            call.name: replace(call, trained=False)
            for call in calls
            if call.follows_training and call.kind == "forward"
        }
        self._known: dict[tuple[Any, ...], tuple[Option, ...]] = {}
        self._meshes: dict[tuple[int, ...], Mesh] = {}
        # The last mesh that was asked for, and what was computed for it
        self._mesh: Mesh | None = None
        self._here: dict[tuple[Any, ...], Any] = {}

    def options(
        self, call_group: str, mesh: Mesh, *, beside: tuple[str, ...] = (), lagged: bool = False
    ) -> Sequence[Option]:
        key = (call_group, mesh.counts, beside, lagged)
        if key not in self._known and call_group in self._verifiers:
            seconds, _ = self._verifiers[call_group].on(mesh, lagged=lagged)
            self._known[key] = (Option({call_group: seconds}, 0, {call_group: 0}, {}),)
        if key not in self._known:
            mesh = self._meshes.setdefault(mesh.counts, mesh)
            if self._mesh is not mesh:
                self._mesh = mesh
                self._here.clear()
            slack = int(_SLACK * mesh.memory_bytes)

            def found(fitting: bool) -> Iterator[Option]:
                most = mesh.memory_bytes if fitting else None
                for held, ways in self._ways(call_group, beside, mesh, lagged=lagged, most=most):
                    room = None if most is None else most - held
                    chosen = _within_bytes(ways, room, slack)
                    yield from (_option(held, plans) for plans in chosen)

            options = dominant(list(found(fitting=True)), slack_bytes=slack)
            # If nothing fits, the smallest: the refusal then says how much is lacking.
            if not options:
                options = tuple(sorted(found(fitting=False), key=_bytes_of)[:1])
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
            verifiers=tuple(self._verifiers.values()),
        )

    def explain(
        self,
        call_group: str,
        mesh: Mesh,
        option: Option,
        *,
        beside: tuple[str, ...] = (),
        lagged: bool = False,
    ) -> tuple[Mapping[str, Parts], dict[str, CallPlan]]:
        calls = self._calls[call_group]
        asked = self._ways(call_group, beside, mesh, lagged=lagged, only=option.layouts)
        for resident, ways in asked:
            plans = {
                name: way.plan
                for name, of in ways.items()
                for way in of
                if way.duration_s == option.durations_s[name]
                and way.num_bytes == option.transient_bytes[name]
            }
            if resident == option.resident_bytes and len(plans) == len(ways):
                others = [call for name in beside for call in self._calls[name]]
                return self._holds(calls, plans[calls[0].name].layout, others), plans
        raise PlanError(f"'{call_group}' has no such option on this mesh")

    def _of(self, call: Call) -> RoleEngines:
        return self._others.get(call.role, self._engines)

    def engine_of(self, call: Call) -> EngineModel:
        return self._of(call).runs(call.kind)

    def _apart(self, call: Call) -> bool:
        return self._of(call).apart(call.kind)

    # --- ways to run a call group

    def _ways(
        self,
        call_group: str,
        beside: tuple[str, ...],
        mesh: Mesh,
        *,
        lagged: bool = False,
        only: Mapping[str, Layout] | None = None,
        most: int | None = None,
    ) -> Iterator[tuple[int, dict[str, list[_Way]]]]:
        calls = self._calls[call_group]
        others = [call for name in beside for call in self._calls[name]]
        for layout in self._layouts(calls, mesh, only, beside):
            held = sum(parts.total for parts in self._holds(calls, layout, others).values())
            if layout.offload and only is None:
                # To move a little out and in again costs time, and makes room for nothing.
                resident = self.engine_of(calls[0]).memory.resident(calls[0], layout).total
                pinned = any("offload" in self.pins.get(call.name, {}) for call in calls)
                if resident <= _SLACK * mesh.memory_bytes and not pinned:
                    continue
            if most is not None and held > most:
                continue
            sized = {1: layout}
            ways: dict[str, list[_Way]] = {}
            for call in calls:
                made = partial(self._plans, call, sized, mesh, only)
                ways[call.name] = self._once((call.name, layout), made, only)
            for call in others:
                made = partial(self._beside, call, calls[0], sized, mesh, only, lagged)
                ways[call.name] = self._once((call.name, layout, lagged), made, only)
            yield held, ways

    def _once(self, key: tuple[Any, ...], make: Callable[[], _T], only: object) -> _T:
        # `explain` gives the layouts, and asks for each once: keeping them would save nothing.
        if only is not None:
            return make()
        if key not in self._here:
            self._here[key] = make()
        return self._here[key]

    def _layouts(
        self,
        calls: Sequence[Call],
        mesh: Mesh,
        only: Mapping[str, Layout] | None,
        beside: tuple[str, ...] = (),
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
        may_offload = self._may_offload(calls, mesh, beside)
        for size in sizes:
            for changes in self._variants(size, calls, trained, may_offload):
                layout = size.model_copy(update=changes)
                if all(self._allowed(call, layout) for call in calls):
                    yield layout

    def _variants(
        self, size: Layout, calls: Sequence[Call], trained: bool, may_offload: bool
    ) -> Iterator[dict[str, object]]:
        engine = self.engine_of(next((call for call in calls if call.kind != "generate"), calls[0]))
        cut = engine.sequence_parallel and size.tp > 1 and calls[0].kind != "generate"
        shares = size.dp * size.cp > 1 and (trained or engine.shards_frozen)
        for zero in engine.zero_stages if shares else (0,):
            for again in (False, True) if trained else (False,):
                for offload in (False, True) if may_offload else (False,):
                    yield {
                        "sequence_parallel": cut,
                        "zero": zero,
                        "checkpointing": again,
                        "offload": offload,
                    }

    def _may_offload(self, calls: Sequence[Call], mesh: Mesh, beside: tuple[str, ...]) -> bool:
        # It may not if it generates, or another does so with its weights, or is sent them. A CPU's
        # memory is its host's, so there it is for those who pin it.
        role, *others = {call.role for call in calls}
        if others or any(call.leader or call.kind == "generate" for call in calls):
            return False
        readers = [c for of in self._calls.values() for c in of if c.role == role]
        if any(c.follows_training for c in calls) or any(
            c.follows_training and (c.kind == "generate" or c.call_group not in beside)
            for c in readers
        ):
            return False
        pinned = any(self.pins.get(call.name, {}).get("offload") for call in calls)
        return pinned or not mesh.is_cpu

    def _allowed(self, call: Call, layout: Layout) -> bool:
        pinned = self.pins.get(call.name, {})
        kept = all(
            getattr(layout, key) == value for key, value in pinned.items() if key != "micro_batch"
        )
        return kept and self.engine_of(call).refuses(call, layout) is None

    def _holds(
        self, calls: Sequence[Call], layout: Layout, beside: Sequence[Call]
    ) -> Mapping[str, Parts]:
        # A frozen role that one engine evaluates and another samples from is there twice.
        held: dict[str, Parts] = {}
        if layout.offload:
            return held
        apart = [call for call in calls if self._apart(call)]
        for own in (apart, [call for call in calls if call not in apart]):
            ordered = sorted(own, key=lambda call: call.kind != "train")
            for first in {call.role: call for call in reversed(ordered)}.values():
                name = first.role if first.leader else first.call_group
                parts = self.engine_of(first).memory.resident(self._copy(first), layout)
                held[name] = held.get(name, Parts()).plus(parts)
        if any(self._apart(call) and self._of(call).keeps_sent for call in beside):
            sent = calls[0].model.sent_bytes(calls[0].head)
            senders = layout.tp * layout.pp * layout.cp * (layout.dp if layout.zero > 1 else 1)
            held["weights sent"] = Parts(transfer=2 * -(-sent // senders))
        return held

    def _copy(self, call: Call) -> Call:
        return self._copies.get(call.name, call)

    def _plans(
        self, call: Call, sized: dict[int, Layout], mesh: Mesh, only: Mapping[str, Layout] | None
    ) -> list[_Way]:
        layout, engine = sized[1], self.engine_of(call)
        # A copy is sent what each of its devices holds; what is trained here stays.
        move_s = self._sent_s(call, layout, mesh) if call.follows_training else 0.0
        if call.kind == "generate":
            return _unbeaten(self._generations(call, layout, mesh, move_s, borrows=False))
        held = Parts()
        if layout.offload:
            held = engine.memory.resident(call, layout)
            move_s = (2 if call.trained else 1) * offload_time(held.total, mesh)
        return _unbeaten(self._computed(self._copy(call), sized, mesh, move_s, held, only))

    def _computed(
        self,
        call: Call,
        sized: dict[int, Layout],
        mesh: Mesh,
        move_s: float,
        held: Parts,
        only: Mapping[str, Layout] | None,
    ) -> Iterator[CallPlan]:
        engine = self.engine_of(call)
        times = self._times[engine]
        sizes = [only[call.name].micro_batch] if only else self._micro_batches(call, sized[1], mesh)
        for size in sizes:
            if size not in sized:
                sized[size] = sized[1].model_copy(update={"micro_batch": size})
            adds = engine.memory.transient(call, sized[size], on_cpu=mesh.is_cpu)
            time = times.call_time(call, sized[size], mesh)
            yield CallPlan(sized[size], time, move_s, adds.plus(held))

    # --- beside the call group that trains the weights

    def _beside(
        self,
        call: Call,
        home: Call,
        sized: dict[int, Layout],
        mesh: Mesh,
        only: Mapping[str, Layout] | None,
        lagged: bool,
    ) -> list[_Way]:
        layout = sized[1]
        found = list(self._in_place(call, sized, mesh, only))
        # Processes of their own are worth a generation; an evaluation has a view or stays.
        views = self.engine_of(call).views and not lagged
        if not layout.offload and (views or call.kind == "generate"):
            memory = self.engine_of(home).memory
            whole = memory.resident(home, Layout()).weights
            held = memory.resident(home, layout).weights / whole
            held = held if views else 0.0
            key = (call.name, layout.tp, layout.pp, held)
            made = partial(self._viewed, call, layout, held, mesh, only)
            found += self._once(key, made, only)
        return _unbeaten(plan for plan in found if not only or plan.layout == only[call.name])

    def _in_place(
        self, call: Call, sized: dict[int, Layout], mesh: Mesh, only: Mapping[str, Layout] | None
    ) -> Iterator[CallPlan]:
        engine, layout = self.engine_of(call), sized[1]
        if call.kind == "generate":
            layout = Layout(tp=layout.tp, pp=layout.pp, dp=layout.dp, cp=layout.cp, ep=layout.ep)
            if self._apart(call) or not engine.generates_in_place:
                return
        if not self._allowed(call, layout):
            return
        if call.kind == "generate":
            yield from self._generations(call, layout, mesh, 0.0, borrows=False)
            return
        held = engine.memory.resident(call, layout) if layout.offload else Parts()
        load_s = 2 * offload_time(held.total, mesh)
        yield from self._computed(call, sized, mesh, load_s, held, only)

    def _viewed(
        self,
        call: Call,
        home: Layout,
        held: float,
        mesh: Mesh,
        only: Mapping[str, Layout] | None,
    ) -> list[CallPlan]:
        # `held` is the share of the model that a device has of what training holds. With a lag that
        # is of another version: all is sent.
        found: list[CallPlan] = []
        for plan in self._once((call.name,), partial(self._foreign, call, mesh, only), only):
            layout = plan.layout
            lacks = 1.0 - held * min(layout.tp, home.tp) * min(layout.pp, home.pp)
            # The difference of equal shares is not always zero.
            move_s = 0.0
            if lacks > _NOTHING:
                move_s = self._sent_s(call, layout, mesh, lacks, frozen=held > 0)
            found.append(plan._replace(move_s=move_s))
        return [way.plan for way in _unbeaten(found)]

    def _foreign(self, call: Call, mesh: Mesh, only: Mapping[str, Layout] | None) -> list[CallPlan]:
        # The call in each layout of its own, whose weights are there while it runs.
        copy, memory = self._copy(call), self.engine_of(call).memory
        kept: dict[tuple[int, int], list[CallPlan]] = {}
        for layout in self._layouts([call], mesh, only):
            if call.kind == "generate":
                plans = self._generations(call, layout, mesh, 0.0, borrows=True)
            else:
                held = memory.resident(copy, layout)
                plans = self._computed(copy, {1: layout}, mesh, 0.0, held, only)
            kept.setdefault((layout.tp, layout.pp), []).extend(plans)
        found = [way for plans in kept.values() for way in _unbeaten(plans)]
        # Sent everything, the best of them still beat others that are sent nothing.
        whole = _unbeaten(
            way.plan._replace(move_s=self._sent_s(call, way.plan.layout, mesh, frozen=True))
            for way in found
        )
        return [
            way.plan
            for way in found
            if not any(
                other.duration_s <= way.duration_s
                and other.num_bytes <= way.num_bytes
                and other.plan.layout is not way.plan.layout
                for other in whole
            )
        ]

    def _sent_s(
        self, call: Call, layout: Layout, mesh: Mesh, lacks: float = 1.0, *, frozen: bool = False
    ) -> float:
        """Seconds until devices have this share of their parts; a view lacks `frozen` ones too."""
        size = lacks * call.model.sent_bytes(call.head, frozen=frozen) / (layout.tp * layout.pp)
        return move_time(size, mesh, self._constants)

    def micro_batch_tokens(self, call: Call, layout: Layout) -> int:
        rows = layout.micro_batch * call.tokens_longest
        return self.engine_of(call).packs_tokens or -(-rows // layout.cp)

    def _micro_batches(self, call: Call, layout: Layout, mesh: Mesh) -> list[int]:
        engine = self.engine_of(call)
        packed = engine.packs_tokens
        if packed is not None:
            # Its memory does not follow from the count of rows.
            tokens = call.tokens_mean
            if not mesh.is_cpu:
                room = mesh.memory_bytes - engine.memory.resident(call, layout).total
                packed = tokens_on_device(engine, [(call, layout)], room) or packed
                tokens = self._times[engine].tokens_per_row(call)
            return [max(1, int(packed / tokens))]
        pinned = self.pins.get(call.name, {}).get("micro_batch")
        if isinstance(pinned, int):
            return [pinned]
        rows = -(-call.num_sequences * call.passes // call.updates // layout.dp)
        return [size for size in _MICRO_BATCHES if size == 1 or size <= rows]

    def _generations(
        self, call: Call, layout: Layout, mesh: Mesh, move_s: float, *, borrows: bool
    ) -> Iterator[CallPlan]:
        engine = self.engine_of(call)
        times = self._times[engine]
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


class _Way(NamedTuple):
    duration_s: float
    num_bytes: int
    plan: CallPlan


def _unbeaten(plans: Iterable[CallPlan]) -> list[_Way]:
    """Those that none equals or beats in time and bytes, the fastest first."""
    kept: list[_Way] = []
    ways = [_Way(plan.duration_s, plan.transient.total, plan) for plan in plans]
    for way in sorted(ways, key=lambda way: way[:2]):
        if not kept or way.num_bytes < kept[-1].num_bytes:
            kept.append(way)
    return kept


def _within_bytes(
    ways: Mapping[str, Sequence[_Way]], room: int | None, slack: int
) -> Iterator[dict[str, CallPlan]]:
    """The fastest plan of every call in less and less memory, of which the calls take turns."""
    if not all(ways.values()):
        return
    least = max(of[-1].num_bytes for of in ways.values())
    most = max(of[0].num_bytes for of in ways.values())
    most = most if room is None else min(most, room)
    while most >= least:
        chosen = {name: next(w for w in of if w.num_bytes <= most) for name, of in ways.items()}
        yield {name: way.plan for name, way in chosen.items()}
        used = max(way.num_bytes for way in chosen.values())
        most = max(used - max(slack, 1), least if used > least else 0)
    if room is None:
        yield {name: of[-1].plan for name, of in ways.items()}


def _bytes_of(option: Option) -> tuple[int, int]:
    return option.least_bytes, sum(option.transient_bytes.values())


def _option(resident: int, plans: Mapping[str, CallPlan]) -> Option:
    return Option(
        {name: plan.duration_s for name, plan in plans.items()},
        resident,
        {name: plan.transient.total for name, plan in plans.items()},
        {name: plan.layout for name, plan in plans.items()},
    )
