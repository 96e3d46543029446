"""The command line: `penstock run`, `graph`, `plan`, `eval`, `export` and the others below.

This module finds the command, runs it, and turns whatever happens into an exit code and at most one
message:

- 0: done.
- 1: something failed while running; the message says which node, and what happened before.
- 2: what was typed, configured or defined cannot run; nothing was trained.
- 130, 143: interrupted, terminated; workers are ended and checkpoints are intact. While steps are
  taken a checkpoint is written first; see `run_dir/stop.py`.

Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import NoReturn

from ..dataflow.errors import NOT_STARTED, ConfigError, PenstockError, nearest
from .openmp import spin_briefly
from .run_dir.stop import Terminated, say, tell, visible

# Name -> what runs it on the words after it and returns the exit code, and its help. Modules are
# imported when they are needed: each needs what the others do not.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("run:run_command", "train as an algorithm, a model and a task say; or continue a run"),
    "graph": ("plan:graph_command", "show the graph that an algorithm's step function makes"),
    "plan": (
        "plan:plan_command",
        "say where each node should run, in which layout, and how long a step takes",
    ),
    "eval": (
        "evaluate:eval_command",
        "answer held-out problems with the policy of a run, or with any model",
    ),
    "export": (
        "export:export_command",
        "write a run's model at a checkpoint as a Hugging Face folder, or upload it",
    ),
    "profile": (
        "plan:profile_command",
        "measure this machine or a cluster, for plans and for runs that are planned",
    ),
    "samples": ("run_commands:samples_command", "show what a run sampled, and what it earned"),
    "scale": (
        "run_commands:scale_command",
        "have a run that goes on sample with more replicas, or fewer",
    ),
    "runs": ("runs:runs_command", "list, compare, plot, check, reproduce and send runs"),
    "watch": (
        "run_commands:watch_command",
        "show runs in the browser while they go on: curves, samples, timelines",
    ),
    "doctor": (
        "doctor:doctor_command",
        "say what is installed and what this machine has, for a report of a fault",
    ),
}

_HELP = """\
usage: penstock COMMAND [key=value ...] [options]

{commands}

`penstock COMMAND --help` lists a command's groups and keys.
`eval "$(penstock -sc install=bash)"` completes commands, groups and keys in bash.
`penstock --version` prints the version.
`--debug` shows where an error arose, before the message.
"""

_DEBUG = "--debug"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = _DEBUG in words
    return _guarded(lambda: _dispatch([word for word in words if word != _DEBUG]), debug)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        shown = "\n".join(f"  {name:<9}{what}" for name, (_, what) in COMMANDS.items())
        print(_HELP.format(commands=shown), end="")
        return 0
    if words[0] == "--version":
        from .. import __version__

        print(f"penstock {__version__}")
        return 0
    if "-sc" in words or "--shell-completion" in words:
        from .cli.completion import complete

        return complete(words, COMMANDS)
    command, arguments = words[0], words[1:]
    if command not in COMMANDS:
        raise ConfigError(
            f"penstock has no command '{command}'{nearest(command, COMMANDS)}\n"
            f"    commands are: {', '.join(COMMANDS)}"
        )
    spin_briefly()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_VisibleFormatter())
    module, _, function = COMMANDS[command][0].partition(":")
    run: Callable[[list[str]], int] = getattr(
        import_module(f".cli.{module}", __package__), function
    )
    return run(arguments)


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _guarded(body: Callable[[], int], debug: bool) -> int:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _terminate)
    # Who ignores SIGCHLD never learns how its children ended: programs that fail would be rewarded.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with _no_sudden_end():
            return body()
    except KeyboardInterrupt as stopped:
        return _say(f"interrupted {stopped}".rstrip(), 130, stopped)
    except Terminated as stopped:
        return _say(f"terminated {stopped}".rstrip(), 143, stopped)
    except BrokenPipeError:
        # The reader left, as `penstock graph | head` does; nothing more can be shown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - no traceback but the user's own is ever shown
        from .inputs.failures import in_our_words, left_debugger, may_go_on

        if left_debugger(error):
            return _say("interrupted in the debugger", 130, error)
        if debug:
            traceback.print_exception(error)
        # What is raised while a run is under way has got our words there.
        known = error if isinstance(error, PenstockError) else in_our_words(error, running=False)
        tell(may_go_on=may_go_on(known))
        return _say(str(known), 2 if isinstance(known, NOT_STARTED) else 1, known)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _no_sudden_end() -> Generator[None]:
    # The user's code would end the run with its own code, so `os._exit` raises here. A process that
    # was forked from this one may still end so, as `multiprocessing` has it.
    own, end = os.getpid(), os._exit

    def refused(status: int) -> NoReturn:
        if os.getpid() != own:
            end(status)
        raise SystemExit(status)

    os._exit = refused
    try:
        yield
    finally:
        os._exit = end


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _say(message: str, code: int, error: BaseException) -> int:
    say("\n    ".join([message, *getattr(error, "__notes__", ())]))
    return code


if __name__ == "__main__":
    sys.exit(main())
