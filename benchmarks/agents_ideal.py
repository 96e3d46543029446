"""What `agents.py` measures of one engine: conversations with waits and without, what is reused.

See there for `share_of_ideal` and `prefix_reused`.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from agents_case import MAX_TOTAL_TOKENS, MAX_TURN_TOKENS, wait_s
from agents_task import LookUpSpec, NumberedQuestions
from penstock.algorithms.roles import Conversations, Sampling
from penstock.algorithms.roles.language import ENDINGS, Turn, TurnRequest
from penstock.dataflow.runtime.call_context import call_scope
from penstock.dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec, drain_metrics
from penstock.workers.agents.worker import AgentSpec
from penstock.workers.engines.torch_engine.specs import TorchGeneratorSpec
from penstock.workers.engines.vllm_engine.generator import VllmPolicySpec, VllmTurns
from penstock.workers.engines.vllm_engine.requests import Sampled
from penstock.workers.models.spec import ModelSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.training.flat_parameters import read_tensors

__all__ = ["ENGINES", "Held", "Talk", "ideal_s", "talk_of"]

ENGINES = ("torch", "vllm")


class CountedTurns(VllmTurns):
    """`VllmTurns` that tell what the prefix cache spared of second and later turns."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._rows: set[int] = set()
        self.reused_later = 0

    def _turn(self, asked: TurnRequest, said: Sampled) -> Turn:
        if asked.row in self._rows:
            self.reused_later += said.cached_tokens
        self._rows.add(asked.row)
        return super()._turn(asked, said)


@dataclass(frozen=True)
class Held:
    """What one call of `converse` took, and what came of it.

    Attributes:
        seconds: From its beginning to its end.
        own_tokens: Sampled ones of each conversation.
        wait_s: What each has waited for its tool.
        reused: Tokens of second and later turns that were not computed again.
        known: Tokens before a second or later turn that an earlier turn had read or sampled.
        prefix_reused: The metric of this name, which counts the tokens of first turns as well.
    """

    seconds: float
    own_tokens: list[int]
    wait_s: list[float]
    reused: int
    known: int
    prefix_reused: float


def ideal_s(held: Held, together_s: float) -> float:
    """Seconds that the conversations would take if nothing waited but for what it needs.

    Args:
        held: What they sampled and waited for.
        together_s: What generating takes if no tool has a wait.

    Example:
        >>> ideal_s(Held(9.0, [10, 5], [0.5, 3.0], 0, 0, 0.0), 4.0)
        5.0
    """
    pace = together_s / max(held.own_tokens)
    pairs = zip(held.own_tokens, held.wait_s, strict=True)
    return max(together_s, *(wait + pace * tokens for tokens, wait in pairs))


class Talk:
    """A policy that holds the same conversations with waits or without.

    Args:
        engine: One of `ENGINES`.
        folder: The model.
        num_conversations: At once.
        num_turns: Of each.
        longest_s: Longest wait for a tool, in seconds.
    """

    def __init__(
        self, engine: str, folder: Path, num_conversations: int, num_turns: int, longest_s: float
    ) -> None:
        self._engine, self._folder, self._num_turns = engine, folder, num_turns
        self._longest_s, self._tokenizer = (
            longest_s,
            TokenizerSpec(kind="folder", folder=str(folder)),
        )
        tokenizer = self._tokenizer.build()
        self._task = LookUpSpec(num_train=num_conversations, num_turns=num_turns)
        source = NumberedQuestions(self._task.build(), tokenizer, num_conversations)
        self._prompts = source.batch(0)
        model = ModelSpec(folder=str(folder))
        spec: WorkerSpec = TorchGeneratorSpec(model=model, end_ids=tokenizer.end.ids)
        if engine == "vllm":
            spec = VllmPolicySpec(
                model=model,
                end_ids=tokenizer.end.ids,
                max_decode_rows=num_conversations,
                max_model_len=MAX_TOTAL_TOKENS,
            )
        self._policy: Any = spec.build(WorkerContext("actor"))
        self._turns: list[Any] = []
        given = self._policy.engine.turns

        def turns(sampling: Sampling, num_rows: int) -> Any:
            vllm = engine == "vllm"
            made = (
                CountedTurns(self._policy.vllm, sampling, tokenizer.end.ids)
                if vllm
                else given(sampling, num_rows)
            )
            self._turns.append(made)
            return made

        self._policy.engine.turns = turns

    def hold(self, *, waits: bool) -> Held:
        """Hold them once; as in a run, with nothing kept from before."""
        longest_s = self._longest_s if waits else 0.0
        task = LookUpSpec(
            num_train=self._task.num_train, num_turns=self._num_turns, longest_s=longest_s
        )
        agent = AgentSpec(task=task, tokenizer=self._tokenizer)
        made = agent.build(WorkerContext("agent", seed=0))
        if self._engine == "vllm":  # what the prefix cache holds is of other weights from now on
            self._policy.engine.load(read_tensors(self._folder / "model.safetensors"), 0)
        sampling = Sampling(
            num_samples=1, max_new_tokens=MAX_TURN_TOKENS, max_total_tokens=MAX_TOTAL_TOKENS
        )
        given = self._prompts
        with call_scope(0, 0, version=0):
            began_s = time.perf_counter()
            held = self._policy.converse(
                given.prompt, given.prompt_id, made, sampling, max_turns=self._num_turns
            )
            seconds = time.perf_counter() - began_s
        made.close()
        return self._found(held, seconds, longest_s)

    def _found(self, held: Conversations, seconds: float, longest_s: float) -> Held:
        done = ENDINGS.index("done")
        if held.ending.tolist() != [done] * len(held.ending):
            raise RuntimeError(f"some conversations did not end as they should: {held.ending}")
        turns = self._turns.pop()
        waits = [
            sum(wait_s(number, turn, longest_s) for turn in range(self._num_turns - 1))
            for number in held.prompt_id.tolist()
        ]
        return Held(
            seconds,
            held.mask.sum(1).tolist(),
            waits,
            turns.reused_later if isinstance(turns, CountedTurns) else turns.num_reused,
            _known(held),
            drain_metrics(self._policy)["prefix_reused"].value,
        )

    def close(self) -> None:
        """End the policy."""
        self._policy.engine.close()


def _known(held: Conversations) -> int:
    """Tokens up to the end of each turn but the last, over all turns."""
    place = torch.arange(held.turn.shape[1])
    ends = 0
    for turn in range(int(held.turn.max())):
        last = torch.where(held.turn == turn, place, -1).amax(1) + 1
        ends += int(last[(held.turn == turn + 1).any(1)].sum())
    return ends


@contextmanager
def talk_of(*given: Any) -> Generator[Talk]:
    """A `Talk` that is closed in the end."""
    talk = Talk(*given)
    try:
        yield talk
    finally:
        talk.close()
