"""What every report says of a plan: its cluster, its workload, and who runs where."""

from __future__ import annotations

from ...dataflow.graph.graph import Graph
from ...dataflow.kinds import NodeKind
from ..formatting import hours_text
from ..inputs.cluster import ClusterSpec
from ..inputs.segments import begun_before
from ..inputs.workload import Lengths, Workload
from ..plan.plan import Plan


def lengths_text(lengths: Lengths) -> str:
    """A constant ("1,024 tokens"), or the range and the mean of a histogram."""
    if len(lengths.tokens) == 1:
        return f"{lengths.longest:,} tokens"
    return f"{lengths.tokens[0]:,} to {lengths.longest:,} tokens (mean {lengths.mean:,.0f})"


def workload_text(workload: Workload) -> str:
    """Rows and tokens of a step in one line."""
    samples = workload.samples_per_prompt
    rows = f"{workload.num_prompts:,} prompts"
    rows += "" if samples is None else f" x {samples} response{'s' if samples > 1 else ''}"
    prompt, response = lengths_text(workload.prompt), lengths_text(workload.response)
    text = f"{rows}; prompt {prompt}, response {response}"
    return text + (f", {workload.updates_per_train} updates" if workload.updates_per_train else "")


def schedule_text(max_lag: int, segment_tokens: int) -> str:
    """A schedule as its keys: "max_lag 1, segment_tokens 512"."""
    return f"max_lag {max_lag}" + (f", segment_tokens {segment_tokens}" if segment_tokens else "")


def segments_text(workload: Workload) -> str:
    segment = workload.segment_tokens or workload.response.longest
    rows = sum(begun.rows for begun in begun_before(workload.response, segment))
    steps = -(-workload.response.longest // segment)
    return (
        f"a response grows by at most {segment:,} tokens in a step: {1 + rows:.2f} steps on "
        f"average and {steps} at most, and {rows * workload.num_rows:,.0f} go on"
    )


def cluster_text(cluster: ClusterSpec | str) -> str:
    """Its nodes and devices: "h100: 16 nodes x 8 h100 = 128 devices"."""
    if isinstance(cluster, str):
        return cluster or "some cluster"
    groups = " + ".join(
        f"{g.num_nodes} node{'s' if g.num_nodes > 1 else ''} x {g.devices_per_node} {g.device.name}"
        for g in cluster.node_groups
    )
    return f"{cluster.name}: {groups} = {cluster.num_devices} devices"


def cost_text(plan: Plan) -> str:
    text = "device-hours per step"
    if plan.num_steps is None or plan.prediction is None:
        return text
    whole, hours = plan.num_steps * plan.device_hours, plan.prediction.step_time_s / 3600
    return (
        f"{text}; {hours_text(whole)} for the {plan.num_steps:,} steps of the run, which take "
        f"{hours_text(plan.num_steps * hours)} h"
    )


def roles_by_group(graph: Graph, plan: Plan) -> dict[str, list[str]]:
    """Group -> what runs there: roles, or single calls of roles that are spread over groups."""
    calls = [node for node in graph.nodes if node.role and node.kind is not NodeKind.SOURCE]
    roles: dict[str, list[str]] = {group.name: [] for group in plan.groups}
    for role in graph.roles:
        mine = [node for node in calls if node.role == role]
        homes = dict.fromkeys(plan.group_of(node) for node in mine)
        if len(homes) == 1:
            roles[next(iter(homes))].append(role)
        else:
            for node in mine:
                roles[plan.group_of(node)].append(node.name)
    return roles


def placement_text(graph: Graph, plan: Plan) -> str:
    roles = roles_by_group(graph, plan)
    return ", ".join(
        f"{{{', '.join(roles[group.name])}}} on {len(group.devices) or group.num_ranks}"
        for group in plan.groups
        if roles[group.name]
    )
