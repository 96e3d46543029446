"""A causal language model as a `Policy` that generates with vLLM, and does nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ....algorithms.roles.language import Policy, PolicyOutput, Rollout, Sampling, TrainMetrics
from ....dataflow.graph.role import Loss, Metric, add_metrics
from ....dataflow.option_checks import check_range
from ....dataflow.runtime.call_context import call_key
from ....dataflow.runtime.worker_protocol import WorkerContext
from ....planner.resharding.sharding import Sharding, whole
from ...models.spec import ModelSpec
from ...models.tokenizer import TokenizerSpec
from ...rollout.rollout import check_prompts, report_responses, to_rollout
from ...rollout.sampling import stream_key
from ...training.flat_parameters import read_tensors, write_tensors
from ...weight_sync.weight_buffer import ReceivedWeights
from ..torch_engine.decode import Responses
from .engine import Drawn, EngineOptions, Request, VllmEngine
from .engine_cache import engine_key, keep, take

__all__ = ["VllmPolicy", "VllmPolicySpec"]

B = TypeVar("B")

_LEAST_TEMPERATURE = 0.01
"""vLLM silently raises lower ones, but 0, to this."""
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's attention on CPUs has kernels for."""


@dataclass(frozen=True, kw_only=True)
class VllmPolicySpec:
    """Recipe for a `VllmPolicy`."""

    model: ModelSpec
    """Architecture and first weights."""
    eos_token_id: int
    """The token that ends a response."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None for as long as the model's config says."""
    max_decode_rows: int = 256
    """Responses drawn at once."""
    kv_cache_bytes: int | None = None
    """Key-value cache of one process. None: on CPUs room for `max_decode_rows` longest sequences,
    on GPUs what `memory_fraction` leaves."""
    memory_fraction: float = 0.9
    """Of a GPU's memory, for weights, activations and cache together."""
    enforce_eager: bool | None = None
    """Whether to do without compiled graphs; None: only on CPUs."""
    stop: tuple[str, ...] = ()
    """Texts that end a response as the end-of-sequence token does; need `tokenizer`."""
    tokenizer: TokenizerSpec | None = None
    """Only to look for `stop`; prompts and responses are token ids."""

    def __post_init__(self) -> None:
        check_range(self, "max_decode_rows", at_least=1)
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction is {self.memory_fraction}; expected more than 0 and at most 1"
            )
        if self.stop and self.tokenizer is None:
            raise ValueError(
                "stop strings are looked for in text, and the spec has no tokenizer; give "
                "tokenizer=, or drop stop="
            )

    def build(self, context: WorkerContext) -> VllmPolicy:
        """Start the engine on the context's device. All processes of a group must, together."""
        return VllmPolicy(self, context)


