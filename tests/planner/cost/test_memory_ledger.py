"""Ledgers: peaks, the table, and the refusal of what does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.planner.cost.memory_ledger import GroupLedger, MemoryLedger, Parts, check

GIB = 2**30
TRAIN = GroupLedger(
    "train",
    8,
    resident={
        "actor": Parts(weights=2 * GIB, optimizer=16 * GIB),
        "reference": Parts(weights=2 * GIB),
    },
    calls={
        "reference.logprob": Parts(activations=GIB // 2),
        "actor.train": Parts(activations=43 * GIB),
    },
)
ROLLOUT = GroupLedger(
    "rollout",
    2,
    resident={"actor.generate": Parts(weights=8 * GIB)},
    calls={"actor.generate": Parts(activations=GIB, kv_cache=60 * GIB)},
)
LEDGER = MemoryLedger((TRAIN, ROLLOUT))

TABLE = """\
group                                  weights  optimizer  activations  kv cache     total
train x8    always: actor             2.00 GiB   16.0 GiB            -         -  18.0 GiB
            always: reference         2.00 GiB          -            -         -  2.00 GiB
            while: reference.logprob         -          -      512 MiB         -   512 MiB
            while: actor.train               -          -     43.0 GiB         -  43.0 GiB
            peak                      4.00 GiB   16.0 GiB     43.0 GiB         -  63.0 GiB
rollout x2  always: actor.generate    8.00 GiB          -            -         -  8.00 GiB
            while: actor.generate            -          -     1.00 GiB  60.0 GiB  61.0 GiB
            peak                      8.00 GiB          -     1.00 GiB  60.0 GiB  69.0 GiB
"""


def test_the_peak_is_what_is_held_and_the_hungriest_call() -> None:
    assert TRAIN.peak == (
        "actor.train",
        Parts(weights=4 * GIB, optimizer=16 * GIB, activations=43 * GIB),
    )
    assert LEDGER.peak_bytes() == {"train": 63 * GIB, "rollout": 69 * GIB}


def test_a_group_without_calls_is_at_its_peak_at_rest() -> None:
    group = GroupLedger("idle", 1, {"judge": Parts(weights=7)}, {})
    assert group.peak == ("", Parts(weights=7))


_PARTS = st.builds(Parts, *[st.integers(0, 2**40)] * len(Parts._fields))


@given(
    resident=st.dictionaries(st.text(max_size=3), _PARTS, max_size=3),
    calls=st.dictionaries(st.text(max_size=3), _PARTS, max_size=4),
)
def test_no_moment_is_above_the_peak(resident: dict[str, Parts], calls: dict[str, Parts]) -> None:
    name, peak = GroupLedger("any", 1, resident, calls).peak
    held = sum(parts.total for parts in resident.values())
    assert peak.total == max([held, *(held + parts.total for parts in calls.values())])
    assert name in calls or peak.total == held


def test_the_table_shows_every_moment() -> None:
    assert LEDGER.table() == TABLE.strip()


def test_what_fits_is_let_through() -> None:
    check(LEDGER, {"train": 63 * GIB, "rollout": 69 * GIB})


def test_what_does_not_fit_is_refused_with_what_lacks() -> None:
    with pytest.raises(PlanError) as caught:
        check(LEDGER, {"train": 60 * GIB, "rollout": 64 * GIB}, change="actor.train: zero=1")
    text = str(caught.value)
    assert text == (
        "group 'rollout' does not fit: during 'actor.generate' each of its 2 devices needs "
        "69.0 GiB, but roles can use 64.0 GiB; 5.00 GiB (5368709120 bytes) are missing. "
        f"The largest part is kv cache, 60.0 GiB\n{LEDGER.table()}\n"
        "the cheapest change that makes it fit: actor.train: zero=1"
    )


def test_a_group_that_cannot_even_rest_says_so() -> None:
    ledger = MemoryLedger((GroupLedger("idle", 1, {"judge": Parts(weights=7)}, {}),))
    with pytest.raises(PlanError, match="at rest each of its 1 devices needs 7 B") as caught:
        check(ledger, {"idle": 3})
    assert "cheapest" not in str(caught.value)
