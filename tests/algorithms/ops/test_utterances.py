"""Values of whole turns by hand: where they are asked for, their targets and advantages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.algorithms.papers.archer import (
    Utterances,
    bellman_targets,
    utterance_advantage,
    utterances,
)
from penstock.algorithms.roles import Conversations
from torch import Tensor

NAN = float("nan")


def held(turn: list[list[int]], reward: list[list[float]]) -> Utterances:
    """Conversations of tokens 1, 2, ..., padded where the turn is -2."""
    index = torch.tensor(turn)
    place = torch.arange(1, index.shape[1] + 1).expand(index.shape)
    return utterances(
        Conversations(
            prompt_id=torch.arange(len(turn)),
            tokens=place.where(index > -2, -1),
            mask=index >= 0,
            behavior_logprob=torch.zeros(index.shape),
            finished=torch.ones(len(turn), dtype=torch.bool),
            version=torch.zeros_like(index),
            turn=index.clamp(min=-1),
            reward=torch.tensor(reward, dtype=torch.float32),
            score=torch.tensor(reward, dtype=torch.float32).sum(1),
            ending=torch.zeros(len(turn), dtype=torch.int64),
            branch=torch.zeros(len(turn), dtype=torch.int64),
            piece=torch.zeros(len(turn), dtype=torch.int64),
        )
    )


def two_rows() -> Utterances:
    """Turns of 2 and 2 tokens with an answer between; one turn of 1 token in a shorter row."""
    return held(
        [[-1, 0, 0, -1, 1, 1], [-1, -1, 0, -2, -2, -2]], [[0, 0, -1, 0, 0, 2], [0, 0, 3, 0, 0, 0]]
    )


# V(s) of row 0 is 10 and 30, Q(s, a) 20 and 40; of row 1, 5 and 7.
VALUE = torch.tensor([[NAN, 10, NAN, 20, 30, NAN, 40], [NAN, NAN, 5, 7, NAN, NAN, NAN]])


def at(places: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in places]


def test_a_critic_is_asked_before_and_after_each_turn() -> None:
    longer = two_rows()
    assert longer.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 6], [1, 2, 3, 3, -1, -1, -1]]
    assert at(longer.states) == [[1, 3, 4, 6], [2, 3]]
    assert at(longer.mask) == [[1, 2, 4, 5], [2]]
    assert longer.turn[:, -1].tolist() == [-1, -1]


def test_targets_by_hand_and_nothing_else_is_read() -> None:
    longer = two_rows()
    found = bellman_targets(longer.turn, reward=longer.reward, value=VALUE, discount=0.5)
    # V <- Q: 20 and 40, and 7. Q <- r + V' / 2: -1 + 15 and 2, and 3.
    assert found.tolist() == [[0, 20, 0, 14, 40, 0, 2], [0, 0, 7, 3, 0, 0, 0]]


def test_all_tokens_of_a_turn_have_its_advantage() -> None:
    longer = two_rows()
    found = utterance_advantage(longer.turn, reward=longer.reward, value=VALUE, discount=0.5)
    assert found.tolist() == [[0, 10, 10, 0, 10, 10, 0], [0, 0, 2, 0, 0, 0, 0]]


def test_what_the_critic_learns_from_may_stand_for_its_value_of_a_turn() -> None:
    longer = two_rows()
    given: dict[str, Any] = {"reward": longer.reward, "value": VALUE, "discount": 0.5}
    found = utterance_advantage(longer.turn, action_value="backup", **given)
    # r + V' / 2 - V: -1 + 15 - 10 and 2 - 30, and 3 - 5.
    assert found.tolist() == [[0, 4, 4, 0, -28, -28, 0], [0, 0, -2, 0, 0, 0, 0]]
    with pytest.raises(ValueError, match="action_value 'q' is unknown; choose 'critic' or 'backup"):
        utterance_advantage(longer.turn, action_value="q", **given)  # pyright: ignore[reportArgumentType]


def test_where_nothing_is_shown_the_next_turn_is_the_state_after() -> None:
    longer = held([[-1, 0, 0, 1]], [[0, 0, -1, 2]])
    assert at(longer.states) == [[1, 3, 4]]
    value = torch.tensor([[NAN, 10, NAN, 30, 40]])
    given: dict[str, Any] = {"reward": longer.reward, "value": value, "discount": 0.5}
    # Q of turn 0 is -1 + 30 / 2; slot 3 is asked for V of turn 1.
    assert bellman_targets(longer.turn, **given).tolist() == [[0, 14, 0, 40, 2]]
    assert utterance_advantage(longer.turn, **given).tolist() == [[0, 4, 4, 10, 0]]


def test_more_padding_and_other_rows_change_nothing() -> None:
    longer = two_rows()
    alone = held([[-1, -1, 0]], [[0, 0, 3]])
    columns: dict[str, Any] = {"reward": alone.reward, "value": VALUE[1:, :4], "discount": 0.5}
    both: dict[str, Any] = {"reward": longer.reward, "value": VALUE, "discount": 0.5}
    for formula in (bellman_targets, utterance_advantage):
        found, expected = formula(alone.turn, **columns), formula(longer.turn, **both)[1:]
        assert torch.equal(found, expected[:, :4])
        assert not expected[:, 4:].any()


def test_conversations_in_which_nothing_was_said() -> None:
    longer = held([[-1, -1]], [[0, 0]])
    unread = torch.full((1, 3), NAN)
    nothing: dict[str, Any] = {"reward": longer.reward, "value": unread, "discount": 1.0}
    assert not longer.states.any()
    assert bellman_targets(longer.turn, **nothing).tolist() == [[0, 0, 0]]
    assert utterance_advantage(longer.turn, **nothing).tolist() == [[0, 0, 0]]


def test_a_column_of_another_shape_is_refused() -> None:
    longer = two_rows()
    with pytest.raises(ValueError, match="value must be a floating tensor of the mask's shape"):
        bellman_targets(longer.turn, reward=longer.reward, value=VALUE[:, 1:], discount=1.0)
