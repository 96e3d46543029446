"""What the pages call a module of the reader's: a step, a reward, a tool and an agent."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.algorithms.reference_grpo import ReferenceGRPO, reference_grpo_step
from penstock.algorithms.roles import Policy, Prompts, Reward, Sampling, TrainMetrics

__all__ = ["MyReward", "lookup", "my_step"]


@dataclass(frozen=True, kw_only=True)
class MyOptions(ReferenceGRPO):
    """Options with defaults for short answers."""

    sampling: Sampling = Sampling(num_samples=4, max_new_tokens=5)


def my_step(
    prompts: Prompts, actor: Policy, ref: Policy, reward: Reward, cfg: MyOptions
) -> TrainMetrics:
    """A step with options of its own."""
    return reference_grpo_step(prompts, actor, ref, reward, cfg)


class MyReward(Reward):
    """A reward of the reader's."""


def lookup(word: str) -> str:
    """Say what a word means.

    Args:
        word: The word.
    """
    return word
