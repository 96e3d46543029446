"""What to tell when no plan fits: the ledger of the best attempt, and the cheapest way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...dataflow.errors import InfeasibleError, PlanError
from ..cost.memory_ledger import GroupLedger, Ledger, Parts, check
from ..formatting import bytes_text
from ..inputs.calls import Call
from ..inputs.cluster import ClusterSpec
from ..inputs.logical_params import adapter_params
from ..inputs.mesh import Mesh
from ..inputs.model_shape import ModelShape
from ..search.option_table import ModelTable

_MOST_TIMES = 64
"""More nodes than this many times those there are not suggested."""
_NODE = 8
"""Nor are more devices of a node: it is what most have."""
_RANK = 16
"""Of adapters that are suggested."""


def refusal(
    calls: Sequence[Call], table: ModelTable, cluster: ClusterSpec, error: InfeasibleError
) -> InfeasibleError:
    """The error to raise in place of the search's own.

    The attempt that is shown has every call group on all devices, each in the way that needs least:
    nothing else spreads the states of every model further.
    """
    everywhere = tuple(group.num_devices for group in cluster.node_groups)
    attempt = _attempt(calls, table, Mesh(cluster, everywhere))
    if attempt is None:
        return error
    ways = [
        _again(calls, table, cluster),
        _more_devices(calls, table, cluster),
        _adapters(calls, table, cluster),
    ]
    change = "; or ".join(filter(None, ways)) or _more_memory(attempt, cluster)
    mesh = Mesh(cluster, everywhere)
    try:
        check(Ledger((attempt,)), {attempt.name: mesh.memory_bytes}, change=change)
    except PlanError as full:
        return InfeasibleError(f"{error}\n{full}")
    return error


def _attempt(calls: Sequence[Call], table: ModelTable, mesh: Mesh) -> GroupLedger | None:
    resident: dict[str, Parts] = {}
    transient: dict[str, Parts] = {}
    call_groups = tuple(dict.fromkeys(call.call_group for call in calls))
    for call_group in call_groups:
        role = call_group.removesuffix(".generate")
        with_source = role != call_group and role in call_groups
        options = table.options(call_group, mesh, with_source=with_source)
        if not options:
            return None
        least = min(options, key=lambda option: option.least_bytes)
        held, plans = table.explain(call_group, mesh, least, with_source=with_source)
        resident |= {name: parts for name, parts in held.items() if parts.total}
        transient |= {name: plan.transient for name, plan in plans.items()}
    ordered = {call.name: transient[call.name] for call in calls}
    return GroupLedger("all", mesh.num_devices, resident, ordered)


def _fits(calls: Sequence[Call], table: ModelTable, cluster: ClusterSpec) -> bool:
    mesh = Mesh(cluster, tuple(group.num_devices for group in cluster.node_groups))
    attempt = _attempt(calls, table, mesh)
    return attempt is not None and attempt.peak[1].total <= mesh.memory_bytes


def _again(calls: Sequence[Call], table: ModelTable, cluster: ClusterSpec) -> str:
    """To compute activations again, where a pin forbids that and all else is as it is."""
    held = [name for name, fields in table.pins.items() if fields.get("checkpointing") is False]
    pins = dict(table.pins) | {name: {**table.pins[name], "checkpointing": True} for name in held}
    if not held or not _fits(calls, table.variant(pins=pins), cluster):
        return ""
    return ", ".join(f"plan.pins.layouts.{name}.checkpointing=true (now false)" for name in held)


def _adapters(calls: Sequence[Call], table: ModelTable, cluster: ClusterSpec) -> str:
    """To train adapters instead of all weights."""
    if any(call.model.adapter_params for call in calls):
        return ""
    adapted = [
        replace(call, model=_with_adapters(call.model)) if call.trained else call for call in calls
    ]
    fits = _fits(adapted, table.variant(calls=adapted), cluster)
    return f"model.lora.rank={_RANK}, which trains adapters" if fits else ""


def _with_adapters(model: ModelShape) -> ModelShape:
    return model.model_copy(update={"adapter_params": adapter_params(model, _RANK)})


def _more_devices(calls: Sequence[Call], table: ModelTable, cluster: ClusterSpec) -> str:
    """The least number of devices of a node, or of nodes, with which the attempt fits.

    Returns:
        "" if that is out of reach.
    """
    if not cluster.is_uniform:
        return ""
    now, node = cluster.node_groups[0].num_nodes, cluster.node_groups[0]
    for number in range(node.devices_per_node + 1, _NODE + 1) if now == 1 else ():
        wider = node.model_copy(update={"devices_per_node": number})
        larger = cluster.model_copy(update={"node_groups": (wider,)})
        if _fits(calls, table.variant(), larger):
            return f"cluster.devices_per_node={number} (now {node.devices_per_node})"
    for nodes in range(now + 1, now * _MOST_TIMES + 1):
        group = cluster.node_groups[0].model_copy(update={"num_nodes": nodes})
        larger = cluster.model_copy(update={"node_groups": (group,)})
        if _fits(calls, table.variant(), larger):
            return f"cluster.num_nodes={nodes} (now {now})"
    return ""


def _more_memory(attempt: GroupLedger, cluster: ClusterSpec) -> str:
    reserved = max(group.device.reserved_bytes for group in cluster.node_groups)
    needed = bytes_text(attempt.peak[1].total + reserved)
    return f"devices with {needed} of memory, shorter responses, or smaller models"
