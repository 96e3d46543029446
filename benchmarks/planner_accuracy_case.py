"""Steps whose time `planner_accuracy.py` predicts and measures, each placed in two ways.

None of them was timed for a calibration: they have other widths, depths, lengths, vocabularies and
numbers of rows than the calls of `penstock profile`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.roles import Prompts, Sampling
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.planner.inputs.calls import Lengths, Workload
from penstock.planner.inputs.model_shape import ModelShape, shape_of
from penstock.planner.search.pins import Pins
from penstock.workers.engines.torch_engine.specs import (
    TorchPolicySpec,
    TorchRewardModelSpec,
    TorchValueSpec,
)
from penstock.workers.models.hub import packaged_folder
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of PPO or GRPO, whose models all have one shape.

    Attributes:
        name: What the tables call it.
        width: Hidden size of the models; 0 for SmolLM2-135M, which says the sizes itself.
        num_layers: Of each.
        vocab_size: Of each.
        dtype: Of their weights.
        num_prompts: Of a step.
        num_samples: Responses to each: one is PPO, more are GRPO.
        prompt: Tokens of a prompt.
        response: Tokens of a response; none ends early.
        epochs: Passes over the rows.
        num_minibatches: Optimizer steps of a pass.
    """

    name: str
    width: int = 0
    num_layers: int = 0
    vocab_size: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_prompts: int
    num_samples: int = 1
    prompt: int
    response: int
    epochs: int = 1
    num_minibatches: int = 1

    @cached_property
    def model(self) -> ModelSpec:
        """Of all roles."""
        if not self.width:
            folder = packaged_folder("smollm2-135m", lambda text: print(text, file=sys.stderr))
            return ModelSpec(folder=str(folder), dtype=self.dtype)
        return ModelSpec(architecture=self._architecture, dtype=self.dtype)

    @property
    def _architecture(self) -> dict[str, Any]:
        heads = max(1, self.width // 64)
        return {
            "model_type": "qwen2",
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": 3 * self.width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 2 * (self.prompt + self.response),
            "tie_word_embeddings": True,
        }

    @cached_property
    def shape(self) -> ModelShape:
        """The same for the planner."""
        config = self.model.config.to_dict()
        return shape_of(config, name=self.name, dtype=self.dtype)

    @property
    def workload(self) -> Workload:
        """Rows and tokens of a step."""
        return Workload(
            num_prompts=self.num_prompts,
            samples_per_prompt=self.num_samples,
            prompt=Lengths.constant(self.prompt),
            response=Lengths.constant(self.response),
        )

    def graph(self) -> Graph:
        """The recorded step."""
        sampling = Sampling(num_samples=self.num_samples, max_new_tokens=self.response)
        options: dict[str, Any] = {
            "sampling": sampling,
            "epochs": self.epochs,
            "num_minibatches": self.num_minibatches,
        }
        if self.num_samples > 1:
            return build(grpo_step, cfg=GRPO(**options), name="grpo")
        return build(ppo_step, cfg=PPO(**options), name="ppo")

    def workers(self) -> dict[str, Any]:
        """All roles; no token ends a response, so all have their full length."""
        optimizer, end = OptimizerSpec(lr=1e-6), self.shape.vocab_size
        policy = TorchPolicySpec(model=self.model, end_ids=(end,), optimizer=optimizer)
        reward = TorchRewardModelSpec(model=self.model)
        if self.num_samples > 1:
            return {"actor": policy, "reward": reward}
        return {
            "actor": policy,
            "critic": TorchValueSpec(model=self.model, optimizer=optimizer),
            "ref": TorchPolicySpec(model=self.model, end_ids=(end,)),
            "reward": reward,
        }

    @property
    def pins(self) -> Mapping[str, Pins]:
        """The two placements: roles on ranks of their own, or all on both."""
        actor = ("actor", "actor.generate")
        apart = ("critic", "reward") if self.num_samples == 1 else ("reward",)
        beside = ("ref",) if self.num_samples == 1 else ()
        return {
            "split": Pins(together=((*actor, *beside), apart), apart=(("actor", apart[0]),)),
            "colocated": Pins(together=((*actor, *beside, *apart),)),
        }

    def batch(self, step: int) -> Prompts:
        """Random prompts, other ones in every step."""
        random = torch.Generator().manual_seed(step)
        size = (self.num_prompts, self.prompt)
        return Prompts(
            prompt=torch.randint(0, self.shape.vocab_size, size, generator=random),
            prompt_id=torch.arange(self.num_prompts),
        )


CASES = (
    Case(name="many updates on few rows", width=512, num_layers=4, vocab_size=64, num_prompts=4,
         prompt=16, response=16, epochs=12),
    Case(name="one update on many rows", width=256, num_layers=4, vocab_size=64, num_prompts=64,
         prompt=32, response=32),
    Case(name="long responses", width=256, num_layers=6, vocab_size=1024, num_prompts=16,
         prompt=16, response=112, num_minibatches=2),
    Case(name="a large vocabulary", width=192, num_layers=4, vocab_size=16384, num_prompts=24,
         prompt=24, response=40),
    Case(name="narrow and deep", width=128, num_layers=12, vocab_size=512, num_prompts=32,
         prompt=32, response=32),
    Case(name="bfloat16, wide", width=512, num_layers=8, vocab_size=4096, dtype="bfloat16",
         num_prompts=32, prompt=24, response=40),
    Case(name="bfloat16, long prompts", width=256, num_layers=8, vocab_size=8192,
         dtype="bfloat16", num_prompts=48, prompt=96, response=16),
    Case(name="bfloat16, many updates", width=384, num_layers=6, vocab_size=2048,
         dtype="bfloat16", num_prompts=16, prompt=16, response=48, epochs=2, num_minibatches=4),
    Case(name="groups of 8", width=320, num_layers=6, vocab_size=4096, num_prompts=6,
         num_samples=8, prompt=32, response=32),
    Case(name="groups of 8, long", width=128, num_layers=8, vocab_size=8192, num_prompts=8,
         num_samples=8, prompt=16, response=80),
    Case(name="bfloat16, groups of 8", width=448, num_layers=10, vocab_size=8192,
         dtype="bfloat16", num_prompts=6, num_samples=8, prompt=20, response=60),
    Case(name="SmolLM2, 4 x 8", dtype="bfloat16", num_prompts=4, num_samples=8, prompt=40,
         response=40),
    Case(name="SmolLM2, 8 x 4", dtype="bfloat16", num_prompts=8, num_samples=4, prompt=24,
         response=24, num_minibatches=2),
)  # fmt: skip
