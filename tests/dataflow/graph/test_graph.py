"""The recorded graph as data: texts, JSON, comparison, pickling, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest
import torch
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.reference_grpo import ReferenceGRPO, reference_grpo_step
from penstock.algorithms.reward_modelling import RewardModelling, reward_modelling_step
from penstock.algorithms.roles import Sampling
from penstock.algorithms.sft import SFT, sft_step
from penstock.dataflow.errors import FlowError, Where
from penstock.dataflow.graph.graph import Constant, Graph, Node, Ref
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.kinds import NodeKind

GOLDEN = Path(__file__).parents[1] / "graphs"
SHIPPED = {
    "sft": build(sft_step, cfg=SFT()),
    "reward_modelling": build(reward_modelling_step, cfg=RewardModelling()),
    "grpo": build(grpo_step, cfg=GRPO()),
    "reference_grpo": build(reference_grpo_step, cfg=ReferenceGRPO()),
    "ppo": build(ppo_step, cfg=PPO()),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_graphs_print_as_before(name: str) -> None:
    """PENSTOCK_ACCEPT=1 replaces the texts by what is printed now; read the diff afterwards."""
    file = GOLDEN / f"{name}.txt"
    text = f"{SHIPPED[name]}\n"
    if os.environ.get("PENSTOCK_ACCEPT") == "1":
        file.write_text(text)
    assert text == file.read_text()


def test_equal_steps_make_equal_graphs() -> None:
    for name, again in (
        ("grpo", build(grpo_step, cfg=GRPO())),
        ("ppo", build(ppo_step, cfg=PPO())),
    ):
        assert again == SHIPPED[name]
        assert again.diff(SHIPPED[name]) == ""
        assert again.to_json() == SHIPPED[name].to_json()


def test_a_diff_shows_what_changed() -> None:
    other = build(grpo_step, cfg=GRPO(epochs=2))
    assert SHIPPED["grpo"] != other
    diff = SHIPPED["grpo"].diff(other).splitlines()
    assert [line for line in diff if line[0] in "+-"] == [
        "--- grpo_step",
        "+++ grpo_step",
        "-  epochs = 1",
        "+  epochs = 2",
    ]


@pytest.mark.parametrize("name", SHIPPED)
def test_json_holds_the_whole_graph(name: str) -> None:
    graph = SHIPPED[name]
    data = json.loads(graph.to_json())
    assert [node["name"] for node in data["nodes"]] == [node.name for node in graph.nodes]
    assert list(data["roles"]) == list(graph.roles)
    assert data["results"] == list(graph.results)
    text = graph.to_json()
    for node in graph.nodes:
        for _, ref in node.inputs:
            assert f'"from": "{ref}"' in text


def test_json_of_a_node() -> None:
    node = next(n for n in json.loads(SHIPPED["grpo"].to_json())["nodes"] if n["kind"] == "op")
    node.pop("where")
    assert node == {
        "name": "group_advantage",
        "kind": "op",
        "scope": "group",
        "role": None,
        "method": None,
        "op": "penstock.algorithms.ops.advantages:group_advantage",
        "arguments": {
            "score": {"from": "reward.score.out"},
            "prompt_id": {"from": "actor.generate.prompt_id"},
            "divide_by_std": {"constant": "True"},
            "variance": {"constant": "'unbiased'"},
            "eps": {"constant": "1e-06"},
        },
        "outputs": [{"name": "out", "spec": "f32[sample]", "rows": "actor.generate"}],
        "reads": [],
    }


@pytest.mark.slow
def test_json_is_the_same_in_another_process() -> None:
    code = (
        "from penstock.algorithms.ppo import PPO, ppo_step\n"
        "from penstock.dataflow.graph.tracer import build\n"
        "print(build(ppo_step, cfg=PPO()).to_json())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert ran.stdout == SHIPPED["ppo"].to_json() + "\n"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_graph_with_its_ops_survives_pickling(name: str) -> None:
    graph = SHIPPED[name]
    copy = pickle.loads(pickle.dumps(graph))
    assert copy == graph
    assert [node.function for node in copy.nodes] == [node.function for node in graph.nodes]
    assert str(copy) == str(graph)


@pytest.mark.slow
def test_a_graph_of_a_script_s_own_ops_survives_cloudpickle() -> None:
    """Ray carries what a script defines in `__main__` by value, with cloudpickle."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    code = (
        "import sys, torch\n"
        "from penstock.algorithms.roles import Demonstrations, PerSample, TokenMask\n"
        "from penstock.dataflow.graph.tracer import build, op\n"
        "from ray import cloudpickle\n"
        "@op(scope='row')\n"
        "def count(mask: TokenMask) -> PerSample:\n"
        "    return mask.sum(1).float()\n"
        "def step(demos: Demonstrations) -> object:\n"
        "    return count(demos.mask)\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(build(step)))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=True)
    graph = cloudpickle.loads(ran.stdout)
    function = graph["count"].function
    assert function(torch.tensor([[True, False], [True, True]])).tolist() == [1.0, 2.0]
    assert str(graph).endswith("  mask ~> demos.mask\n  -> out f32[sample]\n\nreturns count")


