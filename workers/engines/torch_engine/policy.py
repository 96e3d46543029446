"""A causal language model as a `Policy`: sampled from, evaluated and trained in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....algorithms.roles.language import Policy, PolicyOutput, Rollout, Sampling, TrainMetrics
from ....dataflow.graph.role import Loss
from ....dataflow.option_checks import check_range
from ....dataflow.runtime.call_context import call_key
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.spec import ModelSpec, quiet_transformers
from ...rollout.rollout import check_prompts, report_responses, to_rollout
from ...rollout.sampling import row_uniforms, stream_key
from ...training.logprob_mismatch import MismatchLimits
from ...training.optimizer import OptimizerSpec
from ...training.train_calls import check_temperature, policy_forward
from .decode import Responses, decode
from .decode_plain import decode_plain
from .network import LeanNetwork, make_network
from .worker import TorchWorker, first_masked, no_outputs

__all__ = ["TorchPolicy", "TorchPolicySpec", "check_temperature"]

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class TorchPolicySpec:
    """Recipe for a `TorchPolicy`."""

    model: ModelSpec
    """Architecture and weights."""
    eos_token_id: int
    """The token that ends a response."""
    optimizer: OptimizerSpec | None = None
    """None for a frozen policy, such as a reference."""
    micro_batch_tokens: int = 4096
    """Tokens computed at once in evaluation and training."""
    max_decode_rows: int = 512
    """Responses drawn at once; a bound on the memory of the key-value cache."""
    mismatch: MismatchLimits = MismatchLimits()
    """How far what it is trained on may be from its own log-probabilities."""

    def __post_init__(self) -> None:
        check_range(self, "micro_batch_tokens", "max_decode_rows", at_least=1)

    def build(self, context: WorkerContext) -> TorchPolicy:
        """Make the policy on the context's device."""
        return TorchPolicy(self, context)


class TorchPolicy(TorchWorker, Policy):
    """See `TorchPolicySpec`."""

    def __init__(self, spec: TorchPolicySpec, context: WorkerContext) -> None:
        module = spec.model.causal_lm(context.device)
        self.spec = spec
        self.module: Any = module
        network = make_network(module, module.base_model, None)
        super().__init__(context, network, spec.optimizer, spec.micro_batch_tokens)

    def generate(self, prompt: Tensor, prompt_id: Tensor, sampling: Sampling) -> Rollout:
        """See `Policy.generate`. Rows of one prompt are adjacent, in the order of the prompts.

        Raises:
            ValueError: If a prompt is empty, or too long for the model with its response.
        """
        reach = getattr(self.module.config, "max_position_embeddings", None)
        check_prompts(prompt, sampling, reach)
        key = call_key(self.context.role, "generate")
        stream = stream_key(self.context.seed, self.context.role, "generate", key)
        repeated = prompt_id.repeat_interleave(sampling.num_samples)
        sample = torch.arange(sampling.num_samples).repeat(len(prompt_id))
        uniform = row_uniforms(
            stream, repeated.cpu().numpy(), sample.numpy(), sampling.max_new_tokens
        )
        waves: list[Responses] = []
        per_wave = max(1, self.spec.max_decode_rows // sampling.num_samples)
        with torch.no_grad():
            for begin in range(0, len(prompt), per_wave):
                end = min(begin + per_wave, len(prompt))
                rows = slice(begin * sampling.num_samples, end * sampling.num_samples)
                waves.append(self._decode(prompt[begin:end], uniform[rows], sampling))
        responses = _joined(waves, sampling.max_new_tokens)
        report_responses(self.metrics, responses)
        return to_rollout(prompt.cpu(), repeated, responses)

    def _decode(self, prompt: Tensor, uniform: Tensor, sampling: Sampling) -> Responses:
        width = int((prompt >= 0).sum(1).max())
        prompt, uniform = prompt[:, :width].to(self.device), uniform.to(self.device)
        options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "eos_token_id": self.spec.eos_token_id,
        }
        if isinstance(self.network, LeanNetwork):
            return decode(self.network, prompt, sampling.num_samples, uniform, **options)
        return decode_plain(self.module, prompt, sampling.num_samples, uniform, **options)

    def logprob(self, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
        """See `Policy.logprob`."""
        check_temperature(temperature)
        return self._evaluate(
            tokens, mask, lambda t, m: self._output(t, m, temperature).logprob, per_token=True
        )

    def train(
        self,
        loss: Loss[B, PolicyOutput],
        batch: B,
        *,
        epochs: int = 1,
        num_minibatches: int = 1,
        temperature: float = 1.0,
    ) -> TrainMetrics:
        """See `Policy.train`."""
        forward = policy_forward(self._output, temperature)
        limits = self.spec.mismatch
        return self._train(forward, loss, batch, epochs, num_minibatches, limits)

    def _output(
        self, tokens: Tensor, mask: Tensor, temperature: float, *, needs_entropy: bool = False
    ) -> PolicyOutput:
        """Log-probabilities (and entropies) of masked tokens, f32[rows, T]."""
        reads = torch.zeros_like(mask)
        reads[:, :-1] = mask[:, 1:]
        zero = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        if not bool(mask.any()):
            zero = zero + no_outputs(self.network)
            return PolicyOutput(zero, zero if needs_entropy else None)
        logits, entry = self.network.outputs(tokens, reads, first_masked(mask))
        every = torch.log_softmax(logits.float() / temperature, dim=-1)
        logprob = zero.masked_scatter(mask, every[entry, tokens[mask]])
        if not needs_entropy:
            return PolicyOutput(logprob)
        entropy = -(every.exp() * every).sum(-1)
        return PolicyOutput(logprob, zero.masked_scatter(mask, entropy[entry]))

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads (only rank 0 does)."""
        if self.context.rank == 0:
            with quiet_transformers():
                self.module.save_pretrained(folder)


def _joined(waves: list[Responses], max_new: int) -> Responses:
    if not waves:
        none = torch.zeros(0, dtype=torch.int64)
        return Responses(none.view(0, max_new), torch.zeros(0, max_new), none, none.bool())
    return Responses(
        torch.cat([wave.token for wave in waves]).cpu(),
        torch.cat([wave.logprob for wave in waves]).cpu(),
        torch.cat([wave.length for wave in waves]).cpu(),
        torch.cat([wave.finished for wave in waves]).cpu(),
    )
