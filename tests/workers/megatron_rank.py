"""The processes of `test_megatron_engine`: `python megatron_rank.py FOLDER SIZE LAYOUT...`.

A LAYOUT is "TP,DP,PP:PART+PART"; they are taken on one after another. FOLDER holds models and a
batch; what a part finds is written to it, named by the part, the layout and the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import fork_groups, join
from megatron_models import (
    FAMILIES,
    OPTIMIZER,
    frozen,
    load_batch,
    numbers_saved,
    optimizer_of,
    read_weights,
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
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.megatron_engine.groups import parallel_state, prepare_megatron
from penstock.workers.engines.megatron_engine.specs import (
    MegatronPolicySpec,
    MegatronRewardSpec,
    MegatronValueSpec,
)
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.logprob_mismatch import MismatchError, MismatchLimits
from penstock.workers.training.network import MicroBatches
from torch import Tensor
from torch_models import architecture


class Part:
    """What a process was started with, and what it found."""

    def __init__(self, process: int, sizes: Sequence[int], folder: Path) -> None:
        tp, dp, pp = sizes
        self.folder = folder
        self.sizes: dict[str, Any] = {
            "rank": process // tp % dp,
            "num_ranks": dp,
            "tensor_parallel": tp,
            "tensor_rank": process % tp,
            "pipeline_parallel": pp,
            "stage": process // tp // dp,
        }
        self.layout = f"tp{tp}dp{dp}pp{pp}"
        self.process = process
        self.found: dict[str, Tensor] = {}

    def context(self, role: str) -> WorkerContext:
        return WorkerContext(role, seed=7, **self.sizes)

    def policy(self, family: str, **options: Any) -> PolicyWorker:
        model = ModelSpec(folder=str(self.folder / family))
        spec = MegatronPolicySpec(model=model, end_ids=(2,), **options)
        return spec.build(self.context("actor"))

    def build(self, model: ModelSpec, role: str, **sizes: int) -> PolicyWorker:
        context = dataclasses.replace(self.context(role), **sizes)
        return MegatronPolicySpec(model=model, end_ids=(2,)).build(context)

    def rows(self, batch: Any) -> Any:
        """This rank's rows: uneven shares, whole groups of four."""
        if self.sizes["num_ranks"] == 1:
            return batch
        rank = self.sizes["rank"]
        return {key: value[:8] if rank == 0 else value[8:] for key, value in batch.items()}

    def keep(self, prefix: str, tensors: Any) -> None:
        self.found |= {f"{prefix}/{name}": value for name, value in tensors.items()}


def logits(part: Part) -> None:
    batch = load_batch(part.folder)
    for family in FAMILIES:
        policy = part.policy(family, micro_batch_tokens=150)
        part.found[f"{family}/logprob"] = policy.logprob(batch["tokens"], batch["mask"])
        part.found[f"{family}/cold"] = policy.logprob(
            batch["tokens"], batch["mask"], temperature=0.7
        )
        top = policy.top_words(batch["tokens"], batch["mask"], num_words=40)
        part.keep(f"{family}/top", vars(top))
        rows = batch["tokens"][:3]

        def load(part: Tensor) -> Any:
            return SimpleNamespace(tokens=part)

        def compute(rows: Any, policy: Any = policy, family: str = family) -> Tensor:
            tokens = rows.tokens
            outputs = policy.network.outputs(tokens, tokens >= 0)
            part.found[f"{family}/logits"] = outputs.values
            words = torch.arange(5).expand(int((tokens >= 0).sum()), 5)
            part.found[f"{family}/words"], _ = policy.network.token_logprob(
                outputs, words, 0.7, needs_entropy=False
            )
            return torch.zeros(())

        with torch.no_grad():
            policy.network.run(MicroBatches([rows], load, compute), backward=False)
        part.keep(f"{family}/export", policy.export_weights())
        stored = sum(tensor.numel() for tensor in policy.local_tensors().values())
        held = policy.weights_layout().bytes_on[part.process] // 4
        part.found[f"{family}/stored"] = torch.tensor([stored, held])


