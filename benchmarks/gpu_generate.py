"""Stages of `gpu.py` that generate: decoding against the memory's bandwidth, and the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from gpu_case import SAMPLES, Bench, Figure, batch_of, prompts_of
from gpu_compute import mfu
from gpu_kernels import profiled, tables
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.roles import Sampling
from penstock.algorithms.roles.language_tables import Rollout
from penstock.dataflow.runtime.call_context import call_scope
from penstock.planner.inputs.model_shape import ModelShape
from penstock.workers.engines.roles import PolicyWorker
from penstock.workers.engines.torch_engine import device_decode
from penstock.workers.engines.torch_engine.device_decode import StepGraphs
from penstock.workers.engines.torch_engine.network import prepare_same_bits
from penstock.workers.models.lora import LoraSpec
from penstock.workers.training.host_memory import MEMORY_TO_SPARE
from torch.profiler import ProfilerActivity, profile

BANDWIDTH = 0.5
LORA_RANK = 16
WAITS = 1 / 16
LAUNCHES = (
    *("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "cudaGraphLaunch",
)
WAITING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")

# --- decoding


def decode(bench: Bench) -> Iterator[Figure]:
    """Few and many rows: a call, a replayed step, a capture, and what a token launches."""
    name = bench.sizes.large
    policy = bench.policy(name, trained=False)
    for rows in bench.sizes.decode_rows:
        yield from _decoded(bench, policy, name, rows)
    yield from _launches(bench, policy, name)
    for rows in (bench.sizes.decode_rows[0], bench.sizes.decode_rows[-1]):
        yield _kernels(bench, policy, name, rows)


def adapters(bench: Bench) -> Iterator[Figure]:
    """Train adapters and decode with them: the larger model, and seven layers of a 7B."""
    sizes = bench.sizes
    layers = min(7, sizes.sent["num_hidden_layers"])
    wide = {**sizes.sent, "num_hidden_layers": layers}
    for name, architecture in {
        sizes.large: sizes.models[sizes.large],
        f"{layers} layers of the model whose weights are sent": wide,
    }.items():
        its = Bench(replace(sizes, models={name: architecture}))
        policy = its.policy(name, lora=LoraSpec(rank=LORA_RANK))
        share = mfu(its, policy, name, "", None)
        what = f"training adapters of rank {LORA_RANK}, {name}"
        rate = share.details["tokens_per_s"]
        yield Figure(name=what, value=rate, unit="tokens/s", details=share.details)
        yield from _decoded(its, policy, name, sizes.decode_rows[1])


def _decoded(bench: Bench, policy: PolicyWorker, name: str, rows: int) -> Iterator[Figure]:
    """A call as it is, and then one whose steps and captures are timed apart."""
    sizes, meter = bench.sizes, bench.meter
    meter.peak_gib(reset=True)
    seconds = meter.seconds(lambda: _generate(bench, policy, rows, sizes.decode_tokens))
    peak_gib = meter.peak_gib()  # before memory is copied to be compared with
    least_bytes = _bytes_read(bench.shape(name), rows, sizes.prompt, sizes.decode_tokens)
    yield Figure(
        name=f"decoding {rows} rows, share of the bandwidth, {name}",
        value=least_bytes / bench.copied_per_s / seconds,
        goal=BANDWIDTH,
        details={
            "seconds": seconds,
            "ms_per_token": 1e3 * seconds / sizes.decode_tokens,
            "tokens_per_s": rows * sizes.decode_tokens / seconds,
            "copied_bytes_per_s": bench.copied_per_s,
            "read_bytes_per_s": bench.read_per_s,
            "peak_gib": peak_gib,
        },
    )
    what = f"a replayed step of {rows} rows, {name}"
    if not sizes.is_cuda:
        yield Figure(name=what, open="a CPU captures no graphs")
        return
    with _timed_graphs() as times:
        call_s = meter.once(lambda: _generate(bench, policy, rows, sizes.decode_tokens))
    replay_s = [1e-3 * begin.elapsed_time(end) for begin, end in times.replays]
    least_s = least_bytes / sizes.decode_tokens / bench.copied_per_s
    yield Figure(
        name=what,
        value=1e3 * median(replay_s),
        unit="ms",
        details={
            "num_replays": len(replay_s),
            "all_replays_s": sum(replay_s),
            "first_and_last_ms": [1e3 * median(replay_s[:16]), 1e3 * median(replay_s[-16:])],
            "share_of_the_bandwidth": least_s / median(replay_s),
            "first_steps_ms": [1e3 * one for one in times.first_s],
            "captures_ms": [1e3 * one for one in times.capture_s],
            "captures_and_first_steps_s": sum(times.capture_s) + sum(times.first_s),
            "call_s": call_s,
        },
    )


class _Times:
    """How long the parts of a call took.

    Attributes:
        replays: Events before and after each replay.
        first_s: Of each step that ran before its capture, with a wait for the device.
        capture_s: Of each capture, with such a wait as well.
    """

    def __init__(self) -> None:
        self.replays: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.first_s: list[float] = []
        self.capture_s: list[float] = []


@contextmanager
def _timed_graphs() -> Generator[_Times]:
    """Have the torch engine's graphs note how long their steps take, meanwhile."""
    times = _Times()

    class Timed(StepGraphs):
        def run(self, step: Callable[[int], None], span: int, weights_at: object) -> None:
            captured = len(times.capture_s)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            if span not in self._graphs:
                torch.cuda.synchronize()
            began_s = perf_counter()
            events[0].record()
            super().run(step, span, weights_at)
            events[1].record()
            if len(times.capture_s) == captured:
                times.replays.append((events[0], events[1]))
            else:
                torch.cuda.synchronize()
                times.first_s.append(perf_counter() - began_s - times.capture_s[-1])

        def _captured(self, step: Callable[[int], None], span: int) -> torch.cuda.CUDAGraph:
            torch.cuda.synchronize()
            began_s = perf_counter()
            graph = super()._captured(step, span)
            torch.cuda.synchronize()
            times.capture_s.append(perf_counter() - began_s)
            return graph

    drop_captures()
    with mock.patch.object(device_decode, "StepGraphs", Timed):
        yield times
    drop_captures()


