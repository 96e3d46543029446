"""A vLLM engine under a policy that generates with it, and does nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import psutil
import torch
from torch import Tensor
from typing_extensions import override

from ....algorithms.roles.language import Turn, TurnRequest
from ....algorithms.roles.language_tables import Sampling
from ....dataflow.errors import ConfigError
from ....dataflow.options import NonNegativeInt, PositiveFraction, PositiveInt, option_class
from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.formatting import bytes_text
from ...models.architecture import empty_model
from ...models.file_weights import as_in_files
from ...models.lora import AdaptedModel, LoraSpec
from ...models.model_folder import weight_files
from ...models.spec import ModelSpec
from ...models.tokenizer import TokenizerSpec
from ...rollout.generation_engine import (
    BegunRows,
    EndedRows,
    GenerationEngine,
    Responses,
    check_stop,
)
from ...rollout.generator_policy import GeneratorPolicy
from ...rollout.response_sampler import StopStrings
from ...rollout.sampling import SampleStreams
from ...training.flat_parameters import read_tensors, write_tensors
from .engine import EngineOptions, VllmEngine
from .requests import Progress, Request, Sampled


class VllmTurns:
    """`Turns` of a vLLM engine, which samples nothing else meanwhile."""

    def __init__(self, engine: VllmEngine, sampling: Sampling, end_ids: Sequence[int]) -> None:
        self._batch = engine.begin({}, sampling, end_ids=end_ids)
        self._is_greedy = sampling.temperature == 0
        self._asked: list[TurnRequest] = []
        # Tokens of texts that were computed, and that were found in the prefix cache.
        self.num_read = self.num_reused = 0

    @property
    def num_open(self) -> int:
        return len(self._batch)

    def ask(self, request: TurnRequest) -> None:
        self._asked.append(request)
        made = Request([*request.text], request.seed, request.max_new_tokens)
        self._batch.add(len(self._asked) - 1, made)

    def step(self) -> list[Turn]:
        ended = self._batch.step()
        return [self._turn(self._asked[number], ended[number]) for number in sorted(ended)]

    def release(self, row: int) -> None:
        """See `Turns.release`: the prefix cache forgets by itself."""

    def close(self) -> None:
        self._batch.give_up()

    def _turn(self, asked: TurnRequest, said: Sampled) -> Turn:
        self.num_reused += said.cached_tokens
        self.num_read += len(asked.text) - said.cached_tokens
        logprob = torch.tensor(said.logprobs, dtype=torch.float32)
        if self._is_greedy:  # a likeliest token is certain
            logprob = torch.zeros_like(logprob)
        return Turn(
            asked.row,
            torch.tensor(said.tokens, dtype=torch.int64),
            logprob,
            torch.tensor(said.versions, dtype=torch.int64),
            said.finished,
        )


def as_requests(
    prompt: Tensor,
    streams: SampleStreams,
    sampling: Sampling,
    begun: BegunRows | None,
    *,
    ends: Collection[int],
    completes: Callable[[int, int], bool] | None,
) -> tuple[dict[int, Request], dict[int, Sampled]]:
    """Return what is to be sampled, by row, and the responses that are complete."""
    rows = [[token for token in row if token >= 0] for row in prompt.tolist()]
    rows = [row for row in rows for _ in range(sampling.num_samples)]
    if begun is None:
        before, is_over = [Sampled() for _ in rows], [False] * len(rows)
        most_new = [sampling.max_new_tokens] * len(rows)
    else:
        before = _before(begun, ends, completes)
        is_over = begun.ended.tolist()
        most_new = torch.as_tensor(begun.most_new).expand(len(rows)).tolist()
    seeds = streams.seeds([len(one.tokens) for one in before])
    requests: dict[int, Request] = {}
    over: dict[int, Sampled] = {}
    for row, (ids, one) in enumerate(zip(rows, before, strict=True)):
        rest = min(sampling.longest_response(len(ids)) - len(one.tokens), most_new[row])
        if is_over[row] or rest <= 0:
            over[row] = one
        else:
            requests[row] = Request(ids, seeds[row], rest, one)
    return requests, over


def _before(
    begun: BegunRows, ends: Collection[int], completes: Callable[[int, int], bool] | None
) -> list[Sampled]:
    found: list[Sampled] = []
    for row, (tokens, logprobs) in enumerate(zip(begun.token, begun.logprob, strict=True)):
        length = int((tokens >= 0).sum())
        # The caller knows which weights sampled the tokens that there were before.
        one = Sampled(tokens[:length].tolist(), logprobs[:length].tolist(), [-1] * length)
        for token in one.tokens:  # of which the last says whether it is finished
            one.finished = token in ends or bool(completes and completes(row, token))
        found.append(one)
    return found


def as_columns(step: Progress, sampling: Sampling) -> EndedRows:
    rows = sorted(step.ended)
    responses = Responses.none_yet(len(rows), sampling.max_new_tokens)
    for place, one in enumerate(step.ended[row] for row in rows):
        length = len(one.tokens)
        responses.token[place, :length] = torch.tensor(one.tokens, dtype=torch.int64)
        if sampling.temperature > 0:  # a likeliest token is certain
            responses.logprob[place, :length] = torch.tensor(one.logprobs)
        responses.versions[place, :length] = torch.tensor(one.versions, dtype=torch.int64)
        responses.length[place] = length
        responses.finished[place] = one.finished
    return EndedRows(torch.tensor(rows, dtype=torch.int64), responses, step.at_least)


_WHERE_FROM = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""Fields of a config that describe its file and not the model."""

