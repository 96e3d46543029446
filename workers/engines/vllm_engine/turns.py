"""Turns of conversations as requests to vLLM, each of them when it is asked for.

A turn is a request whose prompt is the whole text before it. What vLLM has computed of that in
earlier turns is found in its prefix cache, block by block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....algorithms.roles.agents import Turn, TurnRequest
from ....algorithms.roles.language import Sampling
from .engine import VllmEngine
from .requests import Request, Sampled


class VllmTurns:
    """`Turns` of a vLLM engine, which samples for nobody else meanwhile.

    Args:
        engine: Samples.
        sampling: How turns are sampled.
        end_ids: Tokens that end a turn, as `sampling.stop_token_ids` do.

    Attributes:
        num_read: Tokens of texts that were computed.
        num_reused: Tokens of texts that were found in the prefix cache.
    """

    def __init__(self, engine: VllmEngine, sampling: Sampling, end_ids: Sequence[int]) -> None:
        self._batch = engine.begin({}, sampling, end_ids=end_ids)
        self._is_greedy = sampling.temperature == 0
        self._asked: list[TurnRequest] = []
        self.num_read = self.num_reused = 0

    @property
    def num_open(self) -> int:
        """See `Turns.num_open`."""
        return len(self._batch)

    def ask(self, request: TurnRequest) -> None:
        """See `Turns.ask`."""
        self._asked.append(request)
        made = Request([*request.text], request.seed, request.max_new_tokens)
        self._batch.add(len(self._asked) - 1, made)

    def step(self) -> list[Turn]:
        """See `Turns.step`."""
        ended = self._batch.step()
        return [self._turn(self._asked[number], ended[number]) for number in sorted(ended)]

    def release(self, row: int) -> None:
        """See `Turns.release`: the prefix cache forgets by itself."""

    def close(self) -> None:
        """See `Turns.close`."""
        self._batch.give_up()

    def _turn(self, asked: TurnRequest, said: Sampled) -> Turn:
        self.num_reused += said.cached_tokens
        self.num_read += len(asked.text) - said.cached_tokens
        logprob = torch.tensor(said.logprobs, dtype=torch.float32)
        if self._is_greedy:  # a likeliest token is certain
            logprob = torch.zeros_like(logprob)
        return Turn(
            asked.row,
            torch.tensor(said.tokens, dtype=torch.int64),
            logprob,
            torch.tensor(said.versions, dtype=torch.int64),
            said.finished,
        )
