"""The calls that `penstock profile` times: what the planner is asked about, and what is run.

A policy generates, evaluates and trains, at several widths. Every call is described once: as a
`Call`, the model of time predicts it; as work for a policy, a rank carries it out. Prompts differ
from row to row, because equal ones would be computed once, and no response ends early, because the
token that would end it does not exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from ...algorithms.losses.tokens import ClippedPolicyLoss
from ...algorithms.roles.language_tables import PolicyBatch, Sampling
from ...dataflow.runtime.call_context import call_scope
from ...dataflow.runtime.worker_protocol import WorkerContext
from ...planner.cost.calibration_fit import Timed
from ...planner.inputs.calls import Call, CallKind
from ...planner.inputs.model_shape import ModelShape, shape_of
from ...planner.inputs.workload import Lengths
from ...workers.engines.registry import DEFAULT
from ...workers.engines.roles import PolicyWorker
from ...workers.models.spec import ModelSpec
from ...workers.training.optimizer import OptimizerSpec

MICRO_BATCH_TOKENS = 4096  # tokens that a worker computes at once, unless its options say otherwise

_LAYERS = 4
_PROMPT = 16
_RESPONSE = 48  # tokens of a row; `_LONG` times as many in a call for attention
_LONG = 3
# of the vocabulary: the head is as large a share of these models as of small language models
_WORDS = 4096

AtLeastOne = Annotated[int, Field(ge=1)]


class ProfileCall(BaseModel):
    """One call of a policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: CallKind  # what the policy does
    width: AtLeastOne  # its hidden size
    rows: AtLeastOne  # prompts, with one response each
    dtype: str  # of its weights
    long: bool = False  # whether its rows are long ones
    # optimizer steps, if it trains: the rows are cut into so many minibatches
    updates: AtLeastOne = 1

    @property
    def name(self) -> str:
        updates = f", {self.updates} updates" if self.updates > 1 else ""
        return f"{self.kind} {self.rows} x {self._prompt + self._response} tokens{updates}"

    @property
    def _prompt(self) -> int:
        return _PROMPT * (_LONG if self.long else 1)

    @property
    def _response(self) -> int:
        return _RESPONSE * (_LONG if self.long else 1)

    def timed(self, measured_s: float) -> Timed:
        at_once = min(self.rows, max(1, MICRO_BATCH_TOKENS // (self._prompt + self._response)))
        return Timed(self._call(), at_once, measured_s)

    def _call(self) -> Call:
        return Call(
            name=f"actor.{self.kind}",
            role="actor",
            kind=self.kind,
            model=_shape(self.width, self.dtype),
            head="vocabulary",
            trained=True,
            num_sequences=self.rows,
            prompt=Lengths.constant(self._prompt),
            response=Lengths.constant(self._response),
            updates=self.updates,
        )

    def prepared(self, policy: PolicyWorker) -> Callable[[], None]:
        random = torch.Generator().manual_seed(0)
        prompt, response = self._prompt, self._response
        tokens = torch.randint(0, _WORDS, (self.rows, prompt + response), generator=random)
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


def calls_of_width(width: int, rows: int, dtype: str) -> tuple[ProfileCall, ...]:
    # The first fills a micro-batch nearly, as most calls of a run do. In the third the optimizer's
    # step weighs most: it takes one for each row. In the fourth attention does.
    few, many = max(1, rows // 4), 3 * rows
    sizes: tuple[tuple[CallKind, int, int, bool], ...] = (
        ("train", many, 1, False),
        ("train", rows, rows // few, False),
        ("train", few, few, False),
        ("train", few, 1, True),
        ("forward", many, 1, False),
        ("generate", rows, 1, False),
        ("generate", rows, 1, True),
        ("generate", 4 * rows, 1, False),
    )
    return tuple(
        ProfileCall(kind=kind, width=width, rows=number, dtype=dtype, updates=updates, long=long)
        for kind, number, updates, long in sizes
    )


def architecture(width: int) -> dict[str, Any]:
    """A Qwen2 of that width: four layers, heads of 32 or 64, a feed-forward three times as wide."""
    heads = max(1, width // (32 if width < 256 else 64))
    return {
        "model_type": "qwen2",
        "vocab_size": _WORDS,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": _LONG * (_PROMPT + _RESPONSE),
        "tie_word_embeddings": True,
    }


def _shape(width: int, dtype: str) -> ModelShape:
    return shape_of(architecture(width), name=f"width {width}", dtype=dtype)


def make_policy(width: int, dtype: str, device: str) -> PolicyWorker:
    """The policy of that width, trained and alone."""
    dtypes: Any = dtype
    spec = DEFAULT.spec("policy")(
        model=ModelSpec(architecture=architecture(width), dtype=dtypes),
        end_ids=(_WORDS,),
        optimizer=OptimizerSpec(lr=1e-6),
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )
    return spec.build(WorkerContext("actor", device=device))