def test_the_networkx_graph_is_frozen_and_its_edges_name_their_columns() -> None:
    dag = SHIPPED["ppo"].dag
    assert nx.is_directed_acyclic_graph(dag)
    assert dag.edges["actor.generate", "critic.value"]["columns"] == ("tokens", "mask")
    assert dag.nodes["whiten"] == {"kind": "op", "scope": "batch", "role": None}
    with pytest.raises(nx.NetworkXError, match="Frozen graph"):
        dag.add_edge("a", "b")


def test_consumers_are_in_program_order() -> None:
    graph = SHIPPED["ppo"]
    assert graph.consumers("gae") == ("whiten", "critic.train")
    assert graph.consumers("critic.train") == ()


def test_an_output_is_found_by_name() -> None:
    generate = SHIPPED["grpo"]["actor.generate"]
    assert generate.output("mask").name == "mask"
    with pytest.raises(KeyError, match="maks"):
        generate.output("maks")


def node(name: str, line: int, reads: str | None = None) -> Node:
    arguments = (("x", Ref(reads, "out")),) if reads else ()
    where = Where("steps.py", line, f"{name}(...)")
    return Node(name, NodeKind.OP, "row", 0, where, arguments=arguments)


def test_two_nodes_of_one_name_are_refused() -> None:
    with pytest.raises(FlowError) as caught:
        Graph("g", (node("f", 1), node("f", 2)), {}, {})
    assert str(caught.value) == (
        "steps.py:2\n"
        "    f(...)\n"
        "two nodes are named 'f'\n"
        "    the first was made at steps.py:1\n"
        "    give one of them another name"
    )


@pytest.mark.parametrize("missing", ["ghost", "later"])
def test_an_edge_from_nowhere_or_from_below_is_refused(missing: str) -> None:
    with pytest.raises(FlowError) as caught:
        Graph("g", (node("f", 1, reads=missing), node("later", 2)), {}, {})
    assert str(caught.value) == (
        "steps.py:1\n"
        "    f(...)\n"
        f"node 'f', input 'x': '{missing}.out' is made by no earlier node\n"
        "    an edge must point to a node that stands before it"
    )


def test_a_graph_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SHIPPED["grpo"].name = "x"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_constant_prints_what_differs_from_its_defaults() -> None:
    assert str(Constant(Sampling())) == "Sampling()"
    assert str(Constant(Sampling(num_samples=4))) == "Sampling(num_samples=4)"
    assert str(Constant(ClippedPolicyLoss(eps_low=0.1))) == "ClippedPolicyLoss(eps_low=0.1)"
    assert str(Constant(len)) == "len"
    assert str(Constant("k1")) == "'k1'"


def test_a_fingerprint_is_of_the_wiring_and_not_of_constants() -> None:
    made = {
        build(step, cfg=cfg).fingerprint for step, cfg in ((grpo_step, GRPO()), (ppo_step, PPO()))
    }
    assert len(made) == 2
    longer = GRPO(sampling=Sampling(num_samples=2, max_new_tokens=99))
    assert build(grpo_step, cfg=longer).fingerprint in made
    graph = build(grpo_step, cfg=GRPO())
    first, *others = graph.nodes
    renamed = dataclasses.replace(others[-1], name="other")
    changed = dataclasses.replace(graph, nodes=(first, *others[:-1], renamed), results=())
    assert changed.fingerprint not in made
