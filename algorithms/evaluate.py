"""Evaluation: answer held-out problems and score the answers. Trains nothing.

A graph of its own on the workers of another: its policy has the same name and is the same worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from .roles import Agent, Observer, PerSample, Policy, Prompts, Reward, Sampling

__all__ = ["Evaluation", "Observer", "agent_evaluate_step", "evaluate_step"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Options of evaluation."""

    sampling: Sampling = Sampling(temperature=0.0)
    """How responses are sampled; greedily by default."""
    max_turns: int = 8
    """Most turns of a conversation, where there are some."""


def evaluate_step(
    prompts: Prompts, actor: Policy, verifier: Reward, observer: Observer, cfg: Evaluation
) -> PerSample:
    """One response per prompt (or `num_samples`), scored."""
    roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = verifier.score(roll.tokens, roll.mask, roll.prompt_id)
    return observer.observe(roll.tokens, roll.mask, roll.prompt_id, score=score)


def agent_evaluate_step(
    prompts: Prompts, actor: Policy, agent: Agent, observer: Observer, cfg: Evaluation
) -> PerSample:
    """One conversation about each problem (or `num_samples`), scored by who answers in it."""
    held = actor.converse(
        prompts.prompt, prompts.prompt_id, agent, cfg.sampling, max_turns=cfg.max_turns
    )
    return observer.observe(held.tokens, held.mask, held.prompt_id, score=held.score)
