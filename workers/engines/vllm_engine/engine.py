"""vLLM's engine, driven request by request in this process.

`LLMEngine` with its core in the process is chosen over `AsyncLLM`. Both run the same scheduler and
model runner with continuous batching. `AsyncLLM` has its core in a further process, and which
requests share a batch there depends on when messages arrive; a worker is given all prompts of a
call, or of all calls of a step, at once, so waiting asynchronously would gain nothing, and the
batches (and with them the last bits of log-probabilities) would vary from run to run. In this
process weights are handed over by reference, responses leave with the step that ends them, and
to kill the worker is to kill the engine.
"""

from __future__ import annotations

import gc
import math
import os
import random
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....algorithms.roles.language_tables import Sampling
from .requests import Request, RequestBatch

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core in this process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # compiling small functions costs the first call 7 to 26 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the process may share its cores with others
}


@dataclass(frozen=True)
class EngineOptions:
    """Options that a vLLM engine is started with."""

    dtype: str  # "float32" or "bfloat16"
    max_model_len: int  # Longest sequence, prompt and response
    max_rows: int | None  # Sequences decoded at once; None for as many as vLLM takes by default
    kv_cache_bytes: int | None  # Size of the key-value cache; None for `memory_fraction` of a GPU
    # Share of a GPU's memory, for weights, activations and cache together; None for vLLM's
    # default
    memory_fraction: float | None
    quantization: str | None  # How vLLM quantizes weights as it loads them; None for not at all
    enforce_eager: bool  # Whether to do without compiled graphs
    device: str  # "cpu" or "cuda:0"
    tensor_parallel: int  # Processes that share the model
    process: int  # This process in torch.distributed's default group, if that is initialized


class VllmEngine:
    """A model in vLLM.

    A process has at most one: vLLM keeps its process groups in globals, and closing one engine
    would take them away from another.
    """

    _running: bool = False

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        if VllmEngine._running:
            raise RuntimeError(
                "this process already runs a vLLM engine, and vLLM can have one per process; place "
                "the roles that use it on groups of their own (executor=ray)"
            )
        self._options = options
        self._calls = self._loads = 0
        self._asleep = False
        self._freed_bytes: list[int] = []
        with _starting(options):
            from vllm.platforms import current_platform
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.llm_engine import LLMEngine

            device, built_for = torch.device(options.device).type, current_platform.device_type
            if built_for != device:
                raise RuntimeError(
                    f"the vLLM that is installed runs on '{built_for}', and this worker is placed "
                    f"on '{device}'; install the build for {device} or place the role elsewhere"
                )
            # What is not set takes vLLM's defaults for many prompts at once, not a server's.
            arguments = engine_arguments(folder, options)
            self._engine: Any = LLMEngine.from_engine_args(arguments, UsageContext.LLM_CLASS)
            self._engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
        VllmEngine._running = True

    def begin(
        self,
        requests: Mapping[int, Request],
        sampling: Sampling,
        *,
        end_ids: Sequence[int],
        completes: Callable[[int, int], bool] | None = None,
    ) -> RequestBatch:
        """Begin to sample responses. The caller steps, and gives up what is left.

        Equal prompts share their keys and values. A response depends on its prompt, its seed and
        the weights, not on the other requests, up to the rounding of sums: where two tokens are
        equally good to the last bits, a batch of another shape may choose the other one.
        """
        if self._asleep:
            raise RuntimeError("the vLLM engine sleeps; call wake() before generating")
        self._require_idle("generate")
        self._calls += 1
        call, loaded = str(self._calls), str(self._loads)
        return RequestBatch(self._engine, call, loaded, requests, sampling, end_ids, completes)

    def _require_idle(self, what: str) -> None:
        if self._engine.has_unfinished_requests():
            raise RuntimeError(
                f"the vLLM engine cannot {what}: it is sampling for a stream that was not read to "
                "its end; close that one first"
            )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all weights; no request that is made from now on finds what old ones computed."""
        from .weights import load_whole_tensors

        self._loads += 1
        load_whole_tensors(self._engine, tensors)

    def sample_among(self, num_words: int | None) -> None:
        self._engine.collective_rpc(_sample_among, args=(num_words,))

    @property
    def drops_weights(self) -> bool:
        """Whether it can sleep without its weights."""
        return not self._on_cpu

    def sleep(self, *, keep_weights: bool = True) -> int:
        """Give device memory to others until `wake`; nothing to do if it sleeps.

        On a GPU weights move to host memory and the key-value cache is dropped, by vLLM's own sleep
        mode. vLLM's CPU build has none: there the cache's memory is given back to the system, and
        the weights stay, because their packed form cannot be taken out of its kernels.
        Without `keep_weights` they are dropped there, and `load` is called after `wake`. Returns
        the bytes given back.
        """
        if self._asleep:
            return 0
        self._require_idle("sleep")
        self._asleep = True
        if self._on_cpu:
            self._engine.reset_prefix_cache()
            (self._freed_bytes,) = self._engine.collective_rpc(_free_kv_cache)
            return sum(self._freed_bytes)
        free = torch.cuda.mem_get_info()[0]
        self._engine.sleep(level=1 if keep_weights else 2)
        return max(torch.cuda.mem_get_info()[0] - free, 0)

    def wake(self) -> None:
        if not self._asleep:
            return
        if self._on_cpu:
            self._engine.collective_rpc(_allocate_kv_cache, args=(self._freed_bytes,))
        else:
            self._engine.wake_up()
        self._asleep = False

    @property
    def _on_cpu(self) -> bool:
        return torch.device(self._options.device).type == "cpu"

    def close(self) -> None:
        """End the engine; nothing may be asked of it afterwards."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.engine_core.shutdown()
        del engine
        # What vLLM does when an engine is collected must not happen to the next one.
        gc.collect()
        VllmEngine._running = False


