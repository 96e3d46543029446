"""Placements: what a group must host, what the scheduler is told, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.losses import CrossEntropyLoss
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.roles import DemonstrationBatch, Demonstrations, Policy
from penstock.dataflow.errors import PlanError
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, flow_of, follow, one_group

GRAPH = build(grpo_step, cfg=GRPO())
NODES = {
    "actor.generate": "sampling",
    "reward.score": "sampling",
    "group_advantage": "sampling",
    "broadcast_over_tokens": "sampling",
    "actor.train": "training",
}
GROUPS = (DeviceGroup("sampling", 3), DeviceGroup("training", 2, "cuda"))


def split(nodes: Mapping[str, str] = NODES, num_chunks: int = 4) -> Placement:
    return Placement(GROUPS, nodes, num_chunks)


def test_one_group_holds_everything_with_a_chunk_for_each_rank() -> None:
    placement = one_group(GRAPH, num_ranks=3, device="cuda")
    assert placement.groups == (DeviceGroup("all", 3, "cuda"),)
    assert set(placement.nodes) == {node.name for node in GRAPH.nodes} - {"prompts"}
    assert placement.num_chunks == 3
    assert placement.hosted_roles(GRAPH, "all") == ("actor", "reward")
    assert placement.home(GRAPH, "actor") == "all"


def test_a_group_hosts_the_roles_its_nodes_read() -> None:
    assert split().hosted_roles(GRAPH, "sampling") == ("actor", "reward")
    assert split().hosted_roles(GRAPH, "training") == ("actor",)
    assert split().group("training").num_ranks == 2


def test_a_trained_role_s_home_is_where_it_trains_and_a_frozen_one_has_none() -> None:
    assert split().home(GRAPH, "actor") == "training"
    assert split().home(GRAPH, "reward") is None


def test_the_scheduler_is_told_groups_reads_and_chunks_and_nothing_of_frozen_roles() -> None:
    flow = flow_of(GRAPH, split())
    assert flow.groups == {"sampling": 3, "training": 2}
    assert flow.homes == {"actor": "training"}
    assert flow.trains_per_step == {"actor": 1}
    assert flow.num_chunks == 4
    shown = [(n.name, n.kind, n.chunked, n.group, n.inputs, n.reads, n.trains) for n in flow.nodes]
    generate, advantage = "actor.generate", "group_advantage"
    assert shown == [
        ("prompts", "source", True, "", (), (), None),
        (
            generate,
            "rollout",
            True,
            "sampling",
            ("prompts",),
            (WeightRead("actor", 0, True),),
            None,
        ),
        ("reward.score", "forward", True, "sampling", (generate,), (), None),
        (advantage, "op", True, "sampling", ("reward.score", generate), (), None),
        ("broadcast_over_tokens", "op", True, "sampling", (advantage, generate), (), None),
        (
            "actor.train",
            "train",
            False,
            "training",
            (generate, "broadcast_over_tokens"),
            (WeightRead("actor", 0),),
            "actor",
        ),
    ]


def test_a_batch_op_is_not_chunked() -> None:
    graph = build(ppo_step, cfg=PPO())
    flow = flow_of(graph, one_group(graph))
    assert [node.name for node in flow.nodes if not node.chunked] == [
        "whiten",
        "actor.train",
        "critic.train",
    ]


def test_a_second_graph_follows_the_first_one_s_roles() -> None:
    def imitate(demos: Demonstrations, actor: Policy, extra: Policy) -> object:
        batch = DemonstrationBatch(tokens=demos.tokens, mask=demos.mask)
        logprob = extra.logprob(demos.tokens, demos.mask)
        return actor.train(CrossEntropyLoss(), batch), logprob

    graph = build(imitate)
    placement = follow(graph, GRAPH, split())
    assert placement.nodes == {"actor.train": "training", "extra.logprob": "sampling"}
    assert (placement.groups, placement.num_chunks) == (GROUPS, 4)
    flow_of(graph, placement)


def without(name: str) -> dict[str, str]:
    return {node: group for node, group in NODES.items() if node != name}


@pytest.mark.parametrize(
    ("nodes", "num_chunks", "message"),
    [
        (
            {**NODES, "actor.trian": "training"},
            4,
            "the placement names node 'actor.trian', which graph 'grpo_step' does not have; did "
            "you mean 'actor.train'?",
        ),
        (
            without("reward.score"),
            4,
            "node 'reward.score' has no group; add it to the placement's nodes",
        ),
        (
            {**NODES, "reward.score": "smapling"},
            4,
            "node 'reward.score' is placed on group 'smapling', which is not declared; did you "
            "mean 'sampling'?",
        ),
        (
            NODES,
            2,
            "num_chunks is 2 but the largest group has 3 ranks, so some would have no rows; use "
            "at least 3",
        ),
    ],
    ids=["unknown node", "missing node", "unknown group", "too few chunks"],
)
def test_a_placement_that_does_not_fit_is_refused(
    nodes: Mapping[str, str], num_chunks: int, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        flow_of(GRAPH, split(nodes, num_chunks))
    assert str(caught.value) == message


def test_a_role_trains_in_one_place() -> None:
    def twice(demos: Demonstrations, actor: Policy) -> object:
        batch = DemonstrationBatch(tokens=demos.tokens, mask=demos.mask)
        return actor.train(CrossEntropyLoss(), batch), actor.train(CrossEntropyLoss(), batch)

    placement = split({"actor.train": "training", "actor.train#2": "sampling"})
    with pytest.raises(PlanError) as caught:
        flow_of(build(twice), placement)
    assert str(caught.value) == (
        "role 'actor' trains on groups ['sampling', 'training']; its weights have one home: put "
        "all its train nodes on one group"
    )
