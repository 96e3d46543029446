"""The runs whose processes `chaos.py` kills."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CASES", "Case"]

_STEPS = 50
_ACTING_STEPS = 120


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        name: What tables call it.
        words: After `penstock run`.
        num_steps: Of its main stage.
        gap_s: Longest time from the step after a kill to the next kill.
    """

    name: str
    words: tuple[str, ...]
    num_steps: int = _STEPS
    gap_s: float = 1.5


_ALL = (
    "tracker=none",
    "executor=ray",
    "executor.num_threads=1",
    "checkpoint_every=3",
    "recovery.pause_s=0.1",
)
_TEXT = (
    *_ALL,
    f"algorithm.num_steps={_STEPS}",
    "evaluation.num_prompts=8",
    "task.num_train=200",
    "task.num_held_out=16",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "algorithm.per_step.prompts=8",
    "algorithm.before.sft.num_steps=2",
)
_PPO = (
    *_TEXT,
    "algorithm=ppo",
    "algorithm.roles.reward.worker=rule",
    "executor.groups={train: 1, values: 1, rollout: 2, frozen: 1}",
    "executor.nodes={actor.generate: rollout, critic: values, ref: frozen, reward: frozen}",
)
_GRPO = (
    *_TEXT,
    "algorithm=grpo",
    "executor.groups={train: 2, rollout: 2, reward: 1}",
    "executor.nodes={actor.generate: rollout, reward: reward}",
)
_ENV = (
    *_ALL,
    "algorithm=env_ppo",
    "task=cartpole",
    "model=mlp",
    f"algorithm.num_steps={_ACTING_STEPS}",
    "task.group_size=2",
    "evaluation.num_episodes=4",
    "executor.groups={train: 1, acting: 2, policy: 1}",
    "executor.nodes={env: acting}",
    "executor.served={acting: {actor: policy}}",
)
_TALK = (
    *_TEXT,
    "algorithm=agent_grpo",
    "task=calculator",
    "executor.groups={train: 1, talking: 2}",
    "executor.nodes={actor.converse: talking}",
)
_VLLM = (
    *_GRPO,
    "rollout=vllm",
    "schedule.max_lag=1",
    # It computes no narrower heads than of 32 dimensions on CPUs.
    "model.architecture.hidden_size=64",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=1",
)
_CASES = (
    Case("ppo, k=0", _PPO),
    Case("ppo, k=1", (*_PPO, "schedule.max_lag=1")),
    Case("ppo, k=1, mirror", (*_PPO, "schedule.max_lag=1", "checkpoint.mirror=neighbor")),
    Case("grpo on two ranks, k=0", _GRPO),
    Case("grpo, partial", (*_GRPO, "schedule=streaming", "schedule.segment_tokens=4")),
    Case("environments, k=0", _ENV, _ACTING_STEPS),
    Case("environments, k=1", (*_ENV, "schedule.max_lag=1"), _ACTING_STEPS),
    Case("conversations, k=0", _TALK),
    Case("vllm, k=1", _VLLM),
)
CASES = {case.name: case for case in _CASES}
