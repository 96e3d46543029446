"""Language models as workers: a network under a head, in the three roles that learn.

Which engine computes the network makes no difference here; see `LanguageNetwork`. Of each role
there is the worker, and a recipe for it. An engine's spec of a role is that recipe and the engine's
own options, which say how its network is made; what stands in both may be set by a configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import SkipValidation
from torch import Tensor

from ...algorithms.roles.language import Policy, RewardModel, ValueModel
from ...algorithms.roles.language_tables import (
    PolicyOutput,
    ScoreOutput,
    TopWords,
    TrainMetrics,
    ValueOutput,
)
from ...dataflow.errors import ConfigError
from ...dataflow.graph.role import Loss, Role, add_metrics
from ...dataflow.options import PositiveInt, option_class
from ...dataflow.runtime.worker_protocol import WorkerContext
from ..models.spec import Head, ModelSpec
from ..rollout.generate_calls import Generates
from ..rollout.generation_engine import GenerationEngine
from ..rollout.scores import score_metrics
from ..training.host_memory import derived, masked, on_host, spread
from ..training.logprob_mismatch import MismatchLimits
from ..training.model_worker import ModelWorker, check_columns
from ..training.network import LanguageNetwork
from ..training.optimizer import OptimizerSpec
from ..training.trainer import Forward
from .engine import MICRO_BATCH_TOKENS

ADAPTER = "adapter"
"""Below a saved model: the adapter that has been merged into it, if it was trained by one."""

B = TypeVar("B")
O = TypeVar("O")  # noqa: E741 - O for output, as in Loss[B, O]


@option_class
class Recipe:
    """A model, and how much of it is computed at once."""

    model: ModelSpec
    """Architecture and weights; also a folder that such a worker saved."""
    optimizer: OptimizerSpec | None = None
    """None for a frozen model, such as a reference."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens a process computes at once in evaluation and training, padding not counted, and a
    prompt once for rows that follow each other. By default 4,096, and on a GPU up to 16,384 if they
    fit by the planner's ledger."""
    offload: bool = False
    """Whether the model waits in host memory while none of its calls runs."""

    def optimizer_on(self, context: WorkerContext) -> OptimizerSpec | None:
        """The optimizer on the group that trains the role; others only evaluate it."""
        return self.optimizer if "train" in context.methods or not context.methods else None

    def tokens_at_once(self, context: WorkerContext, head: Head) -> int:
        """`micro_batch_tokens`, or what stands for None there."""
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS

    def check_group(self, context: WorkerContext) -> None:
        """Refuse a worker group that the model cannot be built on, without building anything.

        Raises:
            ConfigError: If the group cannot be divided as the options say.
            PlanError: If the model cannot be divided as the group is.
        """

    def make_network(self, model: ModelSpec, context: WorkerContext, head: Head) -> LanguageNetwork:
        """This process's part of a model with its first weights.

        Raises:
            ConfigError: If the engine cannot compute the model.
            PlanError: If the model cannot be divided as the group is.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class RecipeByGroup:
    """Recipe for a role that some groups evaluate in a layout of their own."""

    trained: Recipe
    evaluated: Mapping[str, Recipe]  # Group -> how it does

    def build(self, context: WorkerContext) -> Role:
        recipe: Any = self._on(context)
        return recipe.build(context)

    def check_group(self, context: WorkerContext) -> None:
        self._on(context).check_group(context)

    def _on(self, context: WorkerContext) -> Recipe:
        return self.evaluated.get(context.group, self.trained)


class LanguageWorker(ModelWorker):
    """A language model under a head, without the calls of a role."""

    def __init__(self, context: WorkerContext, head: Head, recipe: Recipe) -> None:
        # This process's part of the model
        self.network = recipe.make_network(recipe.model, context, head)
        recipe.model.check_weights(self.network.tensors(), context)
        super().__init__(
            context,
            self.network,
            recipe.optimizer_on(context),
            recipe.tokens_at_once(context, head),
            offload=recipe.offload,
        )
        self.head = head
        self.model = recipe.model

    def save_pretrained(self, folder: Path) -> None:
        """Write a folder in Hugging Face's layout, head included (one process does).

        `ModelSpec(folder=...)` in a spec of the same role reads it back.
        """
        if self.context.rank != 0:
            return
        whole = self.network.whole_module(
            lambda: self.head.whole_model(self.model, self.context, "cpu")
        )
        if whole is not None:
            self.head.save(folder, whole)
        self.network.save_adapter(folder / ADAPTER, self.model.folder)


@option_class
class PolicyRecipe(Recipe):
    """A causal language model."""

    end_ids: tuple[int, ...]
    """Tokens that end a response: a tokenizer's `end.ids`."""
    num_words: int | None = None
    """Number of tokens of the tokenizer, if the model may have more: no others are sampled, and
    probabilities are of these alone."""
    mismatch: MismatchLimits = MismatchLimits()
    """Limits of the mismatch between sampled log-probabilities and its own."""

    def build(self, context: WorkerContext) -> PolicyWorker:
        return PolicyWorker(context, self)

    def make_generator(self, network: LanguageNetwork) -> GenerationEngine | None:
        """The engine that samples tokens from the same weights; None if there is none."""
        return None


