"""Step index to table: the prompts, demonstrations or preference pairs of one step.

A source is a pure function of (seed, step). It has no position to save: a resumed run asks for the
step it stopped at. Every epoch visits the problems in its own seeded order; the remainder that does
not fill a batch is left out of that epoch, so no problem stands twice in one step.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...algorithms.roles.language import Demonstrations, PreferencePairs, Prompts, ScoredPairs
from ...dataflow.errors import ConfigError, one_process
from ..models.tokenizer import Tokenizer, pad_rows
from .row_report import DataReport
from .synthetic_negatives import wrong_answer
from .task import ScoresPairs, Task

__all__ = [
    "DemonstrationSource",
    "PairSource",
    "PromptSource",
    "ScoredPairSource",
    "epoch_order",
]


@lru_cache(maxsize=8)
def epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which an epoch visits `num_rows` rows: a permutation, the same on every machine.

    Rows are sorted by one raw Philox number each (key `seed`, counter `epoch`). Raw Philox output
    is fixed for good, whereas numpy may change how its generators shuffle.

    Returns:
        i64[num_rows], read-only.
    """
    bits = np.random.Philox(key=seed % 2**64, counter=[0, 0, 0, epoch])
    order = np.argsort(bits.random_raw(num_rows), kind="stable")
    order.setflags(write=False)
    return order


class _Rows:
    """Which problems a step uses; shared by the three kinds of source."""

    def __init__(
        self, what: str, problems: Sequence[int], *, batch_size: int, seed: int, task: Task
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}\n    use at least 1 {what} per step")
        if batch_size > len(problems):
            raise ConfigError(
                f"batch_size is {batch_size} {what}s per step, but task '{task.task_id}' has only "
                f"{len(problems)}\n    use batch_size <= {len(problems)} (a stage's `per_step` "
                "key), or more problems"
            )
        self._problems = np.asarray(problems, dtype=np.int64)
        self._batch_size = batch_size
        self._seed = seed

    @property
    def steps_per_epoch(self) -> int:
        return len(self._problems) // self._batch_size

    def at(self, step: int) -> list[int]:
        """Problem indices of a step, all different."""
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        epoch, batch = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self._problems), self._seed, epoch)
        chosen = order[batch * self._batch_size : (batch + 1) * self._batch_size]
        return self._problems[chosen].tolist()


class PromptSource:
    """Prompts to generate from.

    Args:
        task: The problems.
        tokenizer: Encodes the prompts.
        batch_size: Prompts per step.
        seed: Seed of the order of the problems.
        max_prompt_tokens: Longer prompts are reported and left out; None for no limit.
        max_bad_fraction: Largest share of prompts that may be left out.

    Attributes:
        report: Prompts kept and left out, training and held-out ones together.

    Raises:
        ConfigError: If too many prompts are left out, or fewer are left than `batch_size`.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seed: int,
        max_prompt_tokens: int | None = None,
        max_bad_fraction: float = 0.1,
    ) -> None:
        self.report = DataReport(f"prompts of task '{task.task_id}'")
        reader = _Reader(task, tokenizer, self.report, max_prompt_tokens)
        self._prompts = reader.prompts([*task.train, *task.held_out])
        self.report.check(max_bad_fraction)
        train = [index for index in task.train if index in self._prompts]
        self._held_out = [index for index in task.held_out if index in self._prompts]
        self._rows = _Rows("prompt", train, batch_size=batch_size, seed=seed, task=task)
        self._task = task

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every problem has been used, but for a remainder below one batch."""
        return self._rows.steps_per_epoch

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, held-out ones included."""
        return max(map(len, self._prompts.values()))

    def batch(self, step: int) -> Prompts:
        """The prompts of a step; `prompt_id` is the problem's index in the task."""
        return self.asked(self._rows.at(step))

    def held_out(self, num_prompts: int | None = None) -> Prompts:
        """The first `num_prompts` held-out prompts, or all of them: for evaluation.

        Raises:
            ConfigError: If there are fewer.
        """
        wanted = len(self._held_out) if num_prompts is None else num_prompts
        if not 0 < wanted <= len(self._held_out):
            raise ConfigError(
                f"{wanted} held-out prompts are asked for, but task '{self._task.task_id}' holds "
                f"out {len(self._held_out)}\n    ask for 1 to {len(self._held_out)}, or hold out "
                "more (num_held_out)"
            )
        return self.asked(self._held_out[:wanted])

    def usable(self, problems: Iterable[int]) -> list[int]:
        """Those of these problems whose prompts were not left out, in the same order."""
        return [index for index in problems if index in self._prompts]

    def asked(self, problems: Sequence[int]) -> Prompts:
        """The prompts of some usable problems."""
        return Prompts(
            prompt=pad_rows(self._prompts[index] for index in problems),
            prompt_id=torch.tensor(problems, dtype=torch.int64),
        )


