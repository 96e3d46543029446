"""Signals that ask for a stop: what the first one does, the second one, and none at all."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from penstock.launch.run_dir.stop import Terminated, say, unhidden

from ..conftest import Penstock

SCRIPT = """
import sys, time
from penstock.launch.run_dir.stop import Terminated, stoppable

deadline_s, heeds = float(sys.argv[1]), sys.argv[2] == "heeds"
try:
    with stoppable(deadline_s) as stop:
        print("ready", flush=True)
        until = time.monotonic() + 30
        while time.monotonic() < until and not (heeds and stop()):
            time.sleep(0.01)
    stop.end("after 1 of 2 steps")
except (KeyboardInterrupt, Terminated) as error:
    print(type(error).__name__, error)
"""
STOPPING = (
    "penstock: stopping: what has begun to train is completed and a checkpoint written, within {} "
    "s; interrupt again to stop at once\n"
)


def started(*words: str, deaf: bool = False) -> subprocess.Popen[str]:
    """A process that can be stopped, once it can be; perhaps one that ignores SIGINT."""
    code = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{SCRIPT}"
    process = subprocess.Popen(
        [sys.executable, "-c", code if deaf else SCRIPT, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def wait_for_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def test_the_first_signal_asks() -> None:
    process = started("60", "heeds")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == (
        "KeyboardInterrupt after 1 of 2 steps\n",
        STOPPING.format(60),
    )


def test_the_second_signal_ends_it_at_once() -> None:
    process = started("60", "goes on")
    process.send_signal(signal.SIGINT)
    assert wait_for_line(process) == STOPPING.format(60)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20) == ("Terminated \n", "")


def test_so_does_the_deadline() -> None:
    process = started("0.2", "goes on")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == (
        "KeyboardInterrupt \n",
        f"{STOPPING.format(0.2)}penstock: no checkpoint was written within 0.2 s; stopping at "
        "once\n",
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [(("60", "heeds"), "after 1 of 2 steps"), (("0.2", "goes on"), "")],
    ids=["asked", "deadline"],
)
def test_nobody_needs_to_read_what_is_said(words: tuple[str, ...], said: str) -> None:
    """Ctrl-C ends `tee` in `penstock run ... 2>&1 | tee log` as well."""
    process = started(*words)
    assert process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20) == (f"KeyboardInterrupt {said}\n", "")
    assert process.returncode == 0


def test_who_was_started_deaf_to_sigint_stays_so_and_hears_sigterm() -> None:
    process = started("60", "heeds", deaf=True)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20) == (
        "Terminated after 1 of 2 steps\n",
        STOPPING.format(60),
    )


def test_how_children_end_is_heard_whoever_started_the_command(penstock: Penstock) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert penstock("--version").code == 0
        assert subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def test_a_message_only_shows(capsys: pytest.CaptureFixture[str]) -> None:
    say("'a\x1b[31m\x9b\u202eb'\tc\npenstock: all is well\n\x00")
    assert capsys.readouterr().err == (
        "penstock: 'a\\x1b[31m\\x9b\\u202eb'\tc\n    penstock: all is well\n\\x00\n"
    )


def test_an_end_that_c_code_hides_is_found() -> None:
    hidden = SystemError("<built-in method> returned a result with an exception set")
    assert unhidden(hidden) is hidden
    hidden.__cause__ = Terminated()
    assert unhidden(hidden) is hidden.__cause__
    other = ValueError()
    other.__cause__ = KeyboardInterrupt()
    assert unhidden(other) is other
