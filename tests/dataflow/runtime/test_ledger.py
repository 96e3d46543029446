"""A row that is missing, there twice or changed is found; a step that comes again counts once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.runtime.columns import Packed, Part
from penstock.dataflow.runtime.engine import Engine, Source
from penstock.dataflow.runtime.host import Host
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.ledger import (
    Ledger,
    LedgerError,
    Line,
    as_json,
    check,
    digest_of,
    from_json,
    text_of,
)
from penstock.dataflow.runtime.messages import Handle, RankWork, Report
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.events import NodeTask
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore

from ..counter import COUNT, Counter, Key, Keys, Score, apart

SAMPLE, TRAIN = "model.sample", "model.train"


class Telling(Counter):
    """Its samples tell keys apart as well."""

    def sample(self, key: Key) -> Score:
        return key + self.weight


@dataclass(frozen=True)
class TellingSpec:
    def build(self, context: WorkerContext) -> Telling:
        return Telling()


class Rows:
    """Other keys in every step."""

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def batch(self, step: int) -> Keys:
        return Keys(key=torch.arange(6) + 6 * step + self.shift)


def part(values: Sequence[float]) -> Part:
    return (Packed(torch.tensor(values, dtype=torch.float32)),)


def report(made: Sequence[Part] = (), taken: Sequence[Part] = ()) -> Report:
    given = tuple((SAMPLE, one[0].num_rows, digest_of(one)) for one in taken)
    rows = tuple(one[0].num_rows for one in made)
    return Report(0.0, 0.0, num_rows=rows, made=tuple(map(digest_of, made)), taken=given)


def missing(pieces: list[Part], at: int) -> list[Part]:
    return pieces[:at] + pieces[at + 1 :]


def doubled(pieces: list[Part], at: int) -> list[Part]:
    return [*pieces, pieces[at]]


def swapped(pieces: list[Part], at: int) -> list[Part]:
    """One is given in the place of its neighbor: the number of rows need not tell."""
    return [*pieces[:at], pieces[at - 1], *pieces[at + 1 :]]


def changed(pieces: list[Part], at: int) -> list[Part]:
    values = pieces[at][0].values.clone()
    values[-1] += 1
    return [*pieces[:at], (Packed(values),), *pieces[at + 1 :]]


SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=5)


@given(SIZES, st.data(), st.sampled_from([None, missing, doubled, swapped, changed]))
def test_any_fault_of_rows_is_found_and_nothing_else(
    sizes: list[int], data: st.DataObject, fault: Callable[[list[Part], int], list[Part]] | None
) -> None:
    values = torch.arange(sum(sizes), dtype=torch.float32) * 2
    pieces: list[Part] = [(Packed(one),) for one in torch.split(values, sizes)]
    lines: list[Line] = []
    ledger = Ledger(COUNT, lines.append)
    ledger.read(0, "keys", pieces)
    for chunk in data.draw(st.permutations(range(len(pieces)))):
        ledger.done(NodeTask(SAMPLE, 0, chunk), report([pieces[chunk]]))
    at = data.draw(st.integers(0, len(pieces) - 1))
    taken = pieces if fault is None else fault(pieces, at)
    cut = data.draw(st.integers(0, len(taken)))
    for share in (taken[:cut], taken[cut:]):  # of two ranks
        ledger.done(NodeTask(TRAIN, 0), report(taken=share))
    if fault is None:
        ledger.complete(0)
        (line,) = lines
        assert (line.read, line.made, line.trained) == (
            {"keys": sum(sizes)},
            {SAMPLE: sum(sizes)},
            {TRAIN: sum(sizes)},
        )
        return
    with pytest.raises(
        LedgerError, match=rf"^step 0: '{TRAIN}' was not given what '{SAMPLE}' made"
    ):
        ledger.complete(0)


def test_what_is_made_twice_or_by_nobody_is_found() -> None:
    ledger = Ledger(COUNT, lambda _: None)
    ledger.read(0, "keys", [part([1.0])])
    ledger.done(NodeTask(SAMPLE, 0, 0), report([part([1.0])]))
    with pytest.raises(LedgerError) as raised:
        ledger.done(NodeTask(SAMPLE, 0, 0), report([part([1.0])]))
    assert str(raised.value) == "step 0: piece 0 of 'model.sample' was made twice"
    with pytest.raises(LedgerError) as raised:
        ledger.complete(0)
    assert str(raised.value) == "step 0 is complete, and nothing was made by 'model.train'"


def test_rows_do_not_depend_on_how_they_are_cut() -> None:
    found: list[Line] = []
    for parts in ([part([1.0, 2.0, 3.0])], [part([1.0]), part([2.0, 3.0])]):
        ledger = Ledger(COUNT, found.append)
        ledger.read(0, "keys", parts)
        ledger.done(NodeTask(SAMPLE, 0, 0), report([part([1.0])]))
        ledger.done(NodeTask(TRAIN, 0), report(taken=[part([1.0])]))
        ledger.complete(0)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([0, 2], "step 1 is missing"),
        ([0, 1], "step 2 is missing"),
        ([0, 1, 1, 2], "step 1 is there once more than it should be"),
        ([0, 1, 2, 3], "step 3 is there once more than it should be"),
    ],
)
def test_steps_that_do_not_add_up_are_named(steps: list[int], said: str) -> None:
    lines = [Line(step, {}, {}, {}, {}) for step in steps]
    with pytest.raises(LedgerError) as raised:
        check(lines, 3)
    assert str(raised.value) == f"the ledger of 3 steps does not add up: {said}"
    check([Line(step, {}, {}, {}, {}) for step in range(3)], 3)


# --- with an engine


Handles = tuple[Handle, ...]


class Tampering(InProcess):
    """Gives the training of step 2 something else than what was made."""

    def __init__(self, tamper: Callable[[Handles], Handles]) -> None:
        super().__init__()
        self._tamper = tamper

    def submit(self, ticket: int, program: str, group: str, rank: int, work: RankWork) -> None:
        call = work.arguments[0] if work.method is Host.call else None
        if call is not None and call.node == TRAIN and call.step == 2:
            inputs = {node: self._tamper(handles) for node, handles in call.inputs.items()}
            work = replace(work, arguments=(replace(call, inputs=inputs),))
        super().submit(ticket, program, group, rank, work)


def run(
    ledger: Ledger,
    num_steps: int = 6,
    *,
    source: Source | None = None,
    store: CheckpointStore | None = None,
    executor: InProcess | None = None,
    take: int | None = None,
) -> None:
    engine = Engine(
        COUNT,
        apart(COUNT, num_chunks=3, model__sample="gen"),
        workers={"model": TellingSpec()},
        schedule=Schedule(max_lag=1),
        executor=executor,
    )
    with engine:
        steps = engine.run(
            {"keys": source or Rows()},
            num_steps,
            checkpoints=store,
            checkpoint_every=2,
            ledger=ledger,
        )
        for step in steps:
            if take is not None and step.step + 1 == take:
                steps.close()


def test_a_run_s_ledger_adds_up() -> None:
    lines: list[Line] = []
    run(Ledger(COUNT, lines.append))
    check(lines, 6)
    assert text_of(lines, [SAMPLE]) == (
        "6 steps, each once; 36 rows (keys) read, 36 rows (model.sample) made, 36 rows "
        "(model.train) trained on; 0 steps computed more than once, none counted twice"
    )
    assert [from_json(as_json(line)) for line in lines] == lines


TAMPERED: list[tuple[Callable[[Handles], Handles], str]] = [
    (lambda parts: parts[1:], "is missing (6 rows were made, 4 were given)"),
    (lambda parts: (*parts, parts[0]), "was given twice (6 rows were made, 8 were given)"),
    (
        lambda parts: (parts[0], parts[0], *parts[2:]),
        "has been changed on the way (6 rows were made, 6 were given)",
    ),
]


@pytest.mark.parametrize(("tamper", "said"), TAMPERED)
def test_what_a_rank_is_really_given_is_what_counts(
    tamper: Callable[[Handles], Handles], said: str
) -> None:
    with pytest.raises(LedgerError) as raised:
        run(Ledger(COUNT, lambda _: None), executor=Tampering(tamper))
    assert str(raised.value) == (
        f"step 2: 'model.train' was not given what 'model.sample' made: a piece of 2 rows {said}"
    )


def test_a_run_that_goes_on_from_a_checkpoint_counts_each_step_once(tmp_path: Path) -> None:
    whole: list[Line] = []
    run(Ledger(COUNT, whole.append))
    before: list[Line] = []
    run(Ledger(COUNT, before.append), store=CheckpointStore(tmp_path / "there"), take=3)
    assert [line.step for line in before] == [0, 1, 2]
    after: list[Line] = []
    run(Ledger(COUNT, after.append, known=before), store=CheckpointStore(tmp_path / "there"))
    first = after[0].step
    assert 0 < first <= 2, "there was a checkpoint, and a step after it"
    found = [*before[:first], *after]
    check(found, 6)
    assert [line.times for line in found] == [2 if first <= s < 3 else 1 for s in range(6)]
    assert [replace(line, times=1) for line in found] == whole, "what was under way is known too"


def test_a_source_that_brings_other_rows_the_second_time_is_found(tmp_path: Path) -> None:
    before: list[Line] = []
    run(Ledger(COUNT, before.append), store=CheckpointStore(tmp_path / "there"), take=4)
    (tmp_path / "there").rename(tmp_path / "gone")
    with pytest.raises(LedgerError) as raised:
        run(Ledger(COUNT, lambda _: None, known=before), source=Rows(shift=1))
    assert str(raised.value).startswith(
        "step 0 is computed again, and 'keys' brings other rows than the first time\n"
    )


def test_digests_tell_values_lengths_and_columns_apart() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([1, 1])
    parts: list[Part] = [
        (Packed(one),),
        (Packed(-one),),
        (Packed(one, two),),
        (Packed(one, two.flip(0) + 1),),
        (Packed(one), Packed(one)),
        (Packed(one.bfloat16()),),
        (),
    ]
    assert len(set(map(digest_of, parts))) == len(parts)


def test_a_piece_of_one_value_may_have_any_stride() -> None:
    whole = torch.arange(1)
    expected = digest_of((Packed(whole, None),))
    assert digest_of((Packed(torch.as_strided(whole, (1,), (0,)), None),)) == expected