class DemonstrationSource:
    """Prompts with the task's own answers, for supervised fine-tuning.

    Arguments as for `PromptSource`; `max_response_tokens` limits the answer with its
    end-of-sequence token in the same way.

    Raises:
        ConfigError: As `PromptSource`, and if the task has no answers.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seed: int,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
        max_bad_fraction: float = 0.1,
    ) -> None:
        self.report = DataReport(f"demonstrations of task '{task.task_id}'")
        _need_answers(task, "demonstrations")
        reader = _Reader(task, tokenizer, self.report, max_prompt_tokens, max_response_tokens)
        answer_of = one_process()(task.answer_text)
        answers = {index: (answer_of(index),) for index in task.train}
        self._rows_of = reader.with_responses(answers)
        self.report.check(max_bad_fraction)
        self._rows = _Rows(
            "demonstration", list(self._rows_of), batch_size=batch_size, seed=seed, task=task
        )

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every problem has been used, but for a remainder below one batch."""
        return self._rows.steps_per_epoch

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer."""
        return _longest(self._rows_of)

    def batch(self, step: int) -> Demonstrations:
        """The demonstrations of a step; the mask is True on the answer and its end of sequence."""
        rows = [
            (prompt, answer)
            for prompt, (answer,) in (self._rows_of[index] for index in self._rows.at(step))
        ]
        tokens, mask = _sequences(rows)
        return Demonstrations(tokens=tokens, mask=mask)


class PairSource:
    """Pairs of a better and a worse response, for reward modelling.

    Explicit pairs are used if the task has them. Otherwise the better response is the task's answer
    and the worse one a wrong answer made from it, another one in every epoch.

    Arguments as for `DemonstrationSource`; `batch_size` counts pairs.

    Raises:
        ConfigError: As `DemonstrationSource`.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        seed: int,
        max_prompt_tokens: int | None = None,
        max_response_tokens: int | None = None,
        max_bad_fraction: float = 0.1,
    ) -> None:
        self.report = DataReport(f"preference pairs of task '{task.task_id}'")
        with one_process():
            self._explicit = task.pair_texts(task.train[0]) is not None
        if not self._explicit:
            _need_answers(task, "preference pairs")
        self._task, self._tokenizer, self._seed = task, tokenizer, seed
        self._max_response_tokens = max_response_tokens
        reader = _Reader(task, tokenizer, self.report, max_prompt_tokens, max_response_tokens)
        self._rows_of = reader.with_responses({index: self._given(index) for index in task.train})
        self.report.check(max_bad_fraction)
        self._rows = _Rows(
            "preference pair", list(self._rows_of), batch_size=batch_size, seed=seed, task=task
        )

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every problem has been used, but for a remainder below one batch."""
        return self._rows.steps_per_epoch

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response; made-up responses do not count."""
        return _longest(self._rows_of)

    def batch(self, step: int) -> PreferencePairs:
        """The pairs of a step: two rows each, the better one first; `pair_id` is the problem."""
        problems = self._rows.at(step)
        epoch = step // self.steps_per_epoch
        rows: list[tuple[list[int], list[int]]] = []
        for index in problems:
            prompt, responses = self._rows_of[index]
            worse = responses[1] if self._explicit else self._made_up(index, epoch)
            rows += [(prompt, responses[0]), (prompt, worse)]
        tokens, mask = _sequences(rows)
        return PreferencePairs(
            pair_id=torch.tensor(problems, dtype=torch.int64).repeat_interleave(2),
            tokens=tokens,
            mask=mask,
            chosen=torch.tensor([True, False] * len(problems)),
        )

    @one_process()
    def _given(self, index: int) -> tuple[str | None, ...]:
        pair = self._task.pair_texts(index)
        # An empty answer counts as missing: nothing could be wrong about it.
        return (self._task.answer_text(index) or None,) if pair is None else pair

    def _made_up(self, index: int, epoch: int) -> list[int]:
        return [*self._tokenizer.encode(self._made_up_text(index, epoch)), self._tokenizer.eos_id]

    @one_process()
    def _made_up_text(self, index: int, epoch: int) -> str:
        rng = random.Random(f"{self._seed}/{epoch}/{index}")
        answer = self._task.answer_text(index) or ""
        other = self._task.answer_text(rng.choice(self._task.train)) or ""
        return wrong_answer(answer, other, rng, lambda made: self._is_wrong(index, made))

    @one_process()
    def _is_wrong(self, index: int, text: str) -> bool:
        """Whether a made-up answer can stand as the worse one."""
        if self._tokenizer.inexpressible(text):
            return False
        limit = self._max_response_tokens
        if limit is not None and len(self._tokenizer.encode(text)) >= limit:
            return False
        if self._task.verifier is not None:
            return True  # too expensive to ask; it differs from the answer, which must do
        try:
            return self._task.score(index, text) < self._task.correct_score
        except Exception:  # as in a reward: what the verifier cannot read is not right
            return True


