"""What is asked of vLLM for each row, and what comes back; no engine is started."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from penstock.algorithms.roles import Sampling
from penstock.dataflow.runtime.call_context import CallKey, call_version
from penstock.workers.engines.vllm_engine.generator import as_columns, as_requests
from penstock.workers.engines.vllm_engine.requests import Progress, Request, RequestBatch, Sampled
from penstock.workers.rollout.generation_engine import BegunRows
from penstock.workers.rollout.sampling import SampleStreams
from torch import Tensor

EOS = 2
PROMPT = torch.tensor([[5, 6, 7], [8, -1, -1], [9, 9, -1]])
STREAMS = SampleStreams(7, "actor", CallKey(3, 0), torch.tensor([40, 41, 42]), 2)
SAMPLING = Sampling(num_samples=2, max_new_tokens=6, max_total_tokens=8)


def requests(sampling: Sampling, begun: BegunRows | None, *completing: tuple[int, int]):
    told: list[tuple[int, int]] = []

    def completes(row: int, token: int) -> bool:
        told.append((row, token))
        return (row, token) in completing

    asked = as_requests(PROMPT, STREAMS, sampling, begun, ends={EOS, 9}, completes=completes)
    return (*asked, told)


def so_far(*rows: list[int], ended: tuple[int, ...] = (), most_new: int | Tensor = 3) -> BegunRows:
    token = torch.full((6, 6), -1)
    for row, tokens in enumerate(rows):
        token[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    logprob = (token >= 0) * -0.5
    return BegunRows(token, logprob, torch.tensor([row in ended for row in range(6)]), most_new)


def test_every_sample_of_a_prompt_is_a_request():
    asked, over, _ = requests(SAMPLING, None)
    seeds = STREAMS.seeds()
    ids = [[5, 6, 7], [5, 6, 7], [8], [8], [9, 9], [9, 9]]
    most = [5, 5, 6, 6, 6, 6]  # 8 tokens with the prompt
    assert asked == {row: Request(ids[row], seeds[row], most[row]) for row in range(6)}
    assert over == {}


def test_a_response_goes_on_by_what_is_left_and_no_further_than_this_call_may():
    begun = so_far([4] * 4, [4] * 5, [], [4, 4], [4, EOS], [4] * 6, ended=(4,))
    asked, over, _ = requests(SAMPLING, begun)
    assert {row: one.max_new_tokens for row, one in asked.items()} == {0: 1, 2: 3, 3: 3}
    assert asked[3].so_far == Sampled([4, 4], [-0.5, -0.5], [-1, -1])
    # Rows 1 and 5 are as long as they may be, whoever did not notice.
    assert {row: (len(one.tokens), one.finished) for row, one in over.items()} == {
        1: (5, False),
        4: (2, True),
        5: (6, False),
    }
    fresh, old = STREAMS.seeds(), {row: one.seed for row, one in asked.items()}
    assert old[2] == fresh[2]
    assert not {old[0], old[3]} & set(fresh)
    assert requests(SAMPLING, so_far(*[[4]] * 6, most_new=0))[0] == {}


def test_each_response_may_have_a_length_of_its_own():
    asked, over, _ = requests(SAMPLING, so_far(most_new=torch.tensor([1, 4, 9, 2, 0, 3])))
    assert {row: one.max_new_tokens for row, one in asked.items()} == {0: 1, 1: 4, 2: 6, 3: 2, 5: 3}
    assert list(over) == [4]


def test_stop_strings_are_told_of_what_there_is():
    begun = so_far([4, 9], [4, 5], [], [6, 7], ended=(0, 1, 3))
    _, over, told = requests(SAMPLING, begun, (1, 5), (3, 6))
    assert told == [(0, 4), (1, 4), (1, 5), (3, 6), (3, 7)]  # 9 ends a response by itself
    assert {row: one.finished for row, one in over.items()} == {0: True, 1: True, 3: False}


def test_columns_are_in_the_order_of_rows():
    progress = Progress(
        {4: Sampled([3, 2], [-1.0, -2.0], [8, 9], True), 1: Sampled([7], [-3.0], [9])}, 2
    )
    ended = as_columns(progress, SAMPLING)
    assert (ended.rows.tolist(), ended.at_least) == ([1, 4], 2)
    assert ended.responses.token.tolist() == [[7, *[-1] * 5], [3, 2, *[-1] * 4]]
    assert ended.responses.logprob[:, :2].tolist() == [[-3.0, 0.0], [-1.0, -2.0]]
    assert ended.responses.length.tolist() == [1, 2]
    assert ended.responses.finished.tolist() == [False, True]
    greedy = as_columns(progress, Sampling(temperature=0, max_new_tokens=2))
    assert not greedy.responses.logprob.any()
    assert as_columns(Progress({}, 5), SAMPLING).responses.token.shape == (0, 6)


def test_hundreds_of_rows_cost_a_step_little_of_a_gpus_time() -> None:
    """Ours is about 1 ms of a step of 512 rows on a slow core, where a 1.5B computes for 6."""
    num_rows, num_steps = 512, 20
    one = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-0.5)}])
    outputs = [
        SimpleNamespace(
            request_id=f"1/{row}",
            outputs=[SimpleNamespace(**vars(one), finish_reason=None)],
            num_cached_tokens=0,
            finished=False,
        )
        for row in range(num_rows)
    ]
    engine: Any = SimpleNamespace(step=lambda: outputs)
    batch = RequestBatch.__new__(RequestBatch)
    sampled = {row: Sampled() for row in range(num_rows)}
    names = {f"1/{row}": row for row in range(num_rows)}
    vars(batch).update(_engine=engine, _open=names, _sampled=sampled, _completes=None)
    vars(batch).update(_version=call_version(), _older=[])
    begin_s = time.process_time()
    for _ in range(num_steps):
        assert batch.step() == {}
    assert time.process_time() - begin_s < 0.010 * num_steps
    assert all(row.tokens == [7] * num_steps for row in sampled.values())
    assert batch.at_least == num_steps
