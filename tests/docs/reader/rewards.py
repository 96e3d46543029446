"""A reward of the reader's: a function of the prompt, the response and the right answer."""

from __future__ import annotations


def reward(prompt: str, response: str, answer: str) -> float:
    """Short responses are good."""
    del prompt, answer
    return float(len(response) < 40)
