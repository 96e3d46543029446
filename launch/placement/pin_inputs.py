"""Pinned parts of a plan, from the configuration, checked before any search begins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from ...configs.plan_schema import PinsConfig
from ...configs.validate import nearest_key, validated
from ...configs.yaml_files import load_yaml
from ...dataflow.errors import ConfigError, PlanError
from ...planner.formatting import ranges_text
from ...planner.inputs.calls import Call
from ...planner.inputs.cluster import ClusterSpec
from ...planner.inputs.layout import Layout, check_layout, pinned_layout
from ...planner.search.pins import Pins

_SIZES = ("tp", "pp", "dp", "cp")
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")


def flat_layouts(section: Any) -> Any:
    """The composed section `plan.pins.layouts` with node names as keys.

    A name has a dot, which the command line takes for a step down:
    `plan.pins.layouts.actor.train.tp=8` arrives as `{actor: {train: {tp: 8}}}`.
    """
    if not isinstance(section, Mapping):
        return section
    flat: dict[str, Any] = {}
    for name, value in cast("Mapping[str, Any]", section).items():
        below: Any = value
        if (
            isinstance(below, Mapping)
            and below
            and all(isinstance(v, Mapping) for v in below.values())
        ):
            flat |= {f"{name}.{method}": fields for method, fields in below.items()}
        else:
            flat[name] = value
    return flat


def pins_of(config: PinsConfig, calls: Sequence[Call], cluster: ClusterSpec) -> Pins:
    """The pins, typed.

    Args:
        config: The section `plan.pins`.
        calls: The step's calls.
        cluster: What the plan is for.

    Raises:
        ConfigError: If a pin names what is not there.
        PlanError: If a pinned layout or mesh is none that the model and the cluster can have.
    """
    at = "plan.pins"
    call_groups = list(dict.fromkeys(call.call_group for call in calls))
    for key in ("together", "apart"):
        for entry in getattr(config, key):
            for call_group in entry:
                _known(call_group, call_groups, f"{at}.{key}", "call group")
    for key in ("num_devices", "devices"):
        for call_group in getattr(config, key):
            _known(call_group, call_groups, f"{at}.{key}", "call group")
    devices = {
        call_group: _ids(ids, f"{at}.devices.{call_group}", cluster)
        for call_group, ids in config.devices.items()
    }
    sizes = {**config.num_devices, **{call_group: len(ids) for call_group, ids in devices.items()}}
    layouts = {
        name: _layout(name, fields, calls, sizes, cluster, f"{at}.layouts.{name}")
        for name, fields in config.layouts.items()
    }
    pins = Pins(
        together=tuple(map(tuple, config.together)),
        apart=tuple(map(tuple, config.apart)),
        num_devices=config.num_devices,
        devices=devices,
        layouts=layouts,
    )
    _check_used(pins, call_groups, sizes, cluster, at)
    return pins


def pins_of_file(file: str, calls: Sequence[Call], cluster: ClusterSpec) -> Pins:
    """The pins of a YAML file, which has the keys of `plan.pins`.

    Args:
        file: Its name, as `plan.compare` has it.
        calls: The step's calls.
        cluster: What the plan is for.

    Raises:
        ConfigError: If it cannot be read, is no such file, or a pin names what is not there; or a
            pinned layout or mesh is none that the model and the cluster can have.
    """
    at = f"'plan.compare': '{file}'"
    path = Path(file)
    try:
        # As JSON, because a YAML file can say more than keys can: dates, or a value inside itself.
        text = json.dumps(load_yaml(path), default=str)
    except OSError as error:
        raise ConfigError(f"{at} cannot be read: {error.strerror}") from None
    except (TypeError, ValueError, RecursionError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{at} is no YAML file: {said:.300}") from None
    keys: Any = json.loads(text)
    if not isinstance(keys, dict) or not keys:
        raise ConfigError(
            f"{at}: expected keys of plan.pins, got {text:.60}\n"
            f"    its keys are: {', '.join(PinsConfig.model_fields)}"
        )
    keys = cast("dict[str, Any]", keys)
    if "layouts" in keys:
        keys["layouts"] = flat_layouts(keys["layouts"])
    try:
        return pins_of(validated(PinsConfig, keys, "plan.pins"), calls, cluster)
    except (ConfigError, PlanError) as error:
        raise ConfigError(f"{at}:\n{error}") from None


def _known(name: str, known: Sequence[str], at: str, what: str) -> None:
    if name not in known:
        raise ConfigError(
            f"'{at}' names a {what} '{name}', which the step does not have"
            f"{nearest_key(name, known)}\n    its {what}s are: {', '.join(known)}"
        )


def _ids(given: Sequence[int] | str, at: str, cluster: ClusterSpec) -> tuple[int, ...]:
    if not isinstance(given, str):
        ids = list(given)
    else:
        ids = []
        for piece in given.split(","):
            found = _RANGE.fullmatch(piece)
            if found is None:
                raise ConfigError(f"'{at}': expected ids such as \"0-7, 12\", got {given!r}")
            first, last = int(found[1]), int(found[2] or found[1])
            # No more of them than show that there is one too many.
            ids += range(first, min(last, max(first, cluster.num_devices)) + 1)
    for device in ids:
        if not 0 <= device < cluster.num_devices:
            raise ConfigError(
                f"'{at}': there is no device {device}\n    cluster '{cluster.name}' has devices 0 "
                f"to {cluster.num_devices - 1}"
            )
    return tuple(ids)


def _layout(
    name: str,
    fields: Mapping[str, Any],
    calls: Sequence[Call],
    sizes: Mapping[str, int],
    cluster: ClusterSpec,
    at: str,
) -> Mapping[str, Any]:
    """The pinned fields of one call's layout, if the model and its devices can have it."""
    _known(name, [call.name for call in calls], "plan.pins.layouts", "node")
    call = next(call for call in calls if call.name == name)
    validated(Layout, fields, at)
    layout = pinned_layout(fields)
    node_size = max(group.devices_per_node for group in cluster.node_groups)
    check_layout(layout, call.model, node_size=node_size, where=f"'{at}'")
    devices = sizes.get(call.call_group, cluster.num_devices)
    whole = all(size in fields for size in ("tp", "pp", "dp"))
    used = layout.num_devices
    if used > devices or devices % used or (whole and call.call_group in sizes and used != devices):
        product = " x ".join(f"{size} {getattr(layout, size)}" for size in _SIZES if size in fields)
        there = f"'{call.call_group}' is pinned to {devices}" if call.call_group in sizes else (
            f"cluster '{cluster.name}' has {devices}"
        )  # fmt: skip
        raise PlanError(
            f"'{at}': {product} uses {used} devices, but {there}\n    a layout uses every device "
            "of its group: choose sizes whose product is their number"
        )
    return dict(fields)


