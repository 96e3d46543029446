"""How often a rank is started again, and what is said in the end."""

from __future__ import annotations

import pytest
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.runtime.executor import Recovery
from penstock.workers.executors.supervisor import RestartBudget

DIED = "rank 1 of group 'rollout' died: it got SIGKILL"


def test_deaths_in_a_row_are_counted_until_the_rank_answers() -> None:
    budget = RestartBudget(Recovery(max_repeats=3, pause_s=40.0))
    for _ in range(4):  # a long run forgives any number of deaths
        assert [budget.pause_s("rollout", 1, DIED) for _ in range(3)] == [0.0, 40.0, 60.0]
        budget.answered("rollout", 1)
    assert [budget.pause_s("rollout", 1, DIED) for _ in range(3)] == [0.0, 40.0, 60.0]
    budget.answered("rollout", 0)
    assert budget.pause_s("rollout", 0, DIED) == 0.0, "another rank"
    with pytest.raises(WorkerError) as raised:
        budget.pause_s("rollout", 1, DIED)
    assert str(raised.value) == (
        f"{DIED}\n    it had been started again 3 times without an answer in between: that does "
        "not fix it (recovery.max_repeats)"
    )


def test_a_pause_above_a_minute_stays_as_it_is() -> None:
    assert [Recovery(pause_s=90.0).wait_s(times) for times in (0, 1, 4)] == [0.0, 90.0, 90.0]


def test_an_answer_of_any_rank_counts_where_all_are_started_again() -> None:
    budget = RestartBudget(Recovery(max_repeats=1))
    assert budget.pause_s("rollout", None, DIED) == 0.0
    budget.answered("rollout", 0)
    assert budget.pause_s("rollout", None, DIED) == 0.0
    with pytest.raises(WorkerError, match="without an answer"):
        budget.pause_s("rollout", None, DIED)


def test_a_run_that_may_not_go_back_may_start_replicas_again() -> None:
    assert RestartBudget(Recovery(max_restarts=0)).pause_s("rollout", 1, DIED) == 0.0
