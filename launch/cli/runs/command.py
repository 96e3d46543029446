"""`penstock runs`: what can be done with runs that exist, and the words of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ....dataflow.errors import ConfigError, nearest
from .comparing import compare_runs, plot_runs
from .listing import diff_runs, list_command, show_run
from .reproducing import reproduce_run
from .transfer import export_command, import_command


@dataclass(frozen=True)
class _Action:
    """One of them: what runs it and returns the exit code, its words, and what it does."""

    run: Callable[[Sequence[str]], int]
    words: str
    what: str


ACTIONS: Mapping[str, _Action] = {
    "list": _Action(
        list_command,
        "[KEY=VALUE ...] [sort=KEY] [show=KEY,...] [limit=N]",
        "the runs in which each KEY has that VALUE, oldest first",
    ),
    "show": _Action(show_run, "RUN", "what a run is, what came out, and how each metric went"),
    "diff": _Action(diff_runs, "RUN RUN", "in what two runs differ"),
    "plot": _Action(
        plot_runs,
        "SET ... [KEY=VALUE ...] metric=NAME,... [over=steps] [by=KEY] [stage=NAME] [file=FILE]",
        "metrics of sets of runs over steps, samples, tokens or seconds; FILE is .svg or .png",
    ),
    "compare": _Action(
        compare_runs,
        "SET SET [KEY=VALUE ...] [key=KEY,...] [by=KEY] [report=FILE]",
        "how much better the second set is; FILE is Markdown",
    ),
    "reproduce": _Action(
        reproduce_run,
        "RUN [into=FOLDER]",
        "run it again, into the folder of runs or another; exit code 1 if other weights came out",
    ),
    "export": _Action(
        export_command, "RUN FILE [checkpoints=true]", "write a run as one archive with checksums"
    ),
    "import": _Action(
        import_command,
        "FILE [as=archive]",
        "unpack such an archive; as=csv for curves that another program has exported",
    ),
}

_HELP = """\
usage: penstock runs ACTION [word ...] [runs=FOLDER]

{actions}

RUN is a run's folder, or its name in the folder of runs, which is `runs` by default.
SET is a RUN, several with commas between them, or a pattern in quotes: '20261123-*-grpo-*'.
KEY is `name`, `seed`, `created`, `state`, `code` or `data`, a key of the configuration such as
`algorithm.step`, or one of summary.json. With by=KEY the runs with the same value make a set.
"""


def runs_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock runs`.

    Raises:
        ConfigError: If a word or its value is wrong, or a run is not there.
    """
    if {"-h", "--help"} & set(arguments):
        print(_HELP.format(actions="\n".join(map(_help, ACTIONS.items()))), end="")
        return 0
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    action = ACTIONS.get(name)
    if action is None:
        raise ConfigError(
            f"penstock runs: expected one of {', '.join(ACTIONS)}, got '{name:.40}'"
            f"{nearest(name, ACTIONS)}\n    penstock runs --help says what each takes"
        )
    return action.run(rest)


def _help(one: tuple[str, _Action]) -> str:
    name, action = one
    return f"  {name:<10}{action.words}\n{'':12}{action.what}"
