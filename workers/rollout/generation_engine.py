"""The contract of generation engines, which sample tokens for a policy, and what they give."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ...algorithms.roles.language import Turns
from ...algorithms.roles.language_tables import Rollout, Sampling
from ...dataflow.errors import WorkerError
from ...dataflow.graph.role import Metric, add_metrics
from ...dataflow.runtime.call_context import call_lag, call_version, current_step
from .sampling import SampleStreams

T = TypeVar("T")


@dataclass(frozen=True)
class EndedRows:
    """Some responses to which this call adds nothing more."""

    rows: Tensor  # i64[n]; which, ascending. None, if only `at_least` has grown
    responses: Responses  # All that was sampled of each of them, in this call and before
    at_least: int  # What every response still to come has at its end: at least so many tokens

    def put_into(self, responses: Responses) -> None:
        rows, new = self.rows, self.responses
        responses.token[rows], responses.logprob[rows] = new.token, new.logprob
        responses.length[rows], responses.finished[rows] = new.length, new.finished
        responses.versions[rows] = new.versions


def collected(steps: Iterable[EndedRows], num_rows: int, max_new: int) -> Responses:
    """All responses, in the order of their rows, once the last has ended."""
    responses = Responses.none_yet(num_rows, max_new)
    for ended in steps:
        ended.put_into(responses)
    return responses


@dataclass(frozen=True)
class BegunRows:
    """Tokens of responses that earlier calls have sampled, and the limit of this one."""

    token: Tensor  # i64[rows, max_new]; -1 after what there is
    logprob: Tensor  # f32[rows, max_new]; 0 after it
    ended: Tensor  # bool[rows]; nothing more is sampled of these
    # Tokens by which this call may lengthen a response: the same for all, or i64[rows].
    most_new: int | Tensor


@dataclass(frozen=True)
class Responses:
    """Responses that were sampled for some rows."""

    token: Tensor  # i64[rows, max_new]; -1 after the end
    logprob: Tensor  # f32[rows, max_new]; 0 after the end
    length: Tensor  # i64[rows]; tokens sampled, the end-of-sequence token included
    finished: Tensor  # bool[rows]; True if a token ended it as `Sampling` says
    # i64[rows, max_new]; of the weights that sampled each token, -1 after the end. None if all are
    # of the weights with which the call being served is made.
    version: Tensor | None = None

    @staticmethod
    def none_yet(num_rows: int, max_new: int) -> Responses:
        """Responses without any token, on the CPU."""
        length = torch.zeros(num_rows, dtype=torch.int64)
        token = torch.full((num_rows, max_new), -1, dtype=torch.int64)
        logprob = torch.zeros(num_rows, max_new)
        return Responses(token, logprob, length, length.bool(), token.clone())

    def rows(self, begin: int, end: int) -> Responses:
        own = slice(begin, end)
        return Responses(
            self.token[own].clone(),
            self.logprob[own].clone(),
            self.length[own].clone(),
            self.finished[own].clone(),
            self.versions[own].clone(),
        )

    @property
    def versions(self) -> Tensor:
        """`version`, whether or not it is said: i64[rows, max_new]."""
        if self.version is not None:
            return self.version
        return torch.where(self.token >= 0, call_version(), -1)


def check_prompts(prompt: Tensor, sampling: Sampling, engine: GenerationEngine) -> None:
    """Require prompts that a model can answer."""
    if not len(prompt):
        return
    num_positions, vocab_size = engine.num_positions, engine.vocab_size
    lengths = (prompt >= 0).sum(1)
    if int(lengths.min()) == 0:
        raise ValueError(f"prompt row {int(lengths.argmin())} is empty; drop it before generating")
    longest = int(lengths.max())
    if sampling.longest_response(longest) < 1:
        raise ValueError(
            f"prompt row {int(lengths.argmax())} has {longest} tokens, so with max_total_tokens="
            f"{sampling.max_total_tokens} none are left for a response. Drop long prompts or raise "
            "max_total_tokens"
        )
    most = max(n + sampling.longest_response(n) for n in lengths.unique().tolist())
    if num_positions is not None and most > num_positions:
        raise ValueError(
            f"prompt row {int(lengths.argmax())} has {longest} tokens; with "
            f"max_new_tokens={sampling.max_new_tokens} that exceeds the model's {num_positions} "
            "positions. Drop long prompts or lower max_new_tokens"
        )
    if int(prompt.max()) >= vocab_size:
        row = int(prompt.max(1).values.argmax())
        raise ValueError(
            f"prompt row {row} has token {int(prompt.max())}, but the model's vocabulary has "
            f"{vocab_size}; prompts and model need the same tokenizer"
        )
    unknown = max(sampling.stop_token_ids, default=0)
    if unknown >= vocab_size:
        raise ValueError(
            f"stop_token_ids has {unknown}, but the model's vocabulary has {vocab_size}; give ids "
            "of the model's own tokens"
        )


def check_stop(sampling: Sampling, *, has_tokenizer: bool) -> None:
    """Require a tokenizer where stop strings are asked for."""
    if sampling.stop and not has_tokenizer:
        raise ValueError(
            f"stop is {sampling.stop!r}, and stop strings are looked for in text, but the policy's "
            "spec has no tokenizer; give it tokenizer=, or use stop_token_ids"
        )


def check_logprobs(responses: Responses, role: str) -> None:
    """Require that tokens were sampled from distributions."""
    bad = ~responses.logprob.isfinite()
    if bool(bad.any()):
        rows = int(bad.any(dim=1).sum())
        raise WorkerError(
            f"step {current_step()}: the logits of '{role}' are not finite in {rows} of {len(bad)} "
            "responses\n    its weights have run away: go on from the last checkpoint with a lower "
            "optimizer.lr, or in dtype float32"
        )


def to_rollout(prompt: Tensor, prompt_id: Tensor, responses: Responses) -> Rollout:
    """Prompts and responses as whole sequences, padded on the right."""
    num_samples = len(prompt_id) // max(len(prompt), 1)
    before = (prompt >= 0).sum(1).repeat_interleave(num_samples)[:, None]
    after = before + responses.length[:, None]
    width = int(after.max()) if len(after) else 0
    place = torch.arange(width).expand(len(prompt_id), -1)
    mask = (place >= before) & (place < after)
    sampled = responses.token >= 0
    tokens = torch.full(place.shape, -1, dtype=torch.int64)
    tokens[place < before] = prompt.repeat_interleave(num_samples, 0)[
        (prompt >= 0).repeat_interleave(num_samples, 0)
    ]
    tokens[mask] = responses.token[sampled]
    logprob = torch.zeros(place.shape, dtype=torch.float32)
    logprob[mask] = responses.logprob[sampled]
    of_token = torch.where(tokens >= 0, 0, -1)
    of_token[mask] = responses.versions[sampled]
    return Rollout(
        prompt_id=prompt_id.cpu(),
        tokens=tokens,
        mask=mask,
        behavior_logprob=logprob,
        finished=responses.finished,
        version=of_token,
    )


def report_responses(metrics: dict[str, Metric], responses: Responses, new_tokens: int) -> None:
    """Add lengths and truncation to a worker's metrics."""
    rows = float(len(responses.length))
    values: dict[str, Metric] = {}
    if rows or new_tokens:
        values["new_tokens"] = Metric.sum(float(new_tokens))
    if rows:
        values |= {
            "response_length": Metric.mean(float(responses.length.sum()), rows),
            "response_length_min": Metric(float(responses.length.min()), 1.0, "min"),
            "response_length_max": Metric(float(responses.length.max()), 1.0, "max"),
            "truncated": Metric.mean(rows - float(responses.finished.sum()), rows),
        }
    add_metrics(metrics, values)