class PolicyWorker(LanguageWorker, Generates, Policy):
    """See `PolicyRecipe`: evaluated, trained, and sampled from if its engine does that."""

    def __init__(self, context: WorkerContext, recipe: PolicyRecipe) -> None:
        super().__init__(context, Head("lm_head"), recipe)
        self._num_words: int = recipe.model.config.vocab_size
        if recipe.num_words is not None and recipe.num_words < self._num_words:
            self.network.num_words = self._num_words = recipe.num_words
        self._mismatch = recipe.mismatch
        self._generator = recipe.make_generator(self.network)
        self.takes_weights = self._generator is not None and self._generator.takes_weights

    def generating(self) -> GenerationEngine:
        if self._generator is None:
            raise ConfigError(
                f"'{self.context.role}' is trained by {self.network.engine}, which does not "
                "generate; give it a rollout engine (rollout=)"
            )
        return self._generator

    def logprob(self, tokens: Tensor, mask: Tensor, *, temperature: float = 1.0) -> Tensor:
        _check_temperature(temperature)
        return self._evaluate(
            tokens,
            mask,
            lambda t, m: self._output(t, m, temperature).logprob,
            per_token=True,
            what="log-probabilities",
        )

    def top_words(
        self, tokens: Tensor, mask: Tensor, *, num_words: int, temperature: float = 1.0
    ) -> TopWords:
        _check_temperature(temperature)
        num_words = min(num_words, self._num_words)

        def top(tokens: Tensor, mask: Tensor) -> Tensor:
            outputs = self.network.outputs(tokens, _before(mask), _prompt_lengths(mask))
            found = outputs.zeros((*mask.shape, 2 * num_words))
            if not on_host(mask).any():
                return found
            both = self.network.top_words(outputs, num_words, temperature)
            return spread(torch.cat(both, dim=-1), mask, found)

        # Words travel as float32, which is exact for vocabularies of up to 2^24.
        found = self._evaluate(
            tokens, mask, top, per_token=True, width=2 * num_words, what="log-probabilities"
        )
        words = found[..., num_words:].long().where(mask[..., None], -1)
        return TopWords(words=words, logprob=found[..., :num_words])

    def train(
        self,
        loss: Loss[B, PolicyOutput],
        batch: B,
        *,
        epochs: int = 1,
        num_minibatches: int = 1,
        temperature: float = 1.0,
    ) -> TrainMetrics:
        _check_temperature(temperature)
        _check_behavior(batch)

        def forward(rows: Any, needs_entropy: bool) -> PolicyOutput:
            check_columns(rows.tokens, rows.mask)
            words = getattr(rows, "words", None)
            if words is not None:
                _check_words(words, self._num_words)
            return self._output(rows.tokens, rows.mask, temperature, words, entropy=needs_entropy)

        return self._train(forward, loss, batch, epochs, num_minibatches, self._mismatch)

    def _output(
        self,
        tokens: Tensor,
        mask: Tensor,
        temperature: float,
        words: Tensor | None = None,
        *,
        entropy: bool = False,
    ) -> PolicyOutput:
        """Log-probabilities (and entropies) of masked tokens f32[rows, T], and of words."""
        outputs = self.network.outputs(tokens, _before(mask), _prompt_lengths(mask))
        target = masked(tokens, mask)
        if words is not None:
            target = torch.cat([target[:, None], masked(words, mask)], dim=1)
        logprob, entropies = outputs.zeros(target.shape), outputs.zeros(target.shape[:1])
        if len(target):
            logprob, found = self.network.token_logprob(
                outputs, target, temperature, needs_entropy=entropy
            )
            entropies = entropies if found is None else found

        def table(column: Tensor) -> Tensor:
            return spread(column, mask, outputs.zeros((*mask.shape, *column.shape[1:])))

        return PolicyOutput(
            table(logprob if words is None else logprob[:, 0]),
            table(entropies) if entropy else None,
            None if words is None else table(logprob[:, 1:]),
        )


@option_class
class ValueRecipe(Recipe):
    """A backbone under a value head: the policy's, or one that such a worker saved."""

    zero_init_head: bool = True
    """Start with value 0 everywhere, unless the folder has a head of its own."""

    def build(self, context: WorkerContext) -> ValueWorker:
        return ValueWorker(context, Head("value_head", zero_init=self.zero_init_head), self)