_cached: dict[str, VllmEngine] = {}
"""The cached engine by its key; at most one, as a process can have only one."""


def engine_key(config: Any, options: EngineOptions) -> str:
    """Return a key that engines share if they differ in their weights alone."""
    model = {key: value for key, value in config.to_dict().items() if key not in _WHERE_FROM}
    described = json.dumps(model, sort_keys=True, default=str)
    return f"{described} {options}"


def keep(key: str, engine: VllmEngine) -> None:
    """Cache an engine, asleep, until one like it is asked for or another is started."""
    engine.sleep()
    _cached[key] = engine


def take(key: str) -> VllmEngine | None:
    """Return the engine cached under this key, awake, with the weights it had; or None."""
    engine = _cached.pop(key, None)
    if _cached and torch.distributed.is_initialized():
        # Closing it would end torch.distributed, which the next engine needs to reach its peers.
        raise RuntimeError(
            "processes that share a vLLM engine were kept for a model that has changed since; end "
            "them with shutdown_ray() and start again"
        )
    while _cached:  # a process has one engine
        _cached.popitem()[1].close()
    if engine is not None:
        engine.wake()
    return engine


Quantization = Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
"""As vLLM calls its ways to quantize weights that are not; its "fp8" is for files that are."""

_OWN_SHARE = 0.92
"""VLLM's own `gpu_memory_utilization`."""
_CONTEXT_BYTES = 1 << 30
"""GPU memory of a sleeping process: its context, with kernels and their workspaces."""
_APART = "divide the model (executor.tensor_parallel), or put it on GPUs of its own"
_LEAST_TEMPERATURE = 0.01
"""vLLM silently raises lower ones, but 0, to this."""
_LENGTH_STEP = 64
_CPU_ROWS = 256
_CPU_BLOCK = 32
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of heads that vLLM's attention on CPUs has kernels for."""
_NOT_ON_CPU = ("gpt_oss",)
"""The `model_type`s of mixtures, with biases and a gate of their own, that it has none for."""


