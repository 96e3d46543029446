"""Step index to table: the prompts, demonstrations or preference pairs of one step.

A source is a pure function of (seed, step). It has no position to save: a resumed run asks for the
step it stopped at. Every epoch visits the problems in its own seeded order; the remainder that does
not fill a batch is left out of that epoch, so no problem stands twice in one step.
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ...algorithms.roles.language_tables import (
    Demonstrations,
    Feedback,
    PreferencePairs,
    Prompts,
    ScoredPairs,
)
from ...dataflow.errors import ConfigError, one_process
from ..isolation.child import as_score
from ..models.tokenizer import ChatTemplateError, Tokenizer, pad_rows
from .chat import ChatOptions, Encoded, LossOn, NoPrefix, PromptEncoder, runs
from .orders import SHUFFLED, Buffers, Order, StepRows, step_rows
from .task import BadRow, DataReport, Message, Task

T = TypeVar("T")

Response = str | Sequence[Message]
"""The target of a row: a text, or the messages that follow those of the prompt."""


class TaskSource:
    """Rows of a task for each step, of which some are held out.

    Args:
        task: The problems.
        tokenizer: Encodes them.
        batch_size: Problems of a step.
        seed: Of the order of the problems.
        max_prompt_tokens: Longer prompts are reported and left out; None for no limit.
        max_response_tokens: The same of responses, with their end-of-sequence token.
        max_bad_fraction: Largest share of rows that may be left out.
        chat: How conversations are rendered.
        loss_on: Tokens of a demonstration that are imitated.
        pack_tokens: A step takes packs of rows that have so many tokens together, not single rows.
        left_out: Training problems that are not used: those that are evaluated on elsewhere.
        order: Which problems a step takes.

    Attributes:
        report: Rows kept and left out, training and held-out ones together.

    Raises:
        ConfigError: If too many rows are left out, fewer are left than `batch_size`, or the task
            has nothing to learn from.
    """

    what = "row"
    _takes_texts = False  # whether a row may be a text without a prompt

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
        chat: ChatOptions = ChatOptions(),
        left_out: Container[int] = (),
        order: Order = SHUFFLED,
        loss_on: LossOn = "response",
        pack_tokens: int | None = None,
    ) -> None:
        self._task, self._tokenizer, self._seed = task, tokenizer, seed
        self._max_prompt_tokens = max_prompt_tokens
        self._max_response_tokens = max_response_tokens
        self.report = DataReport(f"{self.what}s of task '{task.task_id}'")
        self._prompts = PromptEncoder(task, tokenizer, chat)
        self._loss_on: LossOn = loss_on
        self._pack_tokens = pack_tokens
        self._packs: dict[int, list[int]] = {}  # by their first rows
        train = [i for i in task.listed if i in task.train and i not in left_out]
        # of rows of a stream, which are not known yet
        self._longest = self._bound(train, order) if task.buffer_rows else None
        self._rows_of = self._encoded([*train, *task.held_out])
        self.report.check(max_bad_fraction)
        train, self._held_out = (
            [i for i in part if i in self._rows_of] for part in (train, task.held_out)
        )
        what = self.what if pack_tokens is None else "pack"
        self._buffers = {0: self._units(train)}
        if task.buffer_rows:
            self._rows: StepRows = Buffers(self._buffer, what, batch_size, seed)
            return
        self._rows = step_rows(
            what,
            self._buffers[0],
            batch_size=batch_size,
            seed=seed,
            task=task,
            order=order,
            report=self.report,
        )

    def _bound(self, train: Sequence[int], order: Order) -> int:
        """Return the most tokens that rows of a stream may have, by the limits."""
        if order != SHUFFLED:
            raise ConfigError(
                "'task.order' and 'task.pass_rates' compare all problems, and a stream's are not "
                "known\n    leave them out, or read the rows before the run starts: "
                "task.streaming=false"
            )
        prompts = self._max_prompt_tokens
        if prompts is None and any(self._prompts.written(index) for index in train):
            raise ConfigError(
                f"task '{self._task.task_id}' is a stream, so its longest prompt is not known "
                "before the run\n    say what to leave out: task.max_prompt_tokens=1024"
            )
        return (prompts or 0) + (self._max_response_tokens or 0)

    def _buffer(self, number: int) -> Sequence[int]:
        """Return what can be used of a buffer of a stream; the rows of two are kept."""
        if number not in self._buffers:
            problems = self._task.buffered(number)
            found = self._encoded(problems) if problems else {}
            if len(self._buffers) > 1:
                for index in self._rows_in(self._buffers.pop(next(iter(self._buffers)))):
                    del self._rows_of[index]
                    self._packs.pop(index, None)
            self._rows_of.update(found)
            self._buffers[number] = self._units([*found])
        return self._buffers[number]

    def _units(self, train: list[int]) -> list[int]:
        """Return numbers of what steps take: of rows, or of the first row of each pack."""
        most = self._pack_tokens
        if most is None:
            return train
        if self._task.shares:
            raise ConfigError(
                "'task.pack_tokens': a mixture has its share of rows in every step, and packs hold "
                "rows of all\n    leave pack_tokens out, or train on one task"
            )
        lengths = {index: len(self._rows_of[index][0].ids) for index in train}
        packs = packed(lengths, most)
        self.report.notes[
            f"{self.report.source}: {len(train)} rows in {len(packs)} packs of up to {most} "
            f"tokens, {sum(lengths.values()) / max(1, len(packs) * most):.1%} full"
        ] = 0
        self._packs.update((pack[0], pack) for pack in packs)
        return [pack[0] for pack in packs]

    def _rows_in(self, units: Iterable[int]) -> list[int]:
        return [index for unit in units for index in self._packs.get(unit, [unit])]

    def _encoded(self, problems: Sequence[int]) -> dict[int, list[Encoded]]:
        """Return problem -> its rows, of all that can be used."""
        raise NotImplementedError

    def _with_responses(
        self, problems: Sequence[int], texts_of: Callable[[int], Sequence[str | None]]
    ) -> dict[int, list[Encoded]]:
        """Encode the problems to learn from, and held-out ones that have responses.

        Responses are the task's replies, or else what `texts_of` gives; None is missing. Returns
        index -> its prompt with each of its responses, of those that can be used.
        """
        used = [i for i in problems if i in self._task.train or None not in texts_of(i)]
        kept: dict[int, list[Encoded]] = {}
        for index, prompt in self._encoded_prompts(used).items():
            with one_process():
                replies = self._task.replies(index)
            given: Sequence[Response | None] = texts_of(index) if replies is None else replies
            rows = [
                self._or_rejected(index, partial(self._checked, index, prompt, response))
                for response in given
            ]
            whole = [row for row in rows if row is not None]
            if len(whole) == len(rows):
                kept[index] = whole
        self.report.keep(len(kept))
        return kept

    def _with_response(self, index: int, prompt: list[int], response: Response) -> Encoded:
        if (ready := one_process()(self._task.tokens)(index)) is not None:
            size = self._tokenizer.vocab_size
            if wrong := [token for token in ready[0] if not 0 <= token < size]:
                detail = f"{wrong[0]}, and the tokenizer has {size} tokens"
                raise BadRow("a token outside the vocabulary", detail)
            return Encoded(ready[0], runs(ready[1]))
        if self._prompts.messages(index) is not None:
            return self._prompts.with_reply(index, response, self._loss_on)
        ids = self._tokenizer.encode_response(str(response))
        if not prompt:  # a text begins with what a prompt would, and nothing says its first token
            ids = self._tokenizer.begun(ids)
        first = 1 if self._loss_on == "all" else max(len(prompt), 1)
        return Encoded([*prompt, *ids], [(first, len(prompt) + len(ids))])

    def _encoded_prompts(self, indices: Sequence[int]) -> dict[int, list[int]]:
        def checked(index: int, ids: list[int] | BadRow) -> list[int]:
            if isinstance(ids, BadRow):
                raise ids
            if not ids and not self._takes_texts:
                raise BadRow("empty prompt", "it has no tokens")
            self._check("prompt", self._prompts.written(index), len(ids), self._max_prompt_tokens)
            return ids

        encoded = zip(indices, self._prompts.encode(indices), strict=True)
        usable = {i: self._or_rejected(i, partial(checked, i, ids)) for i, ids in encoded}
        return {index: ids for index, ids in usable.items() if ids is not None}

    def _checked(self, index: int, prompt: list[int], response: Response | None) -> Encoded:
        if response is None:
            raise BadRow("missing answer")
        try:
            row = self._with_response(index, prompt, response)
        except ChatTemplateError as error:
            raise BadRow("the chat template fails", str(error)) from None
        except NoPrefix as error:
            raise BadRow("turns cannot be told apart", str(error)) from None
        messages = [{"content": response}] if isinstance(response, str) else response
        text = "".join(str(message["content"]) for message in messages)
        num_tokens = row.spans[-1][1] - row.num_before
        several = len(row.spans) > 1
        what = "conversation from the assistant's first turn on" if several else "response"
        self._check(what, text, num_tokens, self._max_response_tokens)
        self._check("row", "", len(row.ids), self._longest)
        self._check("row for a pack", "", len(row.ids), self._pack_tokens)
        return row

    def _check(self, what: str, text: str, num_tokens: int, limit: int | None) -> None:
        if limit is not None and num_tokens > limit:
            raise BadRow(f"over-long {what}", f"{num_tokens} tokens, limit {limit}")
        if unknown := self._tokenizer.inexpressible(text):
            detail = f"the tokenizer cannot express {unknown!r}"
            raise BadRow(f"{what} outside the alphabet", detail)

    def _or_rejected(self, index: int, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except BadRow as bad:
            where = one_process()(self._task.where)(index)
            self.report.reject(where, bad.reason, bad.detail)
            return None

    @one_process()
    def _need_answers(self) -> None:
        if all(self._task.answer_text(index) is None for index in self._task.listed):
            raise ConfigError(
                f"task '{self._task.task_id}' has no answers to make {self.what}s of\n"
                "    choose another task, name the column of answers (task.answer_field), or leave "
                "out the stage that needs them, such as ~algorithm.before.sft"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every problem has been used, but for a remainder below one batch."""
        return self._rows.steps_per_epoch

    @property
    def longest(self) -> int:
        """Tokens of the longest row, held-out ones included; made-up responses do not count."""
        if self._longest is not None:
            return self._longest
        return max(len(row.ids) for given in self._rows_of.values() for row in given)

    @property
    def statistics(self) -> str:
        """One line on the lengths that limits are compared with; made-up responses do not count."""
        given = self._rows_of.values()
        responses = [
            row.spans[-1][1] - row.num_before for rows in given for row in rows if row.spans
        ]
        prompts = [rows[0].spans[-1][0] if rows[0].spans else len(rows[0].ids) for rows in given]
        lengths = {"prompt": prompts, **({"response": responses} if responses else {})}
        return self.report.with_lengths(lengths, len(self._held_out))