class ValueWorker(LanguageWorker, ValueModel):
    """See `ValueRecipe`."""

    def value(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self._evaluate(tokens, mask, self._values, per_token=True, what="values")

    def train(
        self, loss: Loss[B, ValueOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        forward = _column_forward(self._values, ValueOutput)
        return self._train(forward, loss, batch, epochs, num_minibatches)

    def _values(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """f32[rows, T]: what the backbone says before each masked token."""
        outputs = self.network.outputs(tokens, _before(mask), _prompt_lengths(mask))
        return spread(outputs.column(), mask, outputs.zeros(mask.shape))


@option_class
class RewardRecipe(Recipe):
    """A backbone under a score head: the policy's, or one that such a worker saved."""

    own_text: SkipValidation[Any] = None
    """The `workers.rewards.own_text.OwnText` of a model with another tokenizer or template."""
    chat: bool = True
    """Whether its own chat template, if it has one, writes prompt and response."""

    def build(self, context: WorkerContext) -> RewardWorker:
        return RewardWorker(context, self)


class RewardWorker(LanguageWorker, RewardModel):
    """See `RewardRecipe`. A row without any masked token scores 0."""

    def __init__(self, context: WorkerContext, recipe: RewardRecipe) -> None:
        super().__init__(context, Head("score"), recipe)
        self._skipped: int | None = getattr(recipe.model.config, "score_skips", None)
        self._own_text = recipe.own_text and replace(recipe.own_text, chat=recipe.chat)

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        # A learned score looks at `prompt_id` only to write the prompt anew.
        if self._own_text is not None:
            tokens, mask = self._own_text.rows(tokens, mask, prompt_id)
        score = self._evaluate(tokens, mask, self._scores, per_token=False)
        if self._own_text is not None:  # a row that does not fit is empty
            score = score.where(mask.any(1), torch.nan)
        add_metrics(self.metrics, score_metrics(score, prompt_id))
        return score

    def train(
        self, loss: Loss[B, ScoreOutput], batch: B, *, epochs: int = 1, num_minibatches: int = 1
    ) -> TrainMetrics:
        forward = _column_forward(self._scores, ScoreOutput)
        return self._train(forward, loss, batch, epochs, num_minibatches)

    def _scores(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """f32[rows]: the head's output at one token of each row."""
        reads = self._reads(tokens, mask)
        outputs = self.network.outputs(tokens, reads, _prompt_lengths(mask))
        found = derived(reads, lambda reads: reads.any(1))
        return spread(outputs.column(), found, outputs.zeros(mask.shape[:1]))

    def _reads(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """bool[rows, T]: where scores are read; classifiers of transformers skip what pads."""
        if self._skipped is None:
            return last_masked(mask)

        def last(mask: Tensor) -> Tensor:
            before_end = mask.flip(1).cumsum(1).flip(1) > 0
            return last_masked(before_end & (on_host(tokens).to(mask.device) != self._skipped))

        return derived(mask, last)


def _check_behavior(batch: Any) -> None:
    """Require that every sampled token had a probability: a clip would hide that for one sign."""
    logprob: Tensor | None = getattr(batch, "behavior_logprob", None)
    if logprob is not None and bool((none := logprob.isinf() & batch.mask).any()):
        raise ValueError(
            f"behavior_logprob is infinite at {int(none.sum())} of {int(batch.mask.sum())} tokens "
            "that were sampled, whose probability must have been above 0; give that of the "
            "distribution they were sampled from"
        )


def _before(mask: Tensor) -> Tensor:
    """bool[rows, T]: the tokens after which each masked token is predicted."""

    def shifted(mask: Tensor) -> Tensor:
        reads = torch.zeros_like(mask)
        reads[:, :-1] = mask[:, 1:]
        return reads

    return derived(mask, shifted)


def last_masked(mask: Tensor) -> Tensor:
    """bool[rows, T]: each row's last masked token, if it has any."""
    if not mask.shape[1]:
        return mask

    def last(mask: Tensor) -> Tensor:
        place = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        return (place == (mask * place).amax(1)[:, None]) & mask

    return derived(mask, last)


def _prompt_lengths(mask: Tensor) -> Tensor:
    """Index of each row's first masked token, i64[rows]; 0 if none."""
    if not mask.shape[1]:
        return torch.zeros(len(mask), dtype=torch.int64)
    return derived(mask, lambda mask: mask.long().argmax(1))


def _column_forward(
    compute: Callable[[Tensor, Tensor], Tensor], output: Callable[[Tensor], O]
) -> Forward[O]:
    def forward(rows: Any, needs_entropy: bool) -> O:
        check_columns(rows.tokens, rows.mask)
        return output(compute(rows.tokens, rows.mask))

    return forward


def _check_words(words: Tensor, vocab_size: int) -> None:
    largest = int(on_host(words).max()) if words.numel() else 0
    if largest >= vocab_size:
        raise ValueError(
            f"the batch asks for word {largest}, and the model knows {vocab_size}; student and "
            "teacher need one vocabulary"
        )


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(
            f"temperature is {temperature}; log-probabilities need a positive one (greedy "
            "decoding has no distribution to evaluate)"
        )