@option_class
class VllmPolicySpec:
    """Recipe for a policy that generates with vLLM and does nothing else."""

    model: ModelSpec
    """Architecture and first weights."""
    end_ids: tuple[int, ...]
    """Tokens that end a response: a tokenizer's `end.ids`."""
    num_words: int | None = None
    """Number of tokens of the tokenizer, if the model may have more: no others are sampled."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None for as long as `longest_sequence`, or else the model's
    config, says."""
    longest_sequence: PositiveInt | None = None
    """Tokens of the longest prompt with its response that a run will ask for, which fills it in if
    it knows."""
    max_decode_rows: PositiveInt | None = None
    """Responses sampled at once. None: on GPUs vLLM's own default; on CPUs 256, or as many as half
    of the free memory holds."""
    kv_cache_bytes: int | None = None
    """Key-value cache of one process. None: on CPUs room for that many longest sequences, on GPUs
    what `memory_fraction` leaves."""
    memory_fraction: PositiveFraction | None = None
    """Share of a GPU's memory, for weights, activations and cache together. None: vLLM's own, or
    what is left beside what groups keep that take turns on the GPU."""
    quantization: Quantization | None = None
    """Has vLLM compute matrix products in FP8 on GPUs, with weights that it quantizes as they are
    loaded, each time: what is sent stays as it is trained. `fp8_per_block` has a scale for each
    block of 128 x 128 weights, `fp8_per_channel` for each output, `fp8_per_tensor` one."""
    enforce_eager: bool | None = None
    """Whether to do without compiled graphs; None: only on CPUs."""
    lora: LoraSpec = LoraSpec()
    """Adapters, which alone are received, and merged into weights that are kept in host memory."""
    tokenizer: TokenizerSpec | None = None
    """Only to look for `Sampling.stop`; prompts and responses are token ids."""
    sleeping_beside: NonNegativeInt = 0
    """Groups that take turns with it on its GPUs; a run fills it in."""
    sent_from: NonNegativeInt = 0
    """Processes that divide the weights they send, of which two versions stay in the GPUs' memory
    (`executor.transport=cuda_ipc`); 0 if none stays. A run fills it in."""

    def check_group(self, context: WorkerContext) -> None:
        if context.pipeline_parallel > 1:
            raise ConfigError(
                f"'{context.role}' generates with vLLM on {context.pipeline_parallel} pipeline "
                "stages, and this engine divides a model by tensor parallelism only\n    set "
                "executor.pipeline_parallel to 1"
            )
        if context.tensor_parallel > 1 and "converse" in context.methods:
            raise ConfigError(
                f"'{context.role}' is to hold conversations on {context.tensor_parallel} processes "
                "that share its model, which vLLM does in one\n    set executor.tensor_parallel of "
                "its group to 1, or rollout=torch"
            )
        on_cpu = torch.device(context.device).type == "cpu"
        if on_cpu and self.model.kind in _NOT_ON_CPU:
            raise ConfigError(
                f"'{context.role}' is to generate with vLLM, which has no kernel on CPUs for the "
                f"experts of a '{self.model.kind}'\n    set rollout=torch"
            )
        if self.quantization is not None and on_cpu:
            raise ConfigError(
                f"'{context.role}' is to generate with quantization={self.quantization}, which "
                "vLLM computes on GPUs only, and it is placed on the CPU\n    set "
                "executor.device=cuda, or leave rollout.options.quantization out"
            )

    def build(self, context: WorkerContext) -> VllmPolicy:
        """Start the engine on the context's device. All processes of a group must, together."""
        return VllmPolicy(context, VllmGenerator(self, context))


class VllmPolicy(GeneratorPolicy):
    """A policy that generates with vLLM, whose engine the next one of its process may take over."""

    stays_warm = True

    def __init__(self, context: WorkerContext, generator: VllmGenerator) -> None:
        super().__init__(context, generator)
        self.vllm = generator.vllm
        self._key = generator.key

    @override
    def keep_warm(self) -> None:
        keep(self._key, self.vllm)


