"""One rank of `penstock profile`, on any executor: calls, links and peaks.

All ranks measure the same things at the same times, so each finds what it gets of the machine while
the others work too: that is what a device of the plan will be. On this machine a rank is a process
of its own (`python -m penstock.launch.profile.rank FOLDER < request.json`), which writes what it
found to a file; on a cluster it is the object in a process of an executor's backend.

A policy generates, evaluates and trains, at several widths. Every call is described once: as a
`Call`, the model of time predicts it; as work for a policy, a rank carries it out. Prompts differ
from row to row, because equal ones would be computed once, and no response ends early, because the
token that would end it does not exist.

On a GPU rows are long enough that the device and not the host is what large calls are measured by:
three micro-batches, each as large as those of a run. Small calls and a deeper model, at one width,
then tell what the host takes, for each layer and besides. A call's first time is not counted, in
which kernels are compiled and steps captured.

Links are measured twice: among the ranks of each node, and among the first ranks of all nodes, the
second ones, and so on. Neighbors (0 and 1, 2 and 3, ...) send to each other all at once, because a
link's figure is what one device gets while all of them use it. From a short and a long message
follow latency and bandwidth, from a short and a long sum what collectives reach of them.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist
from pydantic import BaseModel, Field

from ...algorithms.losses.tokens import ClippedPolicyLoss
from ...algorithms.roles.language_tables import PolicyBatch, Sampling
from ...dataflow.runtime.call_context import call_scope
from ...dataflow.runtime.worker_protocol import WorkerContext
from ...planner.cost.calibration import Constants
from ...planner.cost.calibration_fit import Timed
from ...planner.inputs.calls import Call, CallKind, Lengths
from ...planner.inputs.cluster import LinkSpec
from ...planner.inputs.model_shape import shape_of
from ...workers.engines.registry import DEFAULT
from ...workers.engines.roles import PolicyWorker
from ...workers.executors.process_backend import ProcessHome
from ...workers.executors.process_setup import Address, Store, meet
from ...workers.models.spec import ModelSpec
from ...workers.training.optimizer import OptimizerSpec
from ..placement.machine import machine_name


class _Sizes(NamedTuple):
    row: tuple[int, int]  # tokens of a prompt and its response; `_LONG` times as many for attention
    sampled: tuple[int, int]  # the same of a generation
    micro_batch_tokens: int  # as a worker there computes at once by default
    # of the vocabulary: the head is as large a share of these models as of small language models
    words: int


_SIZES = {
    "cpu": _Sizes((16, 48), (16, 48), micro_batch_tokens=4096, words=4096),
    "cuda": _Sizes((256, 768), (32, 96), micro_batch_tokens=16_384, words=16_384),
}
_LONG = 3
_LAYERS, _MORE_LAYERS = 4, 12

AtLeastOne = Annotated[int, Field(ge=1)]


class ProfileCall(BaseModel, frozen=True, extra="forbid"):
    """One call of a policy."""

    kind: CallKind  # what the policy does
    width: AtLeastOne  # its hidden size
    rows: AtLeastOne  # prompts, with one response each
    dtype: str  # of its weights
    long: bool = False  # whether its rows are long ones
    # optimizer steps, if it trains: the rows are cut into so many minibatches
    updates: AtLeastOne = 1
    layers: AtLeastOne = _LAYERS  # of the model
    device: Literal["cpu", "cuda"] = "cpu"  # kind of device that it is sized for

    @property
    def name(self) -> str:
        updates = f", {self.updates} updates" if self.updates > 1 else ""
        layers = f", {self.layers} layers" if self.layers != _LAYERS else ""
        return f"{self.kind} {self.rows} x {sum(self._lengths)} tokens{updates}{layers}"

    @property
    def model(self) -> tuple[int, str, int]:
        return self.width, self.dtype, self.layers

    @property
    def _lengths(self) -> tuple[int, int]:
        sizes, times = _SIZES[self.device], _LONG if self.long else 1
        prompt, response = sizes.sampled if self.kind == "generate" else sizes.row
        return prompt * times, response * times

    def timed(self, measured_s: float) -> Timed:
        prompt, response = self._lengths
        call = Call(
            name=f"actor.{self.kind}",
            role="actor",
            kind=self.kind,
            model=shape_of(
                architecture(self.width, self.device, self.layers),
                name=f"width {self.width}",
                dtype=self.dtype,
            ),
            head="vocabulary",
            trained=True,
            num_sequences=self.rows,
            prompt=Lengths.constant(prompt),
            response=Lengths.constant(response),
            updates=self.updates,
        )
        most = _SIZES[self.device].micro_batch_tokens
        at_once = min(self.rows, max(1, most // (prompt + response)))
        return Timed(call, at_once, measured_s)

    def prepared(self, policy: PolicyWorker) -> Callable[[], None]:
        random = torch.Generator().manual_seed(0)
        prompt, response = self._lengths
        words = _SIZES[self.device].words
        tokens = torch.randint(0, words, (self.rows, prompt + response), generator=random)
        mask = torch.zeros_like(tokens, dtype=torch.bool)
        mask[:, prompt:] = True
        if self.kind == "generate":
            return lambda: _scoped(
                policy.generate,
                tokens[:, :prompt],
                torch.arange(self.rows),
                Sampling(max_new_tokens=response),
            )
        if self.kind == "forward":
            return lambda: _scoped(policy.logprob, tokens, mask)
        batch = PolicyBatch(
            tokens=tokens,
            mask=mask,
            behavior_logprob=torch.full(mask.shape, -4.0),
            advantage=torch.randn(mask.shape, generator=random),
        )
        loss = ClippedPolicyLoss(report_entropy=True)
        return lambda: _scoped(policy.train, loss, batch, num_minibatches=self.updates)


def _scoped(method: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with call_scope(0, 0):
        method(*arguments, **options)


# kind, rows, updates, whether rows are long
_Size = tuple[CallKind, int, int, bool]


def calls_of_width(
    width: int, rows: int, dtype: str, device: Literal["cpu", "cuda"] = "cpu", *, deep: bool = False
) -> tuple[ProfileCall, ...]:
    """The calls of a width; on a GPU fewer of them, or if `deep`, also those of a deeper model."""
    few, many = max(1, rows // 4), 3 * rows
    # The first fills a micro-batch nearly, as most calls of a run do. In the third the optimizer's
    # step weighs most: it takes one for each row. In the fourth attention does.
    sizes: list[_Size] = [
        ("train", many, 1, False),
        ("train", rows, rows // few, False),
        ("train", few, few, False),
        ("train", few, 1, True),
        ("forward", many, 1, False),
        ("generate", rows, 1, False),
        ("generate", rows, 1, True),
        ("generate", 4 * rows, 1, False),
    ]
    deeper: list[_Size] = []
    if device == "cuda":  # `rows` fill a micro-batch; the device waits for the host in few of them
        in_all: list[_Size] = [
            ("train", rows, 1, False),
            ("train", few, few, False),
            ("forward", few, 1, False),
            ("generate", rows, 1, False),
            ("generate", 8 * rows, 1, True),
        ]
        large: list[_Size] = [("train", many, 1, False), ("forward", many, 1, False)]
        more: list[_Size] = [
            ("train", few, 1, True),
            ("generate", rows, 1, True),
            ("generate", 8 * rows, 1, False),
        ]
        sizes = in_all + large + (more if deep else [])
        deeper = in_all if deep else []
    return tuple(
        ProfileCall(kind=kind, width=width, rows=number, dtype=dtype, long=long, updates=updates,
                    layers=layers, device=device)
        for layers, some in ((_LAYERS, sizes), (_MORE_LAYERS, deeper))
        for kind, number, updates, long in some
    )  # fmt: skip


def architecture(width: int, device: str = "cpu", layers: int = _LAYERS) -> dict[str, Any]:
    """A Qwen2 of that width, with heads of 32, 64 or, on a GPU, 128.

    On a GPU four heads share keys and values, and the feed-forward is 5.5 times as wide, both as in
    models of that size; else it is three times as wide.
    """
    sizes, gpu = _SIZES[device], device == "cuda"
    size = 32 if width < 256 else 128 if gpu and width % 128 == 0 else 64
    heads = max(1, width // size)
    return {
        "model_type": "qwen2",
        "vocab_size": sizes.words,
        "hidden_size": width,
        "intermediate_size": 11 * width // 2 if gpu else 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4 if gpu and heads % 4 == 0 else heads,
        "max_position_embeddings": _LONG * sum(sizes.row),
        "tie_word_embeddings": True,
    }


def make_policy(call: ProfileCall, device: str) -> PolicyWorker:
    dtype: Any = call.dtype
    sizes = _SIZES[call.device]
    shape = architecture(call.width, call.device, call.layers)
    spec = DEFAULT.spec("policy")(
        model=ModelSpec(architecture=shape, dtype=dtype),
        end_ids=(sizes.words,),
        optimizer=OptimizerSpec(lr=1e-6),
        micro_batch_tokens=sizes.micro_batch_tokens,
    )
    return spec.build(WorkerContext("actor", device=device))


# --- links

_LONG_BYTES = {"cpu": 2**27, "cuda": 2**28}  # gradients of a model do not stay in a cache
_SHORT_BYTES = 64
_TRIPS = 20  # short messages there and back in one measurement

_REPEATS = 9


class LinkTimes(BaseModel, frozen=True, extra="forbid"):
    """Seconds, medians over repeats, of the slowest rank of a part."""

    num_ranks: int = Field(ge=2)  # that took part in the sums
    long_bytes: int  # size of a long message or sum
    short_message_s: float  # A few bytes, one way
    long_message_s: float  # `long_bytes`, one way
    short_sum_s: float  # adding up a few bytes over all ranks
    long_sum_s: float  # adding up `long_bytes` over all ranks


def within_nodes(nodes: Sequence[int]) -> list[list[int]]:
    ranks = range(len(nodes))
    return [[rank for rank in ranks if nodes[rank] == node] for node in sorted(set(nodes))]


def across_nodes(nodes: Sequence[int]) -> list[list[int]]:
    """The first rank of every node, then the second of every node that has one, and so on."""
    by_node = within_nodes(nodes)
    most = max(map(len, by_node))
    return [[ranks[i] for ranks in by_node if i < len(ranks)] for i in range(most)]


def link_times(
    parts: Sequence[Sequence[int]],
    rank: int,
    device: str,
    once_s: Callable[[Callable[[], object]], float],
) -> LinkTimes | None:
    """Measure in all parts at once; every rank of the default group must call this at that time."""
    if all(len(part) == 1 for part in parts):
        return None
    backend = "nccl" if device.startswith("cuda") else "gloo"
    # Each rank must make all groups, also those of others.
    groups: list[Any] = [dist.new_group(list(part), backend=backend) for part in parts]
    number = next(i for i, part in enumerate(parts) if rank in part)
    group, part = groups[number], parts[number]
    size = _LONG_BYTES[device.partition(":")[0]]
    long, short = (torch.zeros(n // 4, device=device) for n in (size, _SHORT_BYTES))
    place = part.index(rank)
    # A last rank without a partner waits for the others.
    partner = part[place ^ 1] if place ^ 1 < len(part) else None

    def there_and_back(message: torch.Tensor, trips: int) -> None:
        for _ in range(trips if partner is not None else 0):
            if place % 2:
                dist.recv(message, partner, group=group)
                dist.send(message, partner or 0, group=group)
            else:
                dist.send(message, partner or 0, group=group)
                dist.recv(message, partner, group=group)

    def added_up(message: torch.Tensor) -> None:
        if len(part) > 1:
            dist.all_reduce(message, group=group)

    def median_s(body: Callable[[], object]) -> float:
        once_s(body)
        return statistics.median(once_s(body) for _ in range(_REPEATS))

    times = {
        "short_message_s": median_s(lambda: there_and_back(short, _TRIPS)) / (2 * _TRIPS),
        "long_message_s": median_s(lambda: there_and_back(long, 1)) / 2,
        "short_sum_s": median_s(lambda: added_up(short)),
        "long_sum_s": median_s(lambda: added_up(long)),
    }
    if len(part) == 1:
        return None
    # One without a partner has sent nothing, and must not speak for its part.
    slowest = torch.tensor(list(times.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    found = dict(zip(times, slowest.tolist(), strict=True))
    return LinkTimes(num_ranks=len(part), long_bytes=size, **found)


def link_constants(times: LinkTimes, start: Constants) -> tuple[LinkSpec, Constants]:
    """The link, and what collectives make of it, such that both predict what was measured.

    A sum over n ranks is 2 (n - 1) hops of 1/n of the bytes each (`planner/cost/time_parts.py`).
    Where sums are faster than messages, the link is as fast as sums show it to be.
    """
    latency_s = times.short_message_s
    sent_s = max(times.long_message_s - latency_s, 1e-9)
    sum_rate = _sum_rate(times)
    rate = max(times.long_bytes / sent_s, sum_rate)
    hop_s = max(times.short_sum_s / _hops(times) - latency_s, 0.0)
    constants = start.replaced(network_efficiency=sum_rate / rate, hop_s=hop_s, stage_s=hop_s)
    return LinkSpec(bytes_per_s=rate, latency_s=latency_s), constants


def link_of(times: LinkTimes, constants: Constants) -> LinkSpec:
    """Another link, such that the constants of the first predict the sums that it was measured by.

    There is one share of bandwidth that is reached, and one software's part of a hop, for all links
    of a cluster.
    """
    latency_s = max(times.short_sum_s / _hops(times) - constants.hop_s, 0.0)
    rate = _sum_rate(times) / constants.network_efficiency
    return LinkSpec(bytes_per_s=rate, latency_s=latency_s)


def _hops(times: LinkTimes) -> int:
    return 2 * (times.num_ranks - 1)


def _sum_rate(times: LinkTimes) -> float:
    summed_s = max(times.long_sum_s - times.short_sum_s, 1e-9)
    return _hops(times) / times.num_ranks * times.long_bytes / summed_s


# --- a rank

_FEWEST, _FEWEST_ON_GPU, _MOST = 2, 3, 25  # repeats of anything

_MATRIX = {"cpu": 1024, "cuda": 8192}
_COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}
_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}


class RankRequest(BaseModel, frozen=True, extra="forbid"):
    """Measurements that a rank is to make."""

    rank: Annotated[int, Field(ge=0)]  # which one it is
    # number of the node that each rank is on, by rank; there are as many ranks
    nodes: tuple[int, ...]
    # `cpu`, or the CUDA device of this rank
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")]
    num_threads: AtLeastOne  # torch threads
    calls: tuple[ProfileCall, ...]  # calls to time; those of one dtype and width stand together
    seconds: Annotated[float, Field(gt=0)]  # how long each is repeated, about
    deadline_s: Annotated[float, Field(gt=0)]  # longest time for all of it

    @property
    def num_ranks(self) -> int:
        return len(self.nodes)

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]


class RankResult(BaseModel, frozen=True, extra="forbid"):
    """Measurements that a rank made."""

    device_name: str  # of a CUDA device its maker's; else the processor's
    memory_bytes: AtLeastOne  # of the device; on a CPU its share of the machine's
    reserved_bytes: Annotated[int, Field(ge=0)]  # held before any model is there
    flops_per_s: Mapping[str, float]  # dtype -> rate of a large matrix product
    memory_bytes_per_s: float  # A long copy, bytes read and bytes written together
    host_bytes_per_s: float  # to host memory, one direction
    within: LinkTimes | None  # to the ranks of its node; None if it is the only one there
    between: LinkTimes | None  # to ranks of other nodes; None if there are none
    calls_s: tuple[float, ...]  # median seconds of each call


class Together:
    """Times things on all ranks at once."""

    def __init__(self, num_ranks: int, device: str, seconds: float) -> None:
        self._alone = num_ranks == 1
        self._cuda = device.startswith("cuda")
        self._seconds = seconds

    def median_s(self, body: Callable[[], object]) -> float:
        self.once_s(body)
        first_s = self.once_s(body)
        count = int(self._slowest(self._seconds / max(first_s, 1e-6)))
        count = min(max(count, _FEWEST_ON_GPU if self._cuda else _FEWEST), _MOST)
        return statistics.median([first_s, *(self.once_s(body) for _ in range(count - 1))])

    def once_s(self, body: Callable[[], object]) -> float:
        if not self._alone:
            dist.barrier()
        self._synchronize()
        begin = time.perf_counter()
        body()
        self._synchronize()
        return time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _slowest(self, count: float) -> float:
        if self._alone:
            return count
        agreed = torch.tensor(count, dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return float(agreed)


class ProfileRank:
    """A rank that lives in a process of an executor's backend."""

    def __init__(self, home: ProcessHome, request: RankRequest) -> None:
        self._host, self._request = home.host, request
        self._listener: socket.socket | None = None

    def listen(self) -> Address:
        self._listener = socket.create_server((self._host, 0))
        return self._listener.getsockname()

    def measure(self, address: Address) -> RankResult:
        request = self._request
        listener = self._listener if request.rank == 0 else None
        return measured(
            request, meet(address, listener, self._host, request.num_ranks, request.deadline_s)
        )


