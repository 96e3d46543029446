"""PPO with rewards of steps: what the critic is trained on."""

from __future__ import annotations

import pytest
import torch
from penstock.algorithms.ops.rewards import process_shaped_reward
from penstock.algorithms.papers.process_ppo import ProcessPPO, process_ppo_step
from penstock.algorithms.roles import ProcessReward, StepScores
from torch import Tensor

from .test_steps import (
    MASK,
    run_ppo,
    with_prompt,
)

SCORES = with_prompt([[0.9, 0.95, 0.4, 0, 0], [0.9, 0.95, 0.4, 0.8, 0.8]])
ENDS = MASK & torch.tensor([[0, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]]).bool()


class ScriptedSteps(ProcessReward):
    """Always gives the example's steps."""

    def score_steps(self, tokens: Tensor, mask: Tensor, prompt_id: Tensor) -> StepScores:
        return StepScores(step_score=SCORES, step_end=ENDS)


def returns(cfg: ProcessPPO) -> Tensor:
    _, critic, _ = run_ppo(cfg, ScriptedSteps(), step=process_ppo_step)
    return critic.trained["batch"].value_target


def test_the_critic_expects_the_rewards_of_steps_as_well() -> None:
    """With lambda 1 a return is the sum of the rewards from there on."""
    _, plain, _ = run_ppo(ProcessPPO(gae_lambda=1.0))
    cfg = ProcessPPO(gae_lambda=1.0, step_coef=0.5)
    added = process_shaped_reward(
        torch.zeros_like(SCORES), MASK, step_score=SCORES, step_end=ENDS, coef=0.5
    )
    expected = plain.trained["batch"].value_target + added.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns(cfg), torch.where(MASK, expected, 0))
    change = returns(cfg) - plain.trained["batch"].value_target
    assert change[1].tolist() == pytest.approx([0, 0, 0, -0.05, 0, 0])  # step 3 scores 0.4


def test_without_a_weight_for_steps_it_is_ppo() -> None:
    _, plain, _ = run_ppo(ProcessPPO())
    assert torch.equal(returns(ProcessPPO(step_coef=0.0)), plain.trained["batch"].value_target)


def test_nothing_is_paid_after_the_last_step() -> None:
    with pytest.raises(ValueError, match="steps end with the last token"):
        ProcessPPO(score_slot="after_last")
