"""Probes of `gpu_candidates.py`: single calls that decide what is worth building.

Each compares a kernel with what the engine uses now, at the shapes of a 1.5B, and gives the time of
both and how far their results are apart. Times on CUDA are those of a captured graph, as decoding
runs: the host's are not in them.

Shapes: M rows, H query heads, K key heads, E head size, S positions, V words.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gpu_candidate_functions as functions
import torch
from gpu_case import SAMPLES, Scale, prompts_of
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.call_context import call_scope
from penstock.workers.engines.torch_engine.attention import attend_cache
from penstock.workers.rollout.sampling import sample_token
from torch import Tensor

decoding: Any = importlib.import_module("penstock.workers.engines.torch_engine.device_decode")
REPEATS = 3
BLOCK = 64
PRODUCTS = ((17_920, 1536, 4096), (17_920, 1536, 16_384), (151_936, 1536, 1766))
"""Rows and columns of a weight, and tokens: gate and up of a 1.5B, and a chunk of its head."""

Makes = Callable[..., Any]
"""A policy of a model, by sizes, name and whether it is trained."""


def device_ms(body: Callable[[], object], device: str, repeats: int = REPEATS) -> float:
    """Milliseconds of a call on the device, the least of some; captured as a graph on CUDA."""
    if not device.startswith("cuda"):
        body()
        times: list[float] = []
        for _ in range(repeats):
            began_s = time.perf_counter()
            body()
            times.append(1e3 * (time.perf_counter() - began_s))
        return min(times)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    found: list[float] = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return min(found[1:])


def _error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# --- S5b: sums in float32 by the product


def added_products(sizes: Scale, make: Makes) -> dict[str, Any]:
    """Whether a product adds 16-bit factors to a float32 total, and against a product and a sum."""
    found: dict[str, Any] = {}
    shapes = PRODUCTS if sizes.is_cuda else ((48, 32, 40),)
    for rows, columns, tokens in shapes:
        left, right = (
            torch.randn(tokens, width, device=sizes.device).bfloat16() for width in (rows, columns)
        )
        total = torch.zeros(rows, columns, device=sizes.device)
        expected = left.float().t() @ right.float()
        functions.add_product(total, left.t(), right)
        error = _error(total, expected)
        plain = _error(left.t() @ right, expected)

        def product(total: Tensor = total, left: Tensor = left, right: Tensor = right) -> None:
            functions.add_product(total, left.t(), right)

        def both(total: Tensor = total, left: Tensor = left, right: Tensor = right) -> None:
            total.add_(left.t() @ right)

        found[f"{rows} x {columns} x {tokens}"] = {
            "error": error,
            "error_of_product_and_sum": plain,
            "ms": device_ms(product, sizes.device),
            "product_and_sum_ms": device_ms(both, sizes.device),
        }
    return {"by": next(iter(functions.ADDERS)), "refused": functions.REFUSED, **found}


# --- D1: decoding's attention by the flash kernel over used lengths


def used_attention(
    query: Tensor, key: Tensor, value: Tensor, used: Tensor, scale: float, most: int
) -> Tensor:
    """One query per row over the used positions of its cache.

    Args:
        query: [M, H, E].
        key: [M, K, S, E], contiguous.
        value: Likewise.
        used: i32[M]; positions.
        scale: Multiplies the scores.
        most: At least the largest of `used`; the number of splits depends on it.

    Returns:
        [M, H * E].
    """
    rows, keys, positions, size = key.shape
    if query.device.type == "cpu":
        hidden = torch.arange(positions) >= used[:, None, None]
        bias = torch.zeros(rows, 1, positions).masked_fill_(hidden, -torch.inf)
        return attend_cache(query, key, value, bias, scale)
    # The kernel reads rows [tokens, K, E] by strides: position k of row m is token m * K * S + k.
    shape = (rows * keys * positions - (keys - 1) * positions, keys, size)
    strides = (size, positions * size, 1)
    begins = torch.arange(rows + 1, device=query.device, dtype=torch.int32)
    mixed = functions.ATEN._flash_attention_forward(
        query, key.as_strided(shape, strides), value.as_strided(shape, strides),
        begins, begins * (keys * positions), 1, most, 0.0, False, False,
        scale=scale, seqused_k=used,
    )[0]  # fmt: skip
    return mixed.flatten(1)


def decode_attention(sizes: Scale, make: Makes) -> dict[str, Any]:
    """A token's attention in all layers: the products and softmax of now, and the flash kernel."""
    fields = sizes.models[sizes.large]
    heads, keys = fields["num_attention_heads"], fields["num_key_value_heads"]
    size, layers = fields["hidden_size"] // heads, fields["num_hidden_layers"]
    longest = sizes.prompt + sizes.decode_tokens
    capacity, span = -(-longest // 64) * 64, -(-(longest * 3 // 4) // 64) * 64
    found: dict[str, Any] = {"capacity": capacity, "span": span}
    for rows in sizes.decode_rows:
        options: dict[str, Any] = {"device": sizes.device, "dtype": torch.bfloat16}
        query = torch.randn(rows, heads, size, **options)
        caches = [
            tuple(torch.randn(rows, keys, capacity, size, **options) for _ in range(2))
            for _ in range(layers)
        ]
        used = torch.randint(span - 48, span + 1, (rows,)).clamp(min=1).int().to(sizes.device)
        hidden = torch.arange(span, device=sizes.device) >= used[:, None, None]
        bias = torch.zeros(hidden.shape, device=sizes.device).masked_fill_(hidden, -torch.inf)
        found[f"{rows} rows"] = _attended(
            query, caches, used, bias, [span, capacity, 1024], sizes.device
        )
        del caches
    return found


def _attended(
    query: Tensor,
    caches: Sequence[tuple[Tensor, ...]],
    used: Tensor,
    bias: Tensor,
    most: Sequence[int],
    device: str,
) -> dict[str, Any]:
    span, scale = bias.shape[-1], query.shape[-1] ** -0.5

    def now() -> Tensor:
        mixed = query
        for key, value in caches:
            mixed = attend_cache(query, key[:, :, :span], value[:, :, :span], bias, scale)
        return mixed

    def flash(most: int) -> Tensor:
        mixed = query
        for key, value in caches:
            mixed = used_attention(query, key, value, used, scale, most)
        return mixed

    exact: Tensor | None = None
    if len(query) <= 64:
        key, value = (part[:, :, :span].double() for part in caches[-1])
        exact = attend_cache(query.double(), key, value, bias, scale)
    found: dict[str, Any] = {"error_to_now": _error(flash(most[0]), now())}
    if exact is not None:
        found |= {
            "error": _error(flash(most[0]), exact),
            "error_of_now": _error(now(), exact),
        }
    found["now_ms_a_token"] = device_ms(now, device)
    for one in most:
        found[f"flash_ms_a_token, at most {one}"] = device_ms(lambda one=one: flash(one), device)
    return found


# --- D2: capturing a step


def capture(sizes: Scale, make: Makes) -> dict[str, Any]:
    """A generation whose steps are captured twice, by `torch.cuda.graph` and without its cleaning.

    What is replayed is the second graph; the tokens must be those of a generation as it is.
    """
    policy = make(sizes, sizes.large, trained=False)
    rows = sizes.decode_rows[0]
    tokens = sizes.decode_tokens // 4 + 8
    expected = _generated(policy, sizes, rows, tokens)
    if not sizes.is_cuda:
        return {"same": torch.equal(expected, _generated(policy, sizes, rows, tokens))}
    noted: dict[str, list[float]] = {"graph_ms": [], "begin_end_ms": []}
    original, replays = decoding.StepGraphs._captured, list[tuple[Any, Any]]()

    def captured(self: Any, step: Any, span: int) -> Any:
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        original(self, step, span)
        torch.cuda.synchronize()
        between_s = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step(span)
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        noted["graph_ms"].append(1e3 * (between_s - began_s))
        noted["begin_end_ms"].append(1e3 * (time.perf_counter() - between_s))
        return _Timed(graph, replays)

    decoding.StepGraphs._captured = captured
    try:
        found = _generated(policy, sizes, rows, tokens)
    finally:
        decoding.StepGraphs._captured = original
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in replays)
    return {
        "rows": rows,
        "same": torch.equal(expected, found),
        **noted,
        "replay_ms": times[len(times) // 2] if times else None,
        "replays": len(times),
    }


class _Timed:
    """A graph whose replays are timed by events."""

    def __init__(self, graph: Any, times: list[tuple[Any, Any]]) -> None:
        self._graph, self._times = graph, times

    def replay(self) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graph.replay()
        end.record()
        self._times.append((begin, end))


def _generated(policy: Any, sizes: Scale, rows: int, tokens: int) -> Tensor:
    prompt = prompts_of(sizes, rows // SAMPLES)
    with call_scope(0, 0):
        sampling = Sampling(num_samples=SAMPLES, max_new_tokens=tokens)
        return policy.generate(prompt, torch.arange(len(prompt)), sampling).tokens


# --- D4: sampling in two passes


def _block_sums(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest scaled logit, f32[M, 1], and sums of shares, f64[M, blocks]."""
    scaled = logits.float() / temperature
    top = scaled.amax(1, keepdim=True)
    share = (scaled - top).exp()
    whole = logits.shape[1] // BLOCK * BLOCK
    blocks = share[:, :whole].reshape(len(logits), -1, BLOCK).sum(-1, dtype=torch.float64)
    if whole < logits.shape[1]:
        rest = share[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)
        blocks = torch.cat([blocks, rest], 1)
    return top, blocks


block_sums = functions.Compiled(_block_sums, (0,))


def sample_in_two_passes(
    logits: Tensor, uniform: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """`sample_token`, which reads 16-bit logits for the largest, for sums of blocks, and one block.

    Args:
        logits: [M, V].
        uniform: f64[M] in (0, 1).
        temperature: Divides the logits.

    Returns:
        Token i64[M] and its log-probability f32[M].
    """
    num_words = logits.shape[1]
    top, sums = block_sums(logits, functions.number(temperature, logits.device))
    after = sums.cumsum(1)
    total = after[:, -1:]
    target = uniform[:, None] * total
    block = torch.searchsorted(after, target, right=True).clamp(max=after.shape[1] - 1)
    start = after.gather(1, (block - 1).clamp(min=0)) * (block > 0)
    index = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    near = logits.gather(1, index.clamp(max=num_words - 1)).float() / temperature
    inside = (near - top).exp().double() * (index < num_words)
    bounds = torch.cat([start, start + inside.cumsum(1)], 1)
    target = torch.minimum(target, torch.nextafter(bounds[:, -1:], start))
    place = torch.searchsorted(bounds[:, 1:].contiguous(), target, right=True)
    place = place.clamp(max=BLOCK - 1)
    token = (block * BLOCK + place).clamp(max=num_words - 1)
    taken = near.gather(1, token - block * BLOCK)
    return token[:, 0], (taken - top - total.log().float())[:, 0]


def sampling(sizes: Scale, make: Makes) -> dict[str, Any]:
    """A token of 512 rows of 151,936 words: `sample_token`, and the two passes."""
    rows, words = (512, 151_936) if sizes.is_cuda else (8, 5000)
    logits = (3 * torch.randn(rows, words, device=sizes.device)).bfloat16()
    uniform = torch.rand(rows, device=sizes.device, dtype=torch.float64)
    found: dict[str, Any] = {"rows": rows, "words": words}
    results: list[tuple[Tensor, Tensor]] = []
    bodies: Mapping[str, Callable[[], tuple[Tensor, Tensor]]] = {
        "now": lambda: sample_token(logits, uniform, 1.0, waits=False),
        "two_passes": lambda: sample_in_two_passes(logits, uniform, 1.0),
    }
    for name, body in bodies.items():
        results.append(body())  # compiles
        if sizes.is_cuda:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            body()
            found[f"{name}_temporary_bytes_a_logit"] = (
                torch.cuda.max_memory_allocated() - before
            ) / logits.numel()
        found[f"{name}_ms"] = device_ms(body, sizes.device)
    (token, logprob), (other, other_logprob) = results
    same = token == other
    found["other_tokens"] = int((~same).sum())
    found["logprob_error"] = float((logprob - other_logprob).abs()[same].max())
    return found


# --- S2, S3, S4: each function by itself


def alone(sizes: Scale, make: Makes) -> dict[str, Any]:
    """Each replaced function by itself: milliseconds now and then, and bytes per second then."""
    fields = sizes.models[sizes.large]
    width, middle = fields["hidden_size"], fields["intermediate_size"]
    heads = fields["num_attention_heads"] + fields["num_key_value_heads"]
    size = width // fields["num_attention_heads"]
    tokens = 4096 if sizes.is_cuda else 48

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, device=sizes.device).bfloat16()

    x, up, change, weight = (
        some(tokens, width),
        some(tokens, width),
        some(tokens, width),
        some(width),
    )
    scale = torch.rand(tokens, 1, device=sizes.device)
    gate_up, to_product = some(tokens, 2 * middle), some(tokens, middle)
    turned = (some(tokens, heads, size), *(some(tokens, 1, size // 2) for _ in range(2)))
    logits = some(tokens // 2, fields["vocab_size"])
    row = torch.rand(len(logits), device=sizes.device)
    one, eps = (functions.number(value, x.device) for value in (1.0, 1e-6))
    fused = functions.fused

    def before_norm() -> Any:
        return fused._before_norm(up, *fused._normed(x, 1e-6), weight, True)

    def sums() -> Tensor:
        z = logits.float().div_(1.0)
        return z.sub_(z.amax(-1, keepdim=True)).exp().sum(-1)

    def log_change() -> Tensor:
        z = logits.float().div_(1.0).sub_(row[:, None]).sub_(row[:, None]).exp()
        return logits.copy_(z.mul(row[:, None]).div_(1.0))

    cases: Mapping[str, tuple[int, Callable[[], Any], Callable[[], Any]]] = {
        "norm backward (S2)": (3 * x.nbytes, before_norm,
            lambda: functions.norm_backward(up, x, scale, weight, True)),
        "log-sum-exp (S3)": (logits.nbytes, sums, lambda: functions.log_sums(logits, one)),
        "change of logits (S3)": (2 * logits.nbytes, log_change,
            lambda: functions.log_change(logits, row, row, one)),
        "SwiGLU": (3 * to_product.nbytes, lambda: fused._product(gate_up),
            lambda: functions.gated(gate_up)),
        "SwiGLU backward and again": (6 * to_product.nbytes,
            lambda: (fused._before_product(to_product, gate_up), fused._product(gate_up)),
            lambda: functions.before_gated(to_product, gate_up)),
        "rotation": (2 * turned[0].nbytes, lambda: fused._turned(*turned, 1),
            lambda: functions.rotated(*turned)),
        "sum and norm": (4 * x.nbytes,
            lambda: torch.nn.functional.rms_norm(x + change, (width,), weight, 1e-6),
            lambda: functions.add_norm(x, change, weight, eps)),
        "sum and norm backward": (5 * x.nbytes, lambda: (before_norm()[0] + change, x * weight),
            lambda: functions.before_add_norm(up, x, scale, weight, change)),
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, (least_bytes, now, then) in cases.items():
        with torch.no_grad():
            then()  # compiles
            ms = device_ms(then, sizes.device)
            found[name] = {
                "now_ms": device_ms(now, sizes.device),
                "ms": ms,
                "gb_per_s": least_bytes / ms / 1e6,
            }
    return found


PROBES: Mapping[str, Callable[[Scale, Makes], dict[str, Any]]] = {
    "S5b: added by the product": added_products,
    "S2, S3, S4: alone": alone,
    "D4: sampling": sampling,
    "D1: decode attention": decode_attention,
    "D2: capture": capture,
}
"""Name -> probe; last the one that fails in torch 2.11."""
