"""Choice of the problems of a step: shuffled by epochs, in shares, easy ones first, or hard ones.

All of it is a pure function of (seed, step), so there is no position to save: a resumed run asks
for the step it stopped at. That is why pass rates are those that the data states, and not those
that the run itself finds.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ...dataflow.errors import ConfigError, one_process
from ...dataflow.options import Fraction, PositiveInt, option_class
from .task import DataReport, Task


@option_class
class Order:
    """Choice of the problems of a step."""

    kind: Literal["shuffled", "curriculum", "priority"] = "shuffled"
    """`shuffled`: every problem once in an epoch. `curriculum`: the easiest first, more of them
    with every step. `priority`: each by its weight of 1 - pass rate."""
    curriculum_steps: PositiveInt = 100
    """Steps until a curriculum takes from all problems."""
    pass_rates: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Lowest and highest pass rate of problems that are used at all."""

    @property
    def reads_rates(self) -> bool:
        return self.kind != "shuffled" or self.pass_rates != (0.0, 1.0)


SHUFFLED = Order()


@lru_cache(maxsize=8)
def epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order in which an epoch visits `num_rows` rows: a permutation, the same on every machine.

    Rows are sorted by one raw Philox number each (key `seed`, counter `epoch`). Raw Philox output
    is fixed for good, whereas numpy may change how its generators shuffle.
    """
    order = np.argsort(_raw(num_rows, seed, epoch), kind="stable")
    order.setflags(write=False)
    return order


def _raw(count: int, seed: int, number: int) -> NDArray[np.uint64]:
    return np.random.Philox(key=seed % 2**64, counter=[0, 0, 0, number]).random_raw(count)


class StepRows(Protocol):
    @property
    def steps_per_epoch(self) -> int:
        """Steps until every problem could have been used."""
        ...

    def at(self, step: int) -> list[int]: ...


def step_rows(
    what: str,
    problems: Sequence[int],
    *,
    batch_size: int,
    seed: int,
    task: Task,
    order: Order = SHUFFLED,
    report: DataReport | None = None,
) -> StepRows:
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}\n    use at least 1 {what} per step")
    rates = _rates(problems, task) if order.reads_rates else {}
    low, high = order.pass_rates
    problems = [index for index in problems if low <= rates.get(index, low) <= high]
    if batch_size > len(problems):
        raise ConfigError(
            f"batch_size is {batch_size} {what}s per step, but task '{task.task_id}' has only "
            f"{len(problems)}\n    lower batch_size to {len(problems)} or less, or give more "
            "problems"
        )

    def ordered(what: str, own: Sequence[int], size: int, share: float, seed: int) -> StepRows:
        """Return rows of `size` a step, of which a step takes `share` on average."""
        if order.kind != "shuffled":
            easiest = sorted(own, key=lambda index: -rates[index])
            return _ByRate(easiest, rates, order, size, seed)
        rows = _Epochs(own, size, seed)
        used = round(rows.steps_per_epoch * share)
        if report is not None and used < len(own):
            report.notes[
                f"{report.source}: an epoch trains on {used} of {len(own)} {what}s; the other "
                f"{len(own) - used} do not fill a step, and each epoch leaves out others"
            ] = 0
        return rows

    if not task.shares:
        return ordered(what, problems, batch_size, batch_size, seed)
    parts: list[StepRows] = []
    for number, (share, part) in enumerate(task.shares, start=1):
        most = min(batch_size, math.ceil(share * batch_size) + 1)
        own = [index for index in problems if index in part]
        if most > len(own):
            raise ConfigError(
                f"{batch_size} {what}s per step take up to {most} of part {number} of the "
                f"mixture, which has only {len(own)}\n"
                "    lower its weight or the batch size, or give it more problems"
            )
        digest = hashlib.sha256(f"{seed}/part/{number - 1}".encode()).digest()
        its_seed = int.from_bytes(digest[:8], "big")
        parts.append(ordered(f"part {number}'s {what}", own, most, share * batch_size, its_seed))
    return _Shares([share for share, _ in task.shares], parts, batch_size)


class Buffers:
    """Problems of a stream by its buffers, each in its own order.

    Every buffer gives as many steps as the first has problems for; one that has fewer gives some of
    its steps twice, one that has more leaves some out. So the buffer of a step follows from its
    number, whatever rows are left out elsewhere.
    """

    def __init__(
        self, usable: Callable[[int], Sequence[int]], what: str, batch_size: int, seed: int
    ) -> None:
        self._usable, self._what = usable, what
        self._batch_size, self._seed = batch_size, seed
        self.steps_per_epoch = self._steps(0)

    def at(self, step: int) -> list[int]:
        number, place = divmod(_checked(step), self.steps_per_epoch)
        start = place % self._steps(number) * self._batch_size
        problems = self._usable(number)
        order = epoch_order(len(problems), self._seed, number)
        return [problems[i] for i in order[start : start + self._batch_size]]

    def _steps(self, number: int) -> int:
        count = len(self._usable(number))
        if count < self._batch_size:
            raise ConfigError(
                f"batch_size is {self._batch_size} {self._what}s per step, but buffer {number} of "
                f"the stream has only {count} that can be used\n"
                "    lower batch_size, or raise task.buffer_rows"
            )
        return count // self._batch_size


class _Epochs:
    """Every epoch in its own order, without a remainder that fills no step."""

    def __init__(self, problems: Sequence[int], batch_size: int, seed: int) -> None:
        self._problems = np.asarray(problems, dtype=np.int64)
        self._batch_size = batch_size
        self._seed = seed

    @property
    def steps_per_epoch(self) -> int:
        return len(self._problems) // self._batch_size

    def at(self, step: int) -> list[int]:
        epoch, batch = divmod(_checked(step), self.steps_per_epoch)
        order = epoch_order(len(self._problems), self._seed, epoch)
        chosen = order[batch * self._batch_size : (batch + 1) * self._batch_size]
        return self._problems[chosen].tolist()


def _checked(step: int) -> int:
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")
    return step


class _ByRate(_Epochs):
    """A curriculum, or problems by priority; every step anew, so there are no epochs."""

    def __init__(
        self, easiest: list[int], rates: Mapping[int, float], order: Order, size: int, seed: int
    ) -> None:
        super().__init__(easiest, size, seed)
        self._rates = np.asarray([rates[index] for index in easiest])
        self._order = order

    @override
    def at(self, step: int) -> list[int]:
        if self._order.kind == "priority":
            # Without replacement, with weights of 1 - pass rate (Kimi k1.5, section 2.3.4):
            # the largest log(u) / weight, u uniform (Efraimidis and Spirakis, "Weighted random
            # sampling with a reservoir", 2006). What is always solved comes last.
            raw = _raw(len(self._problems), self._seed, _checked(step))
            uniform = (raw >> np.uint64(11)) * 2.0**-53
            weight = np.maximum(1 - self._rates, 1e-9)
            order = np.argsort(-np.log(np.maximum(uniform, 2.0**-54)) / weight, kind="stable")
        else:
            share = min(1.0, (_checked(step) + 1) / self._order.curriculum_steps)
            count = max(self._batch_size, int(share * len(self._problems)))
            order = np.argsort(_raw(count, self._seed, step), kind="stable")
        return self._problems[order[: self._batch_size]].tolist()


class _Shares:
    """Several sets of problems, each with its share of every step.

    Which part a place of a step belongs to is what is due by then: place k of all goes to the part
    that is furthest below its share of k + 1. A part is off its share by less than one item.
    """

    def __init__(self, shares: Sequence[float], rows: Sequence[StepRows], batch_size: int) -> None:
        self._shares = np.asarray(shares)
        self._rows = rows
        self._batch_size = batch_size
        self._taken = [np.zeros(len(shares), dtype=np.int64)]

    @property
    def steps_per_epoch(self) -> int:
        return max(rows.steps_per_epoch for rows in self._rows)

    def at(self, step: int) -> list[int]:
        while len(self._taken) <= _checked(step) + 1:
            self._taken.append(self._next(len(self._taken) - 1))
        counts = self._taken[step + 1] - self._taken[step]
        pairs = zip(self._rows, counts.tolist(), strict=True)
        return [problem for rows, count in pairs for problem in rows.at(step)[:count]]

    def _next(self, step: int) -> NDArray[np.int64]:
        taken = self._taken[step].copy()
        for place in range(step * self._batch_size, (step + 1) * self._batch_size):
            taken[int(np.argmax(self._shares * (place + 1) - taken))] += 1
        return taken


def _rates(problems: Sequence[int], task: Task) -> dict[int, float]:
    if task.shares:  # problems of no share are never taken
        problems = [i for i in problems if any(i in part for _, part in task.shares)]
    rates = {i: rate for i in problems if (rate := task.pass_rate(i)) is not None}
    if len(rates) < len(problems):
        raise ConfigError(
            f"task '{task.task_id}' does not say how often its problems are solved, which "
            "task.order and task.pass_rates need\n    give task.pass_rate_field, or leave both out"
        )
    return rates


_Gram = tuple[str, ...]


def contaminated(
    task: Task, written: Callable[[int], str], num_words: int
) -> tuple[frozenset[int], DataReport]:
    """Training problems that are too near to a held-out one."""
    evaluated: dict[_Gram, int] = {}
    for index in task.held_out:
        for gram in _grams(written(index), num_words):
            evaluated.setdefault(gram, index)
    report = DataReport(f"training prompts without {num_words} words in a row of a held-out one")
    where = one_process()(task.where)
    found: set[int] = set()
    for index in task.train:
        shared = next((g for g in _grams(written(index), num_words) if g in evaluated), None)
        if shared is None:
            report.keep()
            continue
        found.add(index)
        detail = f"'{' '.join(shared):.80}' is in {where(evaluated[shared])}"
        report.reject(where(index), "contaminated", detail)
    return frozenset(found), report


def _grams(text: str, num_words: int) -> Sequence[_Gram]:
    words = re.findall(r"\w+", text.lower())
    if not words:
        return []
    last = max(1, len(words) - num_words + 1)
    return [tuple(words[start : start + num_words]) for start in range(last)]
