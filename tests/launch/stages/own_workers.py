"""Workers of somebody's own that the tests beside it name as `own_workers:NAME`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from penstock.algorithms.losses import ClippedPolicyLoss
from penstock.algorithms.ops.advantages import broadcast_over_tokens
from penstock.algorithms.roles import (
    PerSample,
    Policy,
    PolicyBatch,
    Prompts,
    Reward,
    Sampling,
    TokenIds,
    TokenMask,
    TrainMetrics,
)
from penstock.dataflow import Role, call
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.registry import DEFAULT
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Options of the step."""

    sampling: Sampling = Sampling(num_samples=2, max_new_tokens=8)
    loss: ClippedPolicyLoss = ClippedPolicyLoss()


class Judge(Role):
    """Whoever marks responses."""

    @call("forward")
    def mark(self, tokens: TokenIds, mask: TokenMask) -> PerSample:
        """One mark per response."""
        raise NotImplementedError


def judged_step(prompts: Prompts, actor: Policy, judge: Judge, cfg: Judged) -> TrainMetrics:
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    mark = judge.mark(roll.tokens, roll.mask)
    batch = PolicyBatch(
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        advantage=broadcast_over_tokens(mark, roll.mask),
    )
    return actor.train(cfg.loss, batch)


class Shorter(Judge):
    """A judge without a model."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def mark(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return -self.weight * mask.sum(1).float()


@dataclass(frozen=True, kw_only=True)
class SurpriseSpec:
    """A judge with a model: how likely it finds a response."""

    model: ModelSpec
    tokenizer: TokenizerSpec
    end_ids: tuple[int, ...]
    scale: float = 1.0

    def build(self, context: WorkerContext) -> Surprise:
        return Surprise(self, context)


class Surprise(Judge):
    """See `SurpriseSpec`."""

    def __init__(self, spec: SurpriseSpec, context: WorkerContext) -> None:
        policy = DEFAULT.spec("policy")(model=spec.model, end_ids=spec.end_ids)
        self._policy: Any = policy.build(context)
        self._scale = spec.scale

    def mark(self, tokens: Tensor, mask: Tensor) -> Tensor:
        logprob = self._policy.logprob(tokens, mask)
        return self._scale * torch.where(mask, logprob, 0.0).sum(1)


def slow_policy(
    model: ModelSpec, end_ids: tuple[int, ...], optimizer: OptimizerSpec | None, share: float = 1.0
) -> Any:
    """A policy that learns at a share of the learning rate."""
    own = optimizer and replace(optimizer, lr=share * optimizer.lr)
    return DEFAULT.spec("policy")(model=model, end_ids=end_ids, optimizer=own)


@dataclass(frozen=True)
class Named:
    """A reward whose `model` is a name of its own."""

    model: str = "small"

    def build(self, context: WorkerContext) -> Reward:
        raise NotImplementedError
