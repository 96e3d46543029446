"""Problems of any task, answered with tools that a scripted policy calls for real."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.algorithms.roles import Conversations, Sampling
from penstock.algorithms.roles.language import ENDINGS, Turn, TurnRequest
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.agents.tasks.tools_and_programs import ToolTaskSpec
from penstock.workers.agents.tools.tool import ToolLimits
from penstock.workers.agents.worker import AgentSpec
from penstock.workers.data.chat import TURNS
from penstock.workers.data.reasoning_task import ReasoningTaskSpec
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.models.tokenizer import TokenizerSpec

SERVER = Path(__file__).parents[2] / "tool_mcp_server.py"
PROBLEMS = ReasoningTaskSpec(name="chain_sum", num_train=4, num_held_out=2)
TOKENIZER = TokenizerSpec(kind="byte", chat_template=TURNS)
SAMPLING = Sampling(max_new_tokens=200, max_total_tokens=2000)


class Script:
    """`Turns` that say what they are told to, each after a step."""

    def __init__(self, said: Sequence[str]) -> None:
        self._tokenizer = TOKENIZER.build()
        self._said, self._asked = said, list[TurnRequest]()
        self._turns: dict[int, int] = {}
        self.num_read = self.num_reused = 0
        self.released: set[int] = set()

    @property
    def num_open(self) -> int:
        return len(self._asked)

    def ask(self, request: TurnRequest) -> None:
        self._asked.append(request)

    def step(self) -> list[Turn]:
        asked, self._asked = self._asked, []
        return [self._turn(request.row) for request in asked]

    def _turn(self, row: int) -> Turn:
        number = self._turns.get(row, 0)
        self._turns[row] = number + 1
        ids = [*self._tokenizer.encode(self._said[number]), self._tokenizer.eos_id]
        none = torch.zeros(len(ids))
        return Turn(row, torch.tensor(ids), none, none.long(), True)

    def release(self, row: int) -> None:
        self.released.add(row)

    def close(self) -> None:
        pass


def talk(tools: dict[str, Any], *said: str, **limits: Any) -> tuple[str, Conversations, Any]:
    """One conversation about the first problem: its text, the table and the metrics."""
    spec = ToolTaskSpec(task=PROBLEMS, tools=tools, limits=ToolLimits(**limits))
    agent = AgentSpec(task=spec, tokenizer=TOKENIZER, calls="hermes").build(WorkerContext("agent"))
    script, tokenizer = Script(said), TOKENIZER.build()
    prompt = torch.tensor([tokenizer.encode("how much?\n")])
    try:
        held = agent.hold(
            script, prompt, torch.tensor([0]), SAMPLING, max_turns=len(said), branch=False
        )
    finally:
        agent.close()
    assert script.released == {0}
    return tokenizer.decode(held.tokens[0].tolist()), held, agent.metrics


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.slow
def test_tools_of_all_kinds_answer_in_one_conversation():
    tools = {
        "mine": {"kind": "functions", "functions": ["tool_functions:add"]},
        "server": {"kind": "mcp", "command": [sys.executable, str(SERVER)], "allowed": ["record"]},
        "python": {"kind": "python"},
    }
    right = PROBLEMS.build().answer_text(0)
    text, held, metrics = talk(
        tools,
        call("python", '{"code": "x = 6\\nx * 7"}'),
        call("python", '{"code": "x"}') + call("nothing", "{}"),
        call("add", '{"a": 40, "b": 3}') + call("record", "{}"),
        f"{right}",
    )
    assert "<eos><eos>" not in text
    assert "42" in text
    assert "6\n" in text
    assert "43\n" in text
    assert '"a"' in text
    assert float(held.score) == 1.0
    assert ENDINGS[int(held.ending)] == "done"
    assert metrics["tool_calls"].value == 4
    assert metrics["unknown_tools"].value == 1


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ({"a": {"kind": "functionz"}}, "'task.tools.a' is of kind 'functionz'"),
        ({"a": {"kind": "python", "limit": 3}}, "'task.tools.a' has no option 'limit'"),
        ({"a": {"kind": "python"}, "b": {"kind": "python"}}, "python"),
        ({"a": {"kind": "python", "time_limit_s": -1}}, "time_limit_s is -1"),
    ],
)
def test_bad_tools_are_refused(tools: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        ToolTaskSpec(task=PROBLEMS, tools=tools).build()


def of_length(response: str, response_token_ids: list[int]) -> float:
    return float(len(response_token_ids) - len(response))


@pytest.mark.parametrize(
    ("in_process", "says"), [(False, "scores in processes of its own"), (True, "reads tokens")]
)
def test_a_reward_that_cannot_score_answers_is_refused(
    tmp_path: Path, in_process: bool, says: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "answer": "!"}\n')
    task = FileTaskSpec(
        path=str(tmp_path / "rows.jsonl"), reward=of_length, reward_in_process=in_process
    )
    with pytest.raises(ConfigError, match=says):
        ToolTaskSpec(task=task, tools={}).build()
