"""Each shipped algorithm as something small that can be run: sources, workers, config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.reference_grpo import ReferenceGRPO, reference_grpo_step
from penstock.algorithms.reward_modelling import RewardModelling, reward_modelling_step
from penstock.algorithms.roles import Reward, Sampling
from penstock.algorithms.sft import SFT, sft_step
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.role import Metric
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Source
from penstock.dataflow.runtime.placement import DeviceGroup, Placement
from penstock.dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec
from penstock.workers.data.reasoning_task import ReasoningTaskSpec
from penstock.workers.data.sources import DemonstrationSource, PairSource, PromptSource
from penstock.workers.engines.torch_engine.specs import (
    TorchPolicySpec,
    TorchRewardModelSpec,
    TorchValueSpec,
)
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.rule_reward import RuleRewardSpec
from penstock.workers.training.optimizer import OptimizerSpec
from torch import Tensor

TASK = ReasoningTaskSpec(
    name="chain_sum",
    config={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    prompt_template="{expression}=",
    strip_spaces=True,
    num_train=300,
    num_held_out=16,
)
TOKENIZER = TokenizerSpec(alphabet="0123456789+-= ")
PROMPTS_PER_STEP = 8


class LengthReward(Reward):
    """A rule that tells the samples of an untrained policy apart: shorter is better.

    Its metric `fingerprint` is a mean over rows that changes with any token.
    """

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}

    def score(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1]) * 7919 + prompt_id[:, None] * 104_729
        marks = torch.where(tokens >= 0, (tokens + 1) * (place % 1_000_003 + 1), 0)
        self.metrics["fingerprint"] = Metric.mean(float(marks.sum()), float(len(tokens)))
        return -mask.sum(dim=1).float()


@dataclass(frozen=True)
class LengthRewardSpec:
    """Recipe for a `LengthReward`."""

    def build(self, context: WorkerContext) -> LengthReward:
        return LengthReward()


@dataclass(frozen=True)
class Run:
    """A step function with everything it needs."""

    step: Callable[..., Any]
    cfg: Any
    sources: Mapping[str, Source]
    workers: Mapping[str, WorkerSpec]
    trained: tuple[str, ...] = ("actor",)
    graph: Graph = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "graph", build(self.step, cfg=self.cfg))

    def apart(
        self, rollout: int | DeviceGroup = 1, main: int | DeviceGroup = 1, **options: Any
    ) -> Placement:
        """The actor samples on a group of its own; all else is on another."""
        given = {"main": main, "rollout": rollout}
        first, second = (
            DeviceGroup(name, group) if isinstance(group, int) else group
            for name, group in given.items()
        )
        nodes = {
            node.name: second.name if node.name == "actor.generate" else first.name
            for node in self.graph.nodes
            if node.name not in self.graph.sources
        }
        return Placement((first, second), nodes, **options)


def model() -> ModelSpec:
    """A model small enough for a test."""
    return ModelSpec(
        architecture={
            "model_type": "qwen2",
            "vocab_size": TOKENIZER.build().vocab_size,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.2,
        }
    )


def make(name: str, *, seed: int = 0) -> Run:
    """The run of one of `NAMES`."""
    task, tokenizer = TASK.build(), TOKENIZER.build()
    eos, optimizer = tokenizer.eos_id, OptimizerSpec(lr=1e-3)
    actor = TorchPolicySpec(model=model(), end_ids=(eos,), optimizer=optimizer)
    rule = RuleRewardSpec(task=TASK, tokenizer=TOKENIZER)
    size: dict[str, Any] = {"batch_size": PROMPTS_PER_STEP, "seed": seed}
    if name == "sft":
        demos = DemonstrationSource(task, tokenizer, **size)
        return Run(sft_step, SFT(), {"demos": demos}, {"actor": actor})
    if name == "reward_modelling":
        pairs = PairSource(task, tokenizer, **size)
        reward = TorchRewardModelSpec(model=model(), optimizer=optimizer)
        cfg = RewardModelling()
        return Run(reward_modelling_step, cfg, {"pairs": pairs}, {"reward": reward}, ("reward",))
    prompts = {"prompts": PromptSource(task, tokenizer, **size)}
    if name == "grpo":
        cfg = GRPO(sampling=Sampling(num_samples=4, max_new_tokens=6))
        return Run(grpo_step, cfg, prompts, {"actor": actor, "reward": LengthRewardSpec()})
    ref = TorchPolicySpec(model=model(), end_ids=(eos,))
    if name == "reference_grpo":
        cfg = ReferenceGRPO(sampling=Sampling(num_samples=4, max_new_tokens=6), num_minibatches=2)
        judged = {"actor": actor, "ref": ref, "reward": LengthRewardSpec()}
        return Run(reference_grpo_step, cfg, prompts, judged)
    workers: dict[str, WorkerSpec] = {
        "actor": actor,
        "critic": TorchValueSpec(model=model(), optimizer=optimizer),
        "ref": ref,
        "reward": rule,
    }
    cfg = PPO(sampling=Sampling(max_new_tokens=6), epochs=2, num_minibatches=2)
    return Run(ppo_step, cfg, prompts, workers, ("actor", "critic"))


NAMES = ("sft", "reward_modelling", "grpo", "reference_grpo", "ppo")
