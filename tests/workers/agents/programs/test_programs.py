"""Programs that ask a policy as an OpenAI-compatible server: what is trained of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import program_agents
import psutil
import pytest
import torch
from echo_task import EchoSpec, EchoTask
from killer import killing
from penstock.algorithms.agent_grpo import conversation_advantage
from penstock.algorithms.roles import Sampling
from penstock.algorithms.roles.language import ENDINGS
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import drain_metrics
from penstock.workers.agents.tasks.tools_and_programs import ProgramTaskSpec
from talk import Conversing, same, talking

pytest.importorskip("openai", reason="comes with the engines")
pytestmark = pytest.mark.slow

SAMPLING = Sampling(num_samples=2, max_new_tokens=6, max_total_tokens=64)


class Words(EchoTask):
    def score(self, index: int, response: str) -> float:
        return 1.0 + len(response) % 2


@dataclass(frozen=True, kw_only=True)
class WordsSpec(EchoSpec):
    def build(self) -> Words:
        return Words(self)


class Talk(Conversing):
    sampling, max_turns = SAMPLING, 8

    def __init__(self, function: str = "", *, max_rows: int = 64, **options: Any) -> None:
        if function:
            options["function"] = f"program_agents:{function}"
        spec = ProgramTaskSpec(task=WordsSpec(), **options)
        super().__init__(spec, WordsSpec(), batch_size=4, max_rows=max_rows)

    def metric(self, name: str) -> float:
        return drain_metrics(self.policy)[name].total


Talks = Callable[..., Talk]


@pytest.fixture
def talks() -> Iterator[Talks]:
    with talking(Talk) as make:
        yield make


def test_turns_of_one_text_are_one_row(talks: Talks) -> None:
    talk = talks("turns")
    held = talk.hold()
    assert held.piece.tolist() == [0] * 8
    assert held.turn.amax(1).tolist() == [2] * 8
    assert {ENDINGS[ending] for ending in held.ending.tolist()} == {"done"}
    found = talk.policy.logprob(held.tokens, held.mask)
    torch.testing.assert_close(found, held.behavior_logprob, atol=2e-6, rtol=0)
    for row in range(8):
        own = held.tokens[row][held.tokens[row] >= 0].tolist()
        last = held.tokens[row][held.turn[row] == 2]
        text = talk.tokenizer.decode([t for t in last.tolist() if t != talk.tokenizer.eos_id])
        assert float(held.score[row]) == 1.0 + len(text) % 2
        assert talk.tokenizer.decode(own).count("abc\n") >= 2
    assert talk.metric("requests") == 24


@pytest.mark.parametrize("max_rows", [64, 3])
def test_branches_are_rows_of_their_own(talks: Talks, max_rows: int) -> None:
    talk = talks("branches", max_rows=max_rows, deterministic=True)
    held = talk.hold()
    assert held.piece.tolist() == [0, 1, 2] * 8
    # What branches share is trained once: five turns in all, and no token twice.
    turns = (held.turn.amax(1) + 1).reshape(8, 3)
    assert turns.sum(1).tolist() == [5] * 8
    found = talk.policy.logprob(held.tokens, held.mask)
    torch.testing.assert_close(found, held.behavior_logprob, atol=2e-6, rtol=0)
    for rows in held.tokens.reshape(8, 3, -1):
        starts = [tuple(row[:4].tolist()) for row in rows]
        assert len(set(starts)) == 2  # two that branch, and a sub-agent
    scores = held.score.reshape(8, 3)
    assert bool((scores == scores[:, :1]).all())


def test_delays_and_the_order_of_requests_change_nothing(
    talks: Talks, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = talks("branches").hold()
    waited = asyncio.sleep

    async def other(delay: float, *given: Any) -> Any:
        return await waited(0.05 - delay if 0 < delay <= 0.05 else delay, *given)

    monkeypatch.setattr("program_agents.asyncio.sleep", other)
    assert same(talks("branches").hold(), expected)


def test_a_conversation_counts_once_in_its_group() -> None:
    score = torch.tensor([1.0, 1.0, 1.0, 0.0, 3.0, 3.0])
    piece = torch.tensor([0, 1, 2, 0, 0, 1])
    prompt_id = torch.tensor([4, 4, 4, 4, 4, 4])
    found = conversation_advantage(score, prompt_id, piece, divide_by_std=False)
    mean = 4.0 / 3
    expected = torch.tensor([1 - mean] * 3 + [-mean] + [3 - mean] * 2)
    torch.testing.assert_close(found, expected)


def test_a_script_that_knows_nothing_of_training(talks: Talks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom openai import OpenAI\n\nclient = OpenAI()\n"
        'said = [{"role": "user", "content": sys.stdin.read()}]\n'
        'answer = client.chat.completions.create(model="gpt-5", messages=said, temperature=0)\n'
        "print(answer.choices[0].message.content)\n"
    )
    talk = talks(command=(sys.executable, str(script)), max_running=2)
    held = talk.hold()
    assert held.turn.amax(1).tolist() == [0] * 8
    assert (held.score > 0).all()
    assert talk.metric("overridden") == 8


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "it ended with code 3: it said nothing"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("print('a' * (2 << 20))", "it printed more than 1048576 bytes"),
        ("import time; time.sleep(100)", "no answer in 1 s"),
    ],
)
def test_a_command_that_fails(talks: Talks, code: str, said: str) -> None:
    limit_s = 1.0 if "sleep" in code else 60.0
    talk = talks(command=(sys.executable, "-S", "-c", code), time_limit_s=limit_s)
    with pytest.raises(Exception, match="all of the first 8 conversations of 'agent' failed"):
        talk.hold()
    assert talk.agent.first_error is not None
    assert said in talk.agent.first_error


FAILS = ("raises", "exits", "answers nothing", "hangs", "hangs after a turn")
LIMITS = {"asks for ever": "last turn", "asks too long": "out of tokens"}
NAMED = (
    *("has a wrong key", "has the key of another", "sends too much", "sends nonsense"),
    *("asks for what is not served", "asks for tools"),
)


@pytest.mark.parametrize("how", [*FAILS, *LIMITS, *NAMED])
def test_bad_behavior_costs_its_own_conversation(talks: Talks, how: str) -> None:
    program_agents.HOW[0] = how
    talk = talks("misbehave", time_limit_s=program_agents.LONGEST_S if "hangs" in how else 30.0)
    held = talk.hold()
    endings = {"done": 0} | {ending: 0 for ending in ENDINGS}
    bad: list[str] = []
    for row, ending in enumerate(held.ending.tolist()):
        endings[ENDINGS[ending]] += 1
        length = int((held.tokens[row] >= 0).sum())
        if ENDINGS[ending] != "done" or length < 20:
            bad.append(ENDINGS[ending])
    assert endings["done"] >= 2
    assert bad
    expected = "failed" if how in FAILS else LIMITS.get(how, "done")
    assert set(bad) == {expected}
    counted = drain_metrics(talk.policy)
    if how in ("has a wrong key", "has the key of another", "asks for what is not served"):
        assert counted["stray_requests"].total > 0
    if how in ("sends nonsense", "asks for tools", *LIMITS):
        assert counted["refused_requests"].total > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give either task.function or task.command"),
        ({"function": "program_agents:turns", "command": ("x",)}, "give either task.function"),
        ({"function": "program_agents:nothing"}, "cannot be imported"),
        ({"function": "program_agents:post"}, "has an argument 'url'"),
        ({"command": ("no-such-program",)}, "there is no program 'no-such-program'"),
    ],
)
def test_a_program_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        ProgramTaskSpec(task=WordsSpec(), **options).build()


def test_a_score_that_is_no_number_costs_its_conversation(
    talks: Talks, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = talks("turns")
    scores: Iterator[Any] = iter([float("nan"), "much", *(1.0,) * 6])

    def outcome(problem: int, answer: str) -> Any:
        return next(scores)

    monkeypatch.setattr(talk.agent._task, "outcome", outcome)  # pyright: ignore[reportPrivateUsage]
    held = talk.hold()
    assert [ENDINGS[ending] for ending in held.ending.tolist()].count("failed") == 1
    assert int(held.score.isnan().sum()) == 2  # nan says that there is none, "much" says nothing


def test_few_run_at_once_and_none_waits_within_its_time(talks: Talks) -> None:
    talk = talks("lasts", max_running=2, time_limit_s=1.0)
    assert {ENDINGS[ending] for ending in talk.hold().ending.tolist()} == {"done"}
    assert program_agents.MOST[0] == 2


def test_conversations_of_programs_do_not_branch_for_pairs(talks: Talks) -> None:
    with pytest.raises(ConfigError, match="a program decides by itself where its own go on"):
        talks("turns").hold(branch=True)


def test_a_command_that_is_killed_runs_again(talks: Talks, tmp_path: Path) -> None:
    mark, script = tmp_path / "mark", tmp_path / "script.py"
    script.write_text(
        "import json, os, sys, time\nfrom urllib.request import Request, urlopen\n\n"
        'said = [{"role": "user", "content": sys.stdin.read()}]\n'
        'asked = json.dumps({"model": "x", "messages": said}).encode()\n'
        'headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}\n'
        'address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"\n'
        "answer = json.load(urlopen(Request(address, asked, headers)))\n"
        f"if sys.argv[1:] and not os.path.exists({str(mark)!r}):\n"
        f"    open({str(mark)!r}, 'w').write(str(os.getpid()))\n    time.sleep(600)\n"
        'print(answer["choices"][0]["message"]["content"])\n'
    )
    command = (sys.executable, "-S", str(script))
    expected = talks(command=command, max_running=2).hold()
    talk = talks(command=(*command, "linger"), max_running=2)
    with killing(lambda: [int(mark.read_text())], lambda: mark.exists() and mark.read_text() != ""):
        held = talk.hold()
    assert same(held, expected)
    assert not psutil.pid_exists(int(mark.read_text()))