class VllmGenerator(GenerationEngine):
    """A vLLM engine as a `GenerationEngine`.

    With tensor parallelism every process of a rank runs the same calls with the same rows and
    seeds, and each holds its part of every matrix.
    """

    name = "vLLM"
    takes_weights = True

    def __init__(self, spec: VllmPolicySpec, context: WorkerContext) -> None:
        spec.check_group(context)
        self._spec = spec
        _check_folder(spec.model, context)
        config: Any = spec.model.config
        self.shapes = {name: one.shape for name, one in empty_model(config).named_parameters()}
        weight_bytes = _num_bytes(self.shapes, spec.model.dtype) // (2 if spec.quantization else 1)
        self.dtype = spec.model.dtype
        self.vocab_size: int = config.vocab_size
        self.num_positions = longest_sequence(spec, config)
        if torch.device(context.device).type == "cpu" and _head_dim(config) not in _CPU_HEAD_DIMS:
            raise ValueError(
                f"'{context.role}' has attention heads of {_head_dim(config)} dimensions; vLLM on "
                f"CPUs computes heads of {', '.join(map(str, _CPU_HEAD_DIMS))}. Change the model, "
                "or generate with the torch engine"
            )
        self._adapted: AdaptedModel | None = None
        if spec.lora:  # before the cache takes its part of the memory that is free
            module = spec.model.causal_lm("cpu")
            self._adapted = AdaptedModel(
                module, spec.lora, context.seed, context.device, but="lm_head"
            )
            self.dtype = "float32"
            adapters = self._adapted.adapters
            self.shapes = {name: tensor.shape for name, tensor in adapters.items()}
        options = engine_options(spec, config, self.num_positions, context)
        if torch.device(context.device).type == "cuda":
            share = memory_share(
                spec,
                context.role,
                needed=weight_bytes // context.tensor_parallel
                + (spec.kv_cache_bytes or token_bytes(config, spec, context) * self.num_positions),
                sent=_num_bytes(self.shapes, self.dtype),
                device=torch.cuda.get_device_properties(context.device).total_memory,
            )
            options = replace(options, memory_fraction=share)
        self.key = engine_key(config, options)  # What such engines have in common
        kept = take(self.key)
        # The engine: one that an earlier run of this process left, if it is like this one
        self.vllm = kept or _started(spec.model, options)
        self.vllm.sample_among(spec.num_words)
        self.drops_weights = self.vllm.drops_weights
        if self._adapted is not None:
            if kept is not None or spec.lora.folder is not None:
                self.load(self._adapted.adapters, 0)
        elif kept is not None:  # with weights of another run
            module = spec.model.causal_lm("cpu")
            self.load({name: tensor.detach() for name, tensor in module.named_parameters()}, 0)

    @override
    def check(self, sampling: Sampling) -> None:
        check_stop(sampling, has_tokenizer=self._spec.tokenizer is not None)
        if 0 < sampling.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature is {sampling.temperature}; vLLM samples at no less than "
                f"{_LEAST_TEMPERATURE}, so log-probabilities would be of another distribution. Set "
                "it to 0 for the likeliest token, or higher"
            )

    @override
    def stream(
        self,
        prompt: Tensor,
        streams: SampleStreams,
        sampling: Sampling,
        begun: BegunRows | None = None,
    ) -> Iterator[EndedRows]:
        # A response that goes on has other random numbers from there than if it had not been
        # interrupted: vLLM's own begin anew with each request, here at a seed that says how many
        # tokens there are already.
        stops, end_ids = None, self._spec.end_ids
        if sampling.stop and self._spec.tokenizer is not None:
            stops = StopStrings(self._spec.tokenizer, sampling, prompt)
        completes = None if stops is None else stops.complete
        ends = {*end_ids, *sampling.stop_token_ids}
        requests, over = as_requests(
            prompt, streams, sampling, begun, ends=ends, completes=completes
        )
        if over:
            yield as_columns(Progress(over, 0), sampling)
        batch = self.vllm.begin(requests, sampling, end_ids=end_ids, completes=completes)
        for step in batch.steps():
            yield as_columns(step, sampling)

    @override
    def turns(self, sampling: Sampling, num_rows: int) -> VllmTurns:
        return VllmTurns(self.vllm, sampling, self._spec.end_ids)

    @override
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        whole = tensors if self._adapted is None else self._adapted.merged_with(tensors)
        self.vllm.load(whole)

    @override
    def sleep(self) -> int:
        return self.vllm.sleep()

    @override
    def sleep_empty(self) -> int:
        return self.vllm.sleep(keep_weights=False)

    @override
    def wake(self) -> None:
        self.vllm.wake()

    @override
    def close(self) -> None:
        self.vllm.close()


