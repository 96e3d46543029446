"""The rewards that a configuration can name: rules with a verifier, judges, mixtures of them.

None has weights that a run trains. A name is what `algorithm.roles.reward.worker` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...dataflow.registry import Registry
from ..verifiers.reward_function import is_batch

if TYPE_CHECKING:
    from ..data.task import Task
    from .rule_reward import RuleRewardSpec

_RULE = "penstock.workers.rewards.rule_reward"

RULES: Registry[type[RuleRewardSpec]] = Registry(
    {
        "rule": f"{_RULE}:RuleRewardSpec",
        "exact": f"{_RULE}:ExactRewardSpec",
        "math": f"{_RULE}:MathRewardSpec",
        "instructions": f"{_RULE}:InstructionRewardSpec",
        "code": f"{_RULE}:CodeRewardSpec",
        "trl": f"{_RULE}:RuleRewardSpec",
    }
)
"""Rewards that compare with the task's answers; "rule", or "trl", does what the task says."""

PART_KINDS = Registry[Any](
    {
        **RULES.paths,
        "judge": "penstock.workers.rewards.judge:JudgeSpec",
        "served": "penstock.workers.rewards.served:ServedRewardSpec",
    }
)
"""Rewards that may be part of a mixture, by name."""

_MIXTURE = "mixture"

TASK_REWARDS = Registry[Any](
    {**PART_KINDS.paths, _MIXTURE: "penstock.workers.rewards.mixture:MixtureSpec"}
)
"""Every reward that a configuration can name and that looks at the task, with its spec."""


def check_verifiers(worker: str, options: Mapping[str, Any], task: Task | None = None) -> None:
    """Load the verifiers that a reward, or the parts of a mixture, will ask for.

    Its options have been checked. Raises `ConfigError` if a verifier cannot be loaded, needs a
    sandbox that this machine lacks or reads what the task, if it is known, does not have, or if a
    part's factory does not take its options.
    """
    if worker in RULES or worker == _MIXTURE:
        TASK_REWARDS[worker](task=None, tokenizer=None, **options).check_verifiers(task)


def takes_batches(worker: str, options: Mapping[str, Any], task: Any) -> bool:
    """Return whether a function of a reward, or of the spec of a task, must see a whole batch.

    Its options have not been checked yet.
    """
    if worker == _MIXTURE:
        parts = options.get("parts")
        given = [one for one in dict(parts or {}).values() if isinstance(one, Mapping)]
        return any(
            takes_batches(str(one.get("worker")), one.get("options") or {}, task) for one in given
        )
    if worker not in RULES:
        return False
    own = options.get("verifier", RULES[worker].verifier)
    return any(map(is_batch, _rewards_of(task) if own is None else [own]))


def _rewards_of(task: Any) -> list[Any]:
    """Return the rewards that a task with rows, or its parts, say."""
    parts = [*getattr(task, "tasks", {}).values(), getattr(task, "task", None)]
    own = [task.reward] if hasattr(task, "reward_columns") else []
    return [*own, *(reward for part in parts if part is not None for reward in _rewards_of(part))]
