"""Which call a worker is serving: what all randomness is keyed by."""

from __future__ import annotations

import signal
import threading
import time
from signal import Handlers

import pytest
import torch
from penstock.algorithms.roles import PerSample, Policy, Prompts, Reward, Sampling
from penstock.dataflow import FlowError, build, op
from penstock.dataflow.runtime.call_context import (
    CallKey,
    DeadlineExceeded,
    call_key,
    call_scope,
    call_staleness,
    current_step,
    deadline,
    step_scope,
)

# The deadline is SIGALRM's, which pytest-timeout otherwise takes.
pytestmark = pytest.mark.timeout(60, method="thread")


def test_calls_of_a_method_are_numbered_within_a_step() -> None:
    with step_scope(7):
        assert call_key("actor", "generate") == CallKey(7, 0)
        assert call_key("actor", "generate") == CallKey(7, 1)
        assert call_key("actor", "logprob") == CallKey(7, 0)
        assert call_key("other", "generate") == CallKey(7, 0)
    with step_scope(8):
        assert call_key("actor", "generate") == CallKey(8, 0)


def test_a_scoped_call_has_the_number_of_its_node() -> None:
    with call_scope(3, 2):
        assert call_key("actor", "generate") == CallKey(3, 2)
        assert call_key("actor", "generate") == CallKey(3, 2)


def test_by_hand_and_by_the_engine_the_same_call_gets_the_same_key() -> None:
    with step_scope(4):
        by_hand = [call_key("actor", "generate") for _ in range(3)]
    by_engine: list[CallKey] = []
    for ordinal in range(3):
        with call_scope(4, ordinal):
            by_engine.append(call_key("actor", "generate"))
    assert by_hand == by_engine


def test_a_scope_ends_even_when_the_call_fails() -> None:
    with step_scope(1):
        with pytest.raises(RuntimeError, match="out of memory"), call_scope(9, 9):
            raise RuntimeError("out of memory")
        assert call_key("actor", "generate") == CallKey(1, 0)


def test_a_step_knows_its_number() -> None:
    assert current_step() == 0
    with step_scope(5):
        assert current_step() == 5
        with call_scope(6, 0):
            assert current_step() == 6
    assert current_step() == 0


@op(scope="row")
def annealed(score: PerSample) -> PerSample:
    return score * current_step()


def test_it_is_refused_where_every_step_would_get_the_same() -> None:
    def step(prompts: Prompts, actor: Policy, reward: Reward) -> PerSample:
        roll = actor.generate(prompts.prompt, prompts.prompt_id, Sampling())
        score = reward.score(roll.tokens, roll.mask, roll.prompt_id)
        return annealed(score) if current_step() else score

    with pytest.raises(FlowError) as refused:
        build(step)
    where, *rest = str(refused.value).splitlines()
    assert where.startswith("test_call_context.py:")
    assert rest == [
        "    return annealed(score) if current_step() else score",
        "current_step() was called while the step was recorded, which happens once: every step "
        "would get the same number",
        "    call it inside an op, a worker or a loss, which run in every step",
    ]
    with step_scope(3):
        assert annealed(torch.ones(2)).tolist() == [3.0, 3.0]


def test_outside_any_scope_calls_count_up() -> None:
    first = call_key("test_context.actor", "generate")
    second = call_key("test_context.actor", "generate")
    assert (second.step, second.ordinal) == (first.step, first.ordinal + 1)


def test_another_thread_is_in_no_scope_of_this_one() -> None:
    seen: list[CallKey] = []

    def ask() -> None:
        seen.append(call_key("test_context.threaded", "generate"))

    with step_scope(5):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(timeout=10)
    assert [key.step for key in seen] == [0]


def test_how_old_the_samples_are_is_known_within_a_call_alone() -> None:
    with call_scope(3, 0, staleness=1):
        assert call_staleness() == 1
    with call_scope(3, 0):
        assert call_staleness() is None
    assert call_staleness() is None


# --- the deadline ---------------------------------------------------------------------------------


def test_a_deadline_that_passes_as_the_call_returns_leaves_later_calls_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The alarm comes after the body has ended and before it is turned off."""
    turn = signal.setitimer

    def late(which: int, seconds: float) -> tuple[float, float]:
        if not seconds:
            signal.raise_signal(signal.SIGALRM)
        return turn(which, seconds)

    with monkeypatch.context() as patch:
        patch.setattr(signal, "setitimer", late)
        with pytest.raises(DeadlineExceeded), deadline(60.0):
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    with pytest.raises(DeadlineExceeded), deadline(0.05):
        time.sleep(10)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_alarm_is_left_as_it_was(handler: Handlers) -> None:
    signal.signal(signal.SIGALRM, handler)
    try:
        with deadline(60.0):
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
        assert signal.getsignal(signal.SIGALRM) == handler
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
