"""A task of one's own, as a user writes it: is a number even?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.workers.data.row_report import DataReport
from penstock.workers.verifiers.pool import VerifierSpec


@dataclass(frozen=True, kw_only=True)
class ParitySpec:
    """The numbers below `num_train` to train on, as many as `num_held_out` above them."""

    num_train: int = 40
    num_held_out: int = 8

    def __post_init__(self) -> None:
        if self.num_train < 1:
            raise ValueError(f"num_train is {self.num_train}; expected at least 1")

    def build(self) -> ParityTask:
        return ParityTask(self)


class ParityTask:
    task_id = "parity"
    correct_score = 1.0
    verifier: VerifierSpec | None = None

    def __init__(self, spec: ParitySpec) -> None:
        self.train = range(spec.num_train)
        self.held_out = range(spec.num_train, spec.num_train + spec.num_held_out)
        self.report = DataReport("parities")

    def prompt_text(self, index: int) -> str:
        return f"{index}?"

    def answer_text(self, index: int) -> str:
        return "odd" if index % 2 else "even"

    def pair_texts(self, index: int) -> tuple[str, str] | None:
        del index

    def score(self, index: int, response: str) -> float:
        return float(response == self.answer_text(index))

    def verifier_call(self, index: int, response: str) -> tuple[Any, ...]:
        return (index, response)

    def where(self, index: int) -> str:
        return f"parity[{index}]"


NO_KIND = 3
