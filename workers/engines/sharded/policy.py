"""What a causal language model does that is spread over the processes of a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ....algorithms.roles.language import PolicyOutput, Sampling, TrainMetrics
from ....dataflow.errors import ConfigError
from ....dataflow.graph.role import Loss
from ...models.spec import quiet_transformers
from ...training.logprob_mismatch import MismatchLimits
from ...training.train_calls import check_temperature, policy_forward
from .vocabulary_parallel import vocabulary_logprob
from .worker import ShardedWorker

__all__ = ["ShardedPolicy"]

B = TypeVar("B")


class ShardedPolicy(ShardedWorker):
    """What an engine's `Policy` does with its network. It generates nothing: others do.

    Attributes:
        network: Has `outputs`, which gives logits of this process's part of the vocabulary, and
            `vocabulary_group`.
        limits: How far what it is trained on may be from its own log-probabilities.
        engine: For messages: "the FSDP engine".
    """

    network: Any
    limits: MismatchLimits
    engine: str

    def generate(self, prompt: Tensor, prompt_id: Tensor, sampling: Sampling) -> NoReturn:
        """Refuse.

        Raises:
            ConfigError: Always.
        """
        del prompt, prompt_id, sampling
        raise ConfigError(
            f"'{self.context.role}' is trained by {self.engine}, which does not generate; "
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
        forward = policy_forward(self._output, temperature)
        return self._train(forward, loss, batch, epochs, num_minibatches, self.limits)

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
