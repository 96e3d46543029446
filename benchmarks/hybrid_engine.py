"""Generation in the processes that train, against groups of processes that take turns.

    python benchmarks/hybrid_engine.py --json FILE

For each pair of layouts a small GRPO runs on Ray, once with its generator within the group that
trains (`DeviceGroup.within`) and once in processes of its own on the same devices, rounds
interleaved.

- Bytes of a hand-over are counted where they come from other processes: what torch.distributed
  delivers, by wrapping the process group's own methods, less the rank's own part; and what the
  kernel says that it has copied out of their memory. They are compared with what the transfer plan
  says each process lacks.
- The time is that of bringing new weights from group to group, of every step but the first. A view
  gives its memory back while the group around it trains. A virtual machine may hand such memory on
  to its host, and then takes up to 4 ms for each 2 MiB that is touched again, ten times what the
  weights themselves take; so the time is also measured with the view's memory kept.
- Memory is the greatest resident size of each process from the hand-over until training has its
  turn again, above its size before its model was built, against training's own bytes and those of
  the view that are not training's own.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch.distributed as dist
from bench import parser, report, spread, table
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.roles import Sampling
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import DeviceGroup, Placement
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.planner.resharding.plan_transfer import DeviceTraffic
from penstock.planner.resharding.sharding import Sharding, unsharded
from penstock.workers.data.reasoning_task import ReasoningTaskSpec
from penstock.workers.data.sources import PromptSource
from penstock.workers.engines.divided_network import divided_sharding
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec
from penstock.workers.engines.torch_engine.specs import TorchGeneratorPolicy, TorchGeneratorSpec
from penstock.workers.executors.on_ray.executor import RayExecutor
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.rule_reward import RuleRewardSpec
from penstock.workers.rollout.generator_policy import SplitPolicySpec
from penstock.workers.training.optimizer import OptimizerSpec
from penstock.workers.weight_sync import peer_memory, views
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
SIZES = {"25M": (512, 8), "100M": (896, 10), "300M": (1280, 16)}
"""Hidden size and layers of models of about so many parameters, without the vocabulary."""
SIDES = ["within", "kept", "turns"]
"""A view, one that keeps its memory, and groups that take turns."""
LAYOUTS = TypeAdapter(Sharding)


@dataclass(frozen=True)
class Pair:
    """How a model trains, and how it generates on the same processes."""

    engine: str
    shards: int  # of FSDP
    train: tuple[int, int, int]  # ranks, and tensor- and pipeline-parallel processes of each
    view: tuple[int, int]  # ranks and tensor-parallel processes
    order: tuple[int, ...]  # devices of the view's processes


PAIRS = {
    "tp2 -> dp2": Pair("megatron", 1, (1, 2, 1), (2, 1), (0, 1)),
    "pp2 -> dp2": Pair("megatron", 1, (1, 1, 2), (2, 1), (0, 1)),
    "tp4 -> tp2": Pair("megatron", 1, (1, 4, 1), (2, 2), (0, 2, 1, 3)),
    "tp2 pp2 -> tp2": Pair("megatron", 1, (1, 2, 2), (2, 2), (0, 1, 2, 3)),
    "fsdp4 -> dp4": Pair("fsdp", 4, (1, 4, 1), (4, 1), (0, 1, 2, 3)),
    "fsdp2 x tp2 -> tp2": Pair("fsdp", 2, (1, 4, 1), (2, 2), (0, 1, 2, 3)),
    "tp4 dp2 -> tp2": Pair("megatron", 1, (2, 4, 1), (4, 2), (0, 2, 1, 3, 4, 6, 5, 7)),
    "fsdp4 dp2 -> dp8": Pair("fsdp", 4, (2, 4, 1), (8, 1), tuple(range(8))),
}


@dataclass
class Seen:
    """What one process has seen of its hand-overs."""

    base_bytes: int = 0  # of the process before its model was built
    received_bytes: list[int] = field(default_factory=list[int])  # in each, from other processes
    peak_bytes: list[int] = field(default_factory=list[int])  # of each and of its generation
    in_place_bytes: int = 0  # of the view, which are training's own


_SEEN = Seen()


def _watch(worker: Any) -> None:
    """Count what comes from other processes while weights are handed over, and watch the memory."""
    group: Any = dist.ProcessGroup
    receive, gather, read = group.recv, group.allgather, peer_memory.read_memory
    exchange, wake = views.exchange, worker.wake
    count = 0

    def received(self: Any, tensors: list[Any], *given: Any) -> Any:
        nonlocal count
        count += sum(t.numel() * t.element_size() for t in tensors)
        return receive(self, tensors, *given)

    def gathered(self: Any, outputs: list[list[Any]], inputs: list[Any], *given: Any) -> Any:
        nonlocal count
        found = gather(self, outputs, inputs, *given)
        count += sum(t.numel() * t.element_size() for one in outputs for t in one)
        count -= sum(t.numel() * t.element_size() for t in inputs)
        return found

    def copied(pid: int, runs: Any) -> int:
        nonlocal count
        found = read(pid, runs)
        count += found if pid != os.getpid() else 0
        return found

    def watched(plan: Any, device: int, held: Any, wanted: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the greatest size begins anew
        before = count
        exchange(plan, device, held, wanted)
        _SEEN.received_bytes.append(count - before)
        _SEEN.peak_bytes.append(0)
        trained = {one.untyped_storage().data_ptr() for one in held.values()}
        shared = [one for one in wanted.values() if one.untyped_storage().data_ptr() in trained]
        _SEEN.in_place_bytes = sum(one.nbytes for one in shared)

    def woken() -> None:
        if _SEEN.peak_bytes:
            _SEEN.peak_bytes[-1] = _status("VmHWM")
        wake()

    group.recv, group.allgather, peer_memory.read_memory = received, gathered, copied
    views.exchange, worker.wake = watched, woken


def _write(worker: Any, folder: str) -> None:
    """Leave what this process has seen in a folder."""
    storages = {one.untyped_storage().data_ptr(): one for one in worker.device_tensors()}
    found = {
        **asdict(_SEEN),
        "training_bytes": sum(one.untyped_storage().nbytes() for one in storages.values()),
        "layout": LAYOUTS.dump_python(worker.weights_layout(), mode="json"),
    }
    Path(folder, f"{worker.context.process}.json").write_text(json.dumps(found))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def _keep(policy: Any) -> bool:
    """Have a view sleep without giving its memory back."""
    return bool(policy.context.places)


@dataclass(frozen=True)
class CountedSpec:
    """A recipe whose worker can say what its process has received."""

    spec: Any
    keeps: bool  # the memory of views in its process

    def build(self, context: WorkerContext) -> Any:
        small = {**self.spec.model.architecture, "hidden_size": 64, "num_hidden_layers": 4}
        model = replace(self.spec.model, architecture={**small, "intermediate_size": 64})
        # What is imported, and groups that are joined, are none of the model.
        replace(self.spec, model=model).build(context)
        TASK.build()
        gc.collect()
        _SEEN.base_bytes = _status("VmRSS")
        worker: Any = self.spec.build(context)
        _watch(worker)
        if self.keeps:
            policy: Any = TorchGeneratorPolicy
            policy.sleep_empty = _keep
        worker.write_counts = MethodType(_write, worker)
        return worker


def run_of(pair: Pair, size: str, side: str) -> tuple[Engine, Mapping[str, Any]]:
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
    split = SplitPolicySpec(
        train=CountedSpec(train, side == "kept"), rollout=TorchGeneratorSpec(**own)
    )
    graph = build(grpo_step, cfg=GRPO(sampling=Sampling(num_samples=2, max_new_tokens=2)))
    devices = tuple(range(len(pair.order)))
    train_ranks, train_tensor, stages = pair.train
    main = DeviceGroup("main", train_ranks, "cpu", train_tensor, stages, devices)
    ranks, tensor = pair.view
    rollout = DeviceGroup("rollout", ranks, tensor_parallel=tensor, devices=pair.order)
    rollout = replace(rollout, within="main") if side != "turns" else rollout
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


def measured(pair: Pair, size: str, steps: int, side: str) -> dict[str, Any]:
    """Bytes that each process received in a step, seconds of each hand-over, and the hash."""
    engine, sources = run_of(pair, size, side)
    seconds: list[float] = []
    with engine, tempfile.TemporaryDirectory() as folder:
        for step in engine.run(sources, steps):
            if step.step:
                seconds += [sum(end - start for start, end in step.weights_s)]
        engine.call("actor", "write_counts", folder)
        weights = engine.call("actor", "weights_sha256")
        files = sorted(Path(folder).iterdir(), key=lambda file: int(file.stem))
        found = [json.loads(file.read_text()) for file in files]
    return {"seconds": seconds, "seen": found, "sha256": weights}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--sizes", nargs="+", default=["25M", "300M"], choices=list(SIZES))
    options.add_argument("--pairs", nargs="+", default=list(PAIRS), choices=list(PAIRS))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--steps", type=int, default=6, help="of a run; the first is not timed")
    options.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    given = options.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    pairs: list[dict[str, Any]] = []
    for size in given.sizes:
        for name in given.pairs:
            runs = [
                (side, measured(PAIRS[name], size, given.steps, side))
                for _ in range(given.rounds)
                for side in given.sides
            ]
            pairs.append(compared(name, size, runs))
            print(json.dumps(pairs[-1]), flush=True)
            report({"pairs": pairs}, given.json)  # the rest may take an hour
    head = ["pair", "size", "of view MB", "received MB", "planned MB", "equal", "s", "s kept"]
    rows = [
        [
            f"{one['from']} -> {one['to']}",
            one["size"],
            *(f"{max(one[key]) / 1e6:.1f}" for key in ("view_bytes", "received_bytes")),
            f"{max(one['planned_bytes']) / 1e6:.1f}",
            one["equal"],
            *(f"{one[key] or 0:.3f}" for key in ("seconds", "seconds_kept", "seconds_take_turns")),
            *(f"{one[key] or 0:.2f}" for key in ("ratio", "ratio_kept")),
            f"{max(one['peak_bytes']) / 1e6:.0f}",
            f"{max(one['ledger_bytes']) / 1e6:.0f}",
            f"{one['memory_ratio']:.3f}",
        ]
        for one in pairs
    ]
    head += ["s in turns", "ratio", "ratio kept"]
    print(table([*head, "peak MB", "ledger MB", "ratio"], rows))


def compared(name: str, size: str, runs: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Compare the runs of a pair of layouts; each comes with its side."""
    pair = PAIRS[name]
    every = {side: [run for its, run in runs if its == side] for side in SIDES}
    seen = [one["seen"] for one in every["within"]]
    traffic = planned(pair, seen[0][0]["layout"])
    received = [max(max(one["received_bytes"]) for one in all_) for all_ in zip(*seen, strict=True)]
    peaks = [
        max(max(one["peak_bytes"]) - one["base_bytes"] for one in all_)
        for all_ in zip(*seen, strict=True)
    ]
    ledger = [
        one["training_bytes"] + share.needed_bytes - one["in_place_bytes"]
        for one, share in zip(seen[0], traffic, strict=True)
    ]
    within, kept, turns = (
        spread([second for one in every[side] for second in one["seconds"]])
        if every[side]
        else None
        for side in SIDES
    )
    hashes = {run["sha256"] for _, run in runs}
    fits = all(
        abs(got - share.received_bytes) <= share.received_bytes / 100
        for got, share in zip(received, traffic, strict=True)
    )
    before, after = name.split(" -> ")
    return {
        "from": before,
        "to": after,
        "size": size,
        "ranks": len(pair.order),
        "view_bytes": [share.needed_bytes for share in traffic],
        "received_bytes": received,
        "planned_bytes": [share.received_bytes for share in traffic],
        "equal": fits and len(hashes) == 1,
        "seconds": within["median"] if within else None,
        "seconds_take_turns": turns["median"] if turns else None,
        "seconds_kept": kept["median"] if kept else None,
        "ratio": within["median"] / turns["median"] if within and turns else None,
        "ratio_kept": kept["median"] / turns["median"] if kept and turns else None,
        "spread": within,
        "spread_kept": kept,
        "spread_take_turns": turns,
        "in_place_bytes": [one["in_place_bytes"] for one in seen[0]],
        "peak_bytes": peaks,
        "ledger_bytes": ledger,
        "memory_ratio": max(peak / due for peak, due in zip(peaks, ledger, strict=True)),
    }


def planned(pair: Pair, layout: Any) -> list[DeviceTraffic]:
    """What each process needs of the view, and what it lacks, by the transfer plan."""
    source = LAYOUTS.validate_python(layout)
    shapes = {param.name: param.shape for param in source.params}
    ranks, tensor = pair.view
    view = divided_sharding(shapes, tensor=tensor, replicas=ranks, dtype=source.dtype)
    if tensor == 1:
        view = unsharded(shapes, range(ranks), dtype=source.dtype)
    plan = views.view_plan(source, view, pair.order)
    return [plan.traffic[process] for process in range(len(pair.order))]


if __name__ == "__main__":
    main()