def measured(request: RankRequest, store: Store) -> RankResult:
    """Measure all that is asked for; every rank must do so at the same time."""
    torch.set_num_threads(request.num_threads)
    cuda, device = request.kind == "cuda", request.device
    if cuda:
        torch.cuda.set_device(device)
    if request.num_ranks > 1:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=request.rank,
            world_size=request.num_ranks,
            timeout=timedelta(seconds=request.deadline_s),
        )
    together = Together(request.num_ranks, device, request.seconds)
    if cuda:
        free, memory = torch.cuda.mem_get_info()
        reserved = memory - free
    else:
        sharing = request.nodes.count(request.nodes[request.rank])
        memory = psutil.virtual_memory().total // sharing
        reserved = psutil.Process().memory_info().rss
    size = _COPY_BYTES[request.kind]
    copy_s = _copy_s(together, device)
    result = RankResult(
        device_name=machine_name(request.kind),
        memory_bytes=memory,
        reserved_bytes=reserved,
        flops_per_s={name: _flops(together, device, name) for name in _DTYPES[request.kind]},
        memory_bytes_per_s=2 * size / copy_s,
        host_bytes_per_s=size / (_copy_s(together, device, from_host=True) if cuda else copy_s),
        within=link_times(within_nodes(request.nodes), request.rank, device, together.once_s),
        between=link_times(across_nodes(request.nodes), request.rank, device, together.once_s),
        calls_s=_calls_s(request, device, together),
    )
    if request.num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return result


