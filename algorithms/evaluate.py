"""Evaluation: answer held-out problems and score the answers. Trains nothing.

A graph of its own on the workers of another: its policy has the same name and is the same worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from .roles import Observer, PerSample, Policy, Prompts, Reward, Sampling

__all__ = ["Evaluation", "Observer", "evaluate_step"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Options of evaluation."""

    sampling: Sampling = Sampling(temperature=0.0)
    """How responses are sampled; greedily by default."""


def evaluate_step(
    prompts: Prompts, actor: Policy, verifier: Reward, observer: Observer, cfg: Evaluation
) -> PerSample:
    """One response per prompt (or `num_samples`), scored."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = verifier.score(roll.tokens, roll.mask, roll.prompt_id)
    return observer.observe(roll.tokens, roll.mask, roll.prompt_id, score=score)
