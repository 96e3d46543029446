"""Measure how much faster a GPU would train with other inner functions, before they are built.

    python benchmarks/gpu_candidates.py --json FILE --limit-s 100

Each candidate (`gpu_candidate_functions.py`) is patched in for whole train calls of the models of
`gpu.py`, in one process, alone against the unpatched call, turn by turn, and on top of those before
it. Its gradient and log-probabilities are compared with the unpatched ones, whose own spread from
call to call stands beside. Probes (`gpu_candidate_probes.py`) time what belongs to decoding; they
run in a process of their own, and those after one that fails in another, since a capture that fails
spoils its process. What fails is written down with its error, and the rest goes on; FILE has each
figure of a train call as it is found. `--tiny` runs everything on a CPU, with plain functions where
a kernel is CUDA's alone.

Of train calls `seconds` is the shortest, and `less` is 1 - `seconds` / median of all unpatched
calls so far. `mfu` is the FLOP of distinct tokens (each prompt once for its samples, logits once,
as `gpu_case.train_flops` counts them) / `seconds` / the data sheet's FLOP/s in bfloat16. So a
candidate that computes fewer tokens raises it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")  # torch reads it when it is imported

import gpu_candidate_functions as functions
import gpu_candidate_probes as probes
import torch
from bench import machine, parser
from gpu_case import SAMPLES, Bench, DeviceModel, Scale, batch_of, packs_seen, scale, train_flops
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.executor import build_role
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

Change = tuple[Any, str, Any]
"""Whose attribute, its name, and what it is for a while."""
LEAST_SHARED = 10
"""Divisor of lengths with which prompts are shared as soon as that saves 2 % of the tokens."""
LARGE_MICRO_BATCH = 16_384
KERNELS = 16
"""So many kernels of a profiled call are listed, those that take longest."""
LONGEST_PROBE_S = 60.0
"""A process of probes that still runs so long after its limit hangs."""
SAMPLED = 7
"""One element in so many of a gradient is compared."""

packing: Any = importlib.import_module("penstock.workers.engines.torch_engine.packing")
trainer: Any = importlib.import_module("penstock.workers.training.trainer")


# --- candidates


@dataclass(frozen=True)
class Candidate:
    """A change of the train call.

    Attributes:
        name: As in the list of changes.
        what: What it does.
        changes: What is patched, given the policy.
        alone: Whether it means something without those before it.
    """

    name: str
    what: str
    changes: Callable[[Any], list[Change]]
    alone: bool = True


def _norms(policy: Any) -> list[Change]:
    fused = functions.fused
    return [
        (fused, "_RMSNorm", functions.RMSNorm),
        (fused, "_NormLinear", functions.NormLinear),
    ]


def _logprobs(policy: Any) -> list[Change]:
    return [(functions.token_logprobs, "_TokenLogprob", functions.TokenLogprob)]


def _sharing(policy: Any) -> list[Change]:
    return [
        (packing, "shared_prompts", _shared_from_two_percent),
        (trainer, "micro_batches", distinct_micro_batches),
    ]


def _large_micro_batches(policy: Any) -> list[Change]:
    return [(part, "_micro_batch_tokens", LARGE_MICRO_BATCH) for part in (policy, policy._trainer)]


def _layers(policy: Any) -> list[Change]:
    fused = functions.fused
    return [
        (fused, "_product", functions.gated),
        (fused, "_GatedLinear", functions.GatedLinear),
        (fused, "_Rotate", functions.Rotate),
        (functions.BACKBONE.LeanBackbone, "states", functions.states),
    ]


def _added_by_the_product(policy: Any) -> list[Change]:
    flat = policy.network.flat
    places = {name: flat.span(name) for name in flat.names}
    leaves = [(flat.parameter(name), begin) for name, (begin, _) in places.items()]
    leaves += list(flat._fused.values())
    grad = flat.enable_gradients()
    added = {
        leaf.data_ptr(): grad[begin : begin + leaf.numel()].view(leaf.shape)
        for leaf, begin in leaves
        if leaf.ndim == 2
    }
    # Autograd is to hand over nothing of them; the embedding has rows of its own besides.
    table = policy.network.backbone.embedding
    quiet = [leaf for leaf, _ in leaves if leaf.ndim == 2 and leaf is not table]
    changes: list[Change] = [(leaf, "requires_grad", False) for leaf in quiet]
    return [*changes, (functions.WeightGradients, "added", added)]


def _kept_logits(policy: Any) -> list[Change]:
    return [(functions.TokenLogprob, "keeps_logits", True)]


CANDIDATES = (
    Candidate("S2", "norm backward by torch's own kernel", _norms),
    Candidate("S3", "log-probabilities in one pass each way, compiled", _logprobs),
    Candidate("S1", "share prompts from 2 %, bound distinct tokens", _sharing),
    Candidate("S5a", "micro-batches of 16,384 tokens", _large_micro_batches),
    Candidate("S4", "SwiGLU, rotation, residual with norm compiled", _layers),
    Candidate("S5b", "weight gradients added in float32 by the product", _added_by_the_product,
              alone=False),
    Candidate("S6", "logits kept for the backward pass", _kept_logits, alone=False),
)  # fmt: skip
"""The candidates, the most valuable first."""


def _shared_from_two_percent(
    tokens: Tensor, prompt: Tensor, length: Tensor
) -> tuple[Tensor, Tensor]:
    """`shared_prompts`, which uses lengths for nothing but the fifth that is to be saved."""
    shared: tuple[Tensor, Tensor] = ORIGINAL_SHARED(tokens, prompt, length // LEAST_SHARED)
    return shared


ORIGINAL_SHARED = packing.shared_prompts
ORIGINAL_MICRO_BATCHES = trainer.micro_batches


def distinct_micro_batches(
    batch: Any, rows: Tensor, unit: str, max_tokens: int, *, sort_by_length: bool
) -> Iterator[Tensor]:
    """Cut rows as `micro_batches` does, counting a prompt once where the row before has it too."""
    if unit != "row" or sort_by_length or not len(rows):
        yield from ORIGINAL_MICRO_BATCHES(
            batch, rows, unit, max_tokens, sort_by_length=sort_by_length
        )
        return
    tokens, mask = batch.tokens[rows].cpu(), batch.mask[rows].cpu()
    length: list[int] = (tokens >= 0).sum(1).tolist()
    prompt: list[int] = mask.long().argmax(1).tolist()
    begin, taken = 0, 0
    for at, size in enumerate(length):
        known = at > begin and prompt[at] == prompt[at - 1]
        known = known and torch.equal(tokens[at, : prompt[at]], tokens[at - 1, : prompt[at]])
        new = size - prompt[at] if known else size
        if at > begin and taken + new > max_tokens:
            yield rows[begin:at]
            begin, taken, new = at, 0, size
        taken += new
    yield rows[begin:]


@contextmanager
def patched(changes: Sequence[Change]) -> Generator[None]:
    """Have attributes other values for a while."""
    before: list[Change] = []
    try:
        for owner, name, value in changes:
            before.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


# --- models


def policy_of(sizes: Scale, name: str, *, trained: bool = True) -> Any:
    """A policy that a train call leaves as it is: its learning rate is 0."""
    fields = sizes.models[name]
    spec = TorchPolicySpec(
        model=DeviceModel(architecture=fields, dtype="bfloat16"),
        end_ids=(fields["vocab_size"],),
        optimizer=OptimizerSpec(lr=0.0) if trained else None,
        micro_batch_tokens=4096 if sizes.is_cuda else 64,
    )
    return build_role("actor", spec, WorkerContext("actor", device=sizes.device))


# --- results


class Results:
    """All that was found so far, in the file after each figure.

    Args:
        file: Where it is written; None for nowhere.
        limit_s: After so many seconds nothing more is begun.
    """

    def __init__(self, file: Path | None, limit_s: float) -> None:
        self._file, self._limit_s = file, limit_s
        self._began_s = time.monotonic()
        self.data: dict[str, Any] = {"benchmark": "gpu_candidates", "machine": machine()}

    @property
    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds in which something may still be begun."""
        return max(0.0, self._limit_s - self.spent_s)

    def put(self, section: str, name: str, found: dict[str, Any]) -> None:
        """Note a figure, print it, and write all."""
        found["at_s"] = round(self.spent_s, 1)
        figures: dict[str, Any] = self.data.setdefault(section, {})
        figures[name] = found
        print(f"{section}: {name}: {_text(found)}", flush=True)
        if self._file is not None:
            self._file.write_text(json.dumps(self.data, indent=2) + "\n")

    def attempt(self, section: str, name: str, body: Callable[[], dict[str, Any]]) -> bool:
        """Measure something; whether it was found. A failure is noted as its text."""
        if self.spent_s > self._limit_s:
            self.put(section, name, {"skipped": f"{self._limit_s:.0f} s were over"})
            return False
        began_s = time.monotonic()
        found: dict[str, Any]
        try:
            found = body()
        except Exception as error:  # the others are measured all the same
            found = {"failed": f"{type(error).__name__}: {str(error)[:1500]}"}
        found["took_s"] = round(time.monotonic() - began_s, 2)
        self.put(section, name, found)
        if torch.cuda.is_available() and "failed" in found:
            gc.collect()
            torch.cuda.empty_cache()
        return "failed" not in found