class VllmPolicy(Policy):
    """See `VllmPolicySpec`.

    With tensor parallelism every process of a rank runs the same calls with the same rows and
    random numbers, and each holds its part of every matrix; `receive` and `load_weights` are given
    whole tensors in all of them.

    Attributes:
        metrics: Numbers about the last calls; see `drain_metrics`.
    """

    def __init__(self, spec: VllmPolicySpec, context: WorkerContext) -> None:
        if context.pipeline_parallel > 1:
            raise ValueError(
                f"'{context.role}' generates with vLLM on {context.pipeline_parallel} pipeline "
                "stages; this engine divides a model by tensor parallelism only, set pp=1"
            )
        self.spec = spec
        self.context = context
        self.metrics: dict[str, Metric] = {}
        config, self._shapes = _skeleton(spec.model)
        self._vocab_size: int = config.vocab_size
        self._max_model_len = _longest(spec, config)
        _check_head_dim(context, config)
        options = self._options(config)
        tokenizer = spec.tokenizer if spec.stop else None
        self._key = engine_key(config, options, tokenizer)
        kept = take(self._key)
        self.engine = kept or _started(spec.model, options, tokenizer)
        if kept is not None:  # with weights of another run
            module = spec.model.causal_lm("cpu")
            kept.load({name: tensor.detach() for name, tensor in module.named_parameters()}, 0)
        self._weights = ReceivedWeights(
            context.role, self._shapes, context.process, self.engine.load
        )

    def _options(self, config: Any) -> EngineOptions:
        spec, context = self.spec, self.context
        on_cpu = torch.device(context.device).type == "cpu"
        cache = spec.kv_cache_bytes
        if cache is None and on_cpu:
            cache = _cache_bytes(config, spec, self._max_model_len, context.tensor_parallel)
        return EngineOptions(
            dtype=spec.model.dtype,
            max_model_len=self._max_model_len,
            max_rows=spec.max_decode_rows,
            kv_cache_bytes=cache,
            memory_fraction=spec.memory_fraction,
            enforce_eager=on_cpu if spec.enforce_eager is None else spec.enforce_eager,
            tokenizer=None,
            device=context.device,
            tensor_parallel=context.tensor_parallel,
            process=context.process,
        )

    # --- generation

    def generate(self, prompt: Tensor, prompt_id: Tensor, sampling: Sampling) -> Rollout:
        """See `Policy.generate`. Rows of one prompt are adjacent, in the order of the prompts.

        Raises:
            ValueError: If a prompt is empty, too long for the model with its response, or has ids
                that the model does not know; or if the temperature is one that vLLM would change.
            WeightsError: If the weights are partial or not of the expected version.
            GenerationAbortedError: If `abort` was called meanwhile.
        """
        self._weights.check()
        self._check(prompt, sampling)
        key = call_key(self.context.role, "generate")
        repeated = prompt_id.repeat_interleave(sampling.num_samples)
        requests: list[Request] = []
        for row, number in zip(prompt.tolist(), prompt_id.tolist(), strict=True):
            ids = [token for token in row if token >= 0]
            for sample in range(sampling.num_samples):
                words = stream_key(
                    self.context.seed, self.context.role, "generate", key, number, sample
                )
                requests.append(Request(ids, int(words[0] >> np.uint64(1))))
        drawn = self.engine.generate(
            requests,
            temperature=sampling.temperature,
            max_new_tokens=sampling.max_new_tokens,
            eos_token_id=self.spec.eos_token_id,
            stop=self.spec.stop,
        )
        responses = _responses(drawn, sampling)
        report_responses(self.metrics, responses)
        return to_rollout(prompt.cpu(), repeated, responses)

    def _check(self, prompt: Tensor, sampling: Sampling) -> None:
        check_prompts(prompt, sampling, self._max_model_len)
        if prompt.numel() and int(prompt.max()) >= self._vocab_size:
            row = int(prompt.max(1).values.argmax())
            raise ValueError(
                f"prompt row {row} has token {int(prompt.max())}, but the model's vocabulary has "
                f"{self._vocab_size}; prompts and model need the same tokenizer"
            )
        if 0 < sampling.temperature < _LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature is {sampling.temperature}; vLLM samples at no less than "
                f"{_LEAST_TEMPERATURE}, so log-probabilities would be of another distribution. Set "
                "it to 0 for the likeliest token, or higher"
            )

    def abort(self, rows: Iterable[int] | None = None) -> None:
        """Cut responses of the call being served short, before their next token. From any thread.

        Args:
            rows: Rows of the rollout; each keeps what it has so far and counts as cut off. None for
                the whole call, which then raises `GenerationAbortedError`.
        """
        self.engine.abort(rows)

    def logprob(self, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
        """Refused: this engine generates only."""
        raise self._refusal("evaluate log-probabilities", "logprob")

    def train(
        self,
        loss: Loss[B, PolicyOutput],
        batch: B,
        *,
        epochs: int = 1,
        num_minibatches: int = 1,
        temperature: float = 1.0,
    ) -> TrainMetrics:
        """Refused: this engine generates only."""
        raise self._refusal("train", "train")

    def _refusal(self, what: str, node: str) -> RuntimeError:
        return RuntimeError(
            f"'{self.context.role}' runs in vLLM here, which generates and cannot {what}; place "
            f"'{self.context.role}.{node}' on a group with a training engine (torch, megatron)"
        )

    # --- weights

    def weights_layout(self) -> Sharding:
        """Where weights must be for `receive`: whole, by Hugging Face name, in every process.

        Devices are numbered as the group's processes. vLLM's loader cuts and fuses by itself.
        """
        shapes = {name: tuple(shape) for name, shape in self._shapes.items()}
        return whole(shapes, range(self.context.num_processes), dtype=self.spec.model.dtype)

    def expect(self, version: int) -> None:
        """Refuse to generate from now on with weights of any other version."""
        self._weights.expect(version)

    def receive(
        self,
        tensors: Mapping[str, Tensor],
        version: int,
        checksums: Mapping[str, int] | None = None,
    ) -> None:
        """Take some or all parameters of a version; the engine uses them once all are there.

        Tensors are kept, not copied, until then. From the first of a new version on, generating is
        refused until the last.

        Args:
            tensors: Whole parameters by Hugging Face name.
            version: Of the weights.
            checksums: `parameter_checksum` of each, made by the sender; what does not have its
                checksum is not taken.

        Raises:
            WeightsError: Names the parameter that is unknown, of a wrong shape, damaged, swapped or
                of another version. Those that are right have been taken.
        """
        self._weights.receive(tensors, version, checksums)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights by those of the next version.

        Raises:
            ValueError: If names or shapes differ; nothing has been changed then.
        """
        self._weights.check_fits(weights)
        self.receive(weights, self._weights.expected + 1)

    def export_weights(self) -> dict[str, Tensor]:
        """Refused: vLLM's tensors are fused and packed for its kernels."""
        raise self._refusal("give its weights back", "train")

    def save_state(self, folder: Path) -> None:
        """Refused: a replica's weights are those of the engine that trains the role."""
        raise self._refusal("save a state", "train")

    def load_state(self, folder: Path) -> None:
        """Take the weights out of what a training engine's `save_state` wrote.

        Raises:
            FileNotFoundError: If there is no weights.safetensors.
            ValueError: If they are another model's.
        """
        self.load_weights(read_tensors(folder / "weights.safetensors"))

    # --- sharing the device

    def sleep(self) -> None:
        """Give device memory to others until `wake`; see `VllmEngine.sleep`.

        The next call reports the metrics `slept_bytes`, which were free meanwhile in all processes
        that report, and `wake_s`.
        """
        freed = self.engine.sleep()
        if freed:
            add_metrics(self.metrics, {"slept_bytes": Metric.sum(float(freed))})

    def wake(self) -> None:
        """Take the memory back."""
        since_s = time.perf_counter()
        self.engine.wake()
        if "slept_bytes" in self.metrics:
            self.metrics["wake_s"] = Metric(time.perf_counter() - since_s, 1.0, "max")

    def keep_warm(self) -> None:
        """Leave the engine, asleep, to the next policy of this process that can use it.

        Nothing may be asked of this one afterwards.
        """
        keep(self._key, self.engine)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


def _skeleton(model: ModelSpec) -> tuple[Any, dict[str, torch.Size]]:
    """Config of a model, and shapes of its parameters; tied ones appear once."""
    from transformers import AutoModelForCausalLM

    config: Any = model.config
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        empty = auto.from_config(config)
    return config, {name: tensor.shape for name, tensor in empty.named_parameters()}


def _longest(spec: VllmPolicySpec, config: Any) -> int:
    """Sequence length to make room for.

    Raises:
        ValueError: If nothing says it, or the model is made for shorter ones.
    """
    reach: int | None = getattr(config, "max_position_embeddings", None)
    wanted = spec.max_model_len or reach
    if wanted is None:
        raise ValueError("the model's config says no longest sequence; give max_model_len=")
    if reach is not None and wanted > reach:
        raise ValueError(f"max_model_len is {wanted}; the model is made for {reach} positions")
    return wanted


def _head_dim(config: Any) -> int:
    own = getattr(config, "head_dim", None)
    return own or config.hidden_size // config.num_attention_heads


def _check_head_dim(context: WorkerContext, config: Any) -> None:
    if torch.device(context.device).type == "cpu" and _head_dim(config) not in _CPU_HEAD_DIMS:
        raise ValueError(
            f"'{context.role}' has attention heads of {_head_dim(config)} dimensions; vLLM on CPUs "
            f"computes heads of {', '.join(map(str, _CPU_HEAD_DIMS))}. Change the model, or "
            "generate with the torch engine"
        )


def _cache_bytes(config: Any, spec: VllmPolicySpec, longest: int, tensor_parallel: int) -> int:
    """Room for all rows at their longest."""
    heads = max(config.num_key_value_heads // tensor_parallel, 1)
    element = torch.finfo(getattr(torch, spec.model.dtype)).bits // 8
    token = 2 * config.num_hidden_layers * heads * _head_dim(config) * element
    block = 32
    return token * -(-longest // block) * block * (spec.max_decode_rows + 1)


def _model_folder(model: ModelSpec, scratch: Path) -> Path:
    """A folder that vLLM can load: the model's own, or its seeded weights written to `scratch`.

    `save_pretrained` is not used: in a group of processes it writes in the first alone.
    """
    if model.folder is not None:
        return Path(model.folder)
    folder = scratch / "model"
    folder.mkdir()
    module = model.causal_lm("cpu")
    config: Any = module.config
    config.architectures = [type(module).__name__]
    config.to_json_file(folder / "config.json")
    write_tensors(folder / "model.safetensors", dict(module.named_parameters()))
    return folder


def _started(
    model: ModelSpec, options: EngineOptions, tokenizer: TokenizerSpec | None
) -> VllmEngine:
    """An engine with the model's first weights."""
    with TemporaryDirectory(prefix="penstock-vllm-") as scratch:
        if tokenizer is not None:
            folder = Path(scratch) / "tokenizer"
            tokenizer.build().save(folder)
            options = replace(options, tokenizer=folder)
        return VllmEngine(_model_folder(model, Path(scratch)), options)


def _responses(drawn: list[Drawn], sampling: Sampling) -> Responses:
    """As columns, padded to the longest allowed response."""
    shape = (len(drawn), sampling.max_new_tokens)
    token = torch.full(shape, -1, dtype=torch.int64)
    logprob = torch.zeros(shape, dtype=torch.float32)
    for row, one in enumerate(drawn):
        token[row, : len(one.tokens)] = torch.tensor(one.tokens, dtype=torch.int64)
        if sampling.temperature > 0:  # a likeliest token is certain
            logprob[row, : len(one.tokens)] = torch.tensor(one.logprobs)
    length = torch.tensor([len(one.tokens) for one in drawn], dtype=torch.int64)
    finished = torch.tensor([one.finished for one in drawn], dtype=torch.bool)
    return Responses(token, logprob, length, finished)
