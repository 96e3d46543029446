"""The state after a response: one slot more per row, its reward, and what a critic says of it."""

from __future__ import annotations

import torch
from penstock.algorithms.ops.advantages import gae
from penstock.algorithms.ops.final_state import bootstrap_of, with_final_state
from penstock.algorithms.ops.kl import kl_shaped_reward
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.roles import Rollout
from penstock.dataflow.graph.tracer import build

ROLL = Rollout(
    prompt_id=torch.tensor([1, 2]),
    tokens=torch.tensor([[5, 6, 7, 2, -1], [5, 8, 8, 8, 8]]),
    mask=torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 0, 0]]).bool(),
    behavior_logprob=torch.zeros(2, 5),
    finished=torch.tensor([True, False]),
)


def test_every_row_is_one_token_longer() -> None:
    roll = with_final_state(ROLL)
    assert roll.tokens.tolist() == [[5, 6, 7, 2, 2, -1], [5, 8, 8, 8, 8, 8]]
    assert torch.equal(roll.mask[:, :5], ROLL.mask)
    assert not roll.mask[:, 5].any()
    assert (roll.states & ~roll.mask).nonzero().tolist() == [[0, 4], [1, 3]]


def test_the_score_can_be_paid_after_the_last_token() -> None:
    """The published rewards with the score one slot later, and their returns."""
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]]).bool()
    log_ratio = torch.tensor([[0.1, -0.1, 0.2, 0, 0, 0], [0.1, 0, 0, -0.1, 0.2, 0]])
    reward = kl_shaped_reward(
        torch.tensor([2.0, -1.0]),
        mask,
        logprob=log_ratio,
        ref_logprob=torch.zeros(2, 6),
        kl_coef=0.05,
        score_slot="after_last",
    )
    expected = [[-0.005, 0.005, -0.01, 2, 0, 0], [-0.005, 0, 0, 0.005, -0.01, -1]]
    torch.testing.assert_close(reward, torch.tensor(expected), atol=1e-6, rtol=0)
    states = mask | torch.tensor([[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1]]).bool()
    target = gae(states, reward=reward, value=torch.zeros(2, 6), lam=1.0)
    assert torch.allclose(target.value_target[:, 0], reward.sum(1))
    assert target.value_target[0, 3] == 2


def test_only_a_response_that_was_cut_off_has_a_future() -> None:
    roll = with_final_state(ROLL)
    value = torch.arange(12.0).reshape(2, 6)
    assert bootstrap_of(value, roll.mask, roll.states, roll.finished).tolist() == [0, 9]


def test_both_are_part_of_ppo_s_graph() -> None:
    for cfg in (PPO(score_slot="after_last"), PPO(no_eos="zero")):
        graph = build(ppo_step, cfg=cfg)
        critic = dict(graph["critic.value"].inputs)
        assert (critic["tokens"].node, critic["mask"].column) == ("with_final_state", "states")
    assert "bootstrap_of" in [node.name for node in graph.nodes]