def _text(found: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in found.items()
    )


# --- the ladder


class Ladder:
    """Train calls of a model, with and without candidates.

    Args:
        sizes: How much is measured.
        name: Of the model.
        results: Where figures go.
    """

    def __init__(self, sizes: Scale, name: str, results: Results) -> None:
        self._section, self._results = f"train {name}", results
        self._bench = Bench(sizes)
        self._meter = self._bench.meter
        self._policy = policy_of(sizes, name)
        self._batch = batch_of(sizes, sizes.prompts)
        lengths = self._batch.mask.sum(1).tolist()
        grouped = [lengths[i : i + SAMPLES] for i in range(0, len(lengths), SAMPLES)]
        prompts = [sizes.prompt] * sizes.prompts
        self._flops = train_flops(self._bench.shape(name), prompts, grouped)
        self._step = 0
        self._plain_s: list[float] = []
        self._grad: Tensor | None = None
        self._logprob: Tensor | None = None

    def climb(self, candidates: Sequence[Candidate], *, alone: bool) -> None:
        """Measure the unpatched call, then each candidate alone, if asked, and on those before."""
        if not self._results.attempt(self._section, "as it is", self._unpatched):
            return
        stack: list[Candidate] = []
        for one in candidates:
            if alone and one.alone and not self._tried([one], f"{one.name} alone", by_turns=True):
                continue
            if alone and one.alone and not stack:
                stack.append(one)  # alone it has been the first of those on each other
                continue
            name = "+".join(part.name for part in (*stack, one))
            if self._tried([*stack, one], name, by_turns=not alone):
                stack.append(one)
        if self._bench.sizes.is_cuda and alone:
            self._results.attempt(self._section, "kernels", lambda: self._kernels(stack))

    def _tried(self, candidates: Sequence[Candidate], name: str, *, by_turns: bool) -> bool:
        return self._results.attempt(
            self._section, name, lambda: self._measured(candidates, by_turns=by_turns)
        )

    def _kernels(self, candidates: Sequence[Candidate]) -> dict[str, Any]:
        """Which kernels a call with all candidates spends its time in, and how busy the device is.

        Args:
            candidates: Those that worked.
        """
        recorded = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        with self._with(candidates), recorded as seen:
            seconds = self._seconds()
        kernels: list[Any] = [one for one in seen.key_averages() if one.self_device_time_total]
        kernels.sort(key=attrgetter("self_device_time_total"), reverse=True)
        busy_s = sum(one.self_device_time_total for one in kernels) / 1e6
        return {
            "seconds": seconds,
            "busy_share": busy_s / seconds,
            "count": sum(one.count for one in kernels),
            "longest": [
                {"kernel": one.key[:100], "count": one.count,
                 "ms": one.self_device_time_total / 1e3}
                for one in kernels[:KERNELS]
            ],
        }  # fmt: skip

    def _unpatched(self) -> dict[str, Any]:
        first_s = self._seconds()
        self._grad = self._sampled_gradient()
        self._logprob = self._logprobs()
        self._plain_s = [self._seconds() for _ in range(2)]
        return {
            "what": "the call as it is; errors are its own spread",
            "first_s": first_s,
            **self._figures(self._plain_s),
            **self._errors(),
        }

    def _measured(self, candidates: Sequence[Candidate], *, by_turns: bool) -> dict[str, Any]:
        """Calls with some candidates, of which the first compiles them.

        Args:
            candidates: All of them are patched in.
            by_turns: Whether a call without any comes between two with them.
        """
        with self._with(candidates):
            with packs_seen() as packs:
                first_s = self._seconds()
            errors = self._errors()
            self._meter.peak_gib(reset=True)
            seconds = [self._seconds()]
            figures = self._figures(seconds)
        if by_turns:
            self._plain_s.append(self._seconds())
            with self._with(candidates):
                seconds.append(self._seconds())
            figures = {**self._figures(seconds), "peak_gib": figures["peak_gib"]}
        return {
            "what": candidates[-1].what,
            "less": 1 - figures["seconds"] / statistics.median(self._plain_s),
            **figures,
            "as_it_is_s": self._plain_s[-1],
            "micro_batches": len(packs),
            "packed_tokens": sum(len(pack.tokens) for pack in packs),
            "first_s": first_s,
            **errors,
        }

    @contextmanager
    def _with(self, candidates: Sequence[Candidate]) -> Generator[None]:
        with ExitStack() as stack:
            for one in candidates:
                stack.enter_context(patched(one.changes(self._policy)))
            yield

    def _figures(self, seconds: list[float]) -> dict[str, Any]:
        sheet = self._bench.sheet
        share = {}
        if sheet is not None:
            peak = sheet["flops_per_s"]["bfloat16"]
            share = {"mfu": self._flops / min(seconds) / peak}
        peak_gib = self._meter.peak_gib()
        return {"seconds": min(seconds), "all_s": list(seconds), "peak_gib": peak_gib, **share}

    def _seconds(self) -> float:
        self._step += 1

        def body() -> None:
            with call_scope(self._step, 0):
                self._policy.train(ClippedPolicyLoss(), self._batch)

        return self._meter.once(body)

    def _logprobs(self) -> Tensor:
        with call_scope(self._step, 1):
            return self._policy.logprob(self._batch.tokens, self._batch.mask)

    def _sampled_gradient(self) -> Tensor:
        return self._policy.network.flat.grad[::SAMPLED].clone()

    def _errors(self) -> dict[str, Any]:
        """How far the last call's gradient, and log-probabilities now, are from the unpatched."""
        assert self._grad is not None
        assert self._logprob is not None
        flat = self._policy.network.flat
        now = flat.grad[::SAMPLED]
        change = now - self._grad
        whole = float(change.norm() / self._grad.norm())
        worst, at = 0.0, ""
        for name in flat.names:
            if name.endswith("k_proj.bias"):
                continue  # without positions its gradient would be 0: it is all rounding
            begin, end = (-(-place // SAMPLED) for place in flat.span(name))
            size = self._grad[begin:end].norm()
            error = float(change[begin:end].norm() / size) if float(size) else 0.0
            if not error <= worst:
                worst, at = error, name
        found: list[Tensor] = []
        logprob_call_s = self._meter.once(lambda: found.append(self._logprobs()))
        difference = (found[0] - self._logprob).abs()[self._batch.mask]
        return {
            "logprob_call_s": logprob_call_s,
            "gradient_error": whole,
            "worst_gradient_error": worst,
            "worst_gradient": at,
            "logprob_error": float(difference.max()),
            "mean_logprob_error": float(difference.mean()),
        }


# --- all of it


def main() -> int:
    """Measure what there is time for, and say what failed."""
    args = _arguments()
    sizes = scale(tiny=args.tiny)
    functions.Compiled.plainly = args.plain or (args.tiny and shutil.which("g++") is None)
    if args.tiny:
        torch.set_num_threads(1)
    results = Results(args.json, args.limit_s)
    if args.probe:
        return _probes_here(sizes, args.probe, results)
    names = args.model or [sizes.large, *([sizes.small] if sizes.small != sizes.large else [])]
    for place, name in enumerate(names):
        _ladder(sizes, name, results, alone=place == 0)
        if place == 0 and not args.no_probes:
            _probes(list(probes.PROBES), results, _options(args))
    failed = [
        f"{section}: {name}"
        for section, found in results.data.items()
        if section not in ("benchmark", "machine")
        for name, one in found.items()
        if "failed" in one
    ]
    results.put("end", "seconds", {"spent_s": results.spent_s, "not_measured": failed})
    return int(bool(failed))


def _ladder(sizes: Scale, name: str, results: Results, *, alone: bool) -> None:
    made: list[Ladder] = []

    def make() -> dict[str, Any]:
        made.append(Ladder(sizes, name, results))
        return {}

    if results.attempt(f"train {name}", "made", make):
        made[0].climb(CANDIDATES, alone=alone)
    made.clear()
    gc.collect()
    if sizes.is_cuda:
        torch.cuda.empty_cache()


def _probes(names: Sequence[str], results: Results, options: Sequence[str]) -> None:
    """Run probes in a process of their own, and those after one that fails in another.

    Args:
        names: Of the probes.
        results: Where their figures go when a process has ended.
        options: Of the command line, for each process.
    """
    left = list(names)
    while left:
        found = _apart(left, results.left_s, options) if results.left_s else _skipped(left)
        for name, one in found.items():
            results.put("probes", name, one)
        left = [name for name in left if name not in found]


def _apart(names: Sequence[str], limit_s: float, options: Sequence[str]) -> dict[str, Any]:
    """Return what a new process finds of some probes; at least that the first one failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probes.json"
        command = [sys.executable, __file__, "--probe", *names, "--json", str(file)]
        command += ["--limit-s", str(limit_s), *options]
        try:
            ran = subprocess.run(
                command, stdout=subprocess.DEVNULL, timeout=limit_s + LONGEST_PROBE_S, check=False
            )
            ended = f"its process ended with code {ran.returncode} before it was measured"
        except subprocess.TimeoutExpired as error:
            ended = f"its process took more than {error.timeout:.0f} s"
        found = json.loads(file.read_text())["probes"] if file.exists() else {}
    return found or {names[0]: {"failed": ended}}


def _skipped(names: Sequence[str]) -> dict[str, Any]:
    return {name: {"skipped": "no time was left"} for name in names}


def _probes_here(sizes: Scale, names: Sequence[str], results: Results) -> int:
    """Run probes in this process up to the first that is not measured; 1 if there is one."""
    measured = (
        results.attempt("probes", name, lambda name=name: probes.PROBES[name](sizes, policy_of))
        for name in names
    )
    return int(not all(measured))


def _options(args: argparse.Namespace) -> list[str]:
    return [f"--{name}" for name in ("tiny", "plain") if getattr(args, name)]


def _arguments() -> argparse.Namespace:
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--limit-s", type=float, default=100.0, help="begin nothing after this")
    options.add_argument("--model", nargs="+", help="these models only; the first also alone")
    options.add_argument("--plain", action="store_true", help="compile nothing")
    options.add_argument("--probe", nargs="+", help="these probes only, in this process")
    options.add_argument("--no-probes", action="store_true", help="train calls alone")
    options.add_argument("--tiny", action="store_true", help="a demonstration on the CPU")
    args = options.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        options.error("torch finds no CUDA device here; --tiny runs on the CPU")
    return args


if __name__ == "__main__":
    sys.exit(main())
