"""Step functions, ops and modules of the user's own that misbehave."""

from __future__ import annotations

import pytest

from .conftest import SMALL, Commands, Refused

pytestmark = pytest.mark.slow

HEAD = """\
import os, sys
from dataclasses import dataclass
import penstock.algorithms.grpo as grpo
from penstock.algorithms.grpo import GRPO
from penstock.algorithms.roles import PerSample, Policy, Prompts, Reward
from penstock.dataflow import op
"""
STEP = "def step(prompts: Prompts, actor: Policy, reward: Reward, cfg: GRPO):\n    "
OWN_CFG = "def step(prompts: Prompts, actor: Policy, reward: Reward, cfg: Own): pass\n"

RECORDED = {
    "exit at import": "sys.exit(0)",
    "exit with a text at import": "sys.exit('bye')",
    "end at import": "os._exit(0)",
    "raise at import": "1 / 0",
    "no syntax": "def step(:",
    "zero byte": "x = '\0'",
    "exit": STEP + "sys.exit(0)",
    "end": STEP + "os._exit(0)",
    "raise SystemExit": STEP + "raise SystemExit",
    "raise GeneratorExit": STEP + "raise GeneratorExit",
    "key error": STEP + "{}['x']",
    "recursion": STEP + "step(prompts, actor, reward, cfg)",
    "memory": STEP + "raise MemoryError",
    "missing file": STEP + "open('/nope')",
    "error in a library": STEP + "import json; json.loads('{')",
    "nodes without end": STEP + "while True: actor.generate(prompts.prompt, prompts.prompt_id)",
    "unknown attribute": STEP + "actor.nope(prompts)",
    "unknown column": STEP + "return prompts.nope",
    "if on a column": STEP + "if prompts.prompt: pass",
    "float of a column": STEP + "float(prompts.prompt_id)",
    "loop over a column": STEP + "[x for x in prompts.prompt]",
    "no function": "step = 3",
    "a class": "class step: pass",
    "no such name": "other = 3",
    "exit when asked for the name": "def __getattr__(name): sys.exit(0)",
    "a line of nowhere": "exec(compile('1/0', '/dev/zero', 'exec'))",
    "a forged message": "raise ValueError('no\\npenstock: all is well \\x1b[31m')",
    "no annotations": "def step(a, b): pass",
    "any arguments": "def step(*a, **k): pass",
    "unknown annotation": "def step(a: Nope): pass",
    "async": "async def step(prompts: Prompts): pass",
    "generator": "def step(prompts: Prompts):\n    yield 1",
    "a lambda": "step = lambda prompts: None",
    "cfg that raises": "@dataclass\nclass Own:\n    def __post_init__(self): 1 / 0\n" + OWN_CFG,
    "cfg of unknown types": "@dataclass\nclass Own:\n    x: 'Nope' = 1\n" + OWN_CFG,
    "cfg that is no dataclass": "class Own: pass\n" + OWN_CFG,
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded(name: str, refused: Refused) -> None:
    source = f"{HEAD}{RECORDED[name]}\n"
    refused(["run", *SMALL, "algorithm.step=mine:step"], {"mine.py": source})


RUN = f"""
{STEP}roll = actor.generate(prompts.prompt, prompts.prompt_id, cfg.sampling)
    score = bad(reward.score(roll.tokens, roll.mask, roll.prompt_id))
    advantage = grpo.group_advantage(score, roll.prompt_id)
    per_token = grpo.broadcast_over_tokens(advantage, roll.mask)
    return grpo.train_policy(actor, roll, per_token, cfg.loss, cfg)
"""

RUNNING = {
    "exit": "sys.exit(0)",
    "end": "os._exit(0)",
    "raise": "return {}['x']",
    "raise GeneratorExit": "raise GeneratorExit",
    "too few rows": "return score[:1]",
    "nothing": "return None",
    "another type": "return score.double()",
    "another shape": "return score[:, None]",
    "an array": "return score.numpy()",
    "infinite recursion": "return bad.__wrapped__(score)",
    "a very long message": "raise ValueError('x' * 10**8)",
}


@pytest.mark.parametrize("name", RUNNING)
def test_running(name: str, refused: Refused) -> None:
    body = f"@op(scope='row')\ndef bad(score: PerSample) -> PerSample:\n    {RUNNING[name]}\n{RUN}"
    answer = refused(
        ["run", *SMALL, "algorithm.step=mine:step"], {"mine.py": f"{HEAD}{body}"}, code=1
    )
    assert len(answer.err) < 25_000
    assert "to continue: penstock run resume=runs" in answer.err


def test_debug_shows_where_it_arose(commands: Commands, tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    (folder / "mine.py").write_text(f"{HEAD}{STEP}{{}}['x']\n")
    answer = commands.run(["graph", "algorithm.step=mine:step", "--debug"], folder)
    assert answer.code == 2
    assert "Traceback (most recent call last)" in answer.err
    assert "KeyError: 'x'" in answer.err
