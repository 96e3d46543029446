"""What the torch engine gets out of a GPU: training and decoding at the sizes of small models.

Random weights of the shapes of Qwen2.5-0.5B and 1.5B, in bfloat16, on one device:

- training: one call of GRPO's loss over rows of a prompt and responses of mixed lengths, prompts
  shared; tokens per second, and the share of the device's matrix products that this is. The peak is
  measured beside it, with products of 8,192 x 8,192, so that a device that is throttled or shared
  is compared with itself.
- decoding: tokens per second of few and of many rows, and the share of the memory bandwidth that
  reading the weights once per token takes.
- memory: the most that torch had allocated during each.

`--tiny` runs all of it in seconds on a CPU, on a model that means nothing: it shows that the script
works where there is no GPU.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench import parser, report, table
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import PolicyBatch, Sampling
from penstock.configs.references import option_file
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.inputs.model_shape import ModelShape, shape_of
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec

PROMPTS, SAMPLES = 4, 8
REPEATS = 3
FEWEST_TOKEN_ID, MOST_TOKEN_ID = 3, 90
TINY = {
    "model_type": "qwen2",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Scale:
    """How much is measured, and where.

    Attributes:
        device: Of torch.
        models: Name -> fields of the model's config.
        prompt: Tokens of a prompt.
        response: Tokens of the longest response.
        decode_rows: Rows that are decoded at once, one measurement for each.
        decode_tokens: Tokens of each row.
        product: Width of the matrices by which the peak is measured.
    """

    device: str
    models: dict[str, dict[str, Any]]
    prompt: int
    response: int
    decode_rows: tuple[int, ...]
    decode_tokens: int
    product: int


def scale(*, tiny: bool) -> Scale:
    """The sizes of a GPU, or of a demonstration."""
    if tiny:
        return Scale("cpu", {"tiny": TINY}, 8, 8, (8, 16), 8, 256)
    names = ("qwen2.5-0.5b", "qwen2.5-1.5b")
    models = {name: option_file("model", name)["architecture"] for name in names}
    return Scale("cuda", models, 300, 800, (8, 512), 256, 8192)


class Meter:
    """Times what a device does."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")

    def seconds(self, body: Callable[[], object]) -> float:
        """Median of some repeats, after one that is not counted."""
        self._once(body)
        return statistics.median(self._once(body) for _ in range(REPEATS))

    def _once(self, body: Callable[[], object]) -> float:
        self._wait()
        began_s = time.perf_counter()
        body()
        self._wait()
        return time.perf_counter() - began_s

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def peak_gib(self, *, reset: bool = False) -> float | None:
        """The most that torch has had allocated since the last reset; None on a CPU."""
        if not self._cuda:
            return None
        peak = torch.cuda.max_memory_allocated() / 2**30
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return peak


def peaks(meter: Meter, sizes: Scale) -> tuple[float, float]:
    """Products per second in bfloat16 (FLOP/s), and bytes of memory read and written per second."""
    left = torch.randn(sizes.product, sizes.product, device=sizes.device).bfloat16()
    products = 2 * sizes.product**3 / meter.seconds(lambda: left @ left)
    copy = 2 * left.nbytes / meter.seconds(left.clone)
    return products, copy


def policy_of(architecture: dict[str, Any], sizes: Scale) -> PolicyWorker:
    """A policy with random weights."""
    spec = TorchPolicySpec(
        model=ModelSpec(architecture=architecture, dtype="bfloat16"),
        eos_token_id=0,
        optimizer=OptimizerSpec(lr=1e-6),
    )
    return spec.build(WorkerContext("actor", device=sizes.device))