class ScoredPairSource(PairSource):
    """Pairs with a score for each response: the task's own, the verifier's, or else 1 and 0.

    Arguments as for `PairSource`.
    """

    def batch(self, step: int) -> ScoredPairs:
        """As `PairSource.batch`, with scores."""
        pairs = super().batch(step)
        epoch = step // self.steps_per_epoch
        scores = [
            score for index in pairs.pair_id[::2].tolist() for score in self._scores(index, epoch)
        ]
        return ScoredPairs(**vars(pairs), score=torch.tensor(scores, dtype=torch.float32))

    @one_process()
    def _scores(self, index: int, epoch: int) -> tuple[float, float]:
        given = self._task.pair_scores(index) if isinstance(self._task, ScoresPairs) else None
        if given is not None:
            return given
        if self._explicit or self._task.verifier is not None:
            return 1.0, 0.0
        try:
            worse = self._task.score(index, self._made_up_text(index, epoch))
        except Exception:  # as in a reward: what the verifier cannot read is not right
            worse = 0.0
        return self._task.correct_score, worse


class _Reader:
    """Encodes problems, and reports those that are too long or cannot be expressed."""

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        report: DataReport,
        max_prompt_tokens: int | None,
        max_response_tokens: int | None = None,
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._report = report
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens

    def prompts(self, indices: Sequence[int]) -> dict[int, list[int]]:
        """Index -> ids of the prompts that can be used, in order."""
        usable = self._encoded_prompts(indices)
        self._report.keep(len(usable))
        return usable

    def with_responses(
        self, responses: dict[int, tuple[str | None, ...]]
    ) -> dict[int, tuple[list[int], list[list[int]]]]:
        """Index -> ids of the prompt, and of each response with its end of sequence."""
        kept: dict[int, tuple[list[int], list[list[int]]]] = {}
        for index, prompt in self._encoded_prompts(list(responses)).items():
            encoded = [self._response(index, text) for text in responses[index]]
            whole = [ids for ids in encoded if ids is not None]
            if len(whole) == len(encoded):
                kept[index] = (prompt, whole)
        self._report.keep(len(kept))
        return kept

    def _encoded_prompts(self, indices: Sequence[int]) -> dict[int, list[int]]:
        text_of = one_process()(self._task.prompt_text)
        texts = [text_of(index) for index in indices]
        encoded = self._tokenizer.encode_many(texts)
        usable: dict[int, list[int]] = {}
        for index, text, ids in zip(indices, texts, encoded, strict=True):
            if self._is_usable(index, "prompt", text, len(ids), self._max_prompt_tokens):
                usable[index] = ids
        return usable

    def _response(self, index: int, text: str | None) -> list[int] | None:
        if text is None:
            self._report.reject(self._task.where(index), "missing answer")
            return None
        ids = [*self._tokenizer.encode(text), self._tokenizer.eos_id]
        usable = self._is_usable(index, "response", text, len(ids), self._max_response_tokens)
        return ids if usable else None

    @one_process()
    def _is_usable(
        self, index: int, what: str, text: str, num_tokens: int, limit: int | None
    ) -> bool:
        where = self._task.where(index)
        if what == "prompt" and num_tokens == 0:
            self._report.reject(where, "empty prompt", "it has no tokens")
        elif limit is not None and num_tokens > limit:
            self._report.reject(where, f"over-long {what}", f"{num_tokens} tokens, limit {limit}")
        elif unknown := self._tokenizer.inexpressible(text):
            self._report.reject(
                where, f"{what} outside the alphabet", f"the tokenizer cannot express {unknown!r}"
            )
        else:
            return True
        return False


def _need_answers(task: Task, what: str) -> None:
    answer_of = one_process()(task.answer_text)
    if all(answer_of(index) is None for index in task.train):
        raise ConfigError(
            f"task '{task.task_id}' has no answers to make {what} of\n"
            "    choose another task, or give a file with answers or responses"
        )


def _longest(rows: Mapping[int, tuple[list[int], list[list[int]]]]) -> int:
    return max(len(prompt) + max(map(len, responses)) for prompt, responses in rows.values())


def _sequences(rows: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    tokens = pad_rows([*prompt, *response] for prompt, response in rows)
    position = torch.arange(tokens.shape[1])
    start = torch.tensor([len(prompt) for prompt, _ in rows]).unsqueeze(1)
    return tokens, (position >= start) & (tokens >= 0)
