"""A policy's calls to `generate`, answered one at a time, or several together as responses end."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import accumulate, chain, pairwise
from typing import Any

from torch import Tensor

from ...algorithms.roles.language import Rollout, Sampling, Unfinished
from ...dataflow.graph.role import Metric, add_metrics
from ...dataflow.runtime.call_context import call_in_flight, call_key, current_step
from ...dataflow.runtime.worker_protocol import Streamed, WorkerContext
from .ended import Ended
from .generation_engine import GenerationEngine
from .ordered_answers import OrderedAnswers
from .reports import report_lag, report_responses
from .responses import Responses, check_logprobs, check_prompts, to_rollout
from .sampling import SampleStreams
from .segments import as_begun, as_rollout, grown, joined, new_groups, num_tokens, parted


def sample(
    engine: GenerationEngine,
    context: WorkerContext,
    prompt: Tensor,
    prompt_id: Tensor,
    sampling: Sampling,
    metrics: dict[str, Metric],
) -> Rollout:
    """Answer a role's call to `generate`.

    Args:
        engine: Samples the tokens.
        context: The role, and the run's seed.
        prompt: i64[P, T], right padded with -1.
        prompt_id: i64[P].
        sampling: How many responses, how long, how hot.
        metrics: Lengths and truncation are added to it.

    Returns:
        Rows of one prompt are adjacent, in the order of the prompts.

    Raises:
        ValueError: If a prompt cannot be answered, or the engine cannot sample so.
        WorkerError: If the model's logits are not finite.
    """
    streams = _checked_streams(engine, context, prompt, prompt_id, sampling)
    responses = engine.generate(prompt, streams, sampling)
    return _answer(context, prompt, prompt_id, sampling, responses, metrics)


def sample_streamed(
    engine: GenerationEngine,
    context: WorkerContext,
    method: str,
    calls: Sequence[Mapping[str, Any]],
    metrics: dict[str, Metric],
) -> Iterator[Streamed | None]:
    """Answer calls to `generate` of one step together, each as `sample` would; see `Streams`.

    What an answer has to report is added to the metrics right before it is given. In flight there
    are pauses between answers; see `TakesWeights`.

    Args:
        engine: Samples the tokens.
        context: The role, and the run's seed.
        method: "generate".
        calls: `prompt`, `prompt_id` and `sampling` of each; prompts may differ in width.
        metrics: Lengths and truncation are added to it.

    Raises:
        ValueError: If another method is asked for, calls are to be sampled differently, a prompt
            cannot be answered, or the engine cannot sample so.
        WorkerError: If the model's logits are not finite.
        RuntimeError: If the engine stops before all responses have ended.
    """
    if not calls:
        return
    sampling = _common_sampling(method, calls, context.role)
    groups = [_begun_now(call) for call in calls]
    with closing(_sampled(engine, context, groups, sampling, None)) as answers:
        for found in answers:
            if found is None:
                yield None
                continue
            size, call, responses = found
            own = groups[call]
            answer = _answer(context, own.prompt, own.prompt_id, sampling, responses, metrics)
            yield Streamed(call, answer, size)


def sample_segment(
    engine: GenerationEngine,
    context: WorkerContext,
    method: str,
    calls: Sequence[Mapping[str, Any]],
    begun: Sequence[Unfinished | None],
    length: int,
    metrics: dict[str, Metric],
) -> Iterator[Streamed | None]:
    """Answer calls to `generate` of one step together, each for a segment; see `Continues`.

    A group is returned by the call that ends its last response. What is not is `Unfinished`, the
    groups of earlier steps first; a response goes on with the random numbers of its own step.

    Args:
        engine: Samples the tokens.
        context: The role, and the run's seed.
        method: "generate".
        calls: `prompt`, `prompt_id` and `sampling` of each; prompts may differ in width.
        begun: What each has left unfinished in the step before; None if nothing.
        length: Tokens by which a response may grow.
        metrics: As `sample_streamed`, of what is returned; `new_tokens` are the segment's, and
            `unfinished_rows` are the responses that are not returned.

    Raises:
        ValueError: As `sample_streamed`; also if groups were begun with other numbers of samples or
            longer responses.
        WorkerError: If the model's logits are not finite.
        RuntimeError: If the engine does not give all responses.
    """
    if not calls:
        return
    sampling = _common_sampling(method, calls, context.role)
    groups = [
        _begun_now(call) if old is None else joined([old, _begun_now(call)])
        for call, old in zip(calls, begun, strict=True)
    ]
    with closing(_sampled(engine, context, groups, sampling, length)) as answers:
        for found in answers:
            if found is None:
                yield None
                continue
            size, call, responses = found
            check_logprobs(responses, context.role)
            new_tokens = int(responses.length.sum() - num_tokens(groups[call]).sum())
            whole, left = parted(grown(groups[call], responses, sampling))
            roll, ended = as_rollout(whole)
            report_responses(metrics, ended, new_tokens)
            report_lag(metrics, roll)
            add_metrics(metrics, {"unfinished_rows": Metric.sum(float(len(left.ended)))})
            yield Streamed(call, roll, size, left)


def _begun_now(call: Mapping[str, Any]) -> Unfinished:
    """The groups of a call's own prompts, without any token."""
    num_samples = call["sampling"].num_samples
    return new_groups(call["prompt"], call["prompt_id"], current_step(), num_samples)


