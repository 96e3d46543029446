"""The requests of one call to vLLM's engine: what is asked of it, and how far each has come.

A response that goes on is a request whose prompt ends with what there is of it: its keys and values
are computed anew, at once, as those of any prompt. vLLM counts tokens of the prompt and of the
response alike for the repetition penalty, so that one goes on as well.

New weights may come between two steps of the engine. Keys and values of what there is of a response
stay, and those of a prompt are shared among the requests of a batch, but with no batch that begins
under other weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....algorithms.roles.language_tables import Sampling
from ....dataflow.runtime.call_context import call_in_flight, call_version


@dataclass
class Sampled:
    """A response as far as it was sampled."""

    # Sampled token ids, the one that ended it included
    tokens: list[int] = field(default_factory=list[int])
    # Log-probability of each token, of the distribution it was sampled from
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])  # Of the weights that sampled each token
    finished: bool = False  # Whether an end-of-sequence token or a stop string ended it
    cached_tokens: int = 0  # Tokens of the prompt that were found in the prefix cache


@dataclass(frozen=True)
class Request:
    """One response to sample."""

    prompt: list[int]  # Token ids
    seed: int  # Seed of this response's random numbers; 63 bits
    max_new_tokens: int  # By which it may grow
    # What there is of it; new tokens are added to it
    so_far: Sampled = field(default_factory=Sampled)


@dataclass(frozen=True)
class Progress:
    """Results of one step of the engine."""

    ended: dict[int, Sampled]  # Number of the request -> its response, of those that have ended
    at_least: int  # Tokens that each of the others has, or more


class RequestBatch:
    """Requests that are sampled together.

    `completes` is given the number of a request and its next token, and says whether the response
    ends with it though the token alone does not end one: whether it completes a stop string.
    """

    def __init__(
        self,
        engine: Any,
        call: str,
        loaded: str,
        requests: Mapping[int, Request],
        sampling: Sampling,
        end_ids: Sequence[int],
        completes: Callable[[int, int], bool] | None = None,
    ) -> None:
        self._engine = engine
        self._loaded = loaded
        self._version, self._older = call_version(), list[object]()
        self._completes = completes
        self._call = call
        self._open: dict[str, int] = {}
        self._sampled: dict[int, Sampled] = {}
        self._params = _sampling_params(sampling, end_ids)
        self._min_new_tokens = sampling.min_new_tokens
        try:
            for number, request in requests.items():
                self.add(number, request)
        except BaseException:
            self.give_up()
            raise

    def __len__(self) -> int:
        return len(self._open)

    @property
    def at_least(self) -> int:
        """Tokens that each open request has, or more; 0 if there is none."""
        open_ = (len(self._sampled[number].tokens) for number in self._open.values())
        return min(open_, default=0)

    def steps(self) -> Iterator[Progress]:
        """Sample them all; to close the iterator before its end aborts what is left."""
        known = 0
        try:
            while len(self):
                ended = self.step()
                if ended or self.at_least > known or call_in_flight():
                    known = self.at_least
                    yield Progress(ended, known)
        finally:
            self.give_up()

    def step(self) -> dict[int, Sampled]:
        """Have the next tokens sampled; the requests that end with them."""
        ended: dict[int, Sampled] = {}
        if call_version() != self._version and not self._older:
            self._older = _on_their_way(self._engine)
        outputs = self._engine.step()
        version = self._version if self._older else call_version()
        for output in outputs:
            number = self._open[output.request_id]
            sampled = self._sampled[number]
            new = _append(sampled, output, version)
            if self._completes and not sampled.finished:
                # It ends with the first of its new tokens that completes a stop string.
                for place, token in enumerate(new, start=len(sampled.tokens) - len(new) + 1):
                    if self._completes(number, token):
                        del sampled.tokens[place:], sampled.logprobs[place:]
                        del sampled.versions[place:]
                        sampled.finished = True
                        self._engine.abort_request([output.request_id])
                        break
            if output.finished or sampled.finished:
                del self._open[output.request_id]
                ended[number] = sampled
        left = _on_their_way(self._engine) if self._older else []
        self._older = [batch for batch in self._older if any(batch is one for one in left)]
        self._version = version if self._older else call_version()
        return ended

    def add(self, number: int, request: Request) -> None:
        """Sample one more, under a number that no other has had."""
        name = f"{self._call}/{number}"
        self._open[name] = number
        self._sampled[number] = request.so_far
        own = self._params.clone()
        own.seed = request.seed
        own.max_tokens = request.max_new_tokens
        least = self._min_new_tokens - len(request.so_far.tokens)
        own.min_tokens = min(max(least, 0), request.max_new_tokens)
        ids = [*request.prompt, *request.so_far.tokens]
        # Keys and values that were cached under other weights must not be found.
        prompt = {"type": "token", "prompt_token_ids": ids, "cache_salt": self._loaded}
        self._engine.add_request(name, prompt, own)

    def give_up(self) -> None:
        self._engine.abort_request(list(self._open))
        self._open.clear()


def _sampling_params(sampling: Sampling, end_ids: Sequence[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        # The sampled token's log-probability alone. To pick what is new of 512 rows takes 8 ms, and
        # 25 in vLLM's flat format.
        logprobs=0,
        ignore_eos=True,  # the model's own; the caller's ends a response
        stop_token_ids=[*end_ids, *sampling.stop_token_ids],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _on_their_way(engine: Any) -> list[object]:
    """Batches that are computed ahead of what `step` has given, as vLLM does on GPUs."""
    return list(engine.engine_core.engine_core.batch_queue or ())


def _append(sampled: Sampled, output: Any, version: int) -> Sequence[int]:
    """Add what one step brought, sampled by weights of this version; returns the new tokens."""
    (part,) = output.outputs
    sampled.tokens += part.token_ids
    sampled.versions += [version] * len(part.token_ids)
    sampled.logprobs += [
        entry[token].logprob for token, entry in zip(part.token_ids, part.logprobs, strict=True)
    ]
    sampled.finished = part.finish_reason == "stop"
    sampled.cached_tokens = max(sampled.cached_tokens, output.num_cached_tokens or 0)
    return part.token_ids