class PromptSource(TaskSource):
    """Prompts to generate from; see `TaskSource`."""

    what = "prompt"

    @override
    def _encoded(self, problems: Sequence[int]) -> dict[int, list[Encoded]]:
        usable = self._encoded_prompts(problems)
        self.report.keep(len(usable))
        return {index: [Encoded(ids, [])] for index, ids in usable.items()}

    def batch(self, step: int) -> Prompts:
        """Return the prompts of a step; `prompt_id` is the problem's index in the task."""
        return self.asked(self._rows.at(step))

    def held_out(self, num_prompts: int | None = None) -> Prompts:
        """Return the first `num_prompts` held-out prompts, or all of them.

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
        """Return those of these problems whose prompts were not left out, in the same order."""
        return [index for index in problems if index in self._rows_of]

    def asked(self, problems: Sequence[int]) -> Prompts:
        return Prompts(
            prompt=pad_rows(self._rows_of[index][0].ids for index in problems),
            prompt_id=torch.tensor(problems, dtype=torch.int64),
        )


class DemonstrationSource(TaskSource):
    """Prompts with the task's own answers, for supervised fine-tuning; see `TaskSource`."""

    what = "demonstration"
    _takes_texts = True

    @override
    def _encoded(self, problems: Sequence[int]) -> dict[int, list[Encoded]]:
        self._need_answers()
        answer_of = one_process()(self._task.answer_text)
        return self._with_responses(problems, lambda index: (answer_of(index),))

    def batch(self, step: int) -> Demonstrations:
        """Return the rows of a step; the mask is True on answers and their ends of sequence."""
        return self._table(self._rows_in(self._rows.at(step)))

    def held_out(self) -> Demonstrations | None:
        return self._table(self._held_out) if self._held_out else None

    def _table(self, problems: Sequence[int]) -> Demonstrations:
        tokens, mask = _sequences([self._rows_of[index][0] for index in problems])
        return Demonstrations(tokens=tokens, mask=mask)


