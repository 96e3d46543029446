"""A flow that does not fit together is refused with a message that names the node."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.flow import Flow, FlowNode
from penstock.dataflow.scheduler.schedule import Schedule

PROMPTS = FlowNode("prompts", "source")
GENERATE = FlowNode("generate", "rollout", True, "a", ("prompts",), (WeightRead("actor", 0, True),))
TRAIN = FlowNode("train", "train", False, "a", ("generate",), trains="actor")
STREAMED = replace(GENERATE, streams=True)
ORDERED = replace(TRAIN, order_of="generate")
FLOW = Flow("step", (PROMPTS, GENERATE, TRAIN), {"a": 1}, {"actor": "a"}, {"actor": 1}, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_chunks": 0}, "Flow.num_chunks must be at least 1, got 0"),
        ({"groups": {"a": 0}}, "group 'a' must have at least 1 rank, got 0"),
        ({"homes": {}}, "node 'train' trains 'actor', which Flow.homes lacks"),
        (
            {"trains_per_step": {"actor": 2}},
            "Flow.trains_per_step is {'actor': 2}, but the nodes train {'actor': 1}",
        ),
        (
            {"homes": {"actor": "b"}},
            "role 'actor' lives on group 'b', which Flow.groups lacks",
        ),
        (
            {"homes": {"actor": "a", "critic": "a"}, "trains_per_step": {"actor": 1, "critic": 0}},
            "role 'critic' has a home but no node trains it; leave it out",
        ),
        (
            {"nodes": (GENERATE, TRAIN)},
            "node 'generate' takes 'prompts', which is not a node before it",
        ),
        (
            {"nodes": (replace(GENERATE, inputs=()), TRAIN)},
            "flow 'step' has no source node: its rows come from nowhere",
        ),
        (
            {"nodes": (PROMPTS, PROMPTS, GENERATE, TRAIN)},
            "node 'prompts' appears twice; node names must be unique",
        ),
        (
            {"nodes": (PROMPTS, replace(TRAIN, inputs=()), GENERATE)},
            "node 'generate' reads 'actor' at offset 0, but 1 train node(s) of it come before; "
            "nodes must be in program order",
        ),
        (
            {"nodes": (PROMPTS, replace(PROMPTS, name="x", group="a"), GENERATE, TRAIN)},
            "node 'x' is a source: it has no group, inputs or reads",
        ),
        (
            {"nodes": (PROMPTS, replace(GENERATE, group="b"), TRAIN)},
            "node 'generate' runs on group 'b', which Flow.groups lacks",
        ),
        (
            {"nodes": (PROMPTS, GENERATE, replace(TRAIN, chunked=True))},
            "node 'train' trains 'actor': it must not be chunked and must run on 'a'; got "
            "chunked=True, group 'a'",
        ),
        (
            {"nodes": (PROMPTS, replace(GENERATE, kind="train"), TRAIN)},
            "node 'generate' of kind 'train' has trains=None",
        ),
        (
            {"nodes": (PROMPTS, GENERATE, replace(TRAIN, inputs=("generate", "generate")))},
            "node 'train' names an input twice: generate, generate",
        ),
        (
            {"nodes": (PROMPTS, GENERATE, TRAIN, FlowNode("x", "op", True, "a", ("train",)))},
            "node 'x' takes 'train': a train call yields metrics, not columns",
        ),
        (
            {"nodes": (PROMPTS, replace(GENERATE, reads=GENERATE.reads * 2), TRAIN)},
            "node 'generate' reads a role twice: actor, actor",
        ),
        (
            {"nodes": (PROMPTS, GENERATE, replace(TRAIN, reads=GENERATE.reads))},
            "node 'train' trains 'actor' and cannot read it lagged",
        ),
        (
            {"nodes": (PROMPTS, replace(GENERATE, kind="sample"), TRAIN)},
            "node 'generate': kind must be one of source, op, rollout, forward, train, got "
            "'sample'",
        ),
        (
            {"nodes": (PROMPTS, GENERATE, replace(TRAIN, streams=True))},
            "node 'train' streams; only a chunked rollout can",
        ),
        (
            {"nodes": (PROMPTS, replace(GENERATE, chunked=False, streams=True), TRAIN)},
            "node 'generate' streams; only a chunked rollout can",
        ),
        (
            {
                "nodes": (
                    PROMPTS,
                    FlowNode("asked", "op", True, "a", ("prompts",)),
                    replace(GENERATE, inputs=("asked",), streams=True),
                    TRAIN,
                )
            },
            "node 'generate' streams; its inputs must all be sources",
        ),
        (
            {"nodes": (PROMPTS, GENERATE, replace(TRAIN, order_of="generate"))},
            "node 'train' has order_of='generate': it must be a train node, and that one a "
            "streaming rollout before it",
        ),
        (
            {"nodes": (PROMPTS, STREAMED, replace(TRAIN, order_of="nobody"))},
            "node 'train' has order_of='nobody': it must be a train node, and that one a "
            "streaming rollout before it",
        ),
        (
            {
                "nodes": (
                    PROMPTS,
                    STREAMED,
                    FlowNode("score", "op", True, "a", ("generate",), order_of="generate"),
                    TRAIN,
                )
            },
            "node 'score' has order_of='generate': it must be a train node, and that one a "
            "streaming rollout before it",
        ),
        (
            {"groups": {"a": 3}, "nodes": (PROMPTS, STREAMED, ORDERED), "num_chunks": 4},
            "node 'train' takes chunks one by one on 3 ranks; their number, 4, must be a multiple "
            "of the ranks",
        ),
    ],
)
def test_a_flow_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(FLOW, **change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_lag": -1},
            "Schedule.max_lag must be 0 to 1000, got -1; the samples of as many steps are kept at "
            "once",
        ),
        ({"streaming": -1}, "Schedule.streaming must be at least 0 parts, got -1"),
        ({"order": "random"}, "Schedule.order must be 'step' or 'arrival', got 'random'"),
        (
            {"deadline_s": 0.0},
            "Schedule.deadline_s must be a positive number of seconds, got 0.0",
        ),
    ],
)
def test_a_schedule_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Schedule(**fields)
