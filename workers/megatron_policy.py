"""A causal language model as a `Policy` that is evaluated and trained by megatron-core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ..algorithms.roles import Policy, PolicyOutput, Sampling, TrainMetrics
from ..dataflow.errors import ConfigError
from ..dataflow.role import Loss
from ..dataflow.worker import WorkerContext
from .agreement import AgreementLimits
from .megatron_options import MegatronOptions
from .megatron_worker import MegatronWorker
from .model import ModelSpec, quiet_transformers
from .torch_policy import check_temperature
from .torch_worker import check_columns
from .vocabulary_parallel import vocabulary_logprob

__all__ = ["MegatronPolicy", "MegatronPolicySpec"]

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class MegatronPolicySpec(MegatronOptions):
    """Recipe for a `MegatronPolicy`."""

    model: ModelSpec
    """Architecture and weights: Llama, Qwen2 or Qwen3."""
    eos_token_id: int
    """The token that ends a response."""
    agreement: AgreementLimits = AgreementLimits()
    """How far what it is trained on may be from its own log-probabilities."""

    def build(self, context: WorkerContext) -> MegatronPolicy:
        """Make this process's part of the policy on the context's device."""
        return MegatronPolicy(self, context)


class MegatronPolicy(MegatronWorker, Policy):
    """See `MegatronPolicySpec`. It generates nothing: rollouts are another engine's."""

    def __init__(self, spec: MegatronPolicySpec, context: WorkerContext) -> None:
        super().__init__(context, spec.model, spec)
        self.spec = spec

    def generate(self, prompt: Tensor, prompt_id: Tensor, sampling: Sampling) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: Always.
        """
        del prompt, prompt_id, sampling
        raise ConfigError(
            f"'{self.context.role}' is trained by the Megatron engine, which does not generate; "
            "give it a rollout engine (rollout=vllm or rollout=torch)"
        )

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
        check_temperature(temperature)

        def forward(rows: Any, needs_entropy: bool) -> PolicyOutput:
            check_columns(rows.tokens, rows.mask)
            return self._output(rows.tokens, rows.mask, temperature, needs_entropy=needs_entropy)

        limits = self.spec.agreement
        return self._train(forward, loss, batch, epochs, num_minibatches, limits)

    def _output(
        self, tokens: Tensor, mask: Tensor, temperature: float, *, needs_entropy: bool = False
    ) -> PolicyOutput:
        """Log-probabilities (and entropies) of masked tokens, f32[rows, T]."""
        reads = torch.zeros_like(mask)
        reads[:, :-1] = mask[:, 1:]
        logits, anchor = self.network.outputs(tokens, reads)
        zero = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device) + anchor
        if not bool(mask.any()):
            return PolicyOutput(zero, zero if needs_entropy else None)
        logprob, entropy = vocabulary_logprob(
            logits.float() / temperature, tokens[mask], self.network.vocabulary_group
        )
        logprob = zero.masked_scatter(mask, logprob)
        return PolicyOutput(logprob, zero.masked_scatter(mask, entropy) if needs_entropy else None)

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder that `AutoModelForCausalLM.from_pretrained` loads (one process does)."""
        weights = self.weights_to_write()
        if weights:
            module: Any = self.model.causal_lm("cpu")
            module.load_state_dict(weights, strict=False)  # tied heads are not among them
            with quiet_transformers():
                module.save_pretrained(folder)
