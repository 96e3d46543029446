"""The processes of `test_fsdp_engine`: `python fsdp_rank.py FOLDER SIZE LAYOUT...`.

A LAYOUT is "RANKS,SHARDS,TENSOR:PART+PART", or "RANKS,SHARDS,TENSOR,CONTEXT:PART+PART" where shards
share rows; they are taken on one after another. One that needs half of the processes is for the
first half, and if "~" is before it for the second, at the same time. FOLDER holds models and a
batch; what a part finds is written to it, named by part, layout and process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import fork_groups, join
from megatron_models import (
    DROPPED,
    FAMILIES,
    LORA,
    OPTIMIZER,
    PADDED,
    frozen,
    load_batch,
    numbers_saved,
    optimizer_of,
    ruin,
    take_on,
    tiny,
    train_in_pieces,
    train_pairs,
    train_policy,
    train_value,
    train_with_a_nap,
    write_refusals,
)
from penstock.algorithms.roles import Sampling
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext, on_device, sleep_offloaded
from penstock.workers.engines.fsdp_engine.mesh import (
    CutOutputs,
    _mesh,  # pyright: ignore[reportPrivateUsage]
)
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec, FsdpRewardSpec, FsdpValueSpec
from penstock.workers.engines.roles import PolicyWorker, last_masked
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.data_parallel import _groups  # pyright: ignore[reportPrivateUsage]
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_models import NEWEST, architecture


class Part:
    """What a process was started with, and what it found."""

    def __init__(self, process: int, sizes: list[int], folder: Path) -> None:
        self.folder = folder
        self.ranks, self.shards, self.tensor = ranks, shards, tensor = sizes[:3]
        self.divided: dict[str, Any] = {"shards": shards}
        self.layout = f"r{ranks}s{shards}t{tensor}"
        if len(sizes) > 3:
            self.divided["context_parallel"] = sizes[3]
            self.layout += f"c{sizes[3]}"
        self.process = process
        self.found: dict[str, Tensor] = {}

    def context(self, role: str) -> WorkerContext:
        size = self.shards * self.tensor
        rank, beside = divmod(self.process, size)
        return WorkerContext(role, 7, rank, self.ranks, tensor_rank=beside, tensor_parallel=size)

    def policy(self, family: str, **options: Any) -> PolicyWorker:
        spec = ModelSpec(folder=str(self.folder / family), dtype=options.pop("dtype", "float32"))
        return self.build(spec, **options)

    def build(self, model: ModelSpec, **options: Any) -> PolicyWorker:
        spec = FsdpPolicySpec(model=model, end_ids=(2,), **self.divided, **options)
        return spec.build(self.context("actor"))

    def rows(self, batch: Any) -> Any:
        """This rank's rows: uneven shares, whole groups of four."""
        if self.ranks == 1:
            return batch
        first = self.process < self.shards * self.tensor
        return {key: value[:8] if first else value[8:] for key, value in batch.items()}

    def keep(self, prefix: str, tensors: Any) -> None:
        self.found |= {f"{prefix}/{name}": value for name, value in tensors.items()}


def logits(part: Part) -> None:
    batch = load_batch(part.folder)
    for family in FAMILIES:
        policy = part.policy(family, micro_batch_tokens=150)
        for name, temperature in (("logprob", 1.0), ("cold", 0.7)):
            found = policy.logprob(batch["tokens"], batch["mask"], temperature=temperature)
            part.found[f"{family}/{name}"] = found
        top = policy.top_words(batch["tokens"], batch["mask"], num_words=40)
        part.keep(f"{family}/top", vars(top))
        last = last_masked(batch["mask"][:1])  # of whoever shares the row one has nothing to read
        part.found[f"{family}/last"] = policy.logprob(batch["tokens"][:1], last)
        rows = batch["tokens"][:3]
        with torch.no_grad():
            outputs = policy.network.outputs(rows, rows >= 0)
            cut = isinstance(outputs, CutOutputs)
            values = outputs.rows.whole(outputs.values) if cut else outputs.values
            model: Any = policy.network
            model = model._model
            part.found[f"{family}/logits"] = model.head(values) if model.apart else values
            words = torch.arange(5).expand(int((rows >= 0).sum()), 5)
            part.found[f"{family}/words"], _ = policy.network.token_logprob(
                outputs, words, 0.7, needs_entropy=False
            )
        part.keep(f"{family}/export", policy.export_weights())
        local = policy.local_tensors().values()
        part.found[f"{family}/stored"] = torch.tensor(sum(tensor.numel() for tensor in local))
        held = policy.weights_layout().bytes_on[part.process] // 4
        part.found[f"{family}/described"] = torch.tensor(held)