def _flops(together: Together, device: str, dtype: str) -> float:
    size = _MATRIX[device.partition(":")[0]]
    left, right = (
        torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2)
    )
    out = torch.empty_like(left)
    return 2 * size**3 / together.median_s(lambda: torch.mm(left, right, out=out))


def _copy_s(together: Together, device: str, *, from_host: bool = False) -> float:
    size = _COPY_BYTES[device.partition(":")[0]] // 4
    source = torch.zeros(size, pin_memory=True) if from_host else torch.zeros(size, device=device)
    target = torch.empty_like(source, device=device)
    return together.median_s(lambda: target.copy_(source, non_blocking=from_host))


def _calls_s(request: RankRequest, device: str, together: Together) -> tuple[float, ...]:
    seconds: list[float] = []
    policy, made = None, None
    for call in request.calls:
        if policy is None or made != call.model:
            policy = make_policy(call, device)
            made = call.model
        seconds.append(together.median_s(call.prepared(policy)))
    return tuple(seconds)


def answer_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def main() -> None:
    request, folder = RankRequest.model_validate_json(sys.stdin.read()), Path(sys.argv[1])
    file = str(folder / "store")
    store = dist.FileStore(file, request.num_ranks)  # pyright: ignore[reportPrivateImportUsage] - torch documents it
    result = measured(request, store)
    answer_file(folder, request.rank).write_text(result.model_dump_json())


if __name__ == "__main__":
    main()
