"""Turns of conversations are sampled as whole texts would be, whenever they are asked for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from penstock.algorithms.roles import Sampling
from penstock.algorithms.roles.language import Turn, TurnRequest, Turns
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.torch_engine import generator
from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
from penstock.workers.models.spec import ModelSpec
from torch_models import EOS, FAMILIES, GPT2, VOCAB

MAX_NEW, NUM_TURNS, ROWS = 7, 3, 20
SAMPLING = Sampling(num_samples=4, max_new_tokens=MAX_NEW, max_total_tokens=120)


@dataclass
class Row:
    text: list[int]
    turns: list[tuple[int, Turn]] = field(default_factory=list[tuple[int, Turn]])


def policy(family: str, max_rows: int = 64) -> Any:
    model = ModelSpec(architecture=FAMILIES[family])
    spec = TorchPolicySpec(model=model, end_ids=(EOS,), max_decode_rows=max_rows)
    return spec.build(WorkerContext("actor"))


def shown(row: int, turn: int) -> list[int]:
    """What follows a turn: sometimes longer than all before, sometimes a single token."""
    numbers = random.Random(f"{row}/{turn}")
    return [numbers.randrange(3, VOCAB) for _ in range(numbers.choice([1, 4, 9, 40]))]


def conversations(turns: Turns, *, patience: float, seed: int = 0) -> list[Row]:
    """Rows that answer after a while: the less patience, the sooner."""
    waits = random.Random(seed)
    rows = [Row([*shown(row // 4, -1), 3]) for row in range(ROWS)]
    waiting = list(range(ROWS))
    while waiting or turns.num_open:
        for row in [*waiting]:
            if waits.random() >= patience or not turns.num_open:
                waiting.remove(row)
                number = len(rows[row].turns)
                uniform = torch.rand(
                    MAX_NEW,
                    generator=torch.Generator().manual_seed(row * 100 + number),
                    dtype=torch.float64,
                )
                turns.ask(TurnRequest(row, tuple(rows[row].text), MAX_NEW, uniform, 0))
        for turn in turns.step() if turns.num_open else []:
            one = rows[turn.row]
            one.turns.append((len(one.text), turn))
            one.text += turn.token.tolist()
            if len(one.turns) == NUM_TURNS:
                turns.release(turn.row)
            else:
                one.text += shown(turn.row, len(one.turns))
                waiting.append(turn.row)
    return rows


def columns(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = max(len(row.text) for row in rows)
    tokens = torch.full((len(rows), width), -1)
    mask, logprob = torch.zeros(tokens.shape, dtype=torch.bool), torch.zeros(tokens.shape)
    for number, row in enumerate(rows):
        tokens[number, : len(row.text)] = torch.tensor(row.text)
        for start, turn in row.turns:
            own = slice(start, start + len(turn.token))
            mask[number, own], logprob[number, own] = True, turn.logprob
    return tokens, mask, logprob


@pytest.mark.parametrize(
    ("max_rows", "patience", "seed"), [(64, 0.0, 0), (64, 0.9, 1), (16, 0.5, 2), (3, 0.8, 3)]
)
def test_a_device_that_looks_at_every_16th_token_samples_the_same(
    max_rows: int, patience: float, seed: int, monkeypatch: pytest.MonkeyPatch
):
    expected = columns(
        conversations(policy("qwen2")._generator.turns(SAMPLING, ROWS), patience=0.5)
    )
    monkeypatch.setattr(generator, "waits_for", lambda device: False)  # pyright: ignore[reportUnknownLambdaType]
    turns = policy("qwen2", max_rows)._generator.turns(SAMPLING, ROWS)
    found = columns(conversations(turns, patience=patience, seed=seed))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert turns.num_reused > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2-tied", "llama", "qwen3"])
def test_log_probabilities_are_those_of_the_whole_text(family: str):
    actor = policy(family)
    turns = actor._generator.turns(SAMPLING, ROWS)
    tokens, mask, logprob = columns(conversations(turns, patience=0.7))
    torch.testing.assert_close(actor.logprob(tokens, mask), logprob, atol=2e-6, rtol=0)
    assert turns.num_reused > turns.num_read / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_rows", "patience", "seed"), [(64, 0.0, 0), (64, 0.9, 1), (16, 0.5, 2), (3, 0.8, 3)]
)
def test_nothing_depends_on_when_a_turn_is_asked_for(max_rows: int, patience: float, seed: int):
    expected = columns(
        conversations(policy("qwen2")._generator.turns(SAMPLING, ROWS), patience=0.5)
    )
    turns = policy("qwen2", max_rows)._generator.turns(SAMPLING, ROWS)
    found = columns(conversations(turns, patience=patience, seed=seed))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_text_that_was_changed_is_read_again():
    turns = policy("qwen2")._generator.turns(SAMPLING, 1)
    uniform = torch.full((MAX_NEW,), 0.3, dtype=torch.float64)

    def turn(text: tuple[int, ...]) -> Turn:
        turns.ask(TurnRequest(0, text, MAX_NEW, uniform, 0))
        while turns.num_open:
            for found in turns.step():
                return found
        raise AssertionError

    first = turn((3, 4, 5))
    changed = (3, 9, 5, *first.token.tolist(), 7)
    again = turn(changed)
    assert turns.num_reused == 0
    alone = policy("qwen2")._generator.turns(SAMPLING, 1)
    alone.ask(TurnRequest(0, changed, MAX_NEW, uniform, 0))
    while not (found := alone.step()):
        pass
    assert torch.equal(found[0].token, again.token)
    assert torch.equal(found[0].logprob, again.logprob)


def test_a_model_decoded_by_its_own_forward_is_refused():
    spec = TorchPolicySpec(model=ModelSpec(architecture=GPT2), end_ids=(EOS,))
    actor: Any = spec.build(WorkerContext("actor"))
    with pytest.raises(ConfigError, match="conversations need a model that"):
        actor._generator.turns(SAMPLING, 1)