def drop_captures() -> None:
    """Drop steps that earlier calls captured and left to the next."""
    for one in [*MEMORY_TO_SPARE]:
        one.give_up()


def _kernels(bench: Bench, policy: PolicyWorker, name: str, rows: int) -> Figure:
    """Kernels of a decoded token: the difference of a longer and a shorter call."""
    few = bench.sizes.decode_tokens // 16 or 2
    short, long = (
        profiled(
            lambda tokens=tokens: _generate(bench, policy, rows, tokens),
            is_cuda=bench.sizes.is_cuda,
        ).kernels
        for tokens in (few, 3 * few)
    )
    none = (0.0, 0.0)
    more = {
        kernel: (
            (calls - short.get(kernel, none)[0]) / (2 * few),
            (us - short.get(kernel, none)[1]) / (2 * few),
        )
        for kernel, (calls, us) in long.items()
    }
    return Figure(
        name=f"kernels of a decoded token of {rows} rows, {name}",
        value=sum(calls for calls, _ in more.values()),
        details={"ms": sum(us for _, us in more.values()) / 1e3, **tables(more)},
    )


def _bytes_read(shape: ModelShape, rows: int, prompt: int, tokens: int) -> float:
    """What decoding must read at least: the weights for each token, and keys and values by row."""
    weights = shape.active_params() * shape.dtype_bytes
    cached = rows * (prompt + tokens / 2) * shape.kv_bytes_per_token
    return tokens * (weights + cached)


