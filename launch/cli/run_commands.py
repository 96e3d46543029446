"""Commands on the folder of a run: `penstock samples`, `scale` and `watch`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ...dataflow.errors import ConfigError, nearest
from ..run_dir.evaluations import Evaluations, example_text
from ..run_dir.loopback_server import PageServer
from ..run_dir.run_folder import (
    ElasticGroup,
    RunFolder,
    open_run,
    read_groups,
    record_of,
    write_wish,
)
from ..run_dir.samples import ORDERS, SORTS, read_samples, sample_key, sample_steps, shown
from ..run_dir.stop import visible
from ..runs.values import folder_of
from ..watch.known_runs import KnownRuns
from ..watch.pages import Pages
from .words import Words, chosen, split_words, whole_number

_NO_NAMES = (0, "KEY=VALUE, got {}")

_SAMPLES_KEYS: Mapping[str, str] = {
    "run": "the folder of a run",
    "step": "a step, counted from 0; `last` (the default) or `all`",
    "sort": f"by: {', '.join(SORTS)}",
    "order": "highest (the default) or lowest first, of what `sort` names",
    "limit": "samples to show, 10 by default; 0 for all",
    "prompt": "only prompts that hold this text",
    "stage": "an earlier stage of the run",
}

_SAMPLES_HELP = """\
usage: penstock samples run=FOLDER [key=value ...]

{keys}

The same from Python: penstock.launch.run_dir.samples.read_samples(FOLDER).
"""

_SCALE_HELP = """\
usage: penstock scale run=FOLDER GROUP=NUMBER ...

  run       the folder of a run that goes on
  GROUP     a group that trains nothing and keeps no state, such as `rollout`
  NUMBER    replicas that it is to have, from 1 to the parts of a step's rows

The run starts those that are missing beside its work, and says when it is done. What it learns does
not depend on it.
"""

_WATCH_KEYS: Mapping[str, str] = {
    "port": "of this machine; 0 (the default) for any that is free",
    "runs": "the folder of all runs, `runs` by default",
}

_WATCH_HELP = """\
usage: penstock watch [RUN ...] [key=value ...]

Serves one page of runs to this machine alone: curves, samples, evaluations and timelines, live.
RUN is a run's folder, or its name in the folder of all runs; without any, all runs are shown.

{keys}

It prints the page's address, which nobody else knows, and goes on until Ctrl-C.
"""


def _helped(arguments: list[str], text: str, keys: Mapping[str, str]) -> bool:
    """Print a command's help if that is asked for."""
    asked = bool({"-h", "--help"} & set(arguments))
    if asked:
        lines = "\n".join(f"  {name:<8}{what}" for name, what in keys.items())
        print(text.format(keys=lines), end="")
    return asked


def _run_of(command: str, words: Words) -> RunFolder:
    if "run" not in words.options:
        raise ConfigError(f"penstock {command}: which run?\n    give run=FOLDER, such as runs/...")
    return open_run(Path(words.option("run")))


def samples_command(arguments: list[str]) -> int:
    """Show responses of a run, as conversations with what they earned."""
    if _helped(arguments, _SAMPLES_HELP, _SAMPLES_KEYS):
        return 0
    words = split_words("samples", arguments, (*_SAMPLES_KEYS,), num_names=_NO_NAMES)
    given, folder = words.options, _run_of("samples", words)
    home = folder.stage(given["stage"]).path if "stage" in given else folder.path
    if not home.is_dir():
        raise ConfigError(f"'stage': run '{folder.id}' has no stage '{given['stage']}'")
    sort = chosen("sort", given.get("sort", SORTS[0]), SORTS)
    order = chosen("order", given.get("order", ORDERS[0]), ORDERS)
    wanted, limit = given.get("prompt", ""), whole_number("limit", given.get("limit", "10"))
    if not sample_steps(home) and not given.keys() - {"run", "stage", "limit"}:
        return _show_evaluation(home, limit)
    found = read_samples(home, _steps(home, given.get("step", "last")))
    found.sort(key=sample_key(sort, order))
    found = [sample for sample in found if wanted in sample.prompt]
    if not found:
        raise ConfigError(f"'prompt': no prompt of these samples holds {wanted!r}")
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    reason = record_of(folder).not_reproducible
    if reason:
        console.print(Text(f"this run is not reproducible: {reason}", "dim"))
    for sample in found[: limit or None]:
        console.print(shown(sample))
    if limit and limit < len(found):
        console.print(Text(f"{limit} of {len(found)} samples; limit=0 shows all", "dim"))
    return 0


