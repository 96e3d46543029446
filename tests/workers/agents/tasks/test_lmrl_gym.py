"""The maze and twenty questions: worlds, what is told, what a step is worth, and experts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.workers.agents.environment import Reply
from penstock.workers.agents.tasks.generated_task import play
from penstock.workers.agents.tasks.lmrl_gym import (
    MOVES,
    Maze,
    MazeTaskSpec,
    TwentyQuestionsEnvironment,
    TwentyQuestionsTaskSpec,
    make_world,
)

SPEC = MazeTaskSpec(num_train=100, num_held_out=20, random_share=0.0)


@given(st.integers(2, 9), st.integers(0, 10**6))
def test_there_is_exactly_one_path_between_two_cells(size: int, seed: int) -> None:
    maze = Maze(size, random.Random(seed))
    passages = sum(maze.after(cell, move) != cell for cell in maze.cells for move in MOVES)
    assert passages == 2 * (size**2 - 1)  # a tree, each passage counted from both sides
    for cell in maze.cells:
        at = maze.cells[0]
        for move in maze.shortest(at, cell):
            at = maze.after(at, move)
        assert at == cell


def test_a_wall_stops_a_move_and_is_told() -> None:
    maze = Maze(4, random.Random(0))
    for cell in maze.cells:
        stopped = "".join(move for move in MOVES if maze.after(cell, move) == cell)
        assert maze.walls(cell) == stopped
    assert maze.walls((0, 0)).startswith("u")


def test_every_step_but_the_last_costs_one() -> None:
    task = SPEC.build()
    for index in task.train:
        problem = task.problem(index)
        path = task.maze.shortest(problem.start, problem.goal)
        played = play(task.begin(index), index, path)
        assert played.done
        assert played.reward == 1.0 - len(path)
        assert task.answer_text(index) == "\n".join(path)


def test_what_is_told() -> None:
    task = SPEC.build()
    problem = task.problem(0)
    (x, y), (goal_x, goal_y) = problem.start, problem.goal
    walls = task.maze.walls(problem.start)
    assert task.prompt_text(0) == f"{goal_x},{goal_y} {x},{y} {walls or '-'}"
    stopped = next(iter(walls))
    observed = task.begin(0).step(Reply(0, stopped, stopped))
    assert observed.messages[0]["content"] == f"{x},{y} {walls}"
    blind = replace(SPEC, observed=False).build()
    assert blind.prompt_text(0) == task.prompt_text(0)
    assert blind.begin(0).step(Reply(0, stopped, "")).messages[0]["content"] == walls


@pytest.mark.parametrize("text", ["u", "U", " up\n", "move up", "Move UP"])
def test_ways_to_say_a_move(text: str) -> None:
    result = SPEC.build().begin(0).step(Reply(0, text, text))
    assert result.counts == {"steps": 1.0, "bad_replies": 0.0}


def test_what_is_no_move_costs_a_step() -> None:
    result = SPEC.build().begin(0).step(Reply(0, "jump", "jump"))
    assert (result.reward, result.done) == (-1.0, False)
    assert result.counts == {"steps": 1.0, "bad_replies": 1.0}
    assert result.messages[0]["content"] == "?"


def test_the_walk_ends_after_so_many_steps() -> None:
    task = replace(SPEC, max_steps=7).build()
    played = play(task.begin(0), 0, ["?"] * 20)
    assert (played.reward, played.done) == (-7.0, True)
    assert sum(message["role"] == "assistant" for message in played.messages) == 7
    assert played.reward < task.correct_score


def test_the_expert_errs_as_often_as_it_should() -> None:
    worse = replace(SPEC, random_share=0.25).build()
    best = SPEC.build()
    lengths = [
        sum(len((task.answer_text(index) or "").split("\n")) for index in task.train)
        for task in (best, worse)
    ]
    # A random move is wasted with a probability of 3/4 or so, and may have to be undone.
    assert 1.2 < lengths[1] / lengths[0] < 2.5


def test_sentences_for_a_model_that_knows_language() -> None:
    task = replace(SPEC, words=True, observed=False).build()
    assert "Answer with one move" in task.prompt_text(0)
    told = task.begin(0).step(Reply(0, "hm", "")).messages[0]["content"]
    assert told == "That is no move: answer up, down, left or right."
    told = task.begin(0).step(Reply(0, "up", "")).messages[0]["content"]
    assert told.startswith(("There are walls: ", "There are no walls"))


QUESTIONS = TwentyQuestionsTaskSpec(num_train=200, num_held_out=20)


def test_no_two_objects_are_alike() -> None:
    world = make_world(16, 4, random.Random(0))
    assert len({tuple(attributes) for attributes in world}) == 16


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
    task = QUESTIONS.build()
    for index in (*task.train, *task.held_out):
        problem = task.problem(index)
        assert [int(number) for number in task.prompt_text(index).split()] == [*problem.candidates]
        assert problem.hidden in problem.candidates
        assert len(problem.candidates) == 8


def test_an_expert_that_halves_needs_three_questions_or_few_more() -> None:
    def mean_turns(random_share: float) -> float:
        task = replace(QUESTIONS, random_share=random_share).build()
        answers = [task.answer_text(index) or "" for index in task.train]
        return sum(len(answer.split("\n")) for answer in answers) / len(answers)

    # log2(8) questions and the guess, where ten random attributes split eight objects evenly.
    assert 4.0 <= mean_turns(0.0) < 4.5
    assert mean_turns(0.0) + 0.5 < mean_turns(0.5) < mean_turns(1.0)


def test_an_expert_without_turns_left_guesses() -> None:
    task = replace(QUESTIONS, max_turns=2).build()
    for index in task.train:
        answer = task.answer_text(index) or ""
        assert len(answer.split("\n")) == 2
        assert answer.split("\n")[-1].startswith("=")


def test_a_reply_without_an_end_costs_all_turns() -> None:
    environment = TwentyQuestionsEnvironment([True], 0, 20)
    environment.step(Reply(0, "a0?", ""))
    result = environment.step(Reply(1, "=0", "", finished=False))
    assert (result.reward, result.done) == (-19.0, True)
