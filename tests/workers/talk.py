"""A small policy, an agent and prompts, for tests of conversations."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

import torch
from penstock.algorithms.roles import Conversations, Prompts, Sampling
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.agents.worker import AgentSpec
from penstock.workers.data.chat import TURNS
from penstock.workers.data.sources import PromptSource
from penstock.workers.data.task import TaskSpec, task_alphabet
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec

ARCHITECTURE: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


class Conversing:
    """A policy, an agent and prompts, which are written with the characters of `problems`."""

    sampling: Sampling
    max_turns: int

    def __init__(
        self,
        spec: TaskSpec,
        problems: TaskSpec | None = None,
        *,
        batch_size: int = 8,
        limit_s: float = 5.0,
        max_rows: int = 64,
    ) -> None:
        task: Any = spec.build()
        alphabet = task_alphabet((problems or spec).build())
        tokenizer = TokenizerSpec(kind="char", alphabet=alphabet, chat_template=TURNS)
        self.tokenizer = tokenizer.build()
        vocab_size, eos = self.tokenizer.vocab_size, self.tokenizer.eos_id
        model = ModelSpec(architecture={**ARCHITECTURE, "vocab_size": vocab_size})
        policy = TorchPolicySpec(model=model, end_ids=(eos,), max_decode_rows=max_rows)
        self.policy: Any = policy.build(WorkerContext("actor"))
        agent = AgentSpec(task=spec, tokenizer=tokenizer, answer_limit_s=limit_s)
        self.agent = agent.build(WorkerContext("agent", seed=3))
        source = PromptSource(task, self.tokenizer, batch_size=batch_size, seed=0)
        self.prompts: Prompts = source.batch(0)

    def hold(
        self,
        sampling: Sampling | None = None,
        max_turns: int | None = None,
        *,
        version: int = 0,
        branch: bool = False,
    ) -> Conversations:
        """All conversations about the prompts."""
        with call_scope(version, 0, version=version):
            return self.policy.converse(
                self.prompts.prompt,
                self.prompts.prompt_id,
                self.agent,
                sampling or self.sampling,
                max_turns=self.max_turns if max_turns is None else max_turns,
                branch=branch,
            )


Kind = TypeVar("Kind", bound=Conversing)


@contextmanager
def talking(kind: Callable[..., Kind]) -> Generator[Callable[..., Kind]]:
    """Makes talks, whose agents are closed in the end."""
    made: list[Kind] = []

    def make(*given: Any, **options: Any) -> Kind:
        made.append(kind(*given, **options))
        return made[-1]

    yield make
    for talk in made:
        talk.agent.close()


def same(one: Conversations, other: Conversations) -> bool:
    return all(
        torch.equal(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
    )
