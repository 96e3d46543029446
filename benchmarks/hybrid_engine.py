"""Generation in the processes that train, against groups of processes that take turns.

    python benchmarks/hybrid_engine.py --json FILE

For each pair of layouts a small GRPO runs on Ray, once with its generator within the group that
trains (`DeviceGroup.within`) and once in processes of its own on the same devices, rounds
interleaved. Bytes are counted where torch.distributed receives them, by wrapping the process
group's own methods, and compared with what the transfer plan says each process lacks. The time is
that of bringing new weights from group to group, of every step but the first. Memory is the
greatest resident size of each process while weights are handed over and a token is sampled, above
its size before its model was built, against training's own bytes and those of the view.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import psutil
import torch.distributed as dist
from bench import parser, report, table
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.roles import Sampling
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import DeviceGroup, Placement
from penstock.dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.planner.resharding.sharding import Sharding, unsharded
from penstock.workers.data.reasoning_task import ReasoningTaskSpec
from penstock.workers.data.sources import PromptSource
from penstock.workers.engines.divided_network import divided_sharding
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec
from penstock.workers.engines.torch_engine.specs import TorchGeneratorSpec
from penstock.workers.executors.on_ray.executor import RayExecutor
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.rule_reward import RuleRewardSpec
from penstock.workers.rollout.generator_policy import SplitPolicySpec
from penstock.workers.training.optimizer import OptimizerSpec
from penstock.workers.weight_sync.views import view_plan
from pydantic import TypeAdapter

TASK = ReasoningTaskSpec(
    name="chain_sum",
    config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    prompt_template="{expression}=",
    strip_spaces=True,
    num_train=64,
    num_held_out=16,
)
TOKENIZER = TokenizerSpec(alphabet="0123456789+-= ")
SIZES = {"25M": (512, 8), "100M": (896, 10), "300M": (1280, 15)}
"""Hidden size and layers of models of about so many parameters, without the vocabulary."""
STEPS = 4
LAYOUTS = TypeAdapter(Sharding)


@dataclass(frozen=True)
class Pair:
    """How a model trains, and how it generates on the same processes."""

    engine: str
    shards: int  # of FSDP
    train: tuple[int, int]  # tensor- and pipeline-parallel processes of its one rank
    view: tuple[int, int]  # ranks and tensor-parallel processes
    order: tuple[int, ...]  # devices of the view's processes


PAIRS = {
    "tp2 -> dp2": Pair("megatron", 1, (2, 1), (2, 1), (0, 1)),
    "pp2 -> dp2": Pair("megatron", 1, (1, 2), (2, 1), (0, 1)),
    "tp4 -> tp2": Pair("megatron", 1, (4, 1), (2, 2), (0, 2, 1, 3)),
    "tp2 pp2 -> tp2": Pair("megatron", 1, (2, 2), (2, 2), (0, 1, 2, 3)),
    "fsdp4 -> dp4": Pair("fsdp", 4, (4, 1), (4, 1), (0, 1, 2, 3)),
    "fsdp2 x tp2 -> tp2": Pair("fsdp", 2, (4, 1), (2, 2), (0, 1, 2, 3)),
}

_RECEIVED = {"bytes": 0}


def _count_received() -> None:
    """Have torch.distributed's process groups count what comes from other processes."""
    group: Any = dist.ProcessGroup
    receive = group.recv

    def counted(self: Any, tensors: list[Any], *given: Any) -> Any:
        _RECEIVED["bytes"] += sum(t.numel() * t.element_size() for t in tensors)
        return receive(self, tensors, *given)

    group.recv = counted


def _write(worker: Any, folder: str) -> None:
    """Leave what this process has counted in a folder, and count anew."""
    own = psutil.Process()
    found = {
        "received": _RECEIVED["bytes"],
        "peak": _status("VmHWM"),
        "now": own.memory_info().rss,
        "layout": LAYOUTS.dump_python(worker.weights_layout(), mode="json"),
    }
    Path(folder, f"{worker.context.process}.json").write_text(json.dumps(found))
    _RECEIVED["bytes"] = 0
    Path("/proc/self/clear_refs").write_text("5")  # the greatest size begins anew


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


@dataclass(frozen=True)
class CountedSpec:
    """A recipe whose worker can say what its process has received."""

    spec: WorkerSpec

    def build(self, context: WorkerContext) -> Any:
        _count_received()
        worker: Any = self.spec.build(context)
        worker.write_counts = MethodType(_write, worker)
        return worker


