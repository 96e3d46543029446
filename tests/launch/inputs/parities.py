"""A task of one's own, as a user writes it: is a number even?"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.workers.data.task import Task


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


class ParityTask(Task):
    def __init__(self, spec: ParitySpec) -> None:
        prompts = [f"{number}?" for number in range(spec.num_train + spec.num_held_out)]
        super().__init__("parity", prompts, spec.num_held_out)

    def answer_text(self, index: int) -> str:
        return "odd" if index % 2 else "even"

    def score(self, index: int, response: str) -> float:
        return float(response == self.answer_text(index))


NO_KIND = 3