def engine_arguments(folder: Path, options: EngineOptions) -> Any:
    """VLLM's `EngineArgs`: its own defaults, but for what is listed here or asked for."""
    from vllm.engine.arg_utils import EngineArgs

    from .weights import weight_transfer_config

    device = torch.device(options.device).type
    asked: dict[str, Any] = {
        "max_num_seqs": options.max_rows,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        "gpu_memory_utilization": options.memory_fraction,
        # Quantized as they are loaded, the first time and by every layerwise reload.
        "quantization": options.quantization,
    }
    if device == "cpu":
        # On CPUs vLLM cannot take back the random number of a prompt that it computed in part, so
        # seeded prompts must not be cut into chunks. Blocks of 32 tokens (of 128 by default) let
        # short prompts share theirs.
        batch = max(options.max_model_len, 2048)
        asked |= {"enable_chunked_prefill": False, "max_num_batched_tokens": batch}
        asked["block_size"] = 32
    if torch.distributed.is_initialized():
        asked["distributed_executor_backend"] = "external_launcher"
        if device == "cpu":
            from .cpu_worker import agree_on_name

            asked["worker_cls"] = agree_on_name()
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=options.dtype,  # pyright: ignore[reportArgumentType]
        max_model_len=options.max_model_len,
        enforce_eager=options.enforce_eager,
        tensor_parallel_size=options.tensor_parallel,
        enable_prefix_caching=True,
        enable_sleep_mode=device != "cpu",
        generation_config="vllm",  # nothing but what a request says decides how it is sampled
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled from
        weight_transfer_config=weight_transfer_config(),
        use_tqdm_on_load=False,
        disable_log_stats=True,
        seed=0,  # unused: every request has its own
        **{name: value for name, value in asked.items() if value is not None},
    )


@contextmanager
def _starting(options: EngineOptions) -> Generator[None]:
    """Put back afterwards what vLLM changes in a process to start.

    It reads environment variables, seeds all random generators, and on CPUs replaces
    `torch.set_num_threads`; its modules warn of torch's deprecations. Variables that it sets for
    itself stay, and on CPUs nothing is compiled by torch in this process any more.
    """
    wanted = dict(_ENVIRONMENT)
    if torch.device(options.device).type == "cpu":
        wanted |= _CPU_ENVIRONMENT
        # If it was imported before, it has read its environment already.
        torch._dynamo.config.disable = True  # pyright: ignore[reportPrivateUsage] - its documented switch
    if torch.distributed.is_initialized():
        wanted |= {"RANK": str(options.process), "LOCAL_RANK": "0"}
    before = {name: os.environ.get(name) for name in wanted}
    threads, python, numpy = torch.set_num_threads, random.getstate(), np.random.get_state()
    os.environ.update(wanted)
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = threads
        random.setstate(python)
        np.random.set_state(numpy)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _sample_among(worker: Any, num_words: int | None) -> None:
    model = worker.get_model()
    own = type(model).compute_logits

    def compute_logits(*args: Any, **options: Any) -> Any:
        logits = own(model, *args, **options)
        if logits is not None:  # None in ranks that sample nothing
            logits[..., num_words:] = -math.inf
        return logits

    # A list of allowed tokens would be as long as the vocabulary, and is copied for each request.
    model.__dict__.pop("compute_logits", None)
    if num_words is not None:
        model.compute_logits = compute_logits


def _free_kv_cache(worker: Any) -> list[int]:
    """Free the memory under a CPU worker's key-value cache; bytes of each tensor's storage."""
    storages = [tensor.untyped_storage() for tensor in worker.model_runner.kv_caches]
    sizes = [storage.nbytes() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    return sizes


def _allocate_kv_cache(worker: Any, sizes: Sequence[int]) -> None:
    """Undo `_free_kv_cache`. Zeros, because attention multiplies what is unused by 0."""
    for tensor, size in zip(worker.model_runner.kv_caches, sizes, strict=True):
        tensor.untyped_storage().resize_(size)
        tensor.zero_()
