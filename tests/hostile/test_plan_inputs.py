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
cluster.num_nodes=-1
cluster.devices_per_node=1000000000000
cluster.within.bytes_per_s=.inf
cluster.within.bytes_per_s=nan
cluster.within.bytes_per_s=0
cluster.within.bytes_per_s=1e300
cluster.between.latency_s=-1
cluster.between.latency_s=.inf
cluster.device.flops_per_s={float99:1e12}
cluster.device.flops_per_s={bfloat16:.inf}
cluster.device.flops_per_s={bfloat16:0}
cluster.device=nope
cluster.device=3
cluster.device.memory_bytes=0
cluster.device.memory_bytes=1e400
cluster.device.memory_bytes=10000000000000000000000000000000000000000
cluster.device.reserved_bytes=99999999999999
cluster.device.reserved_bytes=-1
cluster=nope
cluster=[1]
cluster=measured
cluster.name=''
cluster.bogus=1
cluster.node_groups=[1]
cluster.node_groups=[{}]
workload.num_prompts=0
workload.num_prompts=1e400
workload.samples_per_prompt=0
workload.prompt=0
workload.prompt={tokens:[],weights:[]}
workload.prompt={tokens:[1,2],weights:[1]}
workload.prompt={tokens:[1],weights:[nan]}
workload.prompt={tokens:[1],weights:[.inf]}
workload.prompt={tokens:[1],weights:[0]}
workload.prompt={tokens:[-1],weights:[1]}
workload.response=x
workload.response=1000000000000
workload.updates_per_train=0
workload=3
workload=null
workload.bogus=1
plan.deadline_s=0
plan.deadline_s=-1
plan.deadline_s=nan
plan.deadline_s=.inf
plan.lags=[]
plan.lags=[-1]
plan.lags=[x]
schedule.max_lag=1000000000
plan.max_cp=0
engine.kind=nope
engine.kind=os:system
plan.models={actor:nope}
plan.models={nobody:tiny}
plan.models={actor:/proc}
plan.calibration=/nope
plan.calibration=/proc
plan.pins.together=[[a]]
plan.pins.together=[[actor,nobody]]
plan.pins.apart=[[actor,actor]]
plan.pins.num_devices={actor:0}
plan.pins.num_devices={actor:1000}
plan.pins.num_devices={nobody:1}
plan.pins.devices={actor:'0-99999999999'}
plan.pins.devices={actor:'x'}
plan.pins.devices={actor:'3-1'}
plan.pins.devices={actor:[-1]}
plan.pins.devices={actor:[0,0]}
plan.pins.devices={actor:''}
plan.pins.devices={actor:[]}
plan.pins.layouts={actor.train:{tp:0}}
plan.pins.layouts={actor.train:{tp:3}}
plan.pins.layouts={actor.train:{bogus:1}}
plan.pins.layouts={nobody:{tp:1}}
plan.pins.layouts={actor.train:{tp:100000000000}}
plan.pins.layouts=3
plan.pins.layouts={actor.train:3}
plan.pins.bogus=1
plan.pins=null
plan.compare=3
plan.compare=['']
plan.compare=[/nope.yaml]
plan.compare=[/proc]
plan.compare=[/dev/zero]
plan.target_s=0
plan.target_s=-1
plan.target_s=nan
plan.target_s=x
plan.sensitivity=3
plan.bogus=3
plan=3
plan=null
algorithm=null
json=/nope/x
json=/proc
json=3
html=''
output=/proc/x
trace=/dev/full
output=/dev/full
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