def _show_evaluation(home: Path, limit: int) -> int:
    """Show the newest evaluation's responses: nothing is sampled to train on, as in `sft`."""
    evaluations = Evaluations(home)
    step = max(evaluations.steps(), default=None)
    measured = {} if step is None else evaluations.read(step)
    lines = [visible(example_text(one)) for each in measured.values() for one in each.examples]
    if not lines:
        _steps(home, "last")
    print(f"nothing is sampled to train on; responses of the evaluation after {step} steps:")
    print("\n".join(lines[: limit or None]))
    return 0


def _steps(home: Path, text: str) -> list[int] | None:
    """Return the steps asked for; None for all."""
    there = sample_steps(home)
    if not there:
        raise ConfigError(
            f"'{home}' has no samples: its run keeps none (samples.max_rows=0), trains on no "
            "responses, or has not taken a step yet"
        )
    if text == "all":
        return None
    return there[-1:] if text == "last" else [whole_number("step", text)]


def scale_command(arguments: list[str]) -> int:
    """Have groups of a run that goes on take more replicas, or fewer."""
    if _helped(arguments, _SCALE_HELP, {}):
        return 0
    words = split_words("scale", arguments, ("run",), where=True, num_names=_NO_NAMES)
    folder = _run_of("scale", words)
    if not words.where:
        raise ConfigError("penstock scale: which group?\n    give GROUP=NUMBER, such as rollout=4")
    if folder.summary.exists():
        raise ConfigError(
            f"penstock scale: run '{folder.id}' has ended\n"
            "    give a run that goes on; where another one begins its plan says"
        )
    groups = read_groups(folder.path)
    wish = {name: _group_size(groups, name, text) for name, text in words.where.items()}
    write_wish(folder.path, wish)
    asked = ", ".join(f"{name}={number}" for name, number in wish.items())
    print(f"run '{folder.id}' is to have {asked}; it says when it has")
    return 0


def _group_size(groups: Mapping[str, ElasticGroup], name: str, text: str) -> int:
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


def watch_command(arguments: list[str]) -> int:
    """Serve a page of runs to this machine alone, until Ctrl-C."""
    if _helped(arguments, _WATCH_HELP, _WATCH_KEYS):
        return 0
    words = split_words("watch", arguments, (*_WATCH_KEYS,))
    text = words.option("port", "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 65536):
        raise ConfigError(f"'port': expected a whole number from 0 to 65535, got '{text:.40}'")
    port = int(text)
    runs = words.home if not words.names else Path(words.option("runs", "runs"))
    folders = [folder_of(word, runs).path.resolve() for word in dict.fromkeys(words.names)]
    try:
        server = PageServer(Pages(KnownRuns(folders, runs)).answer, port)
    except OSError as error:
        raise ConfigError(
            f"'port': 127.0.0.1:{port} cannot be used: {error.strerror}\n"
            "    give another one, or port=0 for any that is free"
        ) from error
    with server:
        what = f"all runs in {runs}" if not folders else ", ".join(one.name for one in folders)
        print(visible(f"penstock watch: {what}"))
        print(server.url)
        sys.stdout.flush()  # a reader of a pipe waits for the address
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("penstock watch: ended")
    return 0
