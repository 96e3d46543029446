"""Evaluation: answer held-out problems and score the answers, or play episodes. Trains nothing.

A graph of its own on the workers of another: its roles have the same names and are the same
workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dataflow.options import PositiveInt, option_class
from .roles import Agent, Observer, PerSample, Policy, Prompts, Reward, Sampling
from .roles.environment import Actor, Env, EnvRows, PerEnv

__all__ = ["Evaluation", "Observer", "agent_evaluate_step", "evaluate_step"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Options of evaluation."""

    sampling: Sampling = Sampling(temperature=0.0)
    """Sampling of the responses; greedy by default."""
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


@option_class
class EnvEvaluation:
    """Options of evaluation in environments."""

    num_episodes: PositiveInt = 1
    """Episodes of every environment."""
    max_episode_steps: PositiveInt = 10_000
    """An episode that is longer counts with what was earned by then."""


def env_evaluate_step(rows: EnvRows, env: Env, actor: Actor, cfg: EnvEvaluation) -> PerEnv:
    """Measure an actor's return per episode in each environment."""
    return env.evaluate(
        rows.env,
        rows.group,
        actor,
        num_episodes=cfg.num_episodes,
        max_episode_steps=cfg.max_episode_steps,
    )