def _check_used(
    pins: Pins, call_groups: Sequence[str], sizes: Mapping[str, int], cluster: ClusterSpec, at: str
) -> None:
    """Refuse pins that leave devices to nobody, however the other call groups are grouped."""
    groups = _groups(pins, call_groups)
    counts = [max(sizes.get(call_group, 0) for call_group in group) for group in groups]
    free = cluster.num_devices - sum(counts)
    if free <= 0 or not all(counts):
        return
    named = {device for ids in pins.devices.values() for device in ids}
    left = ranges_text([d for d in range(cluster.num_devices) if d not in named])
    which = f" ({left})" if len(named) == sum(counts) else ""
    raise PlanError(
        f"'{at}' gives every call group its devices, {sum(counts)} in all, but cluster "
        f"'{cluster.name}' has {cluster.num_devices}: {free}{which} would be unused\n"
        "    pin more devices, leave a call group free, or plan for a smaller cluster"
    )


def _groups(pins: Pins, call_groups: Sequence[str]) -> list[set[str]]:
    """Call groups that are pinned to share a group, joined; the others alone."""
    groups = [{call_group} for call_group in call_groups]
    for entry in pins.all_together():
        joined = [group for group in groups if group & set(entry)]
        groups = [group for group in groups if not group & set(entry)]
        groups.append(set[str]().union(*joined))
    return groups
