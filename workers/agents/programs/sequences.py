"""The sequences of tokens that the policy read and sampled for a program.

A request whose messages go on from what was said is the next turn of that sequence: the tokens
before it are those that were sampled, never the client's text of them encoded again. A request that
parts from what was said - another branch, a sub-agent, a history that the client has rewritten -
begins a sequence of its own. It shares the tokens of the turns up to which both are the same, which
are trained in the first sequence alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from ....algorithms.roles.language import Turn, TurnRequest
from ....algorithms.roles.language_tables import Sampling
from ...models.tokenizer import ChatTemplateError
from ..conversation import Conversation, Exchange
from ..rendering import TurnRenderer
from .chat_api import ChatAnswer, ChatRequest, Refused, message_key


@dataclass(frozen=True)
class _End:
    """The end of a turn: so many messages and tokens in, and whether a token ended it."""

    messages: int = 0
    tokens: int = 0
    finished: bool = True


@dataclass
class _Sequence:
    """One row and what tells how far a request goes along with it.

    Attributes:
        row: What becomes a row of the table.
        name: Of the request that began it: rows are in the order of their names.
        tools: Of all its requests.
        keys: Of its messages.
        ends: Of each turn in it, its own and those that it shares.
        is_open: Whether a turn is being sampled.
    """

    row: Conversation
    name: str
    tools: str
    keys: list[str] = field(default_factory=list[str])
    ends: list[_End] = field(default_factory=list[_End])
    is_open: bool = True

    def shared(self, tools: str, keys: Sequence[str]) -> _End:
        """The end of the last turn up to which a request is the same; none if there is none."""
        found = _End()
        for end in self.ends if tools == self.tools else ():
            if end.messages >= len(keys) or list(keys[: end.messages]) != self.keys[: end.messages]:
                break
            found = end
        return found

    def goes_on(self, end: _End) -> bool:
        return not self.is_open and self.ends[-1] == end


class ProgramSequences:
    """One conversation of a program.

    Attributes:
        limit: Which limit the program has met; None if none. One of `ENDINGS`.
        counts: What is to be reported of it.
    """

    def __init__(
        self,
        begin: Callable[[int], Conversation],
        rows: Sequence[int],
        exchange: Exchange,
        renderer: TurnRenderer,
        spell: Callable[[Tensor], tuple[str, ...]],
        sampling: Sampling,
        max_turns: int,
    ) -> None:
        self._begin, self._free = begin, list(rows)
        self._exchange, self._renderer, self._spell = exchange, renderer, spell
        self._sampling, self._max_turns = sampling, max_turns
        self._sequences: list[_Sequence] = []
        self._asked: Counter[str] = Counter()
        self._num_turns = 0
        self._rows: list[Conversation] = []
        self._sampled = asyncio.Condition()
        self.limit: str | None = None
        self.counts: Counter[str] = Counter()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        if self._num_turns == self._max_turns:
            self._end("last turn", f"this conversation has had its {self._max_turns} turns")
        name = self._name(request)
        sequence, tokens = self._placed(request, name)
        row = sequence.row
        most = min(
            self._sampling.max_new_tokens, request.max_tokens or self._sampling.max_new_tokens
        )
        most = min(most, self._sampling.max_total_tokens - len(tokens))
        if most < 1:
            self._end(
                "out of tokens",
                f"the messages are {len(tokens)} tokens, and a conversation may have "
                f"{self._sampling.max_total_tokens}",
            )
        self._take(sequence, request, tokens)
        number = int(
            name[:15], 16
        )  # the same request has the same random numbers, whenever it comes
        asked = TurnRequest(
            row.row,
            tuple(tokens),
            most,
            self._exchange.uniform(row.problem, row.sample, number, most),
            self._exchange.seed(row.problem, row.sample, number),
        )
        turn = await self._exchange.speak(asked)
        reply = self._exchange.reply_of(len(row.turns), turn.token, turn.finished)
        # The token that ends a turn is no text.
        own = turn.token[: len(turn.token) - turn.finished]
        answer = ChatAnswer(
            name,
            reply,
            bool(request.tools),
            self._spell(own),
            tuple(turn.logprob[: len(own)].tolist()),
            len(tokens),
        )
        self._said(sequence, turn, answer)
        async with self._sampled:
            self._sampled.notify_all()
        return answer

    async def settled(self) -> None:
        self._max_turns = self._num_turns
        async with self._sampled:
            await self._sampled.wait_for(lambda: not any(s.is_open for s in self._sequences))

    def rows(self) -> list[Conversation]:
        """The rows in an order that no delay changes; the first has the conversation's counts."""
        if self._rows:
            return self._rows
        ordered = sorted(self._sequences, key=lambda one: (len(one.row.messages), one.name))
        rows = self._rows = [one.row for one in ordered] or [self._begin(self._free[0])]
        for piece, row in enumerate(rows):
            row.piece = piece
        self.counts["sequences"] = len(self._sequences)
        rows[0].counts.update({name: float(count) for name, count in self.counts.items()})
        return rows

    def _name(self, request: ChatRequest) -> str:
        asked = json.dumps([request.keys, request.tools, request.max_tokens], sort_keys=True)
        self._asked[asked] += 1
        return hashlib.sha256(f"{self._asked[asked]}{asked}".encode()).hexdigest()[:24]

    def _placed(self, request: ChatRequest, name: str) -> tuple[_Sequence, list[int]]:
        tools = json.dumps(request.tools, sort_keys=True)
        found = [(one.shared(tools, request.keys), one) for one in self._sequences]
        along = [(end, one) for end, one in found if end.messages]
        if not along:
            return self._new(name, tools), self._first_tokens(request)
        # Of those that share as much, one that goes on from there.
        end, best = min(
            along, key=lambda each: (-each[0].messages, not each[1].goes_on(each[0]), each[1].name)
        )
        tokens = best.row.tokens[: end.tokens] + self._shown(request, end)
        if best.goes_on(end):
            return best, tokens
        new = self._new(name, tools)
        new.ends = [one for one in best.ends if one.messages <= end.messages]
        return new, tokens

    def _new(self, name: str, tools: str) -> _Sequence:
        if not self._free:
            self._end("last turn", "this conversation has as many branches as it may have")
        made = self._begin(self._free[0])
        made.tokens, made.messages = [], []
        return _Sequence(made, name, tools, is_open=False)

    def _first_tokens(self, request: ChatRequest) -> list[int]:
        try:
            return self._renderer.before(request.messages, request.tools or None)
        except ChatTemplateError as error:
            raise Refused(f"the policy's chat template refuses this: {error}") from error

    def _shown(self, request: ChatRequest, end: _End) -> list[int]:
        before, after = request.messages[: end.messages - 1], request.messages[end.messages :]
        tools = request.tools or None
        try:
            return self._renderer.after(before, after, tools, finished=end.finished)
        except ChatTemplateError as error:
            raise Refused(f"the policy's chat template refuses this: {error}") from error

    def _take(self, sequence: _Sequence, request: ChatRequest, tokens: list[int]) -> None:
        if sequence not in self._sequences:
            self._free.pop(0)
            self._sequences.append(sequence)
        self._num_turns += 1
        self.counts["requests"] += 1
        self.counts["overridden"] += bool(request.overridden)
        sequence.is_open = True
        sequence.keys = list(request.keys)
        sequence.row.tokens = tokens
        sequence.row.messages = list(request.messages)

    def _said(self, sequence: _Sequence, turn: Turn, answer: ChatAnswer) -> None:
        row = sequence.row
        row.turns.append((len(row.tokens), turn))
        row.tokens += turn.token.tolist()
        row.rewards.append(0.0)
        row.messages.append(answer.message)
        sequence.keys.append(message_key(answer.message))
        sequence.ends.append(_End(len(sequence.keys), len(row.tokens), turn.finished))
        sequence.is_open = False
        calls = answer.reply.calls if answer.with_calls else ()
        self.counts["tool_calls"] += len(calls)
        self.counts["bad_calls"] += len(calls) - len(answer.calls)

    def _end(self, limit: str, why: str) -> NoReturn:
        self.limit = limit
        raise Refused(why, code="context_length_exceeded" if limit == "out of tokens" else "limit")
