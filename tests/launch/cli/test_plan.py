"""`penstock plan`: what it prints and writes, and one clear message for what cannot be meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from penstock.launch.run_dir.step_logs import read_trace
from penstock.planner.plan.plan import Plan

from ..conftest import Penstock

SMALL = ("algorithm=ppo", "cluster=h100")


def refused(penstock: Penstock, *words: str) -> str:
    said = penstock("plan", *SMALL, *words)
    assert said.code == 2, said
    assert said.out == ""
    assert "Traceback" not in said.err
    assert said.err.startswith("penstock: ")
    return said.err.removeprefix("penstock: ").rstrip("\n")


def asked(penstock: Penstock, *words: str) -> dict[str, Any]:
    said = penstock("plan", "--json", *SMALL, *words)
    assert said.code == 0, said.err
    return json.loads(said.out)


# --- what it answers


@pytest.mark.slow
def test_json_holds_what_programs_need(penstock: Penstock) -> None:
    found = asked(penstock)
    assert found["feasible"] is True
    assert found["lower_bound_s"] <= found["step_time_s"]
    assert found["gap"] == pytest.approx(1 - found["lower_bound_s"] / found["step_time_s"])
    assert found["search_time_s"] > 0
    assert found["simulated_step_time_s"] == pytest.approx(found["step_time_s"])
    assert list(found["nodes"]) == [
        "actor.generate", "reward.score", "critic.value", "ref.logprob", "actor.train",
        "critic.train",
    ]  # fmt: skip
    for node in found["nodes"].values():
        layout = node["layout"]
        used = layout["tp"] * layout["pp"] * layout["dp"] * layout["cp"]
        assert used == len(node["devices"])
        assert node["duration_s"] == pytest.approx(sum(node["parts_s"].values()))
    assert list(found["memory_bytes_per_device"]) == [str(i) for i in range(8)]
    assert 0 < max(found["memory_bytes_per_device"].values()) <= 77 * 10**9
    assert found["runner_up"]["step_time_s"] >= found["step_time_s"]
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_text_and_files_show_the_same_plan(penstock: Penstock) -> None:
    words = ("json=plan.json", "html=plan.html", "trace=trace.json", "output=out.json")
    said = penstock("plan", *SMALL, *words)
    assert said.code == 0, said.err
    assert said.out.startswith("plan of ppo on h100: 1 node x 8 h100 = 8 devices, max_lag 0\n")
    for part in (
        "placement\n",
        "nodes\n",
        "timeline of one step",
        "memory of each device",
        "bound",
    ):
        assert part in said.out
    assert said.out.endswith("wrote plan.json\nwrote plan.html\nwrote trace.json\nwrote out.json\n")
    found = json.loads(Path("plan.json").read_text())
    plan = Plan.read(Path("out.json"))
    assert plan.prediction is not None
    assert plan.prediction.step_time_s == found["step_time_s"]
    ElementTree.fromstring(Path("plan.html").read_text().partition("\n")[2])
    generated = [e for e in read_trace(Path("trace.json")) if e["name"] == "actor.generate"]
    seconds = found["nodes"]["actor.generate"]["duration_s"]
    assert generated[0]["dur"] == pytest.approx(seconds * 1e6, abs=1)


@pytest.mark.slow
def test_roles_may_have_models_of_their_own(penstock: Penstock) -> None:
    words = ("plan.models.critic=qwen2.5-0.5b", "plan.models.reward=null", "model=qwen2.5-1.5b")
    found = asked(penstock, *words)
    assert found["nodes"]["critic.train"]["model"] == "qwen2.5-0.5b"
    assert found["nodes"]["actor.train"]["model"] == "qwen2.5-1.5b"
    assert "reward.score" not in found["nodes"]


@pytest.mark.slow
def test_a_model_folder_gives_its_shape(penstock: Penstock, tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 128, "vocab_size": 96}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **sizes}))
    found = asked(penstock, f"plan.models.critic={folder}", "model=qwen2.5-0.5b")
    assert found["nodes"]["critic.train"]["model"] == "my-model"


@pytest.mark.slow
def test_lengths_may_be_a_histogram(penstock: Penstock) -> None:
    short = asked(penstock, "workload.response=256")
    spread = asked(penstock, "workload.response={tokens: [16, 496], weights: [1, 1]}")
    assert spread["workload"]["response"] == {"tokens": [16, 496], "weights": [1.0, 1.0]}
    assert (
        spread["nodes"]["actor.generate"]["duration_s"]
        > (short["nodes"]["actor.generate"]["duration_s"])
    ), "rows that are cut off early leave the longest ones running alone"


@pytest.mark.slow
def test_sizes_follow_from_the_run_where_nothing_else_is_said(penstock: Penstock) -> None:
    words = ("model=tiny", "workload.prompt=null", "workload.response=null", "cluster=cpu")
    found = asked(penstock, *words, "task.num_train=200")
    workload = found["workload"]
    assert (workload["num_prompts"], workload["samples_per_prompt"]) == (128, 8)
    assert workload["response"]["tokens"] == [5]
    assert 3 <= min(workload["prompt"]["tokens"]) <= max(workload["prompt"]["tokens"]) <= 12
    assert sum(workload["prompt"]["weights"]) == 200


@pytest.mark.slow
def test_ranks_divide_the_rows_of_what_is_planned(penstock: Penstock) -> None:
    words = (
        "model=qwen2.5-0.5b",
        "cluster.devices_per_node=3",
        "algorithm.per_step.prompts=7",
        "workload.num_prompts=64",
    )
    nodes = asked(penstock, *words)["nodes"]
    for name in ("actor.train", "critic.train"):
        assert 64 % nodes[name]["layout"]["dp"] == 0
    said = refused(penstock, *words, "plan.pins.layouts.actor.train.dp=3")
    assert "that the pins and the number of rows allow" in said


@pytest.mark.slow
def test_auto_says_which_lag_wins_and_by_how_much(penstock: Penstock) -> None:
    found = asked(penstock, "schedule=auto")
    other = found["other_schedules"][0]
    assert {found["max_lag"], other["max_lag"]} == {0, 1}
    assert other["factor"] == pytest.approx(other["step_time_s"] / found["step_time_s"])
    assert other["factor"] >= 1


@pytest.mark.slow
def test_auto_leaves_out_a_lag_that_the_loss_cannot_correct_for(
    penstock: Penstock, tmp_path: Path
) -> None:
    (tmp_path / "lagging_step.py").write_text(
        "from penstock.algorithms.losses import ClippedPolicyLoss\n"
        "from penstock.algorithms.roles import *\n"
        "from penstock.algorithms.roles import PolicyBatch, Sampling\n"
        "def lagging(prompts: Prompts, actor: Policy, ref: Policy):\n"
        "    roll = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())\n"
        "    logprob = ref.logprob(roll.tokens, roll.mask)\n"
        "    return actor.train(ClippedPolicyLoss(), PolicyBatch(\n"
        "        tokens=roll.tokens, mask=roll.mask, behavior_logprob=logprob,\n"
        "        advantage=logprob))\n"
    )
    words = ("algorithm=own", "algorithm.step=lagging_step:lagging", "schedule=auto")
    said = penstock("plan", *words, "json=-")
    assert said.code == 0, said.err
    assert json.loads(said.out)["max_lag"] == 0
    assert said.err.startswith("penstock: note: max_lag=1 was not considered: ")
    said = penstock("plan", *words[:2], "schedule=one_step_off")
    assert said.code == 2
    assert "reads no 'behavior_logprob'" in said.err


@pytest.mark.slow
def test_pins_are_kept(penstock: Penstock) -> None:
    found = asked(
        penstock,
        "plan.pins.devices.reward=0-3",
        "plan.pins.together=[[actor,actor.generate,ref,critic]]",
        "plan.pins.layouts.reward.score={tp: 2, dp: 2}",
        "plan.models.critic=qwen2.5-0.5b",
        "model=qwen2.5-1.5b",
    )
    assert found["nodes"]["reward.score"]["devices"] == [0, 1, 2, 3]
    assert found["nodes"]["reward.score"]["layout"]["tp"] == 2
    assert found["nodes"]["critic.train"]["devices"] == [4, 5, 6, 7]


@pytest.mark.slow
def test_mixed_clusters_name_their_devices(penstock: Penstock) -> None:
    said = penstock("plan", "algorithm=sft", "cluster=mixed", "model=qwen2.5-1.5b")
    assert said.code == 0, said.err
    assert said.out.splitlines()[0] == (
        "plan of sft on mixed: 2 nodes x 8 h100 + 2 nodes x 8 a100-80g = 32 devices, max_lag 0"
    )


@pytest.mark.slow
def test_a_run_needs_no_more_than_a_group_to_be_planned(penstock: Penstock) -> None:
    """GRPO's reward is a rule, which has no model and costs nothing."""
    found = json.loads(penstock("plan", "--json", "model=qwen2.5-0.5b").out)
    assert list(found["nodes"]) == ["actor.generate", "actor.train"]