class PairSource(TaskSource):
    """Pairs of a better and a worse response, for reward modeling; see `TaskSource`.

    Explicit pairs are used if the task has them. Otherwise the better response is the task's answer
    and the worse one a wrong answer made from it, another one in every epoch.
    """

    what = "preference pair"
    _takes_labels = False

    @override
    def _encoded(self, problems: Sequence[int]) -> dict[int, list[Encoded]]:
        with one_process():
            self._explicit = self._task.pair_texts(problems[0]) is not None
            self._labelled = self._task.is_good(problems[0]) is not None
        if self._labelled and not self._takes_labels:
            raise ConfigError(
                f"task '{self._task.task_id}' has single responses with a label, and "
                f"{self.what}s are read\n    train with algorithm=kto, or give "
                "task.chosen_field and task.rejected_field"
            )
        if not self._explicit:
            self._need_answers()
        return self._with_responses(problems, self._given)

    def batch(self, step: int) -> PreferencePairs:
        """Return the pairs of a step: two rows each, the better one first."""
        return self._table(self._rows.at(step), step // self.steps_per_epoch)

    def held_out(self) -> PreferencePairs | None:
        """Return all held-out pairs, with the first epoch's made-up responses; None without any."""
        return self._table(self._held_out, 0) if self._held_out else None

    def _table(self, problems: Sequence[int], epoch: int) -> PreferencePairs:
        rows: list[Encoded] = []
        for index in problems:
            given = self._rows_of[index]
            rows += given
            if not self._explicit:
                prompt = given[0].ids[: given[0].num_before]
                rows.append(self._with_response(index, prompt, self._made_up_text(index, epoch)))
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

    @one_process()
    def _made_up_text(self, index: int, epoch: int) -> str:
        rng = random.Random(f"{self._seed}/{epoch}/{index}")
        answer = self._task.answer_text(index) or ""
        other = self._task.answer_text(rng.choice(self._task.buffered(0))) or ""
        return wrong_answer(answer, other, rng, lambda made: self._is_wrong(index, made))

    @one_process()
    def _is_wrong(self, index: int, text: str) -> bool:
        if self._tokenizer.inexpressible(text):
            return False
        limit = self._max_response_tokens
        if limit is not None and len(self._tokenizer.encode_response(text)) > limit:
            return False
        if self._task.needs_process:
            return True  # too expensive to ask; it differs from the answer, which must do
        try:
            score = as_score(self._task.score(index, text))
            return score is None or score < self._task.correct_score
        except Exception:  # as in a reward: what the verifier cannot read is not right
            return True


class FeedbackSource(PairSource):
    """Single responses that are good or bad: the task's labelled ones, or both of each pair.

    Arguments as for `PairSource`.
    """

    what = "labelled response"
    _takes_labels = True

    @override
    def _table(self, problems: Sequence[int], epoch: int) -> Feedback:
        if not self._labelled:
            return Feedback(**vars(super()._table(problems, epoch)))
        tokens, mask = _sequences([self._rows_of[index][0] for index in problems])
        good = [bool(one_process()(self._task.is_good)(index)) for index in problems]
        ids = torch.tensor(problems, dtype=torch.int64)
        return Feedback(pair_id=ids, tokens=tokens, mask=mask, chosen=torch.tensor(good))


class ScoredPairSource(PairSource):
    """Pairs with a score for each response: the task's own, the verifier's, or else 1 and 0.

    Arguments as for `PairSource`.
    """

    @override
    def _table(self, problems: Sequence[int], epoch: int) -> ScoredPairs:
        pairs = super()._table(problems, epoch)
        scores = [
            score for index in pairs.pair_id[::2].tolist() for score in self._scores(index, epoch)
        ]
        return ScoredPairs(**vars(pairs), score=torch.tensor(scores, dtype=torch.float32))

    @one_process()
    def _scores(self, index: int, epoch: int) -> tuple[float, float]:
        given = self._task.pair_scores(index)
        if given is not None:
            return given
        if self._explicit or self._task.needs_process:
            return 1.0, 0.0
        try:
            worse = as_score(self._task.score(index, self._made_up_text(index, epoch)))
        except Exception:  # what the verifier cannot read is not right
            worse = None
        best = self._task.correct_score
        return best, best - 1.0 if worse is None else worse


def _sequences(rows: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    tokens = pad_rows(row.ids for row in rows)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for place, row in enumerate(rows):
        for start, end in row.spans:
            mask[place, start:end] = True
    return tokens, mask


def packed(lengths: Mapping[int, int], most: int) -> list[list[int]]:
    """Divide rows among packs of at most `most` tokens, longest first, each where it fits best.

    Best fit decreasing: a row joins the fullest pack that has room for it, or begins one.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # tokens left and number of each pack, ascending
    for index in sorted(lengths, key=lambda index: (-lengths[index], index)):
        place = bisect_left(room, (lengths[index], -1))
        left, pack = room.pop(place) if place < len(room) else (most, len(packs))
        if pack == len(packs):
            packs.append([])
        packs[pack].append(index)
        insort(room, (left - lengths[index], pack))
    return packs


_NUMBER = re.compile(r"[+-]?[0-9]{1,1000}")


def wrong_answer(
    answer: str, other: str, rng: random.Random, accept: Callable[[str], bool] = lambda _: True
) -> str:
    """Return a text that differs from `answer`, also as a whole number."""
    for _ in range(32):
        made = _mistake(answer, other, rng)
        if not _same(made, answer) and accept(made):
            return made
    return ""


def _mistake(answer: str, other: str, rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return other
    if _NUMBER.fullmatch(answer):
        value = int(answer)
        if kind == 1:
            return str(value + rng.choice((-10, -3, -2, -1, 1, 2, 3, 10)))
        if kind == 2:
            if rng.random() < 0.25:
                return str(-value)
            place = rng.choice([i for i, c in enumerate(answer) if c.isdigit()])
            return answer[:place] + rng.choice("0123456789") + answer[place + 1 :]
    # Drop one character, double it, or swap it with the next.
    place = rng.randrange(len(answer))
    before, rest = answer[:place], answer[place:]
    kind = rng.randrange(3)
    if kind == 0:
        return before + rest[1:]
    if kind == 1:
        return before + rest[0] + rest
    return before + rest[:2][::-1] + rest[2:]


def _same(made: str, answer: str) -> bool:
    if _NUMBER.fullmatch(made) and _NUMBER.fullmatch(answer):
        return int(made) == int(answer)
    return made.strip() == answer.strip()
