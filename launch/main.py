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
from typing import Any, NamedTuple, NoReturn

from ..dataflow.errors import NOT_STARTED, ConfigError, PenstockError, nearest
from .openmp import spin_briefly
from .run_dir.stop import Terminated, say, tell, unhidden, visible


class Command(NamedTuple):
    """A command: what runs it, which is imported when it is called, and its help."""

    run: str  # module:function of `cli`, of the words after the command
    help: str
    composes: bool = False  # Hydra composes the words, and `run` takes a configuration instead


COMMANDS: Mapping[str, Command] = {
    "run": Command(
        "run:run_command", "train as an algorithm, a model and a task say; or continue a run"
    ),
    "graph": Command(
        "graph:show_graph", "show the graph that an algorithm's step function makes", True
    ),
    "plan": Command(
        "plan:make_plan",
        "say where each node should run, in which layout, and how long a step takes",
        True,
    ),
    "eval": Command(
        "checkpoints:evaluate_policy",
        "answer held-out problems with the policy of a run, or with any model",
        True,
    ),
    "export": Command(
        "checkpoints:export_model",
        "write a run's model at a checkpoint as a Hugging Face folder, or upload it",
        True,
    ),
    "profile": Command(
        "plan:measure",
        "measure this machine or a cluster, for plans and for runs that are planned",
        True,
    ),
    "samples": Command("runs:samples_command", "show what a run sampled, and what it earned"),
    "scale": Command(
        "runs:scale_command", "have a run that goes on sample with more replicas, or fewer"
    ),
    "runs": Command("runs:runs_command", "list, compare, plot, check, reproduce and send runs"),
    "watch": Command(
        "runs:watch_command",
        "show runs in the browser while they go on: curves, samples, timelines",
    ),
    "doctor": Command(
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


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    return _guarded(lambda: _dispatch([word for word in words if word != "--debug"]), debug)


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        shown = "\n".join(f"  {name:<9}{command.help}" for name, command in COMMANDS.items())
        print(_HELP.format(commands=shown), end="")
        return 0
    if words[0] == "--version":
        from .. import __version__

        print(f"penstock {__version__}")
        return 0
    if "-sc" in words or "--shell-completion" in words:
        return _complete(words)
    name, arguments = words[0], words[1:]
    command = COMMANDS.get(name)
    if command is None:
        raise ConfigError(
            f"penstock has no command '{name}'{nearest(name, COMMANDS)}\n"
            f"    commands are: {', '.join(COMMANDS)}"
        )
    spin_briefly()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_VisibleFormatter())
    module, _, function = command.run.partition(":")

    def run(given: Any) -> Any:
        return getattr(import_module(f".cli.{module}", __package__), function)(given)

    if not command.composes:
        return run(arguments)
    from .cli.hydra_app import hydra_app

    hydra_app(name, arguments, run)
    return 0


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _guarded(body: Callable[[], int], debug: bool) -> int:
    def terminate(signum: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    # Who ignores SIGCHLD never learns how its children ended: programs that fail would be rewarded.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        try:
            with _no_sudden_end():
                return body()
        except SystemError as error:
            raise unhidden(error) from None
    except KeyboardInterrupt as stopped:
        return _say(f"interrupted {stopped}".rstrip(), 130, stopped)
    except Terminated as stopped:
        return _say(f"terminated {stopped}".rstrip(), 143, stopped)
    except BrokenPipeError:
        # The reader left, as `penstock graph | head` does; nothing more can be shown.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - no traceback but the user's own is ever shown
        from .run_dir.failures import in_our_words, left_debugger, may_go_on

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


def _say(message: str, code: int, error: BaseException) -> int:
    say("\n    ".join([message, *getattr(error, "__notes__", ())]))
    return code


# --- shell completion: commands first, then what Hydra knows of a command's groups and keys

# It asks `penstock COMMAND -sc query=bash` for every Tab, with the line in `COMP_LINE`.
_SCRIPT = """\
_penstock_complete()
{
    local word="${COMP_WORDS[COMP_CWORD]}" choices
    if [ "$COMP_CWORD" -eq 1 ]; then
        choices="{commands} --help --version"
    else
        choices=$(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" \\
            "${COMP_WORDS[0]}" "${COMP_WORDS[1]}" -sc query=bash 2>/dev/null)
    fi
    COMPREPLY=($(compgen -o default -W "$choices" -- "$word"))
    # A blank belongs after a command, and nowhere after a key.
    if [ "$COMP_CWORD" -eq 1 ]; then compopt +o nospace 2>/dev/null; fi
}
# Bash must not cut words at "=", or no value could be completed.
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _penstock_complete penstock
"""


def _complete(words: list[str]) -> int:
    """Answer `[COMMAND] -sc install=SHELL | uninstall=SHELL | query=SHELL`."""
    request = next((word for word in words if "=" in word), "")
    action, _, shell = request.partition("=")
    if action not in ("install", "uninstall", "query") or shell not in ("bash", "zsh"):
        raise ConfigError(
            f"shell completion was asked for with '{request or 'nothing'}'\n"
            "    use: penstock -sc install=bash (or zsh), uninstall=..., query=..."
        )
    name = words[0]
    if action == "install":
        if shell == "zsh":
            print("autoload -U +X bashcompinit && bashcompinit")
        print(_SCRIPT.replace("{commands}", " ".join(COMMANDS)), end="")
    elif action == "uninstall":
        print("complete -r penstock; unset -f _penstock_complete")
    elif name == "doctor":
        from .cli.doctor import OPTIONS

        print(" ".join(OPTIONS))
    elif name == "runs":
        from .cli.runs import ACTIONS

        print(" ".join(ACTIONS))
    elif name == "run" or (name in COMMANDS and COMMANDS[name].composes):
        from .cli.hydra_app import hydra_app

        # Hydra takes the first word for the program and all others for overrides.
        program, _, rest = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
        os.environ["COMP_LINE"] = f"{program} {rest.lstrip().removeprefix(name).lstrip()}"

        def never(_: object) -> None:
            raise AssertionError("a completion query runs no task")

        hydra_app(name, ["-sc", "query=bash"], never)
    return 0


if __name__ == "__main__":
    sys.exit(main())
