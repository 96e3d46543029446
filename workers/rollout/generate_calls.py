"""A policy's calls to `generate`, answered one at a time, or several together as responses end."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...algorithms.roles.language import Agent, Conversations
from ...algorithms.roles.language_tables import Rollout, Sampling, Unfinished
from ...dataflow.errors import ConfigError, WorkerError
from ...dataflow.graph.role import Metric, Streamed, add_metrics
from ...dataflow.runtime.call_context import call_in_flight, call_key, current_step
from ...dataflow.runtime.worker_protocol import WorkerContext, drain_metrics
from .generation_engine import (
    BegunRows,
    EndedRows,
    GenerationEngine,
    Responses,
    check_logprobs,
    check_prompts,
    report_lag,
    report_responses,
    to_rollout,
)
from .sampling import SampleStreams


class Generates:
    """The calls of a policy that sample, over the engine that `generating` gives."""

    unfinished = Unfinished
    context: WorkerContext
    metrics: dict[str, Metric]

    def generating(self) -> GenerationEngine:
        """The engine; raises `ConfigError` if there is none."""
        raise NotImplementedError

    def generate(self, prompt: Tensor, prompt_id: Tensor, sampling: Sampling) -> Rollout:
        engine = self.generating()
        streams = self._checked_streams(engine, prompt, prompt_id, sampling)
        responses = engine.generate(prompt, streams, sampling)
        return self._answer(prompt, prompt_id, sampling, responses)

    def converse(
        self,
        prompt: Tensor,
        prompt_id: Tensor,
        agent: Agent,
        sampling: Sampling,
        *,
        max_turns: int = 8,
        branch: bool = False,
    ) -> Conversations:
        engine, at = self.generating(), f"'{self.context.role}.converse'"
        check_turns(at, sampling, max_turns, branch=branch)
        if self.context.tensor_parallel > 1 and not engine.shares_turns:
            raise ConfigError(
                f"{at}: {self.context.tensor_parallel} processes share the model, and "
                f"{engine.name} holds conversations in one\n    set tensor_parallel=1 for its "
                "group, or rollout=torch"
            )
        check_prompts(prompt, sampling, engine)
        engine.check(sampling)
        found = engine.turns(sampling, len(prompt) * sampling.num_samples * agent.max_pieces)
        if found is None:
            raise ConfigError(
                f"{at}: {engine.name} samples whole responses, and no turns of "
                "conversations\n    give the engine a method `turns`, or choose another: "
                "rollout=vllm"
            )
        with closing(found) as turns:
            given = turns, prompt.cpu(), prompt_id.cpu(), sampling
            hold = partial(agent.hold, *given, max_turns=max_turns, branch=branch)
            roll = engine.held(turns, hold)
            shown = turns.num_reused + turns.num_read
            if shown:
                reused = Metric.mean(float(turns.num_reused), float(shown))
                add_metrics(self.metrics, {"prefix_reused": reused})
        bad = ~roll.behavior_logprob.isfinite().all(1)
        if bool(bad.any()):
            raise WorkerError(
                f"step {current_step()}: the logits of '{self.context.role}' are not finite in "
                f"{int(bad.sum())} of {len(bad)} conversations\n    its weights have run away: go "
                "on from the last checkpoint with a lower optimizer.lr, or in dtype float32"
            )
        add_metrics(self.metrics, drain_metrics(agent))
        report_lag(self.metrics, roll)
        return roll

    def stream(self, method: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[Streamed | None]:
        """Answer calls to `generate` of one step together, each as `generate` would.

        What an answer has to report is added to the metrics right before it is given. In flight
        there are pauses between answers; see `Worker.stream` and `Worker.takes_weights`.
        """
        return self._streamed(self.generating(), method, calls, [None] * len(calls), None)

    def stream_segment(
        self,
        method: str,
        calls: Sequence[Mapping[str, Any]],
        begun: Sequence[Unfinished | None],
        length: int,
    ) -> Iterator[Streamed | None]:
        """Answer calls to `generate` of one step together, each for a segment.

        A group is returned by the call that ends its last response. What is not is `Unfinished`,
        the groups of earlier steps first; a response goes on with the random numbers of its own
        step.
        """
        return self._streamed(self.generating(), method, calls, begun, length)

    def _streamed(
        self,
        engine: GenerationEngine,
        method: str,
        calls: Sequence[Mapping[str, Any]],
        begun: Sequence[Unfinished | None],
        length: int | None,
    ) -> Iterator[Streamed | None]:
        if not calls:
            return
        sampling = self._common_sampling(method, calls)
        step, num_samples = current_step(), sampling.num_samples
        groups: list[Unfinished] = []
        for call, old in zip(calls, begun, strict=True):
            new = new_groups(call["prompt"], call["prompt_id"], step, num_samples)
            groups.append(new if old is None else joined([old, new]))
        with closing(self._sampled(engine, groups, sampling, length)) as answers:
            for found in answers:
                if found is None:
                    yield None
                    continue
                size, call, responses = found
                own = groups[call]
                if length is None:
                    answer = self._answer(own.prompt, own.prompt_id, sampling, responses)
                    yield Streamed(call, answer, size)
                    continue
                check_logprobs(responses, self.context.role)
                new_tokens = int(responses.length.sum() - num_tokens(own).sum())
                whole, left = parted(grown(own, responses, sampling))
                ended = Responses(
                    whole.response,
                    whole.behavior_logprob,
                    num_tokens(whole),
                    whole.finished,
                    whole.version,
                )
                num_samples = len(whole.ended) // max(len(whole.prompt), 1)
                prompt_id = whole.prompt_id.repeat_interleave(num_samples)
                roll = to_rollout(whole.prompt, prompt_id, ended)
                report_responses(self.metrics, ended, new_tokens)
                report_lag(self.metrics, roll)
                unfinished = Metric.sum(float(len(left.ended)))
                add_metrics(self.metrics, {"unfinished_rows": unfinished})
                yield Streamed(call, roll, size, left)

    def _sampled(
        self,
        engine: GenerationEngine,
        groups: Sequence[Unfinished],
        sampling: Sampling,
        length: int | None,
    ) -> Generator[tuple[int, int, Responses] | None]:
        """Give the answers to calls in their order: size, call and responses of each."""
        before = joined(groups)
        streams = self._checked_streams(
            engine, before.prompt, before.prompt_id, sampling, before.began
        )
        begun = None if length is None else as_begun(before, sampling, length)
        num_rows = [len(own.ended) for own in groups]
        order = OrderedAnswers(num_rows, num_tokens(before).tolist())
        bounds = list(pairwise(accumulate(num_rows, initial=0)))
        every = Responses.none_yet(sum(num_rows), sampling.max_new_tokens)
        # Calls without any row may be answered before anything has been sampled.
        nothing = EndedRows(every.length[:0], Responses.none_yet(0, sampling.max_new_tokens), 0)
        steps = engine.stream(before.prompt, streams, sampling, begun)
        try:
            for ended in chain([nothing], steps):
                ended.put_into(every)
                lengths = ended.responses.length.tolist()
                answers = order.ended(ended.rows.tolist(), lengths, ended.at_least)
                for size, call in answers:
                    yield size, call, every.rows(*bounds[call])
                if not answers and call_in_flight() and ended is not nothing:
                    yield None
            if order.num_missing:
                raise RuntimeError(
                    f"{engine.name} stopped with {order.num_missing} of {sum(num_rows)} responses "
                    "not given; its `stream` must give every one"
                )
        finally:
            if isinstance(steps, Generator):
                steps.close()  # now, not when a traceback lets go of it

    def _checked_streams(
        self,
        engine: GenerationEngine,
        prompt: Tensor,
        prompt_id: Tensor,
        sampling: Sampling,
        steps: Tensor | None = None,
    ) -> SampleStreams:
        check_prompts(prompt, sampling, engine)
        engine.check(sampling)
        seed, role = self.context.seed, self.context.role
        key = call_key(role, "generate")
        return SampleStreams(seed, role, key, prompt_id, sampling.num_samples, steps)

    def _answer(
        self, prompt: Tensor, prompt_id: Tensor, sampling: Sampling, responses: Responses
    ) -> Rollout:
        check_logprobs(responses, self.context.role)
        report_responses(self.metrics, responses, int(responses.length.sum()))
        rows = prompt_id.repeat_interleave(sampling.num_samples)
        roll = to_rollout(prompt.cpu(), rows, responses)
        report_lag(self.metrics, roll)
        return roll

    def _common_sampling(self, method: str, calls: Sequence[Mapping[str, Any]]) -> Sampling:
        role = self.context.role
        if method != "generate":
            raise ValueError(
                f"'{role}' was asked to stream its '{method}', and only 'generate' streams; make "
                "those calls one after another"
            )
        first: Sampling = calls[0]["sampling"]
        for place, call in enumerate(calls):
            if call["sampling"] != first:
                raise ValueError(
                    f"calls 0 and {place} to '{role}.generate' are to be sampled differently, "
                    f"{first} and {call['sampling']}; stream calls of one node together"
                )
        return first


def check_turns(at: str, sampling: Sampling, max_turns: int, *, branch: bool) -> None:
    """Refuse settings with which no conversation can be held."""
    if not sampling.max_total_tokens:
        raise ConfigError(
            f"{at}: sampling.max_total_tokens is 0, and a conversation needs an end\n    set it to "
            "the tokens of the longest conversation, its prompt included: task.max_total_tokens"
        )
    if sampling.stop:
        raise ConfigError(
            f"{at}: sampling.stop is {sampling.stop!r}; a turn ends with a token\n    leave it "
            "out, and give sampling.stop_token_ids if a turn is to end with more than one"
        )
    if branch and sampling.num_samples % 2:
        raise ConfigError(
            f"{at}: sampling.num_samples is {sampling.num_samples}, and conversations that branch "
            "come in pairs\n    make it even"
        )
    if max_turns < 1:
        raise ConfigError(f"{at}: max_turns is {max_turns}\n    set it to 1 or more")


def new_groups(prompt: Tensor, prompt_id: Tensor, step: int, num_samples: int) -> Unfinished:
    none = Responses.none_yet(len(prompt) * num_samples, 0)
    return Unfinished(
        prompt=prompt.cpu(),
        prompt_id=prompt_id.cpu(),
        began=torch.full((len(prompt),), step, dtype=torch.int64),
        response=none.token,
        behavior_logprob=none.logprob,
        version=none.token,
        ended=none.finished,
        finished=none.finished,
    )


def joined(parts: Sequence[Unfinished]) -> Unfinished:
    columns: dict[str, Tensor] = {}
    for field in fields(Unfinished):
        pieces: list[Tensor] = [getattr(part, field.name).cpu() for part in parts]
        if pieces[0].dim() == 2:
            width = max(piece.shape[1] for piece in pieces)
            fill = 0 if pieces[0].is_floating_point() else -1
            pieces = [pad(piece, (0, width - piece.shape[1]), value=fill) for piece in pieces]
        columns[field.name] = torch.cat(pieces)
    return Unfinished(**columns)


def num_tokens(groups: Unfinished) -> Tensor:
    return (groups.response >= 0).sum(1)


def as_begun(groups: Unfinished, sampling: Sampling, length: int) -> BegunRows:
    """Return what an engine needs to go on with groups."""
    rows, wanted = len(groups.response), len(groups.prompt) * sampling.num_samples
    longest = int(num_tokens(groups).max()) if rows else 0
    if rows != wanted or longest > sampling.max_new_tokens:
        raise ValueError(
            f"{len(groups.prompt)} groups go on with {rows} responses of up to {longest} tokens, "
            f"and are to be sampled with num_samples={sampling.num_samples} and "
            f"max_new_tokens={sampling.max_new_tokens}; let a run end its groups as it began them"
        )
    more = (0, sampling.max_new_tokens - groups.response.shape[1])
    return BegunRows(
        pad(groups.response, more, value=-1),
        pad(groups.behavior_logprob, more),
        groups.ended,
        length,
    )


def grown(groups: Unfinished, responses: Responses, sampling: Sampling) -> Unfinished:
    """Return the groups after a segment."""
    limits = [sampling.longest_response(n) for n in (groups.prompt >= 0).sum(1).tolist()]
    limit = torch.tensor(limits, dtype=torch.int64).repeat_interleave(sampling.num_samples)
    width = int(responses.length.max()) if len(limit) else 0
    token = responses.token[:, :width]
    before = pad(groups.version, (0, width - groups.version.shape[1]), value=-1)
    is_new = (token >= 0) & (before < 0)
    return Unfinished(
        prompt=groups.prompt,
        prompt_id=groups.prompt_id,
        began=groups.began,
        response=token,
        behavior_logprob=responses.logprob[:, :width],
        version=torch.where(is_new, responses.versions[:, :width], before),
        ended=groups.ended | responses.finished | (responses.length >= limit),
        finished=responses.finished,
    )


def parted(groups: Unfinished) -> tuple[Unfinished, Unfinished]:
    """Return the groups all of whose responses have ended, and the others."""
    num_samples = len(groups.ended) // max(len(groups.prompt), 1)
    whole = groups.ended.view(len(groups.prompt), num_samples).all(1)
    return _chosen(groups, whole), _chosen(groups, ~whole)


def _chosen(groups: Unfinished, kept: Tensor) -> Unfinished:
    rows = kept.repeat_interleave(len(groups.ended) // max(len(kept), 1))
    per_prompt = ("prompt", "prompt_id", "began")
    return Unfinished(
        **{
            field.name: getattr(groups, field.name)[kept if field.name in per_prompt else rows]
            for field in fields(groups)
        }
    )


class OrderedAnswers:
    """Says which calls are to be answered, given which responses have ended."""

    def __init__(self, num_rows: Sequence[int], begun: Sequence[int] | None = None) -> None:
        self._call_of = [call for call, num in enumerate(num_rows) for _ in range(num)]
        self._begun = [0] * len(self._call_of) if begun is None else begun
        self._has_ended = bytearray(len(self._call_of))
        self._missing = {call: num for call, num in enumerate(num_rows) if num}
        self._longest = [0] * len(num_rows)
        self._complete = [(0, call) for call, num in enumerate(num_rows) if not num]
        # Rows of each call, the one that had the fewest tokens last: the first to be looked at.
        bounds = pairwise(accumulate(num_rows, initial=0))
        self._by_begun = [
            sorted(range(*own), key=self._begun.__getitem__, reverse=True) for own in bounds
        ]

    @property
    def num_missing(self) -> int:
        return sum(self._missing.values())

    def ended(
        self, rows: Sequence[int], lengths: Sequence[int], at_least: int
    ) -> list[tuple[int, int]]:
        """Note that some responses have ended; none, if only `at_least` has grown."""
        for row, length in zip(rows, lengths, strict=True):
            self._end(row, length)
        first = min(((self._reached(call, at_least), call) for call in self._missing), default=None)
        answers: list[tuple[int, int]] = []
        while self._complete and (first is None or self._complete[0] < first):
            answers.append(heapq.heappop(self._complete))
        return answers

    def _reached(self, call: int, at_least: int) -> int:
        rows = self._by_begun[call]
        while self._has_ended[rows[-1]]:
            rows.pop()
        return max(at_least - self._begun[rows[-1]], self._longest[call])

    def _end(self, row: int, length: int) -> None:
        if self._has_ended[row]:
            raise ValueError(f"response {row} ended twice; an engine gives every response once")
        self._has_ended[row] = True
        call = self._call_of[row]
        self._longest[call] = max(self._longest[call], length - self._begun[row])
        self._missing[call] -= 1
        if not self._missing[call]:
            del self._missing[call]
            heapq.heappush(self._complete, (self._longest[call], call))