def test_cfg_job_checks_what_it_shows(penstock: Penstock) -> None:
    said = penstock("plan", "--cfg", "job", "cluster.num_nodes=3")
    assert said.code == 0
    assert "num_nodes: 3" in said.out
    assert penstock("plan", "--cfg", "job", "cluster.num_nodse=3").code == 2


# --- what fits nowhere


@pytest.mark.slow
def test_a_model_that_fits_nowhere_names_what_is_lacking(penstock: Penstock) -> None:
    said = penstock("plan", *SMALL, "model=llama-70b", "json=plan.json")
    assert said.code == 2
    assert "does not fit" in said.err or "fits nowhere" in said.err
    assert "the cheapest change that makes it fit: " in said.err
    found = json.loads(Path("plan.json").read_text())
    assert found["feasible"] is False
    assert found["reason"] in said.err
    assert found["step_time_s"] is None


# --- what cannot be meant


REFUSED: dict[tuple[str, ...], str] = {
    ("cluster.num_nodes=-1",): (
        "'cluster.num_nodes': expected at least 1, got -1\n    num_nodes: Nodes; all equal."
    ),
    ("cluster=h101",): (
        "there is no cluster 'h101'; did you mean 'h100'?\n"
        "    cluster is one of: a100-80g, b200, cpu, cpu-bf16, h100, h200, l40s, measured, "
        "mixed, rtx-4090"
    ),
    ("cluster.device=h10",): (
        "'cluster.device': there is no device 'h10'; did you mean 'h100'?\n"
        "    known devices are: a100-80g, b200, cpu, cpu-bf16, h100, h200, l40s, rtx-4090; for "
        "another one give its keys (name, memory_bytes, flops_per_s, memory_bytes_per_s, "
        "host_bytes_per_s)"
    ),
    ("workload.response=-1",): "'workload.response': expected at least 1 token, got -1",
    ("workload.prompt=many",): (
        "'workload.prompt': expected a mapping of keys or an integer, got the text 'many'\n"
        "    prompt: Tokens of a prompt, or `{tokens: [..], weights: [..]}`; by default as the "
        "task's prompts."
    ),
    ("workload.response={tokens: [9, 3]}",): (
        "a length histogram's tokens= must ascend without repeats, got (9, 3)"
    ),
    ("plan.models.judge=llama-7b",): (
        "'plan.models' names a role 'judge', which ppo does not have\n"
        "    its roles are: actor, critic, ref, reward"
    ),
    ("plan.models.critic=llama-8b",): (
        "'plan.models.critic': there is no model 'llama-8b'; did you mean 'llama-7b'?\n"
        "    give one of llama-13b, llama-34b, llama-70b, llama-7b, mixtral-8x7b, mlp, "
        "qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-14b, qwen2.5-32b, qwen2.5-3b, qwen2.5-72b, "
        "qwen2.5-7b, smollm2-135m, tiny, or a folder with a config.json"
    ),
    ("engine.kind=jax",): (
        "'engine.kind': 'jax' is no engine that trains\n    there are: torch, fsdp, megatron, "
        "or module:ENGINE for one of your own"
    ),
    ("plan.pins.layouts.actor.train.tp=3",): (
        "'plan.pins.layouts.actor.train': tp=3 does not divide 32 heads (model 'llama-7b')"
    ),
    ("plan.pins.layouts.actor.train={tp: 8, pp: 32, dp: 1}",): (
        "'plan.pins.layouts.actor.train': tp 8 x pp 32 x dp 1 uses 256 devices, but cluster "
        "'h100' has 8\n    a layout uses every device of its group: choose sizes whose product "
        "is their number"
    ),
    ("plan.pins.layouts.actor.train.ttp=2",): (
        "there is no key 'plan.pins.layouts.actor.train.ttp'; did you mean "
        "'plan.pins.layouts.actor.train.tp'?\n    plan.pins.layouts.actor.train has: tp, pp, "
        "dp, cp, ep, zero, sequence_parallel, checkpointing, offload, micro_batch"
    ),
    ("plan.pins.layouts.actor.trian.tp=2",): (
        "'plan.pins.layouts' names a node 'actor.trian', which the step does not have; did you "
        "mean 'actor.train'?\n    its nodes are: actor.generate, reward.score, critic.value, "
        "ref.logprob, actor.train, critic.train"
    ),
    ("plan.pins.together=[[actor, critik]]",): (
        "'plan.pins.together' names a call group 'critik', which the step does not have; did "
        "you mean 'critic'?\n    its call groups are: actor.generate, reward, critic.value, "
        "ref, actor, critic"
    ),
    ("plan.pins.devices.reward='0-3, x'",): (
        "'plan.pins.devices.reward': expected ids such as \"0-7, 12\", got '0-3, x'"
    ),
    ("plan.pins.devices.reward=0-9",): (
        "'plan.pins.devices.reward': there is no device 8\n    cluster 'h100' has devices 0 to 7"
    ),
    (
        "plan.pins.num_devices={actor: 2, actor.generate: 1, critic: 1, critic.value: 1, ref: 1, "
        "reward: 1}",
    ): (
        "'plan.pins' gives every call group its devices, 7 in all, but cluster 'h100' has 8: "
        "1 would be unused\n    pin more devices, leave a call group free, or plan for a "
        "smaller cluster"
    ),
    (
        "plan.pins.together=[[actor, actor.generate, critic, critic.value, ref, reward]]",
        "plan.pins.devices.actor=0-5",
    ): (
        "'plan.pins' gives every call group its devices, 6 in all, but cluster 'h100' has 8: 2 "
        "(6-7) would be unused\n    pin more devices, leave a call group free, or plan for a "
        "smaller cluster"
    ),
    ("plan.pins.num_devices.actor=8", "plan.pins.layouts.actor.train={tp: 2, pp: 1, dp: 2}"): (
        "'plan.pins.layouts.actor.train': tp 2 x pp 1 x dp 2 uses 4 devices, but 'actor' is "
        "pinned to 8\n    a layout uses every device of its group: choose sizes whose product is "
        "their number"
    ),
    ("~cluster.device.flops_per_s.float32", "model.dtype=float32"): (
        "'model': llama-7b of role 'actor' computes in float32, but device 'h100' of cluster "
        "'h100' has flops_per_s for bfloat16, float16 only\n    set model.dtype=bfloat16; or plan "
        "for another cluster"
    ),
    ("html=no/such/plan.html",): (
        "'html': 'no/such/plan.html' cannot be written: there is no such folder"
    ),
    ("cluster.node_groups=[{num_nodes: 1, devices_per_node: 8, device: h100}]",): (
        "'cluster' has both a device and node_groups\n"
        "    for a mixed cluster give node_groups alone: cluster=mixed is an example"
    ),
    ("cluster.device=null",): (
        "'cluster.device' is missing\n    choose a cluster (cluster=h100), or describe one: "
        "num_nodes, devices_per_node, device, within and between"
    ),
    ("cluster.between=null", "cluster.num_nodes=2"): (
        "'cluster.between' is missing, but the cluster has several nodes\n"
        "    say how they are connected: bytes_per_s and latency_s"
    ),
    ("cluster=null",): "a group was given null; leave it out, or choose an option",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_refusals(penstock: Penstock, words: tuple[str, ...]) -> None:
    assert refused(penstock, *words) == REFUSED[words]


def test_a_rate_that_is_not_known_is_that_of_float32(penstock: Penstock) -> None:
    words = ("model=qwen2.5-0.5b", "workload.prompt=8", "workload.response=8", "cluster=cpu")
    memory = f"cluster.device.memory_bytes={40 * 10**9}"
    said = penstock("plan", *words, memory)
    assert said.code == 0, said.err
    assert said.err == (
        "penstock: note: device 'cpu' has no flops_per_s for bfloat16; that of float32 stands for "
        "it\n"
    )


def test_a_measured_cluster_needs_its_measurement(penstock: Penstock) -> None:
    said = penstock("plan", "cluster=measured", "model=tiny")
    assert said.code == 2
    assert said.err == (
        "penstock: 'cluster' is 'measured', but no measurement is given\n    give the file that "
        "`penstock profile` wrote: plan.calibration=runs/calibration.json\n"
    )


def test_auto_is_for_plans(penstock: Penstock) -> None:
    said = penstock("run", "schedule=auto")
    assert said.code == 2
    assert said.err.startswith(
        "penstock: 'schedule.max_lag': expected an integer, got the text 'auto'\n"
    )


@pytest.mark.slow
def test_streaming_is_predicted_for_the_plan_that_is_fastest_without(penstock: Penstock) -> None:
    words = ("algorithm=grpo", "model=qwen2.5-0.5b", "plan.pins.apart=[[actor,actor.generate]]")
    lengths = "workload.response={tokens: [8,64,512,1024], weights: [50,30,15,5]}"
    said = penstock("plan", *words, lengths, "schedule.streaming=32")
    assert said.code == 0, said.err
    assert "  streaming    in 32 parts: " in said.out
    assert "streaming" not in penstock("plan", *words, lengths).out


@pytest.mark.slow
def test_segments_are_chosen_with_the_lag(penstock: Penstock) -> None:
    words = ("algorithm=grpo", "schedule=auto", "plan.segments=[0,512,16]", "plan.lags=[0]")
    lengths = "workload.response={tokens: [64,128,4096], weights: [50,45,5]}"
    found = asked(penstock, *words, lengths)
    assert found["segment_tokens"] == 512
    assert {other["segment_tokens"] for other in found["other_schedules"]} == {0, 16}
    factors = {other["segment_tokens"]: other["factor"] for other in found["other_schedules"]}
    assert factors[0] > 1
    assert factors[16] is None, "too many responses go on for any memory"
    said = penstock("plan", "algorithm=remax", *words[1:], lengths)
    assert "penstock: note: segment_tokens=512 was not considered: " in said.err
    assert said.code == 0, said.err