def report_lag(metrics: dict[str, Metric], roll: Rollout) -> None:
    """Add by how many versions tokens are older than weights that had waited for nothing.

    Those are the weights that are current at the call's own line of the step.
    """
    age = call_version() + call_lag() - roll.version[roll.mask]
    if not len(age):
        return
    values = {
        "token_lag": Metric.mean(float(age.sum()), float(len(age))),
        "token_lag_max": Metric(float(age.max()), 1.0, "max"),
    }
    add_metrics(metrics, values)


class GenerationEngine(ABC):
    """Samples responses from a language model in this process.

    Attributes:
        name: For messages: "vLLM".
        dtype: Data type of the weights: "float32" or "bfloat16".
        vocab_size: Tokens that the model knows.
        shapes: Parameter -> its shape, by Hugging Face name; tied weights appear once.
        num_positions: The longest sequence, prompt and response; None if unknown.
        takes_weights: `load` may be called while a stream is open, between two of what it gives.
            What there is of a response stays, with its keys and values; what is sampled from there
            on is sampled from the new weights, and of `call_version`.
        drops_weights: It can sleep without its weights: `sleep_empty`.
        shares_turns: Its `held` knows what to do where several processes share a model.
    """

    name: str
    dtype: str
    vocab_size: int
    shapes: Mapping[str, torch.Size]
    num_positions: int | None
    takes_weights: bool = False
    drops_weights: bool = False
    shares_turns: bool = False

    def check(self, sampling: Sampling) -> None:
        """Refuse what this engine would do otherwise than asked.

        Raises:
            ValueError: Saying what, and what to ask for instead.
        """

    def generate(self, prompt: Tensor, streams: SampleStreams, sampling: Sampling) -> Responses:
        """Sample responses; on the CPU, the samples of a prompt adjacent."""
        steps = self.stream(prompt, streams, sampling)
        return collected(steps, len(prompt) * sampling.num_samples, sampling.max_new_tokens)

    @abstractmethod
    def stream(
        self,
        prompt: Tensor,
        streams: SampleStreams,
        sampling: Sampling,
        begun: BegunRows | None = None,
    ) -> Iterator[EndedRows]:
        """Sample responses, and give each as soon as it has ended.

        A response depends on its prompt, its stream and the weights, not on the other rows. Every
        row is given once. Rows that are not given yet are given up if the caller stops. In
        flight (`call_in_flight`) something is given after every token, be it no row.

        Args:
            prompt: i64[P, T], right padded with -1, checked.
            streams: The random numbers of each of the P * num_samples responses.
            sampling: How responses are sampled.
            begun: What there is of them already; nothing by default. Token t of a response has the
                same random number in whatever call it is sampled, if the engine takes `uniforms`;
                one with random numbers of its own begins them anew, at a seed of that length.
        """

    def turns(self, sampling: Sampling, num_rows: int) -> Turns | None:
        """Begin to sample turns of so many conversations; checked, and closed by the caller.

        None, the default, if the engine samples whole responses only.

        Raises:
            ConfigError: If it cannot for this model.
        """
        return None

    def held(self, turns: Turns, hold: Callable[[], T]) -> T:
        """Have conversations held, and return what comes of them.

        Where several processes share the model, the first calls `hold`. The others sample with it
        what it asks of its `turns`, and return the same.
        """
        return hold()

    @abstractmethod
    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Replace all weights; what was computed with the old ones is void."""

    def sleep(self) -> int:
        """Give device memory to others until `wake`; nothing to do if it sleeps.

        Returns:
            Bytes given back.
        """
        return 0

    def sleep_empty(self) -> int:
        """Sleep without weights: after `wake` it has none until `load`; see `drops_weights`."""
        raise NotImplementedError

    def wake(self) -> None:
        """Take the memory back; nothing to do if it is awake."""

    def close(self) -> None:
        """End the engine; nothing is asked of it afterwards."""
