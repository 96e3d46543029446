"""Rewards of the reader's: one in our form, and two in TRL's, which read a column of the row."""

from __future__ import annotations


def reward(prompt: str, response: str, answer: str) -> float:
    """Short responses are good."""
    del prompt, answer
    return float(len(response) < 40)


def right(completions: list[str], answer: list[object], **kwargs: object) -> list[float]:
    """The answer stands in the completion."""
    del kwargs
    return [float(str(gold) in said) for said, gold in zip(completions, answer, strict=True)]


def brief(completions: list[str], **kwargs: object) -> list[float]:
    """Short completions are good."""
    del kwargs
    return [1 / (1 + len(said)) for said in completions]
