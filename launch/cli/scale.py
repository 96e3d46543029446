"""`penstock scale`: have a group of a run that goes on have more replicas, or fewer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...dataflow.errors import ConfigError, nearest
from ..run_dir.run_folder import RunFolder, open_run
from ..run_dir.scaling import ElasticGroup, read_groups, write_wish
from .words import split_words, whole_number

_HELP = """\
usage: penstock scale run=FOLDER GROUP=NUMBER ...

  run       the folder of a run that goes on
  GROUP     a group that trains nothing and keeps no state, such as `rollout`
  NUMBER    replicas that it is to have, from 1 to the parts of a step's rows

The run starts those that are missing beside its work, and says when it is done. What it learns does
not depend on it.
"""


def scale_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock scale`.

    Raises:
        ConfigError: If a word is wrong, or the run cannot do it.
    """
    if {"-h", "--help"} & set(arguments):
        print(_HELP, end="")
        return 0
    words = split_words("scale", arguments, ("run",), where=True)
    if words.names:
        raise ConfigError(f"penstock scale: expected KEY=VALUE, got '{words.names[0]:.80}'")
    if "run" not in words.options:
        raise ConfigError("penstock scale: which run?\n    give run=FOLDER, such as runs/...")
    folder = open_run(Path(words.option("run")))
    if not words.where:
        raise ConfigError("penstock scale: which group?\n    give GROUP=NUMBER, such as rollout=4")
    _check_goes_on(folder)
    groups = read_groups(folder.path)
    wish = {name: _size(groups, name, text) for name, text in words.where.items()}
    write_wish(folder.path, wish)
    asked = ", ".join(f"{name}={number}" for name, number in wish.items())
    print(f"run '{folder.id}' is to have {asked}; it says when it has")
    return 0


def _check_goes_on(folder: RunFolder) -> None:
    if folder.summary.exists():
        raise ConfigError(
            f"penstock scale: run '{folder.id}' has ended\n"
            "    give a run that goes on; where another one begins its plan says"
        )


def _size(groups: Mapping[str, ElasticGroup], name: str, text: str) -> int:
    group = groups.get(name)
    if group is None:
        raise ConfigError(
            f"penstock scale: the run has no group '{name:.80}'{nearest(name, groups)}\n"
            f"    groups are: {', '.join(sorted(groups))}"
        )
    if group.why_not:
        able = [one for one, other in sorted(groups.items()) if not other.why_not]
        raise ConfigError(
            f"penstock scale: group '{name}' cannot have other ranks: {group.why_not}\n"
            f"    groups that can: {', '.join(able) or 'none'}"
        )
    number = whole_number(name, text)
    if not 1 <= number <= group.most:
        raise ConfigError(
            f"'{name}': expected 1 to {group.most}, one for each part of a step's rows, got "
            f"{number}\n    start a run with schedule.streaming=N for N parts"
        )
    return number