def batch_of(sizes: Scale) -> PolicyBatch:
    """Rows of prompts that are shared and responses of half to all of the longest length."""
    draw = torch.Generator().manual_seed(0)
    rows = PROMPTS * SAMPLES
    lengths = (sizes.response * (0.5 + 0.5 * torch.rand(rows, generator=draw))).long()
    tokens = torch.full((rows, sizes.prompt + int(lengths.max())), -1)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(FEWEST_TOKEN_ID, MOST_TOKEN_ID, (count,), generator=draw)

    prompts = [ids(sizes.prompt) for _ in range(PROMPTS)]
    for row, length in enumerate(lengths.tolist()):
        end = sizes.prompt + length
        tokens[row, : sizes.prompt] = prompts[row // SAMPLES]
        tokens[row, sizes.prompt : end] = ids(length)
        mask[row, sizes.prompt : end] = True
    advantage = torch.randn(mask.shape, generator=draw) * mask
    behavior = torch.full(mask.shape, -4.0) * mask
    return PolicyBatch(tokens=tokens, mask=mask, behavior_logprob=behavior, advantage=advantage)


def train_flops(
    shape: ModelShape, prompts: Sequence[int], responses: Sequence[Sequence[int]]
) -> float:
    """FLOP of a train call, forward and backward, each prompt computed once for its samples.

    Products: 2 per weight and token forward, twice that backward; the vocabulary's only where a
    token is predicted. Attention: 4 per attended token, head and dimension, causal.

    Args:
        shape: Of the model.
        prompts: Tokens of each prompt.
        responses: For each prompt, tokens of each of its responses.
    """
    sampled = sum(map(sum, responses))
    products = 2.0 * shape.num_layers * shape.active_layer_params * (sum(prompts) + sampled)
    head = 2.0 * shape.embedding_params * sampled
    pairs = sum(
        prompt**2 / 2 + sum(((prompt + length) ** 2 - prompt**2) / 2 for length in lengths)
        for prompt, lengths in zip(prompts, responses, strict=True)
    )
    attention = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    return 3.0 * (products + head + attention)


def trained(name: str, sizes: Scale, meter: Meter, peak: float) -> dict[str, Any]:
    """What training reaches."""
    architecture = sizes.models[name]
    policy, batch = policy_of(architecture, sizes), batch_of(sizes)
    meter.peak_gib(reset=True)

    def step() -> None:
        with call_scope(0, 0):
            policy.train(ClippedPolicyLoss(), batch)

    seconds = meter.seconds(step)
    lengths = batch.mask.sum(1).view(PROMPTS, SAMPLES).tolist()
    flops = train_flops(shape_of(architecture), [sizes.prompt] * PROMPTS, lengths)
    return {
        "model": name,
        "seconds": seconds,
        "tokens_per_s": int((batch.tokens >= 0).sum()) / seconds,
        "peak_share": flops / seconds / peak,
        "memory_gib": meter.peak_gib(),
    }


def decoded(name: str, rows: int, sizes: Scale, meter: Meter, copy: float) -> dict[str, Any]:
    """What decoding reaches."""
    architecture = sizes.models[name]
    policy = policy_of(architecture, sizes)
    draw = torch.Generator().manual_seed(0)
    size = (rows // SAMPLES, sizes.prompt)
    prompt = torch.randint(FEWEST_TOKEN_ID, MOST_TOKEN_ID, size, generator=draw)
    sampling = Sampling(num_samples=SAMPLES, max_new_tokens=sizes.decode_tokens)
    meter.peak_gib(reset=True)
    tokens: list[int] = []

    def call() -> None:
        with call_scope(0, 0):
            roll = policy.generate(prompt, torch.arange(len(prompt)), sampling)
        tokens.append(int(roll.mask.sum()))

    seconds = meter.seconds(call)
    weights = shape_of(architecture).active_params() * 2
    return {
        "model": name,
        "rows": rows,
        "seconds": seconds,
        "tokens_per_s": tokens[-1] / seconds,
        "bandwidth_share": weights * sizes.decode_tokens / seconds / copy,
        "memory_gib": meter.peak_gib(),
    }


def main() -> None:
    """Measure, and print what was found."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--tiny", action="store_true", help="a demonstration on the CPU")
    args = options.parse_args()
    sizes = scale(tiny=args.tiny)
    if sizes.device == "cuda" and not torch.cuda.is_available():
        options.error("torch finds no CUDA device here; --tiny runs on the CPU")
    meter = Meter(sizes.device)
    products, copy = peaks(meter, sizes)
    training: list[dict[str, Any]] = []
    decoding: list[dict[str, Any]] = []
    for name in sizes.models:
        training.append(trained(name, sizes, meter, products))
        gc.collect()
        for rows in sizes.decode_rows:
            decoding.append(decoded(name, rows, sizes, meter, copy))
            gc.collect()
    print(f"products {products / 1e12:.2f} TFLOP/s, copies {copy / 1e9:.0f} GB/s, both measured")
    for found in (training, decoding):
        shown = [[_cell(value) for value in one.values()] for one in found]
        print(table([name.replace("_", " ") for name in found[0]], shown))
    report(
        {
            "products_per_s": products,
            "copied_bytes_per_s": copy,
            "training": training,
            "decoding": decoding,
        },
        args.json,
    )


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "-" if value is None else value


if __name__ == "__main__":
    main()
