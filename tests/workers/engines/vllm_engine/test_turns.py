"""Turns of conversations in vLLM: their log-probabilities, and what its prefix cache spares."""

from __future__ import annotations

import random
from collections.abc import Generator

import pytest
import torch
from penstock.algorithms.roles import Sampling
from penstock.algorithms.roles.language import Turn, TurnRequest, Turns
from penstock.workers.engines.vllm_engine.generator import VllmGenerator
from torch_models import VOCAB
from vllm_models import model_spec, start

pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_new_tokens=12, max_total_tokens=250)
ROWS, NUM_TURNS = 6, 3


@pytest.fixture(scope="module")
def engine() -> Generator[VllmGenerator]:
    made = start("qwen2-tied")
    assert isinstance(made.engine, VllmGenerator)
    yield made.engine
    made.close()


def texts(turns: Turns) -> list[tuple[list[int], list[tuple[int, Turn]]]]:
    """Conversations that go on at once, with a text of 40 tokens before each turn."""
    numbers = random.Random(0)
    rows = [([numbers.randrange(3, VOCAB) for _ in range(40)], list[tuple[int, Turn]]())
            for _ in range(ROWS)]  # fmt: skip

    def ask(row: int) -> None:
        text, said = rows[row]
        none = torch.zeros(12, dtype=torch.float64)
        turns.ask(TurnRequest(row, tuple(text), 12, none, 100 * row + len(said)))

    for row in range(ROWS):
        ask(row)
    while turns.num_open:
        for turn in turns.step():
            text, said = rows[turn.row]
            said.append((len(text), turn))
            text += turn.token.tolist()
            if len(said) < NUM_TURNS:
                text += [numbers.randrange(3, VOCAB) for _ in range(40)]
                ask(turn.row)
            else:
                turns.release(turn.row)
    return rows


def test_turns_are_those_of_the_whole_text(engine: VllmGenerator) -> None:
    turns = engine.turns(SAMPLING, ROWS)
    module = model_spec("qwen2-tied").causal_lm("cpu")
    for text, said in texts(turns):
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([text])).logits[0].float()
        every = torch.log_softmax(logits, dim=-1)
        assert len(said) == NUM_TURNS
        for begin, turn in said:
            places = torch.arange(begin, begin + len(turn.token))
            expected = every[places - 1, turn.token]
            torch.testing.assert_close(turn.logprob, expected, atol=1e-4, rtol=0)
    # Whole blocks of 32 tokens are found: of the second and third texts most.
    assert turns.num_reused > 0.5 * turns.num_read
    turns.close()


def test_the_engine_serves_others_afterwards(engine: VllmGenerator) -> None:
    turns = engine.turns(SAMPLING, 1)
    turns.ask(TurnRequest(0, (3, 4, 5), 12, torch.zeros(12, dtype=torch.float64), 1))
    turns.step()
    with pytest.raises(RuntimeError, match="sampling for a stream"):
        engine.turns(SAMPLING, 1)
    turns.close()
    other = engine.turns(SAMPLING, 1)
    other.close()
