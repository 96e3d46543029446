"""Twenty questions: the world, the answers, the reward, and the expert."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.environment import Reply
from penstock.workers.agents.tasks.generated_task import play
from penstock.workers.agents.tasks.lmrl_gym import (
    TwentyQuestionsEnvironment,
    TwentyQuestionsTaskSpec,
    make_world,
)

SPEC = TwentyQuestionsTaskSpec(num_train=200, num_held_out=20)


def test_no_two_objects_are_alike() -> None:
    world = make_world(16, 4, random.Random(0))
    assert len({tuple(attributes) for attributes in world}) == 16
    with pytest.raises(ConfigError) as refused:
        make_world(17, 4, random.Random(0))
    assert str(refused.value) == (
        "4 attributes cannot tell 17 objects apart\n    give at least 5: task.num_attributes"
    )


def test_a_conversation() -> None:
    environment = TwentyQuestionsEnvironment([True, False], hidden=7, max_turns=20)
    played = play(environment, 0, ["a0?", "A1? ", "a2?", "=08", "what?", "=07"])
    said = [message["content"] for message in played.messages if message["role"] == "user"]
    assert said == ["y", "n", "?", "n", "?"]
    assert (played.reward, played.done) == (-5.0, True)
    assert played.counts == {"questions": 3.0, "guesses": 2.0, "bad_replies": 2.0}


def test_it_ends_after_so_many_turns() -> None:
    played = play(TwentyQuestionsEnvironment([True], 0, 3), 0, ["a0?"] * 9)
    assert (played.reward, played.done) == (-3.0, True)
    last = play(TwentyQuestionsEnvironment([True], 0, 3), 0, ["a0?", "a0?", "=0"])
    assert (last.reward, last.done) == (-2.0, True)


def test_the_prompt_lists_the_candidates() -> None:
    task = SPEC.build()
    for index in (*task.train, *task.held_out):
        problem = task.problem(index)
        assert [int(number) for number in task.prompt_text(index).split()] == [*problem.candidates]
        assert problem.hidden in problem.candidates
        assert len(problem.candidates) == 8


def test_an_expert_that_halves_needs_three_questions_or_few_more() -> None:
    def mean_turns(random_share: float) -> float:
        task = replace(SPEC, random_share=random_share).build()
        answers = [task.answer_text(index) or "" for index in task.train]
        return sum(len(answer.split("\n")) for answer in answers) / len(answers)

    # log2(8) questions and the guess, where ten random attributes split eight objects evenly.
    assert 4.0 <= mean_turns(0.0) < 4.5
    assert mean_turns(0.0) + 0.5 < mean_turns(0.5) < mean_turns(1.0)


def test_an_expert_without_turns_left_guesses() -> None:
    task = replace(SPEC, max_turns=2).build()
    for index in task.train:
        answer = task.answer_text(index) or ""
        assert len(answer.split("\n")) == 2
        assert answer.split("\n")[-1].startswith("=")


def test_a_reply_without_an_end_costs_all_turns() -> None:
    environment = TwentyQuestionsEnvironment([True], 0, 20)
    environment.step(Reply(0, "a0?", ""))
    result = environment.step(Reply(1, "=0", "", finished=False))
    assert (result.reward, result.done) == (-19.0, True)


def test_a_template_needs_a_place_for_the_candidates() -> None:
    with pytest.raises(ConfigError) as refused:
        replace(SPEC, prompt_template="Ask!").build()
    assert str(refused.value) == (
        "'task.prompt_template' is 'Ask!', which has no place for the candidates\n"
        "    write {objects} where they stand"
    )
