"""Two policies that train each other: what is posed, what it is worth, and both ways of running."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from penstock.algorithms.roles import Prompts, Rollout
from penstock.workers.models.tokenizer import pad_rows
from torch import Tensor

from ..algorithms.configured import configured
from ..algorithms.eager import check_eager_equals_graph

FILE = Path(__file__).resolve().parents[2] / "examples" / "proposer_solver.py"


@pytest.fixture(scope="module")
def example() -> Generator[ModuleType]:
    """The example as the module a run would import."""
    spec = importlib.util.spec_from_file_location("proposer_solver", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["proposer_solver"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["proposer_solver"]


def rows(example: ModuleType, *texts: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """Tokens and mask of prompts and responses."""
    tokenizer = example.tokenizer()
    sides = [(tokenizer.encode(a), [*tokenizer.encode(b), tokenizer.eos_id]) for a, b in texts]
    tokens = pad_rows([*prompt, *response] for prompt, response in sides)
    starts = torch.tensor([len(prompt) for prompt, _ in sides])[:, None]
    return tokens, (torch.arange(tokens.shape[1]) >= starts) & (tokens >= 0)


def test_sums_are_begun_posed_and_checked(example: ModuleType) -> None:
    tokenizer = example.tokenizer()
    prompts = Prompts(
        prompt=pad_rows(tokenizer.encode(text) for text in ("3+4=", "1-2+7=")),
        prompt_id=torch.tensor([9, 4]),
    )
    begun = example.beginnings(prompts)
    assert tokenizer.decode_rows(begun.prompt) == ["3+", "1-2+"]
    assert begun.prompt_id.tolist() == [9, 4]
    tokens, mask = rows(example, ("3+", "12"), ("3+", "1+"), ("1-2+", ""), ("1-2+", "123"))
    valid = example.is_number(tokens, mask)
    assert valid.tolist() == [True, False, False, False]
    posed = Rollout(
        prompt_id=torch.tensor([9, 9, 4, 4]),
        tokens=tokens,
        mask=mask,
        behavior_logprob=-mask.float(),
        finished=torch.ones(4).bool(),
    )
    problems = example.sums(posed, valid)
    assert tokenizer.decode_rows(problems.prompt) == ["3+12=", "3+0=", "1-2+0=", "1-2+0="]
    assert problems.prompt_id.tolist() == [0, 1, 2, 3]
    answers = rows(example, ("3+12=", "15"), ("1-2+0=", "-1"), ("1-2+0=", "1"), ("3+12=", ""))
    assert example.is_right(*answers).tolist() == [1, 1, 0, 0]


def test_a_sum_is_worth_most_if_half_of_its_answers_are_right(example: ModuleType) -> None:
    worth = example.interest(
        torch.tensor([True, True, True, False]),
        right=torch.tensor([1.0, 1, 1, 0, 1, 0, 0, 0]),
        solved_id=torch.tensor([0, 1, 0, 1, 3, 3, 2, 2]),
        fine=2.0,
    )
    assert worth.tolist() == [0, 1, 0, -2]


RUN = (
    "algorithm.step=proposer_solver:proposer_solver_step",
    "algorithm.per_step.prompts=4",
    "algorithm.optimizer.lr=1e-2",
)


def test_eager_equals_graph_for_both_policies(example: ModuleType) -> None:
    run = configured("own", *RUN)
    assert run.trained == ("solver", "proposer")  # whose accuracy a run reports: the first one's
    check_eager_equals_graph(run)