def learn(part: Part, family: str, prefix: str, **options: Any) -> PolicyWorker:
    policy = part.policy(family, optimizer=optimizer_of(family), **options)
    train = train_with_a_nap if family == "qwen3" else train_policy
    part.keep(f"{prefix}/metric", train(policy, part.rows(load_batch(part.folder))))
    part.keep(prefix, policy.export_weights())
    return policy


def train(part: Part) -> None:
    policy = learn(part, "qwen2-tied", "qwen2-tied", micro_batch_tokens=60)
    policy.save_state(part.folder / f"state-{part.layout}")
    learn(part, "qwen2-tied", "coarse")
    learn(part, "qwen3", "qwen3", micro_batch_tokens=200)


class _Counted(TorchDispatchMode):
    """Counts the operations with such a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.name in str(func)
        return func(*args, **(kwargs or {}))


def ways(part: Part) -> None:
    """Three steps in each way to keep less; what a forward pass keeps, and how often it gathers."""
    batch = load_batch(part.folder)
    kept, again = {"reshard_after_forward": False}, {"activation_checkpointing": True}
    ways: dict[str, dict[str, Any]] = {"plain": {}, "kept": kept, "again": again}
    if "context_parallel" not in part.divided:
        ways |= {"both": {**kept, **again}, "away": {"offload": True}}
    for name, options in ways.items():
        policy = part.policy("qwen2-tied", optimizer=OPTIMIZER, micro_batch_tokens=60, **options)
        found: dict[str, Tensor] = {}
        with _Counted("allgather") as gathers:
            for step in range(3):
                sleep_offloaded([policy])
                if policy.offload:
                    assert all(t.untyped_storage().nbytes() == 0 for t in policy.device_tensors())
                with on_device([policy]):
                    found = train_policy(policy, part.rows(batch), range(step, step + 1))
        policy.wake()
        part.keep(f"{name}/metric", found)
        part.keep(name, policy.export_weights())
        part.found[f"{name}/gathers"] = torch.tensor(gathers.count)
        part.found[f"{name}/saved"] = torch.tensor(numbers_saved(policy, batch["tokens"][:4], 2))


def roles(part: Part) -> None:
    batch = part.rows(load_batch(part.folder))
    options: dict[str, Any] = {
        "model": ModelSpec(folder=str(part.folder / "qwen2-tied")),
        "optimizer": OPTIMIZER,
        "micro_batch_tokens": 90,
        **part.divided,
    }
    critic = FsdpValueSpec(zero_init_head=False, **options).build(part.context("critic"))
    part.found["value/before"] = critic.value(batch["tokens"], batch["mask"])
    part.keep("value/metric", train_value(critic, batch))
    part.keep("value", critic.export_weights())
    reward = FsdpRewardSpec(**options).build(part.context("reward"))
    rows = torch.arange(len(batch["tokens"]))
    part.found["reward/before"] = reward.score(batch["tokens"], batch["mask"], rows)
    part.keep("reward/metric", train_pairs(reward, batch))
    part.keep("reward", reward.export_weights())
    critic.save_pretrained(part.folder / f"critic-{part.layout}")
    policy = part.policy("qwen3")
    for tensor in policy.local_tensors().values():
        tensor.add_(1)
    policy.weights_changed()
    policy.save_pretrained(part.folder / f"policy-{part.layout}")


def pieces(part: Part) -> None:
    """Rows in three rounds, of which rank 0 has none in the first."""
    policy = part.policy("qwen2-tied", optimizer=OPTIMIZER, micro_batch_tokens=60)
    first = part.process < part.shards * part.tensor
    rows = part.rows(load_batch(part.folder))
    part.keep("metric", train_in_pieces(policy, rows, (0, 3) if first else (2, 5)))
    part.found |= policy.export_weights()


def gpt2(part: Part) -> None:
    """A family without a plan of its own is divided by rows."""
    policy = part.build(ModelSpec(architecture=architecture("gpt2")), optimizer=OPTIMIZER)
    part.keep("metric", train_policy(policy, part.rows(load_batch(part.folder))))
    part.keep("weights", policy.export_weights())


def newest(part: Part) -> None:
    """Adapters with dropout on families that transformers computes."""
    batch = part.rows(load_batch(part.folder))
    for name in NEWEST:
        model = ModelSpec(architecture=architecture(name))
        policy = part.build(model, optimizer=OPTIMIZER, lora=DROPPED, micro_batch_tokens=90)
        part.found[f"{name}/before"] = policy.logprob(batch["tokens"], batch["mask"])
        part.keep(f"{name}/metric", train_policy(policy, batch))
        part.keep(name, policy.export_weights())
        policy.save_pretrained(part.folder / f"newest-{name}")


def padded(part: Part) -> None:
    """The token that pads is a word as well."""
    policy = part.build(ModelSpec(architecture=PADDED), optimizer=OPTIMIZER)
    part.keep("metric", train_policy(policy, part.rows(load_batch(part.folder))))
    part.keep("weights", policy.export_weights())


def half(part: Part) -> None:
    """Weights in bfloat16 are stepped through a float32 copy."""
    policy = part.policy("qwen2-tied", dtype="bfloat16", optimizer=OPTIMIZER)
    part.keep("metric", train_policy(policy, part.rows(load_batch(part.folder))))
    part.keep("trained", policy.export_weights())
    policy.save_state(part.folder / f"half-{part.layout}")


def resume(part: Part) -> None:
    """Go on from states that others saved."""
    batch = part.rows(load_batch(part.folder))
    for saved in ("torch", "r1s2t1", "r1s1t2"):
        policy = part.policy("qwen2-tied", optimizer=OPTIMIZER)
        policy.logprob(batch["tokens"], batch["mask"])  # gathers weights that no longer hold then
        policy.load_state(part.folder / f"state-{saved}")
        part.keep(f"{saved}/metric", train_policy(policy, batch, range(2, 3)))
        part.keep(saved, policy.export_weights())


def refusals(part: Part) -> None:
    """Keep the messages with which models and calls that cannot be divided are refused."""
    policy = part.policy("qwen2")
    none = torch.zeros(0, 3, dtype=torch.int64)
    odd = ModelSpec(architecture={**tiny("qwen2"), "vocab_size": 61})
    other = ModelSpec(architecture=architecture("gpt2"))
    spec = FsdpPolicySpec(model=odd, end_ids=(2,), shards=3)
    two = FsdpPolicySpec(model=other, end_ids=(2,), shards=2, context_parallel=2)
    attempts: dict[str, Callable[[], object]] = {
        "generate": lambda: policy.generate(none, none[:, 0], Sampling()),
        "train": lambda: train_policy(policy, load_batch(part.folder)),
        "odd": lambda: part.build(odd),
        "gpt2": lambda: part.build(other),
        "adapters": lambda: part.policy("qwen2", lora=LORA),
        "shards": lambda: spec.build(part.context("actor")),
        "gpt2 context": lambda: two.build(part.context("actor")),
    }
    write_refusals(part.folder / f"fsdp-refusals-{part.process}.json", attempts)


def adapters(part: Part) -> None:
    """Adapters and a critic's head are all that is trained, stored and exported beside a model."""
    batch = part.rows(load_batch(part.folder))
    policy = part.policy("qwen2-tied", optimizer=OPTIMIZER, lora=LORA)
    part.found["before"] = policy.logprob(batch["tokens"], batch["mask"])
    part.keep("policy/metric", train_policy(policy, batch))
    part.keep("policy", policy.export_weights())
    part.found["after"] = policy.logprob(batch["tokens"], batch["mask"])
    policy.save_pretrained(part.folder / f"adapted-{part.layout}")
    policy.save_state(part.folder / f"state-adapters-{part.layout}")
    policy = part.policy("qwen2-tied", dtype="bfloat16", optimizer=OPTIMIZER, lora=LORA)
    part.keep("half/metric", train_policy(policy, batch))
    part.keep("half", policy.export_weights())
    policy.save_pretrained(part.folder / f"adapted-half-{part.layout}")
    options: dict[str, Any] = {
        "model": ModelSpec(folder=str(part.folder / "qwen2-tied")),
        "optimizer": OPTIMIZER,
        "lora": LORA,
        **part.divided,
    }
    critic = FsdpValueSpec(zero_init_head=False, **options).build(part.context("critic"))
    part.keep("value/metric", train_value(critic, batch))
    part.keep("value", critic.export_weights())
    try:
        part.policy("ruined", lora=LORA)
    except ConfigError as error:
        (part.folder / f"ruined-{part.layout}-{part.process}.txt").write_text(str(error))