def run_of(pair: Pair, size: str, *, within: bool) -> tuple[Engine, Mapping[str, Any]]:
    hidden, layers = SIZES[size]
    tokenizer = TOKENIZER.build()
    model = ModelSpec(
        architecture={
            "model_type": "qwen2",
            "vocab_size": 32,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        }
    )
    own: dict[str, Any] = {
        "model": model,
        "end_ids": (tokenizer.eos_id,),
        "num_words": tokenizer.vocab_size,
    }
    options: dict[str, Any] = {"optimizer": OptimizerSpec(lr=1e-4), **own}
    train: Any = MegatronPolicySpec(**options)
    if pair.engine == "fsdp":
        train = FsdpPolicySpec(shards=pair.shards, **options)
    split = SplitPolicySpec(train=CountedSpec(train), rollout=TorchGeneratorSpec(**own))
    graph = build(grpo_step, cfg=GRPO(sampling=Sampling(num_samples=2, max_new_tokens=2)))
    devices = tuple(range(len(pair.order)))
    main = DeviceGroup("main", 1, "cpu", *pair.train, devices)
    ranks, tensor = pair.view
    rollout = DeviceGroup("rollout", ranks, tensor_parallel=tensor, devices=pair.order)
    rollout = replace(rollout, within="main") if within else rollout
    nodes = {
        node.name: "rollout" if node.name == "actor.generate" else "main"
        for node in graph.nodes
        if node.name not in graph.sources
    }
    rule = RuleRewardSpec(task=TASK, tokenizer=TOKENIZER)
    prompts = PromptSource(TASK.build(), tokenizer, batch_size=4, seed=0)
    engine = Engine(
        graph,
        Placement((main, rollout), nodes, num_chunks=ranks),
        workers={"actor": split, "reward": rule},
        executor=RayExecutor(1),
        schedule=Schedule(max_lag=0),
    )
    return engine, {"prompts": prompts}


def measured(pair: Pair, size: str, *, within: bool) -> dict[str, Any]:
    """Bytes that each process received in a step, seconds of each hand-over, and the hash."""
    engine, sources = run_of(pair, size, within=within)
    seconds: list[float] = []
    with engine, tempfile.TemporaryDirectory() as folder:
        for step in engine.run(sources, STEPS):
            if step.step:
                seconds += [sum(end - start for start, end in step.weights_s)]
        engine.call("actor", "write_counts", folder)
        weights = engine.call("actor", "weights_sha256")
        files = sorted(Path(folder).iterdir(), key=lambda file: int(file.stem))
        found = [json.loads(file.read_text()) for file in files]
    return {"seconds": seconds, "found": found, "sha256": weights}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--sizes", nargs="+", default=["25M", "300M"], choices=list(SIZES))
    options.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    pairs: list[dict[str, Any]] = []
    for size in given.sizes:
        for name in given.pairs:
            pairs.append(compared(name, size, given.rounds))
            print(json.dumps(pairs[-1]), flush=True)
    head = ["pair", "size", "received MB", "planned MB", "equal", "s", "s in turns", "ratio"]
    rows = [
        [
            f"{one['from']} -> {one['to']}",
            one["size"],
            f"{max(one['received_bytes']) / 1e6:.1f}",
            f"{max(one['planned_bytes']) / 1e6:.1f}",
            one["equal"],
            f"{one['seconds']:.3f}",
            f"{one['seconds_take_turns']:.3f}",
            f"{one['seconds'] / one['seconds_take_turns']:.2f}",
        ]
        for one in pairs
    ]
    print(table(head, rows))
    report({"pairs": pairs}, given.json)


def compared(name: str, size: str, rounds: int) -> dict[str, Any]:
    pair = PAIRS[name]
    every: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for _ in range(rounds):
        for within in (True, False):
            every[within].append(measured(pair, size, within=within))
    first = every[True][0]
    received = [one["received"] // STEPS for one in first["found"]]
    planned = planned_bytes(pair, first["found"][0]["layout"])
    seconds = {
        within: statistics.median(s for one in runs for s in one["seconds"])
        for within, runs in every.items()
    }
    hashes = {one["sha256"] for runs in every.values() for one in runs}
    before, after = name.split(" -> ")
    return {
        "from": before,
        "to": after,
        "size": size,
        "ranks": len(pair.order),
        "received_bytes": received,
        "planned_bytes": planned,
        "equal": received == planned and len(hashes) == 1,
        "seconds": seconds[True],
        "seconds_take_turns": seconds[False],
    }


def planned_bytes(pair: Pair, layout: Any) -> list[int]:
    """What each process lacks by the transfer plan."""
    source = LAYOUTS.validate_python(layout)
    shapes = {param.name: param.shape for param in source.params}
    ranks, tensor = pair.view
    view = divided_sharding(shapes, tensor=tensor, replicas=ranks, dtype=source.dtype)
    if tensor == 1:
        view = unsharded(shapes, range(ranks), dtype=source.dtype)
    plan = view_plan(source, view, pair.order)
    return [plan.traffic[process].received_bytes for process in range(len(pair.order))]


if __name__ == "__main__":
    main()
