"""Conversations held together come out as each would alone, and none harms another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import echo_task
import pytest
import torch
from echo_task import EchoSpec
from penstock.algorithms.roles import Prompts, Sampling
from penstock.algorithms.roles.language import ENDINGS
from penstock.dataflow.errors import ConfigError, PenstockError, WorkerError
from talk import Conversing, same, talking

SAMPLING = Sampling(num_samples=2, max_new_tokens=6, max_total_tokens=48)


class Talk(Conversing):
    sampling, max_turns = SAMPLING, 3

    def __init__(self, bad: str = "", **options: Any) -> None:
        super().__init__(EchoSpec(bad=bad), **options)


Talks = Callable[..., Talk]


@pytest.fixture
def talks() -> Iterator[Talks]:
    with talking(Talk) as make:
        yield make


def test_a_row_holds_turns_and_what_was_shown_between_them(talks: Talks):
    talk = talks()
    held = talk.hold()
    assert bool((held.mask == (held.turn >= 0)).all())
    for row in range(len(held.tokens)):
        own = held.tokens[row][held.tokens[row] >= 0]
        for number in range(int(held.turn[row].max()) + 1):
            places = torch.nonzero(held.turn[row] == number)[:, 0]
            assert places.tolist() == list(range(int(places[0]), int(places[-1]) + 1))
            said = [t for t in held.tokens[row, places].tolist() if t != talk.tokenizer.eos_id]
            earned = echo_task.earned_by(number, talk.tokenizer.decode(said))
            assert float(held.reward[row, places[-1]]) == earned
            assert not held.reward[row, places[:-1]].any()
            if number and int(own[places[0] - 2]) != talk.tokenizer.eos_id:
                assert talk.tokenizer.decode(own[places[0] - 3 : places[0]].tolist()).endswith("\n")
    assert bool((held.score == held.reward.sum(1)).all())
    assert {ENDINGS[ending] for ending in held.ending.tolist()} <= {"last turn", "out of tokens"}
    found = talk.policy.logprob(held.tokens, held.mask)
    torch.testing.assert_close(found, held.behavior_logprob, atol=2e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_delays_and_room_change_nothing(talks: Talks, seed: int, monkeypatch: pytest.MonkeyPatch):
    expected = talks().hold()
    waits = random.Random(seed)

    def wait(problem: int, turn: int) -> float:
        del problem, turn
        return waits.choice([0.0, 0.01, 0.05])

    monkeypatch.setattr(echo_task, "WAIT", [wait])
    assert same(talks(max_rows=waits.choice([3, 16, 64])).hold(), expected)


def test_a_conversation_is_the_same_without_the_others(talks: Talks):
    together, talk = talks().hold(), talks()
    keep = [5, 2]
    talk.prompts = Prompts(prompt=talk.prompts.prompt[keep], prompt_id=talk.prompts.prompt_id[keep])
    alone = talk.hold()
    rows = torch.tensor([10, 11, 4, 5])
    width = alone.tokens.shape[1]
    assert torch.equal(alone.tokens, together.tokens[rows][:, :width])
    assert torch.equal(alone.behavior_logprob, together.behavior_logprob[rows][:, :width])


BAD = [
    "cannot be made",
    "fails on reset",
    "hangs on reset",
    "hangs",
    "raises",
    "exits",
    "is cancelled",
    "answers nothing",
    "rewards with a text",
    "answers no messages",
    "shows no text",
    "counts badly",
]


@pytest.mark.slow
@pytest.mark.parametrize("bad", BAD)
def test_who_behaves_badly_harms_its_own_conversation(talks: Talks, bad: str):
    good, talk = talks().hold(), talks(bad, limit_s=0.3)
    held = talk.hold()
    odd = held.prompt_id % 2 == 1
    failed = held.ending == ENDINGS.index("failed")
    assert torch.equal(failed, odd)
    assert torch.equal(held.score.isnan(), odd)  # no score is not the score 0
    assert talk.agent.first_error
    width = min(held.tokens.shape[1], good.tokens.shape[1])
    assert torch.equal(held.tokens[~odd][:, :width], good.tokens[~odd][:, :width])


def test_a_reward_of_nan_says_that_there_is_no_score(talks: Talks):
    held = talks("rewards with nan").hold()
    odd = held.prompt_id % 2 == 1
    assert torch.equal(held.score.isnan(), odd)
    assert held.reward.isfinite().all()
    assert not (held.ending == ENDINGS.index("failed")).any()


@pytest.mark.parametrize("bad", ["hangs on close", "fails on close", "shows too much"])
def test_or_none_at_all(talks: Talks, bad: str):
    held = talks(bad, limit_s=0.3).hold()
    assert not (held.ending == ENDINGS.index("failed")).any()


def test_where_all_fail_the_run_ends(talks: Talks):
    talk = talks("raises")
    odd = talk.prompts.prompt_id % 2 == 1
    talk.prompts = Prompts(prompt=talk.prompts.prompt[odd], prompt_id=talk.prompts.prompt_id[odd])
    with pytest.raises(WorkerError, match="RuntimeError: boom"):
        talk.hold()


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (Sampling(), "max_total_tokens is 0"),
        (Sampling(max_total_tokens=40, stop=("x",)), "sampling.stop is"),
        (Sampling(max_total_tokens=4000, max_new_tokens=600), "positions"),
    ],
)
def test_what_cannot_be_sampled_is_refused(talks: Talks, sampling: Sampling, says: str):
    with pytest.raises((PenstockError, ValueError), match=says):
        talks().hold(sampling)


def test_tokens_say_which_weights_sampled_them(talks: Talks):
    talk = talks()
    for version in (0, 7):
        held = talk.hold(version=version)
        assert bool((held.version[held.mask] == version).all())


def test_turns_are_limited(talks: Talks):
    with pytest.raises(ConfigError, match="max_turns is 0"):
        talks().hold(max_turns=0)
    assert int(talks().hold(max_turns=1).turn.max()) == 0


@pytest.mark.parametrize(("new_tokens", "says"), [(6, "turn"), (44, "whole")])
def test_a_turn_that_is_cut_off_is_counted(talks: Talks, new_tokens: int, says: str):
    talk = talks()
    held = talk.hold(replace(SAMPLING, max_new_tokens=new_tokens), max_turns=2)
    cut = held.ending == ENDINGS.index("out of tokens")
    for row, turn in enumerate(held.turn):
        own = [held.tokens[row, turn == number].tolist() for number in range(int(turn.max()) + 1)]
        cut[row] |= any(talk.tokenizer.eos_id not in said for said in own)
    assert cut.any(), says
    assert talk.policy.metrics["truncated"].value == float(cut.float().mean())
