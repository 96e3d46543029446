"""Clusters, workloads, pins, plans and calibrations that cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import SMALL, Refused

pytestmark = pytest.mark.slow

LINES = """\
cluster.num_nodes=100000000
cluster.num_nodes=0
cluster.within.bytes_per_s=.inf
cluster.within.bytes_per_s=nan
cluster.within.bytes_per_s=0
cluster.within.bytes_per_s=1e300
cluster.device.flops_per_s={float99:1e12}
cluster.device=nope
cluster.device=3
cluster.device.memory_bytes=1e400
cluster.device.reserved_bytes=99999999999999
cluster=nope
cluster=[1]
cluster=measured
cluster.name=''
cluster.bogus=1
cluster.node_groups=[{}]
workload.prompt=0
workload.prompt={tokens:[],weights:[]}
workload.prompt={tokens:[1,2],weights:[1]}
workload.prompt={tokens:[1],weights:[nan]}
workload.response=x
workload.response=1000000000000
workload=null
plan.lags=[x]
schedule.max_lag=1000000000
engine.kind=nope
engine.kind=os:system
plan.models={actor:nope}
plan.models={nobody:tiny}
plan.calibration=/nope
plan.calibration=/proc
plan.pins.together=[[a]]
plan.pins.apart=[[actor,actor]]
plan.pins.num_devices={actor:1000}
plan.pins.devices={actor:'0-99999999999'}
plan.pins.devices={actor:'x'}
plan.pins.devices={actor:'3-1'}
plan.pins.layouts={actor.train:{tp:3}}
plan.pins.layouts={nobody:{tp:1}}
plan.compare=3
plan.compare=[/nope.yaml]
plan.compare=[/proc]
plan.compare=[/dev/zero]
plan.sensitivity=3
algorithm=null
json=/nope/x
json=/proc
json=3
output=/proc/x
trace=/dev/full
resume=/nope
"""


@pytest.mark.parametrize("word", LINES.splitlines())
def test_plan(word: str, refused: Refused) -> None:
    refused(["plan", word])


def group(**keys: Any) -> str:
    return json.dumps({"groups": [{"name": "all", **keys}]})


def plan(**keys: Any) -> str:
    return json.dumps({"groups": [{"name": "all"}], **keys})


PLANS: dict[str, str | bytes] = {
    "empty": "",
    "null": "null",
    "a list": "[]",
    "not UTF-8": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "cut": plan()[:-3],
    "more behind": plan() + "\0",
    "no groups": "{}",
    "empty groups": '{"groups":[]}',
    "unknown key": plan(bogus=1),
    "infinite ranks": '{"groups":[{"name":"a","num_ranks":1e999}]}',
    "negative ranks": group(num_ranks=-1),
    "no ranks": group(num_ranks=0),
    "many ranks": group(num_ranks=100_000_000),
    "two ranks here": group(num_ranks=2),
    "device cpu:99": group(device="cpu:99"),
    "device tpu": group(device="tpu"),
    "no device": group(device=""),
    "cuda": group(device="cuda"),
    "same name twice": '{"groups":[{"name":"a"},{"name":"a"}]}',
    "empty name": '{"groups":[{"name":""}]}',
    "name of blanks": '{"groups":[{"name":" "}]}',
    "unknown node": plan(nodes={"nobody": "all"}),
    "unknown group": plan(nodes={"actor": "nope"}),
    "unknown default": plan(default_group="nope"),
    "no chunks": plan(chunks_per_rank=0),
    "many chunks": plan(chunks_per_rank=10**9),
    "layout of nobody": plan(layouts={"nobody": {"tp": 1}}),
    "layout of nothing": plan(layouts={"actor.train": {"tp": 0}}),
    "no tokens": plan(micro_batch_tokens={"actor.train": 0}),
    "tokens of nobody": plan(micro_batch_tokens={"nobody": 3}),
    "negative lag": plan(max_lag=-1),
    "cluster": plan(cluster=3),
    "prediction": plan(prediction={}),
    "served by nobody": group(served={"actor": "b"}),
    "served by itself": group(served={"actor": "all"}),
    "tensor parallel": group(tensor_parallel=2),
    "device twice": group(devices=[0, 0]),
    "negative device": group(devices=[-1]),
    "huge device": group(devices=[10**20]),
}


@pytest.mark.parametrize("name", PLANS)
def test_plan_file(name: str, refused: Refused) -> None:
    refused(["run", *SMALL, "placement=plan.json"], {"plan.json": PLANS[name]})


CALIBRATIONS: dict[str, str | bytes] = {
    "empty": "",
    "a list": "[]",
    "not UTF-8": b"\xff\xfe",
    "nothing": "{}",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", CALIBRATIONS)
@pytest.mark.parametrize(
    "words",
    [["run", "calibration=c.json"], ["plan", "plan.calibration=c.json"]],
    ids=["run", "plan"],
)
def test_calibration_file(words: list[str], name: str, refused: Refused) -> None:
    refused(words, {"c.json": CALIBRATIONS[name]})
