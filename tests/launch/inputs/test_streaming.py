"""Streaming as the stages of a run take part in it: who does, what is refused, what is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from penstock.algorithms.dpo import DPO, dpo_step
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.sft import SFT, sft_step
from penstock.configs.schema import AlgorithmConfig
from penstock.dataflow.errors import ConfigError, PlanError
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, one_group
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.inputs.record import Stage
from penstock.launch.inputs.sizes import (
    check_parts,
    check_streams,
    stage_flow,
    stage_schedule,
    streaming_lines,
)

GRPO_GRAPH = build(grpo_step, cfg=GRPO(), name="grpo")
SFT_GRAPH = build(sft_step, cfg=SFT(), name="sft")
PARTS = Schedule(max_lag=1, streaming=8)


def stage(graph: Graph, placement: Placement | None = None) -> Stage:
    section = AlgorithmConfig(step="a:b", num_steps=1, per_step=dict.fromkeys(graph.sources, 8))
    placement = placement or one_group(graph)
    return Stage(graph.name, "algorithm", section, graph, 0, placement=placement)


def placed(
    graph: Graph, ranks: tuple[int, int], *on_rollout: str, shared: bool = False
) -> Placement:
    """What generates, and what is named, on a group of its own."""
    names = one_group(graph).nodes
    devices = [tuple(range(count)) if shared else () for count in ranks]
    groups = (
        DeviceGroup("train", ranks[0], devices=devices[0]),
        DeviceGroup("rollout", ranks[1], devices=devices[1]),
    )
    nodes = {n: "rollout" if n in ("actor.generate", *on_rollout) else "train" for n in names}
    return Placement(groups, nodes, num_chunks=max(ranks))


def test_a_stage_in_which_nothing_streams_keeps_its_rows_together() -> None:
    assert stage_schedule(GRPO_GRAPH, PARTS) == PARTS
    assert stage_schedule(SFT_GRAPH, PARTS) == replace(PARTS, streaming=0)
    assert stage_schedule(SFT_GRAPH, Schedule()) == Schedule()
    assert stage_flow(SFT_GRAPH, one_group(SFT_GRAPH), PARTS).num_chunks == 1


@pytest.mark.parametrize(("ranks", "parts"), [((1, 1), 8), ((2, 1), 8), ((3, 1), 9), ((3, 2), 12)])
def test_a_flow_has_equally_many_parts_for_every_rank(ranks: tuple[int, int], parts: int) -> None:
    flow = stage_flow(GRPO_GRAPH, placed(GRPO_GRAPH, ranks), PARTS)
    assert flow.num_chunks == parts
    nodes = {node.name: node for node in flow.nodes}
    assert nodes["actor.generate"].streams
    assert nodes["actor.train"].order_of == "actor.generate"


def test_more_parts_than_prompts_are_refused() -> None:
    placement = placed(GRPO_GRAPH, (2, 1))
    check_parts(GRPO_GRAPH, placement, {"prompts": 8}, PARTS, "algorithm")
    check_parts(SFT_GRAPH, one_group(SFT_GRAPH), {"demos": 1}, PARTS, "algorithm")
    check_parts(GRPO_GRAPH, placement, {"prompts": 1}, Schedule(), "algorithm")
    with pytest.raises(ConfigError) as caught:
        check_parts(GRPO_GRAPH, placement, {"prompts": 7}, PARTS, "algorithm")
    assert str(caught.value) == (
        "'schedule.streaming' is 8: a step's rows would go on in 8 parts, but grpo takes 7 prompts "
        "per step\n"
        "    lower it to at most 6, or raise algorithm.per_step.prompts to at least 8"
    )


def test_parts_that_the_ranks_round_up_are_said_so() -> None:
    placement = placed(GRPO_GRAPH, (3, 2))
    with pytest.raises(ConfigError) as caught:
        check_parts(GRPO_GRAPH, placement, {"prompts": 5}, PARTS, "algorithm.before.grpo")
    assert str(caught.value) == (
        "'schedule.streaming' is 8: a step's rows would go on in 12 parts (a multiple of 6, for "
        "the ranks), but grpo takes 5 prompts per step\n"
        "    raise algorithm.before.grpo.per_step.prompts to at least 12"
    )


def test_a_run_in_which_nothing_streams_is_refused() -> None:
    sft, dpo = stage(SFT_GRAPH), stage(build(dpo_step, cfg=DPO(), name="dpo"))
    check_streams([sft, dpo], Schedule())
    check_streams([sft, stage(GRPO_GRAPH)], PARTS)
    with pytest.raises(ConfigError) as caught:
        check_streams([sft, dpo], PARTS)
    assert str(caught.value) == (
        "'schedule.streaming' is 8, but nothing that this run samples can stream\n"
        "    sft: it samples nothing\n"
        "    dpo: it samples nothing\n"
        "    leave it out"
    )


def test_a_run_in_which_nothing_is_sampled_has_no_segments() -> None:
    schedule = Schedule(segment_tokens=4)
    check_streams([stage(SFT_GRAPH), stage(GRPO_GRAPH)], schedule)
    with pytest.raises(ConfigError) as caught:
        check_streams([stage(SFT_GRAPH)], schedule)
    assert str(caught.value) == (
        "'schedule.segment_tokens' is 4, but this run samples nothing that could go on in a later "
        "step\n    leave it out"
    )


IN_FLIGHT = replace(PARTS, in_flight=True)


def test_only_a_stage_that_streams_takes_weights_in_flight() -> None:
    assert stage_schedule(GRPO_GRAPH, IN_FLIGHT).in_flight
    assert not stage_schedule(SFT_GRAPH, IN_FLIGHT).in_flight
    stage_flow(GRPO_GRAPH, placed(GRPO_GRAPH, (1, 1)), IN_FLIGHT)
    stage_flow(SFT_GRAPH, one_group(SFT_GRAPH), IN_FLIGHT)


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        (
            one_group(GRPO_GRAPH),
            "it runs on group 'all', which trains 'actor'; give it a group of its own",
        ),
        (
            placed(GRPO_GRAPH, (1, 1), shared=True),
            "its group 'rollout' shares devices with 'train', which trains 'actor', and they work "
            "in turn; give it devices of its own",
        ),
    ],
)
def test_weights_in_flight_are_refused_where_none_can_come(
    placement: Placement, reason: str
) -> None:
    with pytest.raises(PlanError) as caught:
        stage_flow(GRPO_GRAPH, placement, IN_FLIGHT)
    assert str(caught.value) == (
        "grpo is to take newer weights in flight (Schedule.in_flight), and nothing that it samples "
        f"can\n    actor.generate cannot: {reason}\n    or leave in_flight out"
    )


def test_who_takes_weights_in_flight_is_said() -> None:
    placement = placed(GRPO_GRAPH, (1, 1))
    lines = streaming_lines(stage(GRPO_GRAPH, placement), IN_FLIGHT, in_processes=True)
    assert lines[-1] == (
        "in flight  actor.generate takes newer weights between two tokens, and parts go on as they "
        "come"
    )
    segments = replace(IN_FLIGHT, streaming=0, segment_tokens=8)
    said = streaming_lines(stage(GRPO_GRAPH, placement), segments, in_processes=True)
    assert said[1:] == lines[-1:]


STREAMS = [
    "  actor.generate streams: a part goes on when its last row has ended",
    "  actor.train streams: it takes the parts of actor.generate one by one, by the length of "
    "their longest rows",
]


def said(graph: Graph, placement: Placement, *, in_processes: bool = True) -> list[str]:
    return streaming_lines(stage(graph, placement), PARTS, in_processes=in_processes)


def test_what_overlaps_has_no_notes() -> None:
    assert said(GRPO_GRAPH, placed(GRPO_GRAPH, (1, 1))) == [
        "streaming  grpo: a step's rows go on in 8 parts",
        *STREAMS,
    ]
    assert said(GRPO_GRAPH, placed(GRPO_GRAPH, (3, 1)))[0] == (
        "streaming  grpo: a step's rows go on in 9 parts, for 8 and the ranks of all groups"
    )
    assert said(SFT_GRAPH, one_group(SFT_GRAPH)) == []


@pytest.mark.parametrize(
    ("placement", "blocked", "group"),
    [
        (one_group(GRPO_GRAPH), "reward.score", "all"),
        (placed(GRPO_GRAPH, (1, 1), "reward.score"), "reward.score", "rollout"),
        (placed(GRPO_GRAPH, (1, 1), shared=True), "reward.score", "rollout"),
        (placed(GRPO_GRAPH, (1, 1), "group_advantage"), "group_advantage", "rollout"),
    ],
)
def test_what_must_wait_for_the_same_devices_is_named(
    placement: Placement, blocked: str, group: str
) -> None:
    assert said(GRPO_GRAPH, placement)[3:] == [
        f"  note: {blocked} could begin with a part, but must wait for the devices of "
        f"actor.generate (group '{group}'); use another group"
    ]


def test_in_one_process_nothing_overlaps() -> None:
    assert said(GRPO_GRAPH, placed(GRPO_GRAPH, (1, 1)), in_processes=False)[3:] == [
        "  note: this executor does one thing at a time, so nothing overlaps"
    ]


def test_where_no_training_streams_it_is_said() -> None:
    graph = build(ppo_step, cfg=PPO(), name="ppo")
    assert said(graph, placed(graph, (1, 1)))[4:] == [
        "  note: no train node streams: training begins when everything has been sampled"
    ]


@pytest.mark.parametrize(("length", "tokens"), [(1, "1 token"), (32, "32 tokens")])
def test_how_far_a_response_grows_in_a_step_is_said_with_and_without_streaming(
    length: int, tokens: str
) -> None:
    line = (
        f"segments   grpo: a response grows by at most {tokens} in a step, and goes on in the next"
    )
    for parts, more in ((0, 0), (8, 3)):
        schedule = Schedule(max_lag=1, segment_tokens=length, streaming=parts)
        placement = placed(GRPO_GRAPH, (1, 1))
        lines = streaming_lines(stage(GRPO_GRAPH, placement), schedule, in_processes=True)
        assert lines[0] == line
        assert len(lines) == 1 + more
    assert (
        streaming_lines(stage(SFT_GRAPH, one_group(SFT_GRAPH)), schedule, in_processes=True) == []
    )
