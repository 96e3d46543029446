"""The state after a response: one slot more per row, its reward, and what a critic says of it."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from penstock.algorithms.ops.final_state import bootstrap_of, with_final_state, with_next_turn
from penstock.algorithms.ops.macro_actions import macro_gae
from penstock.algorithms.ops.returns import gae
from penstock.algorithms.papers.agent_ppo import AgentPPO, agent_ppo_step
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.algorithms.roles import Conversations, Rollout
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


HELD = Conversations(
    prompt_id=torch.zeros(4, dtype=torch.int64),
    tokens=torch.tensor([[5, 8, 2, 9, 7, 2, 9]] * 4),
    mask=torch.tensor([[0, 1, 1, 0, 1, 1, 0]] * 4).bool(),
    behavior_logprob=torch.zeros(4, 7),
    finished=torch.ones(4, dtype=torch.bool),
    version=torch.zeros(4, 7, dtype=torch.int64),
    turn=torch.tensor([[-1, 0, 0, -1, 1, 1, -1]] * 4),
    reward=torch.tensor([[0.0, 0, -1, 0, 0, -1, 0]] * 4),
    score=torch.full((4,), -2.0),
    ending=torch.arange(4),  # done, last turn, out of tokens, failed
    branch=torch.zeros(4, dtype=torch.int64),
    piece=torch.zeros(4, dtype=torch.int64),
)


def test_a_conversation_that_was_cut_off_would_have_gone_on() -> None:
    """Two turns of -1 each, and 3 expected of a third: the critic's slot is where it would begin.

    What came before is worth -2 if the conversation ended, and 1 if it was cut off.
    """
    longer = with_next_turn(HELD)
    assert longer.tokens[0].tolist() == [5, 8, 2, 9, 7, 2, 9, 9]
    assert (longer.states & ~longer.mask).nonzero().tolist() == [[row, 7] for row in range(4)]
    assert longer.ended.tolist() == [True, False, False, True]
    value = torch.zeros(4, 8)
    value[:, 7] = 3
    after = bootstrap_of(value, longer.mask, longer.states, longer.ended)
    assert after.tolist() == [0, 3, 3, 0]
    for target in (
        gae(longer.mask, reward=longer.reward, value=value, bootstrap_value=after, lam=1.0),
        macro_gae(
            longer.mask,
            longer.turn,
            reward=longer.reward,
            value=value,
            bootstrap_value=after,
            lam=1.0,
        ),
    ):
        assert target.value_target[:, 1].tolist() == [-2, 1, 1, -2]
        assert target.value_target[:, 5].tolist() == [-1, 2, 2, -1]


@pytest.mark.parametrize("credit", ["token", "turn"])
def test_agent_ppo_bootstraps_unless_told_otherwise(credit: Literal["token", "turn"]) -> None:
    name = "gae" if credit == "token" else "macro_gae"
    graph = build(agent_ppo_step, cfg=AgentPPO(credit=credit))
    critic = dict(graph["critic.value"].inputs)
    assert (critic["tokens"].node, critic["mask"].column) == ("with_next_turn", "states")
    assert dict(graph[name].inputs)["bootstrap_value"].node == "bootstrap_of"
    graph = build(agent_ppo_step, cfg=AgentPPO(credit=credit, cut_off="ended"))
    assert "bootstrap_value" not in dict(graph[name].inputs)
