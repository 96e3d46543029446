"""The rewards that a configuration can name: rules with a verifier, judges, mixtures of them.

None has weights that a run trains. A name is what `algorithm.roles.reward.worker` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...dataflow.registry import Registry

if TYPE_CHECKING:
    from .rule_reward import RuleRewardSpec

_RULE = "penstock.workers.rewards.rule_reward"

RULES: Registry[type[RuleRewardSpec]] = Registry(
    {
        "rule": f"{_RULE}:RuleRewardSpec",
        "exact": f"{_RULE}:ExactRewardSpec",
        "math": f"{_RULE}:MathRewardSpec",
        "instructions": f"{_RULE}:InstructionRewardSpec",
        "code": f"{_RULE}:CodeRewardSpec",
    }
)
"""Rewards that compare with the task's answers; "rule" does what the task says."""

PART_KINDS = Registry[Any]({**RULES.paths, "judge": "penstock.workers.rewards.judge:JudgeSpec"})
"""Rewards that may be part of a mixture, by name."""

_MIXTURE = "mixture"

TASK_REWARDS = Registry[Any](
    {**PART_KINDS.paths, _MIXTURE: "penstock.workers.rewards.mixture:MixtureSpec"}
)
"""Every reward that a configuration can name and that looks at the task, with its spec."""


def check_verifiers(worker: str, options: Mapping[str, Any]) -> None:
    """Load the verifiers that a reward, or the parts of a mixture, will ask for.

    Its options have been checked. Raises `ConfigError` if a verifier cannot be loaded or needs a
    sandbox that this machine lacks, or if a part's factory does not take its options.
    """
    if worker in RULES or worker == _MIXTURE:
        TASK_REWARDS[worker](task=None, tokenizer=None, **options).check_verifiers()
