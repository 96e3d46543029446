"""The rewards that a configuration can name: rules with a verifier, judges, mixtures of them.

None has weights that a run trains. A name is what `algorithm.roles.reward.worker` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .judge import JudgeSpec
from .rule_reward import RuleRewardSpec


@dataclass(frozen=True, kw_only=True)
class ExactRewardSpec(RuleRewardSpec):
    """1 for the task's answer, white space around it aside."""

    verifier: str | None = "exact_match"


@dataclass(frozen=True, kw_only=True)
class MathRewardSpec(RuleRewardSpec):
    """1 for what equals the task's answer as mathematics."""

    verifier: str | None = "math_verify"


@dataclass(frozen=True, kw_only=True)
class InstructionRewardSpec(RuleRewardSpec):
    """The share of the instructions in the task's answer that a response keeps."""

    verifier: str | None = "instructions"


@dataclass(frozen=True, kw_only=True)
class CodeRewardSpec(RuleRewardSpec):
    """1 for a program that passes the tests in the task's answer; it runs in a sandbox."""

    verifier: str | None = "code_tests"
    time_limit_s: float = 30.0


RULES: Mapping[str, type[RuleRewardSpec]] = {
    "rule": RuleRewardSpec,
    "exact": ExactRewardSpec,
    "math": MathRewardSpec,
    "instructions": InstructionRewardSpec,
    "code": CodeRewardSpec,
}
"""Rewards that compare with the task's answers; "rule" does what the task says."""

PART_KINDS: Mapping[str, Any] = {**RULES, "judge": JudgeSpec}
"""Rewards that may be part of a mixture, by name."""