def _sampled(
    engine: GenerationEngine,
    context: WorkerContext,
    groups: Sequence[Unfinished],
    sampling: Sampling,
    length: int | None,
) -> Generator[tuple[int, int, Responses] | None]:
    """Size, call and responses of each call, in the order of answers; None where there is a pause.

    Args:
        engine: Samples the tokens.
        context: The role, and the run's seed.
        groups: Those of each call.
        sampling: How they are sampled.
        length: Tokens by which a response may grow; None for as many as it takes.
    """
    every = joined(groups)
    ids, began = every.prompt_id, every.began
    streams = _checked_streams(engine, context, every.prompt, ids, sampling, began)
    begun = None if length is None else as_begun(every, sampling, length)
    num_rows = [len(own.ended) for own in groups]
    steps = engine.stream(every.prompt, streams, sampling, begun)
    try:
        yield from _completed(steps, num_rows, every, sampling, engine)
    finally:
        if isinstance(steps, Generator):
            steps.close()  # now, not when a traceback lets go of it


def _completed(
    steps: Iterator[Ended],
    num_rows: Sequence[int],
    before: Unfinished,
    sampling: Sampling,
    engine: GenerationEngine,
) -> Iterator[tuple[int, int, Responses] | None]:
    """Size, call and responses of each call, in the order of answers, as soon as that is known.

    In flight there is None wherever nothing is to be answered though the engine told something.

    Args:
        steps: What the engine tells.
        num_rows: Responses of each call.
        before: What there is of them.
        sampling: How they are sampled.
        engine: For a message.
    """
    order = OrderedAnswers(num_rows, num_tokens(before).tolist())
    bounds = list(pairwise(accumulate(num_rows, initial=0)))
    every = Responses.none_yet(sum(num_rows), sampling.max_new_tokens)
    # Calls without any row may be answered before anything has been sampled.
    nothing = Ended(every.length[:0], Responses.none_yet(0, sampling.max_new_tokens), 0)
    for ended in chain([nothing], steps):
        ended.put_into(every)
        lengths = ended.responses.length.tolist()
        answers = order.ended(ended.rows.tolist(), lengths, ended.at_least)
        for size, call in answers:
            yield size, call, _rows_of(every, *bounds[call])
        if not answers and call_in_flight() and ended is not nothing:
            yield None
    if order.num_missing:
        raise RuntimeError(
            f"{engine.name} stopped with {order.num_missing} of {sum(num_rows)} responses not "
            "given; its `stream` must give every one"
        )


def _rows_of(every: Responses, begin: int, end: int) -> Responses:
    """Some rows, which do not hold on to the others."""
    own = slice(begin, end)
    return Responses(
        every.token[own].clone(),
        every.logprob[own].clone(),
        every.length[own].clone(),
        every.finished[own].clone(),
        every.versions[own].clone(),
    )


def _checked_streams(
    engine: GenerationEngine,
    context: WorkerContext,
    prompt: Tensor,
    prompt_id: Tensor,
    sampling: Sampling,
    steps: Tensor | None = None,
) -> SampleStreams:
    """The random numbers of the call that is served, which the engine can serve.

    Args:
        engine: Samples the tokens.
        context: The role, and the run's seed.
        prompt: i64[P, T], right padded with -1.
        prompt_id: i64[P].
        sampling: How responses are sampled.
        steps: i64[P]; the step in which each prompt's responses began, this one by default.

    Raises:
        ValueError: If a prompt cannot be answered, or the engine cannot sample so.
    """
    check_prompts(
        prompt, sampling, num_positions=engine.num_positions, vocab_size=engine.vocab_size
    )
    engine.check(sampling)
    key = call_key(context.role, "generate")
    return SampleStreams(context.seed, context.role, key, prompt_id, sampling.num_samples, steps)


def _answer(
    context: WorkerContext,
    prompt: Tensor,
    prompt_id: Tensor,
    sampling: Sampling,
    responses: Responses,
    metrics: dict[str, Metric],
) -> Rollout:
    """What a call returns, once its responses are there; they are reported."""
    check_logprobs(responses, context.role)
    report_responses(metrics, responses, int(responses.length.sum()))
    rows = prompt_id.repeat_interleave(sampling.num_samples)
    roll = to_rollout(prompt.cpu(), rows, responses)
    report_lag(metrics, roll)
    return roll


def _common_sampling(method: str, calls: Sequence[Mapping[str, Any]], role: str) -> Sampling:
    """How all of the calls are to be sampled.

    Raises:
        ValueError: If they differ in that, or are of another method.
    """
    if method != "generate":
        raise ValueError(
            f"'{role}' was asked to stream its '{method}', and only 'generate' streams; make those "
            "calls one after another"
        )
    first: Sampling = calls[0]["sampling"]
    for place, call in enumerate(calls):
        if call["sampling"] != first:
            raise ValueError(
                f"calls 0 and {place} to '{role}.generate' are to be sampled differently, {first} "
                f"and {call['sampling']}; stream calls of one node together"
            )
    return first
