"""From prompts to a `Rollout` table: what every engine that generates does before and after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...algorithms.roles.language_tables import Rollout, Sampling
from ...dataflow.errors import WorkerError
from ...dataflow.runtime.call_context import call_version, current_step


@dataclass(frozen=True)
class EndedRows:
    """Some responses to which this call adds nothing more."""

    rows: Tensor  # i64[n]; which, ascending. None, if only `at_least` has grown
    responses: Responses  # All that was sampled of each of them, in this call and before
    at_least: int  # What every response still to come has at its end: at least so many tokens

    def put_into(self, responses: Responses) -> None:
        """Fill these rows in where those of all rows are."""
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

    @property
    def versions(self) -> Tensor:
        """`version`, whether or not it is said: i64[rows, max_new]."""
        if self.version is not None:
            return self.version
        return torch.where(self.token >= 0, call_version(), -1)


def check_prompts(
    prompt: Tensor, sampling: Sampling, *, num_positions: int | None, vocab_size: int
) -> None:
    """Require prompts that a model can answer."""
    if not len(prompt):
        return
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