def learn(part: Part, family: str, **options: Any) -> PolicyWorker:
    policy = part.policy(family, optimizer=optimizer_of(family), **options)
    train = train_with_a_nap if family == "qwen3" else train_policy
    part.keep(f"{family}/metric", train(policy, part.rows(load_batch(part.folder))))
    part.keep(family, policy.export_weights())
    return policy


def tied(part: Part) -> None:
    policy = learn(part, "qwen2-tied", micro_batch_tokens=60)
    policy.save_state(part.folder / f"state-{part.layout}")


def train(part: Part) -> None:
    learn(part, "llama", share_optimizer=False)
    learn(part, "qwen3", sequence_parallel=True, micro_batch_tokens=200)
    batch = part.rows(load_batch(part.folder))
    model = ModelSpec(folder=str(part.folder / "qwen2-tied"))
    options: dict[str, Any] = {"model": model, "optimizer": OPTIMIZER, "micro_batch_tokens": 90}
    critic = MegatronValueSpec(zero_init_head=False, **options).build(part.context("critic"))
    part.found["value/before"] = critic.value(batch["tokens"], batch["mask"])
    part.keep("value/metric", train_value(critic, batch))
    part.keep("value", critic.export_weights())
    reward = MegatronRewardSpec(**options).build(part.context("reward"))
    rows = torch.arange(len(batch["tokens"]))
    part.found["reward/before"] = reward.score(batch["tokens"], batch["mask"], rows)
    part.keep("reward/metric", train_pairs(reward, batch))
    part.keep("reward", reward.export_weights())


def pieces(part: Part) -> None:
    """Rows in three rounds, of which one is empty."""
    policy = part.policy("qwen2-tied", optimizer=OPTIMIZER, micro_batch_tokens=60)
    rows = part.rows(load_batch(part.folder))
    part.keep("metric", train_in_pieces(policy, rows, (3, 3)))
    part.found |= policy.export_weights()


def recomputed(part: Part) -> None:
    """Three steps with activations kept, and computed again; how many numbers a forward keeps."""
    batch = part.rows(load_batch(part.folder))
    for name, again in (("kept", False), ("again", True)):
        policy = part.policy(
            "llama",
            optimizer=OPTIMIZER,
            micro_batch_tokens=100,
            sequence_parallel=part.sizes["tensor_parallel"] > 1,
            activation_checkpointing=again,
        )
        part.keep(f"{name}/metric", train_policy(policy, batch, range(3)))
        part.keep(name, policy.export_weights())
        part.found[f"{name}/saved"] = torch.tensor(numbers_saved(policy, batch["tokens"][:4]))


def resume(part: Part) -> None:
    """Go on from states that others saved, after saving them once more."""
    batch = part.rows(load_batch(part.folder))
    for saved in ("torch", "tp2dp1pp1", "tp1dp1pp2"):
        folder = part.folder / f"state-{saved}"
        if not folder.is_dir():
            continue
        policy = part.policy("qwen2-tied", optimizer=OPTIMIZER)
        policy.load_state(folder)
        policy.save_state(part.folder / f"again-{saved}-{part.layout}")
        part.keep(f"{saved}/metric", train_policy(policy, batch, range(2, 3)))
        part.keep(saved, policy.export_weights())


def half(part: Part) -> None:
    """Weights in bfloat16: trained, saved, and loaded from a state in float32."""
    batch = part.rows(load_batch(part.folder))
    model = ModelSpec(folder=str(part.folder / "qwen2-tied"), dtype="bfloat16")
    spec = MegatronPolicySpec(model=model, end_ids=(2,), optimizer=OPTIMIZER)
    policy = spec.build(part.context("actor"))
    part.keep("metric", train_policy(policy, batch))
    part.keep("trained", policy.export_weights())
    policy.save_state(part.folder / f"half-{part.layout}")
    policy.load_state(part.folder / "state-torch")
    part.keep("loaded", policy.export_weights())


