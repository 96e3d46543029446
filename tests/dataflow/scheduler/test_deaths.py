"""Random histories in which processes die: the run ends as if none had, or says why it does not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.runtime.executor import Recovery
from penstock.dataflow.scheduler.events import NodeTask, ResumeState, RunTrain
from penstock.dataflow.scheduler.schedule import Flow, Schedule
from penstock.dataflow.scheduler.simulate import dry_run

from .acted_out import Recorded, run
from .lives import NEVER, Lives, survive
from .random_flows import LAGS, SEEDS, TIMES, expected_reads, flows, histories
from .test_in_flight import check_bounds, grpo

pytestmark = pytest.mark.timeout(600 * TIMES)

STEPS = st.integers(1, 6)
INTERVALS = st.sampled_from([None, 1, 1, 2, 3])
PAUSES = st.frozensets(st.integers(1, 5), max_size=2)
BUDGETS = st.builds(
    Recovery, max_restarts=st.sampled_from([0, 2, 20, 20]), max_repeats=st.sampled_from([1, 3, 5])
)


def check_budget(lives: Lives, recovery: Recovery) -> None:
    """A run that ends early has gone back as often as it may; one that does not, no more often."""
    if lives.lost is None:
        assert lives.deaths <= recovery.max_restarts
        return
    assert lives.deaths <= recovery.max_restarts + 1
    said = str(lives.lost)
    if recovery.max_restarts and lives.deaths <= recovery.max_restarts:
        assert "max_repeats" in said
        assert lives.deaths > recovery.max_repeats
    assert lives.handed == list(range(len(lives.handed)))


@pytest.mark.slow
@histories(250, often=4)
@given(flows(6), LAGS, STEPS, INTERVALS, PAUSES, BUDGETS, SEEDS)
def test_whoever_dies_the_run_ends_as_if_nobody_had(
    flow: Flow,
    max_lag: int,
    num_steps: int,
    every: int | None,
    pauses: frozenset[int],
    recovery: Recovery,
    seed: int,
) -> None:
    """Every task counts once, every step is handed out once, in order, and the hash is the same."""
    schedule = Schedule(max_lag=max_lag)
    pauses = frozenset(step for step in pauses if step < num_steps)
    last, lives = survive(flow, schedule, num_steps, every, pauses, recovery, seed)
    check_budget(lives, recovery)
    if lives.lost is not None:
        return
    whole, reads = run(flow, schedule, num_steps, seed)
    assert lives.handed == list(range(num_steps))
    assert lives.reads == reads == expected_reads(flow, schedule, num_steps)
    assert last.schedule_sha256() == whole.schedule_sha256()


@pytest.mark.slow
@histories(100, often=4)
@given(flows(6), LAGS, STEPS, INTERVALS, SEEDS)
def test_replicas_come_and_go_and_nothing_else_changes(
    flow: Flow, max_lag: int, num_steps: int, every: int | None, seed: int
) -> None:
    """Nobody dies: what streams is spread anew in the middle of a step."""
    schedule = Schedule(max_lag=max_lag)
    lives = Lives(flow, schedule, num_steps, every, random.Random(seed))
    last = lives.live((), NEVER)
    assert last.done
    assert lives.reads == expected_reads(flow, schedule, num_steps)
    assert last.schedule_sha256() == run(flow, schedule, num_steps, seed)[0].schedule_sha256()


@pytest.mark.slow
@histories(120, often=4)
@given(flows(6), st.integers(1, 3), STEPS, INTERVALS, st.booleans(), BUDGETS, SEEDS)
def test_nothing_is_lost_or_done_twice_where_timing_decides(
    flow: Flow,
    max_lag: int,
    num_steps: int,
    every: int | None,
    in_flight: bool,
    recovery: Recovery,
    seed: int,
) -> None:
    schedule = Schedule(max_lag=max_lag, order="arrival")
    if in_flight:
        schedule = Schedule(max_lag=max_lag, streaming=1, in_flight=True)
    _, lives = survive(flow, schedule, num_steps, every, frozenset(), recovery, seed)
    check_budget(lives, recovery)
    check_bounds(flow, schedule, num_steps, lives.reads)
    if lives.lost is not None:
        return
    expected = expected_reads(flow, schedule, num_steps)
    assert lives.handed == list(range(num_steps))
    assert lives.reads.keys() == expected.keys()


def test_what_other_ranks_have_answered_does_not_say_what_comes_next() -> None:
    """Of two ranks one had answered chunks 1 and 3 at a checkpoint; one rank goes on alone."""
    sizes = {0: 1, 1: 5, 2: 9, 3: 6}
    done = [NodeTask("generate", 0, chunk) for chunk in (1, 3)]
    resume = ResumeState(
        0,
        frozenset([NodeTask("prompts", 0), *done]),
        sizes=tuple((task, sizes[task.chunk or 0]) for task in done),
    )
    scheduler = Recorded(grpo(1, 4), Schedule(streaming=1), 1, resume=resume)
    dry_run(scheduler, lambda work: 1.0, size=lambda task: sizes[task.chunk or 0])
    trained = [m.chunks for m in scheduler.trace if isinstance(m, RunTrain)]
    assert trained == [(0,), (1,), (3,), (2,)]