def engine_options(
    spec: VllmPolicySpec, config: Any, longest: int, context: WorkerContext
) -> EngineOptions:
    on_cpu = torch.device(context.device).type == "cpu"
    cache, rows = spec.kv_cache_bytes, spec.max_decode_rows
    if on_cpu:
        each = token_bytes(config, spec, context) * -(-longest // _CPU_BLOCK) * _CPU_BLOCK
        # The cache takes half of the memory that is free, shared among processes.
        sharing = context.num_processes * context.num_replicas
        free = psutil.virtual_memory().available // (2 * sharing)
        rows = rows or max(1, min(_CPU_ROWS, free // each - 1))
        cache = cache or each * (rows + 1)
    return EngineOptions(
        dtype=spec.model.dtype,
        max_model_len=longest,
        max_rows=rows,
        kv_cache_bytes=cache,
        memory_fraction=spec.memory_fraction,
        quantization=spec.quantization,
        enforce_eager=on_cpu if spec.enforce_eager is None else spec.enforce_eager,
        device=context.device,
        tensor_parallel=context.tensor_parallel,
        process=context.process,
    )


def token_bytes(config: Any, spec: VllmPolicySpec, context: WorkerContext) -> int:
    """Keys and values of one token in one process."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = max(heads // context.tensor_parallel, 1)
    element = getattr(torch, spec.model.dtype).itemsize
    return 2 * config.num_hidden_layers * heads * _head_dim(config) * element


def _num_bytes(shapes: Mapping[str, torch.Size], dtype: str) -> int:
    return sum(shape.numel() for shape in shapes.values()) * getattr(torch, dtype).itemsize


def memory_share(
    spec: VllmPolicySpec, role: str, *, needed: int, sent: int, device: int
) -> float | None:
    """Share of a GPU of `device` bytes for vLLM, whose weights and least cache are `needed` bytes.

    Groups that take turns with it keep their contexts and, of `sent` bytes of weights, the version
    that it has and the next. None for vLLM's own share.

    Raises:
        ConfigError: If that does not fit.
    """
    kept = spec.sleeping_beside * _CONTEXT_BYTES
    kept += 2 * -(-sent // spec.sent_from) if spec.sent_from else 0
    if not kept:
        return spec.memory_fraction
    left = max(device - kept, 0)
    fits = math.floor(1000 * left / device) / 1000
    share = spec.memory_fraction or min(_OWN_SHARE, fits)
    if needed <= share * device <= left:
        return share
    wants, ways = max(needed, int(share * device) if share > fits else 0), [_APART]
    if spec.sent_from:
        ways.insert(0, "leave executor.transport=cuda_ipc out")
    if needed <= fits * device:
        ways.insert(0, f"set rollout.options.memory_fraction={fits}")
    raise ConfigError(
        f"'{role}' generates with vLLM in turns with {spec.sleeping_beside} other group(s), which "
        f"keep {bytes_text(kept)} of each GPU of {bytes_text(device)} while they sleep\n    "
        f"vLLM may have {bytes_text(left)}, and is to have {bytes_text(wants)}\n    "
        + ", or ".join(ways)
    )


def _check_folder(model: ModelSpec, context: WorkerContext) -> None:
    """Require of a model's folder what is required everywhere: vLLM's own loader is less strict."""
    if model.folder is None:
        return
    model.check(scalar_head=False)
    for file in weight_files(Path(model.folder)):
        model.check_weights(read_tensors(file), context)


def longest_sequence(spec: VllmPolicySpec, config: Any) -> int:
    reach: int | None = getattr(config, "max_position_embeddings", None)
    wanted = spec.max_model_len or reach
    if spec.longest_sequence is not None and spec.max_model_len is None:
        # In steps, so that the next run in this process can have the engine of this one.
        steps = -(-spec.longest_sequence // _LENGTH_STEP) * _LENGTH_STEP
        wanted = steps if reach is None else min(steps, reach)
    if wanted is None:
        raise ValueError("the model's config says no longest sequence; give max_model_len=")
    if reach is not None and wanted > reach:
        raise ValueError(f"max_model_len is {wanted}; the model is made for {reach} positions")
    return wanted


def _head_dim(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def _model_folder(model: ModelSpec, scratch: Path) -> Path:
    """A folder that vLLM can load: the model's own, or its seeded weights written to `scratch`."""
    if model.folder is not None:
        return Path(model.folder)
    folder = scratch / "model"
    folder.mkdir()
    module = model.causal_lm("cpu")
    config: Any = module.config
    config.architectures = [type(module).__name__]
    # Not by `save_pretrained`, which writes in the first alone of a group of processes.
    config.to_json_file(folder / "config.json")
    weights = dict(module.named_parameters())
    write_tensors(folder / "model.safetensors", dict(as_in_files(weights, config.model_type)))
    return folder


def _started(model: ModelSpec, options: EngineOptions) -> VllmEngine:
    with TemporaryDirectory(prefix="penstock-vllm-") as scratch:
        return VllmEngine(_model_folder(model, Path(scratch)), options)
