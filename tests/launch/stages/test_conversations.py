"""Conversation tasks of users: what is missing is reported before the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import Penstock

TASK = '''
from dataclasses import dataclass

from penstock.workers.agents.environment import TurnResult
from penstock.workers.agents.tasks.conversation_task import ConversationTask

class Say:
    async def reset(self, problem, seed):
        pass

    async def step(self, reply):
        return TurnResult([{"role": "user", "content": "Again?"}], done=reply.turn == 1)

    async def close(self):
        pass

class Derived(ConversationTask):
    def environment(self, problem):
        return Say()

class WithTools(Derived):
    def tools(self, index):
        return [{"type": "function", "function": {"name": "f", "parameters": {}}}]

class Own:
    """A task with everything that is required and nothing else."""
    task_id, correct_score, verifier, deterministic = "own", 1.0, None, True

    def __init__(self):
        derived = Derived("own", PROMPTS, 2)
        for name in ("train", "held_out", "report"):
            setattr(self, name, getattr(derived, name))

    prompt_text = lambda self, index: PROMPTS[index]
    answer_text = pair_texts = lambda self, index: None
    score = lambda self, index, response: 0.0
    verifier_call = lambda self, index, response: (index, response)
    where = lambda self, index: str(index)
    environment = Derived.environment

PROMPTS = [f"Number {n}" for n in range(8)]

def without(*names):
    members = {k: v for k, v in vars(Own).items() if k not in names and not k.startswith("__")}
    return type("Less", (), {**members, "__init__": Own.__init__})

@dataclass
class Spec:
    lacks: str = ""
    prompts: int = 8
    held_out: int = 2
    derived: bool = False
    tools: bool = False
    half: str = ""

    def build(self):
        if self.tools or self.derived:
            kind = WithTools if self.tools else Derived
            return kind("derived", PROMPTS[: self.prompts], self.held_out)
        made = without(self.lacks)
        if self.half:
            setattr(made, self.half, lambda self, index: None)
        return made()
'''
RUN = (
    *("run", "--dry-run", "algorithm=agent_grpo", "~algorithm.before.sft", "task=own"),
    *("task.kind=mine:Spec", "+task.max_total_tokens=100", "evaluation.num_prompts=2"),
    "algorithm.per_step.prompts=4",
)
LONG = "model.architecture.max_position_embeddings=2048"


@pytest.mark.parametrize("words", [("+task.derived=true",), ()])
def test_an_own_task_needs_no_more(penstock: Penstock, tmp_path: Path, words: tuple[str]) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    said = penstock(*RUN, *words)
    assert (said.code, said.err) == (0, "")
    assert "agent_grpo can start" in said.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        *(
            ((f"+task.lacks={name}",), f"builds a Less without '{name}', which every task has")
            for name in ("answer_text", "pair_texts", "prompt_text", "where")
        ),
        (("+task.lacks=deterministic",), "a task with 'environment' has"),
        (("+task.lacks=environment",), "task 'own' has no environments to talk with"),
        (("+task.half=messages",), "without 'tools', which a task with 'messages' has"),
        (("+task.half=replies",), "without 'imitates_history', which a task with 'replies' has"),
        (("+task.derived=true", "+task.held_out=8"), "8 are held out"),
        (("task.max_total_tokens=0",), "max_total_tokens is 0, and a conversation needs an end"),
        (("task.max_total_tokens=8",), "max_total_tokens is 8: none are left for a response"),
        (("algorithm.cfg.max_turns=0",), "max_turns is 0"),
        (("algorithm.cfg.sampling.stop=[x]",), "a turn ends with a token"),
        (
            ("+task.tools=true", "algorithm.roles.agent.options.calls=brackets"),
            "shows no tools, so they are written into the prompt",
        ),
    ],
)
def test_what_is_missing_is_said_before_the_start(
    penstock: Penstock, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    said = penstock(*RUN, *words)
    assert said.code == 2, said.out
    assert says in said.err
    assert "does not know" not in said.err


def test_tools_that_a_template_does_not_show_are_said(penstock: Penstock, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    said = penstock(*RUN, "+task.tools=true", "task.max_total_tokens=1200", LONG)
    assert (said.code, said.err) == (0, "")
    assert "the chat template of 'derived' shows none" in said.out