def _generate(bench: Bench, policy: PolicyWorker, rows: int, tokens: int) -> Rollout:
    prompt = prompts_of(bench.sizes, rows // SAMPLES)
    sampling = Sampling(num_samples=SAMPLES, max_new_tokens=tokens)
    with call_scope(0, 0):
        return policy.generate(prompt, torch.arange(len(prompt)), sampling)


def _launches(bench: Bench, policy: PolicyWorker, name: str) -> Iterator[Figure]:
    """Per token, from the difference of a longer and a shorter call."""
    rows, few = bench.sizes.decode_rows[0], bench.sizes.decode_tokens // 4
    short, long = (
        _counted(lambda tokens=tokens: _generate(bench, policy, rows, tokens))
        for tokens in (few, 3 * few)
    )
    more = {event: (long[event] - short[event]) / (2 * few) for event in long}
    launched = sum(more.get(event, 0.0) for event in LAUNCHES)
    waited = sum(more.get(event, 0.0) for event in WAITING)
    host = sum(count for event, count in more.items() if event.startswith("aten::"))
    details = {"rows": rows, "operations_of_torch": host}
    said = "" if any(long[event] for event in LAUNCHES) else "the profiler sees no launches here"
    yield Figure(
        name=f"launches per decoded token, {name}",
        value=None if said else launched,
        open=said,
        details=details,
    )
    yield Figure(
        name=f"waits for the device per decoded token, {name}",
        value=None if said else waited,
        goal=None if said else WAITS,
        most=True,
        open=said,
        details=details,
    )


def _counted(body: Callable[[], object]) -> Counter[str]:
    """Event -> how often; what torch does on the host, and what it asks CUDA for."""
    body()
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with profile(activities=activities, acc_events=True) as seen:
        body()
    return Counter({one.key: one.count for one in seen.key_averages()})


# --- determinism


def determinism(bench: Bench) -> Iterator[Figure]:
    """Whether the same calls give the same bits: as it stands, and where that is asked for."""
    prepare_same_bits()  # before the first product, as a process does that is asked from the start
    for name, asked in (("", False), (", engine.options.deterministic=true", True)):
        first, second = (_bits(bench, asked=asked) for _ in range(2))
        for call in first.bits:
            yield Figure(
                name=f"same bits: {call}{name}",
                value=float(first.bits[call] == second.bits[call]),
                details={"train_s": first.train_s},
            )
        if not asked:
            yield from first.invariance


class _Bits:
    """What some calls gave.

    Attributes:
        bits: Call -> something that is equal if all its bits are.
        train_s: Of the train call.
        invariance: Figures about rows alone and among others.
    """

    def __init__(self) -> None:
        self.bits: dict[str, Any] = {}
        self.train_s = 0.0
        self.invariance: list[Figure] = []


def _bits(bench: Bench, *, asked: bool) -> _Bits:
    """Generate, evaluate and train, on a new policy, which may be asked for the same bits."""
    found, sizes = _Bits(), bench.sizes
    policy = bench.policy(sizes.small, deterministic=asked)
    roll = _generate(bench, policy, sizes.decode_rows[0], sizes.decode_tokens)
    found.bits["tokens that are sampled"] = roll.tokens.tolist()
    batch = batch_of(sizes, sizes.prompts)
    with call_scope(0, 0):
        together = policy.logprob(batch.tokens, batch.mask)
        alone = policy.logprob(batch.tokens[:1], batch.mask[:1])
    found.bits["log-probabilities"] = together.tolist()
    change = float((together[:1] - alone).abs().max())
    found.invariance.append(
        Figure(name="log-probabilities of a row alone and among others, largest difference",
               value=change)
    )  # fmt: skip

    def step() -> None:
        with call_scope(0, 0):
            policy.train(ClippedPolicyLoss(), batch)

    found.train_s = bench.meter.once(step)
    found.bits["weights after a train call"] = policy.weights_sha256()
    return found