def written(part: Part) -> None:
    """Folders in Hugging Face's layout, and tensors written from outside."""
    policy = part.policy("qwen3", optimizer=OPTIMIZER)
    policy.load_weights({n: w + 1 for n, w in read_weights(part.folder / "qwen3").items()})
    policy.save_pretrained(part.folder / f"policy-{part.layout}")
    for tensor in policy.local_tensors().values():
        tensor.data.zero_()
    policy.weights_changed()
    part.keep("zeroed", policy.export_weights())
    model = ModelSpec(folder=str(part.folder / "llama"))
    critic = MegatronValueSpec(model=model, zero_init_head=False).build(part.context("critic"))
    critic.save_pretrained(part.folder / f"critic-{part.layout}")
    again = ModelSpec(folder=str(part.folder / f"critic-{part.layout}"))
    if part.sizes["pipeline_parallel"] * part.sizes["tensor_parallel"] > 1:
        dist.barrier()  # one process writes
    part.keep("critic", critic.export_weights())
    part.keep("again", MegatronValueSpec(model=again).build(part.context("x")).export_weights())


def disagree(part: Part) -> None:
    """All processes refuse alike to train on what another model has sampled."""
    batch = part.rows(load_batch(part.folder))  # its log-probabilities are far from the model's
    limits = MismatchLimits(stop_above=0.01)
    policy = part.policy("qwen2-tied", optimizer=OPTIMIZER, mismatch=limits)
    part.keep("before", policy.export_weights())
    try:
        train_policy(policy, batch, staleness=0)
    except MismatchError as error:
        said = str(error).partition(" (largest")[0]
        (part.folder / f"disagree-{part.layout}-{part.process}.txt").write_text(said)
    part.keep("after", policy.export_weights())
    part.keep("metric", train_policy(policy, batch))


def refusals(part: Part) -> None:
    """What it says of what it cannot do, told apart by key."""
    policy = part.policy("qwen2")
    none = torch.zeros(0, 3, dtype=torch.int64)
    biased = ModelSpec(architecture=tiny("llama-biased"))
    odd = ModelSpec(architecture={**tiny("qwen2"), "vocab_size": 61})
    one_key = ModelSpec(architecture={**tiny("qwen2"), "num_key_value_heads": 1})
    window = ModelSpec(architecture={**tiny("mistral"), "sliding_window": 8})
    gpt2 = ModelSpec(architecture=architecture("gpt2"))
    stretched = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    yarn = ModelSpec(architecture={**tiny("llama"), "rope_parameters": stretched})
    weights = read_weights(part.folder / "qwen2")
    longer = {**weights, "model.norm.weight": torch.zeros(5)}
    attempts: dict[str, Callable[[], object]] = {
        "generate": lambda: policy.generate(none, none[:, 0], Sampling()),
        "train": lambda: train_policy(policy, load_batch(part.folder)),
        "names": lambda: policy.load_weights({**weights, "extra": torch.zeros(1)}),
        "shape": lambda: policy.load_weights(longer),
    }
    models = {"gpt2": gpt2, "biased": biased, "odd": odd, "one_key": one_key, "yarn": yarn}
    models["window"] = window
    for name, model in models.items():
        attempts[name] = partial(part.build, model, "actor")
    write_refusals(part.folder / f"refusals-{part.process}.json", attempts)


PARTS: dict[str, Callable[[Part], None]] = {
    "frozen": frozen,
    "logits": logits,
    "tied": tied,
    "train": train,
    "resume": resume,
    "half": half,
    "pieces": pieces,
    "recomputed": recomputed,
    "written": written,
    "disagree": disagree,
    "refusals": refusals,
    "ruin": ruin,
}


def work_off(
    kind: type[Part],
    functions: Mapping[str, Callable[[Any], None]],
    process: int,
    size: int,
    folder: Path,
    layouts: list[str],
) -> None:
    """Take on the layouts, one after another."""
    join(process, size, folder / f"store-{size}")
    for layout in layouts:
        sizes, parts = layout.split(":")
        part = kind(process, [int(number) for number in sizes.split(",")], folder)
        take_on(part, parts, functions)
        parallel_state().destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    prepare_megatron("cpu")
    fork_groups(partial(work_off, Part, PARTS))
