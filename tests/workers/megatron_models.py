"""Models, batches and comparisons of tests of divided engines, and of the processes they start."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from penstock.algorithms.losses import BradleyTerryLoss, ClippedPolicyLoss, ClippedValueLoss
from penstock.algorithms.roles import PolicyBatch, PreferencePairs, TrainMetrics, ValueBatch
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.runtime.call_context import Piece, call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import (
    TorchPolicySpec,
    TorchRewardModelSpec,
    TorchValueSpec,
)
from penstock.workers.models.lora import LoraSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.checkpoint_files import open_state, read_state_json, read_whole
from penstock.workers.training.host_memory import HostCopy
from penstock.workers.training.microbatch import take_rows
from penstock.workers.training.network import MicroBatches
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor
from torch_models import architecture, assert_top_words, make_prompts, module_of

FAMILIES = (
    "llama",
    "llama-all-heads",
    "llama3",
    "mistral",
    "qwen2",
    "qwen2-all-heads",
    "qwen2-tied",
    "qwen3",
)
POLICY_LOSS = ClippedPolicyLoss(report_entropy=True, entropy_coef=0.01)
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
# A larger eps than usual; see `test_trainer`. A small bound on the norm, so that clipping counts.
OPTIMIZER = OptimizerSpec(lr=1e-3, weight_decay=0.01, eps=1e-5, max_grad_norm=0.3)
# A whole parameter at the ends of a pipeline, and one of three that engines fuse.
FROZEN = ("model.embed_tokens.*", "model.layers.0.self_attn.q_proj.*")
# Between its calls "qwen3" sleeps, and its optimizer forgets what it has done.
RESTARTING = dataclasses.replace(OPTIMIZER, restart_every_call=True)
# One of two shards then has none of an adapter's A.
LORA = LoraSpec(rank=1, alpha=4.0)
DROPPED = LoraSpec(rank=2, alpha=8.0, dropout=0.2)
EOS = 2


def optimizer_of(family: str) -> OptimizerSpec:
    """How a family's policy is trained."""
    return RESTARTING if family == "qwen3" else OPTIMIZER


def mixture_optimizer(family: str) -> OptimizerSpec:
    """How a mixture's policy is trained.

    The torch engine adds up the norm that gradients are scaled by in float32, which is 1e-5 off:
    two of three are not clipped, so that gradients are comparable.
    """
    return OPTIMIZER if family == "qwen2_moe" else dataclasses.replace(OPTIMIZER, max_grad_norm=0)


def tiny(family: str) -> dict[str, Any]:
    """Four layers (of mixtures two) and a vocabulary of 64, which two stages can share."""
    layers = 2 if family in MIXTURES else 4
    return {**architecture(family), "vocab_size": 64, "num_hidden_layers": layers}


PADDED = {**tiny("qwen2-tied"), "pad_token_id": 5}


def torch_policy(model: ModelSpec, **options: Any) -> PolicyWorker:
    spec = TorchPolicySpec(model=model, end_ids=(EOS,), **options)
    return spec.build(WorkerContext("actor", seed=7))


