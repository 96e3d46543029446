"""The cluster of a plan, from the configuration: presets by name, equal nodes or groups of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...configs.plan_schema import ClusterConfig
from ...configs.references import option_file, options_of
from ...configs.validate import nearest_key, validated
from ...dataflow.errors import ConfigError
from ...planner.inputs.cluster import ClusterSpec, NodeGroup

MEASURED = "measured"
"""The cluster that a calibration file describes."""


def named_devices(section: Any) -> Any:
    """The composed section `cluster` with devices in place of their names.

    Raises:
        ConfigError: If a name is no cluster with one kind of device.
    """
    if not isinstance(section, Mapping):
        return section
    data = _named(section, "cluster")
    groups = data.get("node_groups")
    if isinstance(groups, list):
        data["node_groups"] = [
            _named(group, f"cluster.node_groups.{i}") if isinstance(group, Mapping) else group
            for i, group in enumerate(groups)
        ]
    return data


def _named(section: Mapping[str, Any], at: str) -> dict[str, Any]:
    data = dict(section)
    name = data.get("device")
    if not isinstance(name, str):
        return data
    known = _preset_files()
    if name not in known:
        raise ConfigError(
            f"'{at}.device': there is no device '{name}'{nearest_key(name, known)}\n"
            f"    known devices are: {', '.join(known)}; for another one give its keys "
            "(name, memory_bytes, flops_per_s, memory_bytes_per_s, host_bytes_per_s)"
        )
    data["device"] = known[name]["device"]
    data["within"] = data.get("within") or known[name]["within"]
    return data


def _preset_files() -> dict[str, dict[str, Any]]:
    """Option of `cluster=` -> its keys, of those with one kind of device."""
    return {
        option: section
        for option in options_of("cluster")
        if isinstance((section := option_file("cluster", option)).get("device"), Mapping)
    }


def presets() -> dict[str, ClusterSpec]:
    """Option of `cluster=` -> the cluster that it describes, of those with one kind of device."""
    return {
        option: cluster_spec(validated(ClusterConfig, section, "cluster"))
        for option, section in _preset_files().items()
    }


def cluster_spec(config: ClusterConfig, measured: ClusterSpec | None = None) -> ClusterSpec:
    """The cluster that a validated section describes.

    Args:
        config: The section.
        measured: The cluster of the calibration file, if there is one: that is `cluster=measured`.

    Raises:
        ConfigError: If it says both or neither of equal nodes and groups of nodes.
    """
    if config == ClusterConfig(name=MEASURED):
        if measured is None:
            raise ConfigError(
                "'cluster' is 'measured', but no measurement is given\n    give the file that "
                "`penstock profile` wrote: plan.calibration=runs/calibration.json"
            )
        return measured
    if config.node_groups:
        if config.device is not None:
            raise ConfigError(
                "'cluster' has both a device and node_groups\n"
                "    for a mixed cluster give node_groups alone: cluster=mixed is an example"
            )
        groups = tuple(config.node_groups)
    elif config.device is None or config.within is None:
        missing = "device" if config.device is None else "within"
        raise ConfigError(
            f"'cluster.{missing}' is missing\n    choose a cluster (cluster=h100), or describe "
            "one: num_nodes, devices_per_node, device, within and between"
        )
    else:
        groups = (
            NodeGroup(
                num_nodes=config.num_nodes,
                devices_per_node=config.devices_per_node,
                device=config.device,
                within=config.within,
            ),
        )
    between = config.between
    if between is None:
        if sum(group.num_nodes for group in groups) > 1:
            raise ConfigError(
                "'cluster.between' is missing, but the cluster has several nodes\n"
                "    say how they are connected: bytes_per_s and latency_s"
            )
        between = groups[0].within  # never used: there is one node
    return ClusterSpec(name=config.name, node_groups=groups, between=between)
