"""A policy's calls to `generate`, answered one at a time, or several together as responses end."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...algorithms.roles.language import Rollout, Sampling
from ...dataflow.graph.role import Metric
from ...dataflow.runtime.call_context import call_key
from ...dataflow.runtime.worker_protocol import Streamed, WorkerContext
from .ended import Ended
from .generation_engine import GenerationEngine
from .ordered_answers import OrderedAnswers
from .responses import Responses, check_logprobs, check_prompts, report_responses, to_rollout
from .sampling import SampleStreams

__all__ = ["sample", "sample_streamed"]


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
) -> Iterator[Streamed]:
    """Answer calls to `generate` of one step together, each as `sample` would; see `Streams`.

    What an answer has to report is added to the metrics right before it is given.

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
    if method != "generate":
        raise ValueError(
            f"'{context.role}' was asked to stream its '{method}', and only 'generate' streams; "
            "make those calls one after another"
        )
    if not calls:
        return
    sampling = _common_sampling(calls, context.role)
    prompts: list[Tensor] = [call["prompt"] for call in calls]
    prompt_ids: list[Tensor] = [call["prompt_id"] for call in calls]
    width = max(prompt.shape[1] for prompt in prompts)
    joined = torch.cat([pad(one, (0, width - one.shape[1]), value=-1) for one in prompts])
    streams = _checked_streams(engine, context, joined, torch.cat(prompt_ids), sampling)
    steps = engine.stream(joined, streams, sampling)
    num_rows = [len(prompt) * sampling.num_samples for prompt in prompts]
    try:
        for size, call, responses in _completed(steps, num_rows, sampling.max_new_tokens, engine):
            answer = _answer(context, prompts[call], prompt_ids[call], sampling, responses, metrics)
            yield Streamed(call, answer, size)
    finally:
        if isinstance(steps, Generator):
            steps.close()  # now, not when a traceback lets go of it


def _completed(
    steps: Iterator[Ended], num_rows: Sequence[int], max_new: int, engine: GenerationEngine
) -> Iterator[tuple[int, int, Responses]]:
    """Size, call and responses of each call, in the order of answers, as soon as that is known.

    Args:
        steps: What the engine tells.
        num_rows: Responses of each call.
        max_new: Longest response.
        engine: For a message.
    """
    order = OrderedAnswers(num_rows)
    bounds = list(pairwise(accumulate(num_rows, initial=0)))
    every = Responses.none_yet(sum(num_rows), max_new)
    # Calls without any row may be answered before anything has been sampled.
    nothing = Ended(every.length[:0], Responses.none_yet(0, max_new), 0)
    for ended in chain([nothing], steps):
        ended.put_into(every)
        lengths = ended.responses.length.tolist()
        for size, call in order.ended(ended.rows.tolist(), lengths, ended.at_least):
            yield size, call, _rows_of(every, *bounds[call])
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
    )


def _checked_streams(
    engine: GenerationEngine,
    context: WorkerContext,
    prompt: Tensor,
    prompt_id: Tensor,
    sampling: Sampling,
) -> SampleStreams:
    """The random numbers of the call that is served, which the engine can serve."""
    check_prompts(
        prompt, sampling, num_positions=engine.num_positions, vocab_size=engine.vocab_size
    )
    engine.check(sampling)
    key = call_key(context.role, "generate")
    return SampleStreams(context.seed, context.role, key, prompt_id, sampling.num_samples)


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
    report_responses(metrics, responses)
    return to_rollout(prompt.cpu(), prompt_id.repeat_interleave(sampling.num_samples), responses)


def _common_sampling(calls: Sequence[Mapping[str, Any]], role: str) -> Sampling:
    """How all of the calls are to be sampled.

    Raises:
        ValueError: If they differ in that.
    """
    first: Sampling = calls[0]["sampling"]
    for place, call in enumerate(calls):
        if call["sampling"] != first:
            raise ValueError(
                f"calls 0 and {place} to '{role}.generate' are to be sampled differently, {first} "
                f"and {call['sampling']}; stream calls of one node together"
            )
    return first