def write_models(folder: Path, families: tuple[str, ...] = FAMILIES) -> None:
    """A folder per family with random weights, biases and norms, and a batch."""
    for family in families:
        policy = torch_policy(ModelSpec(architecture=tiny(family)))
        generator = torch.Generator().manual_seed(3)
        weights = policy.export_weights()
        random = {
            name: torch.randn(weight.shape, generator=generator) * 0.15 + ("norm.weight" in name)
            for name, weight in weights.items()
        }
        policy.load_weights(random)
        policy.save_pretrained(folder / family)
        if family == "qwen2-tied":  # one number of one process, however it is divided
            policy.local_tensors()["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
            policy.save_pretrained(folder / "ruined")
    safetensors.torch.save_file(make_rows(), folder / "batch.safetensors")


def make_rows() -> dict[str, Tensor]:
    """24 rows of ragged prompts and responses in groups of four, one row without a response."""
    prompt, _ = make_prompts(6)
    generator = torch.Generator().manual_seed(5)
    prompt = prompt.repeat_interleave(4, 0)
    before = (prompt >= 0).sum(1, keepdim=True)
    after = before + torch.randint(1, 21, before.shape, generator=generator)
    after[5] = before[5]
    place = torch.arange(int(after.max())).expand(len(prompt), -1)
    sampled = torch.randint(3, 61, place.shape, generator=generator)
    tokens = torch.nn.functional.pad(prompt, (0, place.shape[1] - prompt.shape[1]), value=-1)
    mask = (place >= before) & (place < after)
    tokens = torch.where(mask, sampled, tokens)

    def noise() -> Tensor:
        return torch.randn(mask.shape, generator=generator) * mask

    return {
        "tokens": tokens,
        "mask": mask,
        "behavior_logprob": (noise() * 0.1 - 4) * mask,
        "advantage": noise(),
        "old_value": noise() * 0.1,
        "value_target": noise(),
        "pair_id": torch.arange(len(tokens)) // 2,
    }


def resumable(folder: Path, **options: Any) -> PolicyWorker:
    """The torch engine's, of which states are saved and loaded."""
    model = ModelSpec(folder=str(folder / "qwen2-tied"), **options)
    return torch_policy(model, optimizer=OPTIMIZER)


def under(found: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {n.removeprefix(start): value for n, value in found.items() if n.startswith(start)}


def saved_state(folder: Path, kind: str) -> dict[str, Tensor]:
    return read_whole(open_state(folder, read_state_json(folder), kind))


def load_batch(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "batch.safetensors")


def read_weights(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def values_of(metrics: TrainMetrics) -> dict[str, Tensor]:
    return {
        name: torch.tensor(metric.value, dtype=torch.float64)
        for name, metric in metrics.metrics.items()
    }


def train_policy(
    policy: Any, batch: dict[str, Tensor], steps: range = range(2), staleness: int | None = None
) -> dict[str, Tensor]:
    """Calls of GRPO's and PPO's policy loss, two minibatches each; metrics of the last."""
    found = TrainMetrics({})
    for step in steps:
        with call_scope(step, 0, staleness):
            found = policy.train(
                POLICY_LOSS, policy_batch(batch), num_minibatches=2, temperature=0.9
            )
    return values_of(found)


def policy_batch(batch: Mapping[str, Tensor]) -> PolicyBatch:
    """What a policy loss reads of a batch."""
    names = ("tokens", "mask", "behavior_logprob", "advantage")
    return PolicyBatch(**{name: batch[name] for name in names})


def train_in_pieces(
    policy: Any, batch: dict[str, Tensor], cuts: Sequence[int] = ()
) -> dict[str, Tensor]:
    """Two calls of one step each on rows that come in pieces, cut there, or whole; its metrics."""
    rows = torch.arange(len(batch["tokens"])).tensor_split(tuple(cuts))
    found = TrainMetrics({})
    for step in range(2):
        for number, mine in enumerate(rows):
            piece: Piece = "part" if number < len(cuts) else "last" if cuts else "whole"
            given = take_rows(policy_batch(batch), mine)
            with call_scope(step, 0, piece=piece):
                found = policy.train(POLICY_LOSS, given, temperature=0.9)
    return values_of(found)


def numbers_saved(policy: Any, tokens: Tensor, num_parts: int = 1) -> int:
    """Numbers kept for the backward pass of some rows, weights left out."""
    weights = {tensor.data_ptr() for tensor in policy.local_tensors().values()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor
        return tensor

    def compute(rows: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = policy.network.outputs(rows.tokens, rows.tokens >= 0)
        return outputs.values.sum() * 0

    def load(tokens: Tensor) -> Any:
        return SimpleNamespace(tokens=tokens)

    policy.network.run(MicroBatches([tokens] * num_parts, load, compute), backward=True)
    return sum(tensor.numel() for tensor in saved.values())


def frozen(part: Any) -> None:
    """Some parameters never move, and a policy without an optimizer follows the one that learns."""
    spec = dataclasses.replace(OPTIMIZER, frozen=FROZEN)
    policy, follower = part.policy("qwen2-tied", optimizer=spec), part.policy("qwen2-tied")
    part.keep("metric", train_policy(policy, part.rows(load_batch(part.folder))))
    part.found |= policy.export_weights()
    follower.follow(policy, share=0.25)
    part.keep("follower", follower.export_weights())


def write_refusals(path: Path, attempts: Mapping[str, Callable[[], object]]) -> None:
    """What is said of each attempt that fails."""
    said: dict[str, str] = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    path.write_text(json.dumps(said))


def take_on(part: Any, parts: str, functions: Mapping[str, Callable[[Any], None]]) -> None:
    """Work off the parts of a layout, and write what each has found."""
    for name in parts.split("+"):
        part.found = {}
        functions[name](part)
        found = {key: value.detach().contiguous() for key, value in part.found.items()}
        file = f"{name}-{part.layout}-{part.process}.safetensors"
        safetensors.torch.save_file(found, part.folder / file)
        dist.barrier()


def ruin(part: Any) -> None:
    """Write what every process says of weights that run away, of one advantage that is nan, and of
    one first weight.
    """
    batch = load_batch(part.folder)
    broken = {**batch, "advantage": batch["advantage"].clone()}
    broken["advantage"][0] = torch.nan
    said: list[str] = []
    for lr, rows in ((1e30, batch), (1e-3, broken)):
        policy = part.policy("qwen2-tied", optimizer=OptimizerSpec(lr=lr))
        try:
            train_policy(policy, part.rows(rows), range(1))
        except WorkerError as error:
            said.append(str(error))
    try:
        part.policy("ruined")
    except ConfigError as error:
        said.append(str(error))
    (part.folder / f"ruin-{part.layout}-{part.process}.json").write_text(json.dumps(said))


def assert_ruined_alike(folder: Path, layout: str, num_processes: int) -> None:
    """All processes stopped, with the same words."""
    files = [folder / f"ruin-{layout}-{process}.json" for process in range(num_processes)]
    first, *others = (json.loads(file.read_text()) for file in files)
    assert others == [first] * len(others)
    away, advantage, started = first
    assert started.startswith(f"the weights that 'actor' starts from ('{folder / 'ruined'}') are ")
    assert ", " not in started.splitlines()[0].partition("1e12: ")[2]  # one tensor
    assert away.startswith("step 0: 'actor' cannot be trained on: the gradient norm is nan at opti")
    assert "\n    not finite: " in away
    assert "weights " in away
    assert advantage.startswith("step 0: 'actor' cannot be trained on: the gradient norm is nan at")
    assert "column 'advantage' of its batch" in advantage
    assert "weights " not in advantage.partition("\n")[2].partition(";")[0]


def train_with_a_nap(policy: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """`train_policy`, with all that the worker has on its device taken away between the calls."""
    train_policy(policy, batch, range(1))
    weights = policy.local_tensors()
    kept = HostCopy(policy.device_tensors(), device="cpu")
    for name, tensor in weights.items():
        assert tensor.untyped_storage().nbytes() == 0, name
    kept.restore()
    return train_policy(policy, batch, range(1, 2))


def train_value(critic: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    names = ("tokens", "mask", "old_value", "value_target")
    columns = ValueBatch(**{name: batch[name] for name in names})
    found = TrainMetrics({})
    for step in range(2):
        with call_scope(step, 0):
            found = critic.train(ClippedValueLoss(), columns, num_minibatches=2)
    return values_of(found)


def train_pairs(reward: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    columns = PreferencePairs(
        pair_id=batch["pair_id"],
        tokens=batch["tokens"],
        mask=batch["mask"],
        chosen=torch.arange(len(batch["tokens"])) % 2 == 0,
    )
    with call_scope(0, 0):
        return values_of(reward.train(BradleyTerryLoss(), columns, num_minibatches=3))


def read_found(folder: Path, tp: int, dp: int, pp: int, part: str) -> list[dict[str, Tensor]]:
    """What each process of a layout found."""
    name = f"{part}-tp{tp}dp{dp}pp{pp}"
    return [
        safetensors.torch.load_file(folder / f"{name}-{process}.safetensors")
        for process in range(tp * dp * pp)
    ]


Learnt = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Weights (and what a model said before), and metrics."""


def torch_learns(folder: Path, families: Sequence[str]) -> dict[str, Learnt]:
    """What the torch engine learns: policies of some families, a critic and a reward model."""
    batch = load_batch(folder)
    learnt: dict[str, Learnt] = {}
    for family in families:
        model = ModelSpec(folder=str(folder / family))
        policy = torch_policy(model, optimizer=optimizer_of(family))
        metrics = train_policy(policy, batch)
        learnt[family] = policy.export_weights(), metrics
    options: dict[str, Any] = {
        "model": ModelSpec(folder=str(folder / "qwen2-tied")),
        "optimizer": OPTIMIZER,
    }
    critic = TorchValueSpec(zero_init_head=False, **options).build(WorkerContext("critic", seed=7))
    before = {"before": critic.value(batch["tokens"], batch["mask"])}
    metrics = train_value(critic, batch)
    learnt["value"] = critic.export_weights() | before, metrics
    reward = TorchRewardModelSpec(**options).build(WorkerContext("reward", seed=7))
    rows = torch.arange(len(batch["tokens"]))
    before = {"before": reward.score(batch["tokens"], batch["mask"], rows)}
    metrics = train_pairs(reward, batch)
    learnt["reward"] = reward.export_weights() | before, metrics
    return learnt


def assert_metrics(said: dict[str, Tensor], metrics: dict[str, Tensor]) -> None:
    """Each within 1e-4 of itself."""
    assert said.keys() == metrics.keys()
    # Whether the clipped error is the larger one is decided by rounding where both are the same.
    for name in metrics.keys() - {"value_clip_fraction"}:
        torch.testing.assert_close(said[name], metrics[name], atol=2e-6, rtol=1e-4, msg=name)


def assert_as_torch(found: dict[str, Tensor], weights: Any, metrics: dict[str, Tensor]) -> None:
    """Weights within 1e-5, every metric within 1e-4 of itself."""
    got = {n: value for n, value in found.items() if not n.startswith("metric/")}
    torch.testing.assert_close(got, weights, atol=1e-5, rtol=0)
    assert_metrics(under(found, "metric"), metrics)


def assert_says_the_same(
    folder: Path, family: str, parts: Sequence[dict[str, Tensor]], tensor: int
) -> None:
    """What processes say of a batch: logits are Hugging Face's, and so is all that follows.

    Every tensor-parallel process has its own part of the vocabulary and no more.
    """
    batch, policy = load_batch(folder), torch_policy(ModelSpec(folder=str(folder / family)))
    rows = batch["tokens"][:3]
    with torch.no_grad():
        logits = module_of(policy)(
            input_ids=rows.clamp(min=0), attention_mask=(rows >= 0).long()
        ).logits[rows >= 0]
    for begin in range(0, len(parts), tensor):
        found = torch.cat([p[f"{family}/logits"] for p in parts[begin : begin + tensor]], dim=-1)
        torch.testing.assert_close(found, logits, atol=1e-5, rtol=0)
    expected = {
        "words": torch.log_softmax(logits / 0.7, -1)[:, :5],
        "logprob": policy.logprob(batch["tokens"], batch["mask"]),
        "cold": policy.logprob(batch["tokens"], batch["mask"], temperature=0.7),
    }
    for part in parts:
        for name, numbers in expected.items():
            torch.testing.assert_close(part[f"{family}/{name}"], numbers, atol=1e-5, rtol=0)
        top = under(part, f"{family}/top")
        assert_top_words(top["words"], top["logprob"], policy, batch)


def assert_frozen_stay(folder: Path, found: dict[str, Tensor]) -> None:
    """The others learn as in the torch engine, and a follower with a quarter share is exactly a
    quarter of the way to what was trained.
    """
    model, found = ModelSpec(folder=str(folder / "qwen2-tied")), dict(found)
    policy = torch_policy(model, optimizer=dataclasses.replace(OPTIMIZER, frozen=FROZEN))
    before = policy.export_weights()
    metrics = train_policy(policy, load_batch(folder))
    for name, weight in before.items():
        assert torch.equal(found.pop(f"follower/{name}"), torch.lerp(weight, found[name], 0.25))
    assert_as_torch(found, policy.export_weights(), metrics)
    still = {name for name in before if torch.equal(before[name], found[name])}
    assert still == {n for n in before if any(fnmatchcase(n, pattern) for pattern in FROZEN)}


def assert_torch_goes_on(folder: Path, state: str) -> None:
    """From a state that other processes saved after two calls."""
    whole, policy = resumable(folder), resumable(folder)
    train_policy(whole, load_batch(folder), range(3))
    policy.load_state(folder / state)
    train_policy(policy, load_batch(folder), range(2, 3))
    torch.testing.assert_close(policy.export_weights(), whole.export_weights(), atol=1e-5, rtol=0)


def assert_learns_in_16_bits(folder: Path, found: dict[str, Tensor], state: str) -> float:
    """Weights in bfloat16 learn through a float32 copy; the torch engine's norm of the gradient."""
    policy = resumable(folder, dtype="bfloat16")
    before = policy.export_weights()
    metrics = train_policy(policy, load_batch(folder))
    weights, trained = policy.export_weights(), under(found, "trained")
    assert trained.keys() == weights.keys()
    for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"):
        moved = (weights[name].float() - before[name].float()).abs().mean()
        apart = (weights[name].float() - trained[name].float()).abs().mean()
        assert apart < 0.2 * moved, name
    masters = saved_state(folder / state, "optimizer")
    for name, weight in trained.items():
        assert torch.equal(masters[f"master/{name}"].bfloat16(), weight), name
    return float(metrics["grad_norm"])
