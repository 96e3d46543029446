"""Pins that cannot be meant; what pins do is tested with the search."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.dataflow.errors import PlanError
from penstock.planner.search.pins import Pins

from .graphs import PPO
from .tables import cluster_of, device

CLUSTER = cluster_of((2, 4, device("a", 40)))
CONTRADICT = (
    "the pins contradict each other: which calls share a group cannot be as all of these say\n"
    "    drop one of "
)


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"together": (("actor", "reff"),)},
         "pin together names call group 'reff'; did you mean 'ref'?"),
        ({"apart": (("actor", "actor.train"),)},
         "pin apart names call group 'actor.train'; did you mean 'actor.generate'?"),
        ({"num_devices": {"policy": 2}},
         "pin num_devices names call group 'policy'; known: actor, actor.generate, critic, "
         "critic.value, ref, reward"),
        ({"num_devices": {"ref": 9}},
         "pin num_devices gives 'ref' 9 devices; expected 1 to 8, as many as cluster 'made-up' "
         "has"),
        ({"devices": {"ref": (7, 8)}},
         "pin devices gives 'ref' device 8, but cluster 'made-up' has devices 0 to 7"),
        ({"together": (("actor", "ref"), ("ref", "reward", "critic")),
          "apart": (("actor.generate", "critic", "actor"),)},
         CONTRADICT + "together=[actor, ref], together=[ref, reward, critic], "
         "apart=[actor.generate, critic, actor]"),
        ({"together": (("actor", "ref"),), "devices": {"actor": (0, 1), "ref": (4, 5, 6, 7)}},
         CONTRADICT + "together=[actor, ref], devices.actor=[0, 1], devices.ref=[4, 5, 6, 7]"),
        ({"apart": (("actor", "ref"),), "devices": {"actor": (0, 1), "ref": (1, 0)}},
         CONTRADICT + "apart=[actor, ref], devices.actor=[0, 1], devices.ref=[1, 0]"),
        ({"devices": {"ref": (3, 3)}},
         "pin devices of 'ref' is empty or names a device twice"),
        ({"devices": {"ref": (3, 4)}},
         "pin devices of 'ref': devices 3, 4 are neither whole nodes nor a part of one node; a "
         "group must be one or the other"),
        ({"devices": {"ref": (0, 1, 2, 3, 4)}},
         "pin devices of 'ref': devices 0, 1, 2, 3, 4 are neither whole nodes nor a part of one "
         "node; a group must be one or the other"),
        ({"devices": {"ref": (0, 1), "actor": (1, 2)}},
         "pin devices gives device 1 to 'ref' and to 'actor' but not the same devices to both; "
         "groups share no device"),
        ({"devices": {"ref": (0, 1)}, "num_devices": {"ref": 4}},
         "pins give 'ref' 4 devices and name 2"),
    ],
)  # fmt: skip
def test_refused(pins: dict[str, Any], expected: str) -> None:
    with pytest.raises(PlanError) as caught:
        Pins(**pins).check(PPO, CLUSTER)
    assert str(caught.value) == expected


def test_units_with_the_same_devices_share_a_group_and_others_do_not() -> None:
    pins = Pins(devices={"ref": (1, 0), "reward": (0, 1), "actor": (4, 5, 6, 7)})
    pins.check(PPO, CLUSTER)
    assert ("ref", "reward") in pins.all_together()
    assert set(pins.all_apart()) == {("actor", "ref"), ("actor", "reward")}
    assert pins.fixed((("actor.generate",), ("reward", "ref"), ("actor",))) == (
        (), (0, 1), (4, 5, 6, 7),
    )  # fmt: skip
