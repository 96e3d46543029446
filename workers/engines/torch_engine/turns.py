"""Turns of conversations on the decoder of `decode`: a conversation keeps its row and its cache.

A turn goes on from the keys and values of the turns before it. What it is shown in between is read
token by token, in the steps in which other rows sample theirs; a text that is longer than all that
the row holds is computed at once instead, with what is held. So what a row computes is a function
of its own tokens: no bit depends on the other rows, nor on when an answer came.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile
from operator import eq

import torch
from torch import Tensor

from ....algorithms.roles.agents import Turn, TurnRequest
from ...rollout.turn_sampler import TurnSampler
from .decode import Batch
from .network import LeanNetwork


class TorchTurns:
    """`Turns` of a network of ours.

    Args:
        network: The policy.
        sampler: How tokens are sampled.
        num_rows: Conversations.
        max_rows: Those that are held at once; others begin when one is released.

    Attributes:
        num_read: Tokens of texts that were computed.
        num_reused: Tokens of texts that were not, because the row held them.
    """

    def __init__(
        self, network: LeanNetwork, sampler: TurnSampler, num_rows: int, max_rows: int
    ) -> None:
        self._sampler = sampler
        self._batch = Batch(network, sampler, min(num_rows, max_rows))
        self._most = min(num_rows, max_rows)
        self._num_to_come = num_rows
        self._waiting: deque[TurnRequest] = deque()
        self._slots: dict[int, int] = {}
        self._held: dict[int, list[int]] = {}
        self.num_read = self.num_reused = 0

    @property
    def num_open(self) -> int:
        """See `Turns.num_open`; without conversations that wait until another is released."""
        new = sum(request.row not in self._held for request in self._waiting)
        fitting = min(new, self._most - len(self._slots))
        return self._batch.num_live + len(self._waiting) - new + fitting

    def ask(self, request: TurnRequest) -> None:
        """See `Turns.ask`."""
        self._waiting.append(request)

    @torch.no_grad()
    def step(self) -> list[Turn]:
        """See `Turns.step`."""
        self._enter()
        batch = self._batch
        sampled, live = self._sampler.sample(batch.logits, batch.row, batch.live)
        ended = batch.row[batch.live & ~live].tolist()
        if ended:
            batch.end(live)
        turns = [self._ended(row) for row in sorted(ended)]
        if batch.num_live:
            keep = self._shrink()
            batch.step(sampled if keep is None else sampled[keep])
        return turns

    def release(self, row: int) -> None:
        """See `Turns.release`."""
        self._held.pop(row, None)
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._batch.hold(slot, held=False)

    def close(self) -> None:
        """See `Turns.close`: it holds nothing but memory."""

    def _enter(self) -> None:
        """Begin the turns that wait, as far as there are rows."""
        new: list[TurnRequest] = []
        for request in [*self._waiting]:
            held = self._held.get(request.row)
            if held is None and len(self._slots) + len(new) >= self._most:
                continue
            self._waiting.remove(request)
            self._sampler.begin(request)
            self._num_to_come -= held is None
            if held is None or not self._goes_on(request, held):
                self.release(request.row)
                new.append(request)
        if not new:
            return
        rows = torch.tensor(sorted(request.row for request in new))
        slots = self._batch.enter(rows)
        self._slots |= dict(zip(rows.tolist(), slots.tolist(), strict=True))
        for request in new:
            self._batch.hold(self._slots[request.row], held=True)
            self._held[request.row] = [*request.text]
            self.num_read += len(request.text)

    def _shrink(self) -> Tensor | None:
        """Have rows of conversations that are over leave, once all others have theirs."""
        keep = None if self._num_to_come else self._batch.shrink()
        if keep is not None:
            place = {slot: new for new, slot in enumerate(keep.tolist())}
            self._slots = {row: place[slot] for row, slot in self._slots.items()}
        return keep

    def _goes_on(self, request: TurnRequest, held: list[int]) -> bool:
        """Whether a row goes on from what it holds, and if so, have it read the rest."""
        position = self._batch.position(self._slots[request.row])
        known = sum(1 for _ in takewhile(bool, map(eq, request.text, held)))
        shown = list(request.text[position:])
        if known < position or len(shown) > position:
            return False
        self._sampler.read(request.row, shown)
        self._batch.resume(self._slots[request.row], len(request.text) + request.max_new_tokens)
        self._held[request.row] = [*request.text]
        self.num_reused += position
        self.num_read += len(shown)
        return True

    def _ended(self, row: int) -> Turn:
        self._sampler.open[row] = False
        turn = self._sampler.turn(row)
        self._held[row] += turn.token.tolist()
        return turn
