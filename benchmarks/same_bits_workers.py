"""A user's own task and worker for the cases of `same_bits.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from penstock.algorithms.roles.language import Reward
from penstock.algorithms.roles.language_tables import PerSample, PromptId, TokenIds, TokenMask
from penstock.workers.data.task import DataReport, Task
from penstock.workers.verifiers.pool import VerifierSpec
from same_bits_parts import closeness


@dataclass(frozen=True, kw_only=True)
class DoublesSpec:
    """The numbers below 50: twice the number is asked for."""

    pooled: bool = False
    """Whether responses are scored in processes of their own."""
    num_held_out: int = 8

    def build(self) -> Doubles:
        """Make the task."""
        return Doubles(self)


class Doubles(Task):
    """The task of `DoublesSpec`."""

    task_id = "doubles"
    correct_score = 0.5

    def __init__(self, spec: DoublesSpec) -> None:
        self.train = range(50 - spec.num_held_out)
        self.held_out = range(50 - spec.num_held_out, 50)
        self.report = DataReport("doubles")
        pool = VerifierSpec(factory="same_bits_parts:doubles_verifier", arguments={})
        self.verifier = pool if spec.pooled else None

    def prompt_text(self, index: int) -> str:
        """Ask for the sum."""
        return f"{index}+{index}="

    def answer_text(self, index: int) -> str:
        """Give the sum."""
        return str(2 * index)

    def pair_texts(self, index: int) -> tuple[str, str]:
        """Give the sum, and its neighbor."""
        return str(2 * index), str(2 * index + 1)

    def score(self, index: int, response: str) -> float:
        """Score a response."""
        return closeness("", response, self.answer_text(index))

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        """Give what `doubles_verifier` takes."""
        return (response, self.answer_text(index))

    def where(self, index: int) -> str:
        """Name a problem."""
        return f"doubles[{index}]"


class EvenTokens(Reward):
    """A worker whose score is the share of even tokens."""

    def score(self, tokens: TokenIds, mask: TokenMask, prompt_id: PromptId) -> PerSample:
        """Score each row."""
        del prompt_id
        even = ((tokens % 2 == 0) & mask).sum(1)
        return even.to(torch.float32) / mask.sum(1).clamp(min=1)
