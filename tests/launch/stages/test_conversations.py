"""Conversation tasks of users: what is missing is reported before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import Penstock

TASK = '''
from dataclasses import dataclass

from penstock.workers.agents.environment import TurnResult
from penstock.workers.data.task import Task

class Say:
    async def reset(self, problem, seed):
        pass

    async def step(self, reply):
        return TurnResult([{"role": "user", "content": "Again?"}], done=reply.turn == 1)

    async def close(self):
        pass

class Derived(Task):
    def environment(self, problem):
        return Say()

class WithTools(Derived):
    def tools(self, index):
        return [{"type": "function", "function": {"name": "f", "parameters": {}}}]

class Alike:
    """A class with all methods that does not inherit."""
    task_id, train, held_out = "alike", range(6), range(6, 8)
    prompt_text = lambda self, index: PROMPTS[index]
    score = lambda self, index, response: 0.0

class NoProblems(Task):
    """A class that neither calls `Task.__init__` nor sets what that sets."""
    def __init__(self, *given):
        self.task_id = "none"

class NoOtherSide(Task):
    score = lambda self, index, response: 0.0

PROMPTS = [f"Number {n}" for n in range(8)]

@dataclass
class Spec:
    of: str = "Derived"
    prompts: int = 8
    held_out: int = 2

    def build(self):
        kind = globals()[self.of]
        if kind is Alike:
            return kind()
        return kind("derived", PROMPTS[: self.prompts], self.held_out)
'''
RUN = (
    *("run", "--dry-run", "algorithm=agent_grpo", "~algorithm.before.sft", "task=own"),
    *("task.kind=mine:Spec", "+task.max_total_tokens=100", "evaluation.num_prompts=2"),
    "algorithm.per_step.prompts=4",
)
LONG = "model.architecture.max_position_embeddings=2048"


def test_an_own_task_needs_no_more(penstock: Penstock, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    said = penstock(*RUN)
    assert (said.code, said.err) == (0, "")
    assert "agent_grpo can start" in said.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("+task.of=Alike",),
         "'task.kind': 'mine:Spec' builds a Alike, which does not inherit from Task\n    derive "
         "the class from penstock.workers.data.task.Task and override what it knows; the rest "
         "has defaults"),
        (("+task.of=NoProblems",),
         "'task.kind': 'mine:Spec' builds a NoProblems without 'train', 'held_out', 'report', "
         "'prompt_text', 'score', which every task has\n    see penstock.workers.data.task.Task, "
         "whose __init__ takes a name and prompts; a task that is answered in conversation needs "
         "'environment' and no 'score'"),
        (("+task.of=Task",), "builds a Task without 'score', which every task has"),
        (("+task.of=NoOtherSide",), "task 'derived' has no environments to talk with"),
        (("+task.held_out=8",), "8 are held out"),
        (("task.max_total_tokens=0",), "max_total_tokens is 0, and a conversation needs an end"),
        (("task.max_total_tokens=8",), "max_total_tokens is 8: none are left for a response"),
        (("algorithm.cfg.max_turns=0",), "max_turns is 0"),
        (("algorithm.cfg.sampling.stop=[x]",), "a turn ends with a token"),
        (("+task.of=WithTools", "algorithm.roles.agent.options.calls=brackets"),
         "shows no tools, so they are written into the prompt"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_before_the_start(
    penstock: Penstock, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    said = penstock(*RUN, *words)
    assert said.code == 2, said.out
    assert says in said.err
    assert "does not know" not in said.err


def test_a_base_class_that_has_moved_is_named(penstock: Penstock, tmp_path: Path) -> None:
    old = "from penstock.workers.agents.tasks.conversation_task import ConversationTask\n"
    (tmp_path / "mine.py").write_text(old)
    said = penstock(*RUN)
    assert said.code == 2, said.out
    assert "'task.kind': module 'mine' cannot be imported" in said.err
    assert "conversation_task'; it is Task of penstock.workers.data.task now" in said.err


def test_tools_that_a_template_does_not_show_are_said(penstock: Penstock, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    said = penstock(*RUN, "+task.of=WithTools", "task.max_total_tokens=1200", LONG)
    assert (said.code, said.err) == (0, "")
    assert "the chat template of 'derived' shows none" in said.out
