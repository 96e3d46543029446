"""The processes of `test_mixtures`: `python mixture_rank.py FOLDER SIZE LAYOUT...`.

A LAYOUT is "TP,EP,DP,PP:PART+PART"; they are taken on one after another. FOLDER holds models and a
batch; what a part finds is written to it, named by the part, the layout and the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forked_ranks import fork_groups
from megatron_models import (
    MIXTURES,
    OPTIMIZER,
    load_batch,
    mixture_optimizer,
    tiny,
    train_pairs,
    train_policy,
    write_refusals,
)
from megatron_rank import Part, work_off
from penstock.workers.engines.megatron_engine.groups import prepare_megatron
from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec, MegatronRewardSpec
from penstock.workers.models.spec import ModelSpec
from pydantic import TypeAdapter


class MixturePart(Part):
    """With experts divided over processes that share a model."""

    def __init__(self, process: int, sizes: Sequence[int], folder: Path) -> None:
        tp, ep, dp, pp = sizes
        super().__init__(process, (tp * ep, dp, pp), folder)
        self.experts = ep
        self.layout = f"tp{tp}ep{ep}dp{dp}pp{pp}"

    def policy(self, family: str, **options: Any) -> Any:
        return super().policy(family, expert_parallel=self.experts, **options)


def learn(part: MixturePart) -> None:
    """Of every family: log-probabilities, three steps, the state after them, and a folder."""
    batch = load_batch(part.folder)
    for family in MIXTURES:
        options: dict[str, Any] = {"micro_batch_tokens": 60, "optimizer": mixture_optimizer(family)}
        if family == "qwen3_moe":  # of which the others have none
            options["sequence_parallel"] = part.layout.startswith("tp2")
            options["activation_checkpointing"] = True
            options["share_optimizer"] = False
        policy = part.policy(family, **options)
        part.found[f"{family}/logprob"] = policy.logprob(batch["tokens"], batch["mask"])
        part.keep(f"{family}/before", policy.export_weights())
        part.keep(f"{family}/metric", train_policy(policy, part.rows(batch), range(3)))
        part.keep(f"{family}/after", policy.export_weights())
        policy.save_state(part.folder / f"state-{family}-{part.layout}")
        policy.save_pretrained(part.folder / f"policy-{family}-{part.layout}")
        stored = sum(tensor.numel() for tensor in policy.local_tensors().values())
        layout = policy.weights_layout()
        part.found[f"{family}/stored"] = torch.tensor([stored, layout.bytes_on[part.process] // 4])
        held = policy.device_tensors()
        part.found[f"{family}/held"] = torch.tensor([t.numel() * t.element_size() for t in held])
        if part.process == 0:
            text = TypeAdapter(type(layout)).dump_json(layout)
            (part.folder / f"layout-{family}-{part.layout}.json").write_bytes(text)


def score(part: MixturePart) -> None:
    """A reward model learns."""
    batch = part.rows(load_batch(part.folder))
    spec = MegatronRewardSpec(
        model=ModelSpec(folder=str(part.folder / "mixtral")),
        optimizer=OPTIMIZER,
        micro_batch_tokens=60,
        expert_parallel=part.experts,
    )
    reward = spec.build(part.context("reward"))
    part.keep("metric", train_pairs(reward, batch))
    part.keep("after", reward.export_weights())


def resume(part: MixturePart) -> None:
    """Go on from states that others saved, after saving them once more."""
    batch = part.rows(load_batch(part.folder))
    for saved in ("torch", "tp1ep2dp1pp1", "tp1ep1dp2pp1"):
        folder = part.folder / f"state-qwen2_moe-{saved}"
        if saved == part.layout or not folder.is_dir():
            continue
        policy = part.policy("qwen2_moe", optimizer=OPTIMIZER)
        policy.load_state(folder)
        policy.save_state(part.folder / f"again-{saved}-{part.layout}")
        part.keep(f"{saved}/metric", train_policy(policy, batch, range(3, 4)))
        part.keep(f"{saved}/after", policy.export_weights())


def refusals(part: MixturePart) -> None:
    """What it says of what it cannot do, told apart by key."""
    sparse = {**tiny("qwen3_moe"), "decoder_sparse_step": 2}
    refused: dict[str, tuple[dict[str, Any], int]] = {
        "dense": (tiny("qwen2"), 2),
        "three": ({**tiny("mixtral"), "num_local_experts": 3}, 2),
        "places": (tiny("mixtral"), 3),
        "sparse": (sparse, 2),
        "only": ({**tiny("qwen2_moe"), "mlp_only_layers": [1]}, 2),
        "noise": ({**tiny("mixtral"), "router_jitter_noise": 0.1}, 2),
        "window": ({**tiny("mixtral"), "sliding_window": 8}, 2),
    }
    attempts: dict[str, Callable[[], object]] = {}
    for name, (architecture, experts) in refused.items():
        model = ModelSpec(architecture=architecture)
        spec = MegatronPolicySpec(model=model, end_ids=(2,), expert_parallel=experts)
        attempts[name] = partial(spec.build, part.context("actor"))
    write_refusals(part.folder / f"refusals-{part.process}.json", attempts)


PARTS: dict[str, Callable[[MixturePart], None]] = {
    "learn": learn,
    "score": score,
    "resume": resume,
    "refusals": refusals,
}


if __name__ == "__main__":
    prepare_megatron("cpu")
    fork_groups(partial(work_off, MixturePart, PARTS))
