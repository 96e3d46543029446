"""User code scores with a number, None or a fault, alike in this process and in another."""

from __future__ import annotations

import json
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.row_sources import FileTaskSpec
from penstock.workers.models.tokenizer import TokenizerSpec
from penstock.workers.rewards.rule_reward import RuleRewardSpec
from penstock.workers.verifiers.verifiers import load_verifier

from ..rewards.responses import CONTEXT, scores_of

KINDS: dict[str, tuple[str, float | None | str]] = {
    "int": ("2", 2.0),
    "bool": ("True", 1.0),
    "float": ("-0.5", -0.5),
    "fraction": ("Fraction(1, 4)", 0.25),
    "numpy float": ("np.float32(0.5)", 0.5),
    "numpy bool": ("np.isclose(1.0, 1.0)", 1.0),
    "numpy int": ("np.int64(-3)", -3.0),
    "0-d array": ("np.array(0.5)", 0.5),
    "0-d tensor": ("torch.tensor(0.5)", 0.5),
    "none": ("None", None),
    "nan": ("float('nan')", None),
    "numpy nan": ("np.float32('nan')", None),
    "infinite": ("np.float64('inf')", "inf"),
    "text": ("'1'", "'1'"),
    "list": ("[1.0]", "[1.0]"),
    "1-d array": ("np.array([1.0])", "array([1.])"),
    "complex": ("1j", "1j"),
    "too large": ("10 ** 400", "1000"),
}
REWARD = (
    "from fractions import Fraction\nimport numpy as np\nimport torch\n"
    "def reward(prompt, response, answer):\n    return {"
    + ", ".join(f"{name!r}: lambda: {code}" for name, (code, _) in KINDS.items())
    + "}[response]()\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("here", [True, False])
def test_rewards_here_and_in_another_process_accept_the_same(tmp_path: Path, here: bool) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "p", "answer": "a"}) + "\n")
    task = FileTaskSpec(
        path=str(tmp_path / "rows.jsonl"),
        reward=f"{tmp_path}/mine.py:reward",
        reward_in_process=here,
    )
    spec = RuleRewardSpec(task=task, tokenizer=TokenizerSpec(), time_limit_s=20, num_processes=1)
    with closing(spec.build(CONTEXT)) as reward:
        found = scores_of(reward, *KINDS)
    expected = [None if isinstance(score, str) else score for _, score in KINDS.values()]
    assert found == expected
    faults = sum(isinstance(score, str) for _, score in KINDS.values())
    assert reward.metrics["reward/errors"].total == faults
    assert reward.metrics["reward/unscored"].total == sum(score is None for score in expected)


@pytest.mark.parametrize("name", KINDS)
def test_a_refused_score_is_named(name: str) -> None:
    from penstock.workers.isolation.child import as_score

    code, expected = KINDS[name]
    value: Any = eval(code, {"np": np, "torch": torch, "Fraction": Fraction})
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=r", not a finite number$") as raised:
            as_score(value)
        assert expected in str(raised.value)
    else:
        assert as_score(value) == expected


@pytest.mark.parametrize("head", ["def", "async def"])
def test_functions_that_return_no_number_are_refused_when_they_are_loaded(
    tmp_path: Path, head: str
) -> None:
    (tmp_path / "mine.py").write_text(f"{head} reward(prompt, response, answer):\n    yield 1.0\n")
    with pytest.raises(ConfigError, match="is a generator function"):
        load_verifier(f"{tmp_path}/mine.py:reward")