PARTS: dict[str, Callable[[Part], None]] = {
    "adapters": adapters,
    "frozen": frozen,
    "logits": logits,
    "train": train,
    "ways": ways,
    "roles": roles,
    "gpt2": gpt2,
    "newest": newest,
    "half": half,
    "padded": padded,
    "pieces": pieces,
    "resume": resume,
    "refusals": refusals,
    "ruin": ruin,
}


def rejoin(process: int, size: int, folder: Path, name: str) -> None:
    """Make these processes torch.distributed's; meshes of others are forgotten."""
    _mesh.cache_clear()
    _groups.cache_clear()
    join(process, size, folder / name)


def begin(layout: str, process: int, folder: Path) -> None:
    """Take on a layout."""
    sizes, parts = layout.split(":")
    part = Part(process, [int(number) for number in sizes.split(",")], folder)
    take_on(part, parts, PARTS)


def main(process: int, size: int, folder: Path, layouts: list[str]) -> None:
    """Half of the processes first, then all."""
    half, place = divmod(process, size // 2)
    rejoin(place, size // 2, folder, f"store-half-{half}")
    for layout in layouts:
        mine = layout.startswith("~") == bool(half)
        if mine and needed(layout) < size:
            begin(layout.removeprefix("~"), place, folder)
    dist.destroy_process_group()
    rejoin(process, size, folder, "store")
    for layout in layouts:
        if needed(layout) == size:
            begin(layout, process, folder)
    dist.destroy_process_group()
    if process == 0:
        train_alone(folder)


def train_alone(folder: Path) -> None:
    """In one process, whose group of one another library would first have to start."""
    rejoin(0, 1, folder, "store-alone")
    with _Counted("c10d") as collectives:
        policy = Part(0, [1, 1, 1], folder).policy("qwen2-tied", optimizer=OPTIMIZER)
        metrics = train_policy(policy, load_batch(folder))
    found = {"collectives": collectives.count, "norm": bool(metrics["grad_norm"] > 0)}
    (folder / "alone.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def needed(layout: str) -> int:
    """Processes of a layout."""
    sizes = layout.removeprefix("~").split(":")[0].split(",")
    return prod(int(number) for number in sizes[:3])


if __name__ == "__main__":
    fork_groups(main)
