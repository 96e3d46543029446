"""Whatever a program asks in whatever order: what was sampled is trained once, as it was."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.roles import Sampling
from penstock.algorithms.roles.language import Turn, TurnRequest
from penstock.workers.agents.conversation import Conversation, Exchange, as_table
from penstock.workers.agents.environment import Reply
from penstock.workers.agents.programs.chat_api import Refused, read_request
from penstock.workers.agents.programs.endpoint import ProgramSequences
from penstock.workers.agents.rendering import TurnRenderer
from penstock.workers.data.chat import TURNS
from penstock.workers.models.tokenizer import PRINTABLE, Tokenizer, TokenizerSpec

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHORT = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}{{ eos_token }}"
    "{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
)
TEMPLATES = {"turns": TURNS, "chatml": CHATML, "short": SHORT}
SAMPLING = Sampling(max_new_tokens=5, max_total_tokens=400)


class Sampler:
    """Says random tokens, some of which spell what a client may give back in another way."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.asked: list[TurnRequest] = []
        self.said: list[Turn] = []
        self._rng, self._tokenizer = random.Random(seed), tokenizer

    async def speak(self, request: TurnRequest) -> Turn:
        count = self._rng.randint(1, request.max_new_tokens)
        ids = [self._rng.choice(self._tokenizer.encode("ab <|]")) for _ in range(count)]
        finished = count < request.max_new_tokens or self._rng.random() < 0.5
        ids = [*ids[:-1], self._tokenizer.eos_id] if finished else ids
        logprob = torch.tensor([-self._rng.random() for _ in ids])
        turn = Turn(request.row, torch.tensor(ids), logprob, torch.zeros(count).long(), finished)
        await asyncio.sleep(0)
        self.asked.append(request)
        self.said.append(turn)
        return turn


def tokenizer_of(template: str) -> Tokenizer:
    return TokenizerSpec(kind="char", alphabet=PRINTABLE, chat_template=template).build()


def sequences_of(
    tokenizer: Tokenizer,
    sampler: Sampler,
    *,
    rows: int = 40,
    max_turns: int = 40,
    problem: int = 0,
    sample: int = 0,
) -> ProgramSequences:
    def reply(number: int, token: torch.Tensor, finished: bool) -> Reply:
        ids = [one for one in token.tolist() if one != tokenizer.eos_id]
        text = tokenizer.decode(ids)
        return Reply(number, text, text, (), finished)

    exchange = Exchange(
        speak=sampler.speak,
        reply_of=reply,
        shown=lambda before, after, finished: [],
        uniform=lambda problem, sample, turn, count: torch.full(
            (count,), 100 * problem + sample
        ).double(),
        seed=lambda problem, sample, turn: ((100 * problem + sample) << 60) + turn,
        limit_s=1.0,
    )
    return ProgramSequences(
        lambda row: Conversation(row, problem, sample, [], []),
        range(rows),
        exchange,
        TurnRenderer(tokenizer, {}),
        lambda token: tuple(tokenizer.decode([one]) for one in token.tolist()),
        SAMPLING,
        max_turns,
    )


async def wander(sequences: ProgramSequences, seed: int, num_requests: int) -> None:
    """Ask again and again: to go on, to part from what was said, anew, and several at once."""
    rng = random.Random(seed)
    known: list[list[dict[str, str]]] = [[]]
    while num_requests > 0:
        several = [rng.choice(known) for _ in range(rng.randint(1, 3))]
        num_requests -= len(several)
        asked = [
            [
                *before[
                    : rng.choice((len(before), len(before), 2 * rng.randint(0, len(before) // 2)))
                ]
            ]
            for before in several
        ]
        for messages in asked:
            messages.append({"role": "user", "content": rng.choice(("a", "b b", ""))})
        bodies = [json.dumps({"messages": messages}).encode() for messages in asked]
        answers = await asyncio.gather(*(sequences.answer(read_request(body)) for body in bodies))
        for messages, answer in zip(asked, answers, strict=True):
            text = str(answer.message["content"])
            said = text if rng.random() < 0.7 else rng.choice((text.strip(), text + " more"))
            known.append([*messages, {"role": "assistant", "content": said}])


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_requests=st.integers(1, 16))
def test_what_was_sampled_is_trained_once(template: str, seed: int, num_requests: int) -> None:
    tokenizer = tokenizer_of(TEMPLATES[template])
    sampler = Sampler(tokenizer, seed)
    sequences = sequences_of(tokenizer, sampler)
    asyncio.run(wander(sequences, seed, num_requests))
    rows = sequences.rows()
    held = as_table(rows)

    trained: dict[tuple[int, int], Turn] = {}
    for row in rows:
        trained |= {(row.row, start): turn for start, turn in row.turns}
    assert len(trained) == len(sampler.said)
    assert int(held.mask.sum()) == sum(len(turn.token) for turn in sampler.said)
    number = {row.row: place for place, row in enumerate(rows)}
    for request, turn in zip(sampler.asked, sampler.said, strict=True):
        start, place = len(request.text), number[request.row]
        assert trained[request.row, start] is turn
        # It stands behind exactly what it was sampled after.
        assert held.tokens[place, :start].tolist() == list(request.text)
        own = slice(start, start + len(turn.token))
        assert torch.equal(held.tokens[place, own], turn.token)
        assert torch.equal(held.behavior_logprob[place, own], turn.logprob)
        assert bool(held.mask[place, own].all())


def ask(sequences: ProgramSequences, *messages: tuple[str, str], **fields: Any) -> Any:
    said = [{"role": role, "content": content} for role, content in messages]
    return asyncio.run(
        sequences.answer(read_request(json.dumps({"messages": said, **fields}).encode()))
    )


def test_the_same_request_twice_has_two_answers_with_their_own_random_numbers() -> None:
    tokenizer = tokenizer_of(TURNS)
    sampler = Sampler(tokenizer, 0)
    sequences = sequences_of(tokenizer, sampler)
    first, second = (ask(sequences, ("user", "a")) for _ in range(2))
    assert first.name != second.name
    assert sampler.asked[0].seed != sampler.asked[1].seed
    assert sampler.asked[0].text == sampler.asked[1].text
    assert len(sequences.rows()) == 2


def test_limits_are_named() -> None:
    tokenizer = tokenizer_of(TURNS)
    sequences = sequences_of(tokenizer, Sampler(tokenizer, 0), rows=1, max_turns=2)
    ask(sequences, ("user", "a"), max_tokens=1)
    with pytest.raises(Refused, match="as many branches as it may have"):
        ask(sequences, ("user", "b"))
    assert sequences.limit == "last turn"
    with pytest.raises(Refused, match="the messages are 402 tokens"):
        ask(sequences_of(tokenizer, Sampler(tokenizer, 0)), ("user", "a" * 401))


def test_a_template_that_leaves_a_message_out_is_named() -> None:
    only = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
    tokenizer = tokenizer_of(only)
    sequences = sequences_of(tokenizer, Sampler(tokenizer, 0))
    with pytest.raises(Refused, match="it leaves out what 'system' says"):
        ask(sequences, ("system", "be good"), ("user", "a"))


def test_random_numbers_are_those_of_the_problem_and_its_sample() -> None:
    tokenizer = tokenizer_of(SHORT)
    sampler = Sampler(tokenizer, 0)
    sequences = sequences_of(tokenizer, sampler, problem=3, sample=2)
    request = read_request(json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode())
    asyncio.run(sequences.answer(request))
    (asked,) = sampler.asked
    assert asked.seed >> 60 == 302
    assert set(asked.uniform.tolist()) == {302.0}
