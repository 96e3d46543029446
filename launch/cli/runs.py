"""Commands on runs that exist: `penstock runs`, `samples`, `scale` and `watch`.

None of them composes a configuration: their words are names of runs, keys of their own, and keys of
runs with the values that these must have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.text import Text

from ...dataflow.errors import ConfigError, nearest
from ...planner.formatting import aligned
from ..run_dir.evaluations import Evaluations, example_text
from ..run_dir.files import differences, flat, write_text
from ..run_dir.loopback_server import PageServer
from ..run_dir.provenance import (
    Origins,
    changed_files,
    changed_versions,
    code_version,
    origins_now,
    required,
)
from ..run_dir.run_folder import (
    ElasticGroup,
    RunFolder,
    RunRecord,
    list_runs,
    open_run,
    read_groups,
    record_of,
    write_wish,
)
from ..run_dir.samples import ORDERS, SORTS, read_samples, sample_key, sample_steps, shown
from ..run_dir.step_logs import stage_events
from ..run_dir.stop import say, visible
from ..run_dir.topics import titles
from ..runs.archive import export_run, import_curves, import_run
from ..runs.comparison import compared, comparison_markdown, draw, joined
from ..runs.values import (
    OVER,
    History,
    Over,
    Series,
    about_values,
    folder_of,
    run_of,
    selected,
    sets_by,
    sparkline,
    value_text,
)
from ..watch.pages import KnownRuns, Pages

_Choice = TypeVar("_Choice", bound=str)

_MOST_DIGITS = 18
_MOST_CHARACTERS = 64  # of a cell: an example's response may be as long as a page


@dataclass(frozen=True)
class Words:
    """The sorted words after a command."""

    names: tuple[str, ...]  # words without `=`, or that are there as files: names of runs
    options: Mapping[str, str]  # the command's own keys
    where: Mapping[str, str]  # every other key, of runs, with the value that it must have

    @property
    def home(self) -> Path:
        """The folder of runs, which must exist."""
        home = Path(self.options.get("runs", "runs"))
        if not home.is_dir():
            raise ConfigError(
                f"'{home}' is no folder of runs\n"
                "    give runs=FOLDER, which `penstock run` writes to"
            )
        return home

    def option(self, key: str, otherwise: str = "") -> str:
        return self.options.get(key, otherwise)


def split_words(
    command: str,
    arguments: Sequence[str],
    options: Sequence[str],
    *,
    where: bool = False,
    num_names: tuple[int, str] | None = None,
) -> Words:
    """Sort the words of a command into names, its options and, if `where`, keys of runs.

    `num_names` is how many names it takes, and what is expected instead of other numbers.
    """
    names, given, others = list[str](), dict[str, str](), dict[str, str]()
    for word in arguments:
        key, equals, value = word.partition("=")
        if word.startswith("-") or (equals and not key):
            raise ConfigError(f"penstock {command}: expected KEY=VALUE or a name, got '{word:.80}'")
        if not equals or (key not in options and Path(word).exists()):
            names.append(word)
        elif key in options:
            given[key] = value
        elif where:
            others[key] = value
        else:
            raise ConfigError(
                f"penstock {command}: there is no key '{key:.80}'{nearest(key, options)}\n"
                f"    keys are: {', '.join(options)}"
            )
    if num_names is not None and len(names) != num_names[0]:
        got = len(names) if num_names[0] else f"'{names[0]:.80}'"
        raise ConfigError(f"penstock {command}: expected {num_names[1].format(got)}")
    return Words(tuple(names), given, others)


def whole_number(key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"'{key}': expected a whole number of at least 0, got '{text:.40}'")
    if len(text) > _MOST_DIGITS:
        raise ConfigError(f"'{key}': expected at most {_MOST_DIGITS} digits, got {len(text)}")
    return int(text)


def chosen(key: str, text: str, choices: Sequence[_Choice]) -> _Choice:
    for choice in choices:
        if choice == text:
            return choice
    raise ConfigError(f"'{key}': expected one of {', '.join(choices)}, got '{text:.40}'")


def print_table(rows: Sequence[Sequence[str]], *, whole: bool = False) -> None:
    """Print rows of as many cells each; long ones are cut unless `whole`."""

    def cell(text: str) -> str:
        shown = visible(text).replace("\n", "\\n").replace("\t", "\\t")
        cut = not whole and len(shown) > _MOST_CHARACTERS
        return f"{shown[: _MOST_CHARACTERS - 3]}..." if cut else shown

    for line in aligned([[cell(text) for text in row] for row in rows]):
        print(line)


# --- penstock samples, scale and watch

_NO_NAMES = (0, "KEY=VALUE, got {}")

_SAMPLES_HELP = f"""\
usage: penstock samples run=FOLDER [key=value ...]

  run     the folder of a run
  step    a step, counted from 0; `last` (the default) or `all`
  sort    by: {", ".join(SORTS)}
  order   highest (the default) or lowest first, of what `sort` names
  limit   samples to show, 10 by default; 0 for all
  prompt  only prompts that hold this text
  stage   an earlier stage of the run

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

_WATCH_HELP = """\
usage: penstock watch [RUN ...] [key=value ...]

Serves one page of runs to this machine alone: curves, samples, evaluations and timelines, live.
RUN is a run's folder, or its name in the folder of all runs; without any, all runs are shown.

  port    of this machine; 0 (the default) for any that is free
  runs    the folder of all runs, `runs` by default

It prints the page's address, which is not known to others, and goes on until Ctrl-C.
"""


def _helped(arguments: Sequence[str], text: str) -> bool:
    asked = bool({"-h", "--help"} & set(arguments))
    if asked:
        print(text, end="")
    return asked


def _run_of(command: str, words: Words) -> RunFolder:
    if "run" not in words.options:
        raise ConfigError(f"penstock {command}: which run?\n    give run=FOLDER, such as runs/...")
    return open_run(Path(words.option("run")))


def samples_command(arguments: list[str]) -> int:
    if _helped(arguments, _SAMPLES_HELP):
        return 0
    keys = ("run", "step", "sort", "order", "limit", "prompt", "stage")
    words = split_words("samples", arguments, keys, num_names=_NO_NAMES)
    given, folder = words.options, _run_of("samples", words)
    home = folder.stage(given["stage"]).path if "stage" in given else folder.path
    if not home.is_dir():
        raise ConfigError(f"'stage': run '{folder.id}' has no stage '{given['stage']}'")
    sort = chosen("sort", given.get("sort", SORTS[0]), SORTS)
    order = chosen("order", given.get("order", ORDERS[0]), ORDERS)
    wanted, limit = given.get("prompt", ""), whole_number("limit", given.get("limit", "10"))
    steps = sample_steps(home)
    if not steps and not given.keys() - {"run", "stage", "limit"}:
        # Nothing is sampled to train on, as in `sft`: the newest evaluation's responses.
        evaluations = Evaluations(home)
        step = max(evaluations.steps(), default=None)
        measured = {} if step is None else evaluations.read(step)
        lines = [visible(example_text(one)) for each in measured.values() for one in each.examples]
        if lines:
            said = f"responses of the evaluation after {step} steps:"
            print(f"nothing is sampled to train on; {said}", *lines[: limit or None], sep="\n")
            return 0
    if not steps:
        raise ConfigError(
            f"'{home}' has no samples: its run keeps none (samples.max_rows=0), trains on no "
            "responses, or has not taken a step yet"
        )
    which, chosen_steps = given.get("step", "last"), None
    if which != "all":
        chosen_steps = steps[-1:] if which == "last" else [whole_number("step", which)]
    found = read_samples(home, chosen_steps)
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


def scale_command(arguments: list[str]) -> int:
    if _helped(arguments, _SCALE_HELP):
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
    if _helped(arguments, _WATCH_HELP):
        return 0
    words = split_words("watch", arguments, ("port", "runs"))
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


# --- penstock runs

# Figures of a listing, where any of the runs has them.
_SHOWN = ("state", "num_steps", "accuracy_after_rl", "wall_time_s")
# Beginnings of keys that `show` does not print; summary.json has them.
_LEFT_OUT = ("examples_", "changes", "nodes.")
_ONE_RUN = (1, "one run, got {}")
_CAME_OUT = ("weights_sha256", "roles_sha256", "num_steps", "accuracy_after_rl")


def list_command(arguments: Sequence[str]) -> int:
    keys = ("sort", "show", "limit", "runs")
    words = split_words("runs list", arguments, keys, where=True, num_names=_NO_NAMES)
    limit = whole_number("limit", words.option("limit", "0"))
    found = selected(list_runs(words.home), words.where, words.option("sort"))
    if words.where and not found:
        conditions = ", ".join(f"{key}={value}" for key, value in words.where.items())
        print(visible(f"no run in '{words.home}' has {conditions:.200}"))
        return 0
    wanted = _SHOWN
    if "show" in words.options:
        wanted = tuple(words.option("show").split(","))
        known = {key for one in found for key in one.values}
        for key in wanted:
            if found and key not in known:
                raise ConfigError(f"'show': no run here has a key '{key}'{nearest(key, known)}")
    having = [key for key in wanted if any(one.values.get(key) is not None for one in found)]
    rows = [["run", *having]]
    for one in found[: limit or None]:
        rows.append([one.record.folder.id, *(value_text(one.values.get(key)) for key in having)])
    print_table(rows)
    for one in found:
        if one.record.fault:
            print(visible(f"{one.record.folder.id}: {one.record.fault}"))
    return 0


def show_run(arguments: Sequence[str]) -> int:
    words = split_words("runs show", arguments, ("runs",), num_names=_ONE_RUN)
    record = run_of(words.names[0], words.home)
    print(visible(str(record.folder.path)))
    values = about_values(record)
    about = {key: values[key] for key in ("state", "created", "seed", "code", "data")}
    versions, hardware = record.origins.versions, record.origins.hardware
    about["not reproducible"] = record.not_reproducible or None
    packages = (name for name in ("python", *required()) if name in versions)
    about["packages"] = ", ".join(f"{name} {versions[name]}" for name in packages)
    about["machine"] = ", ".join(f"{key} {value_text(value)}" for key, value in hardware.items())
    _section("the run", {k: value for k, value in about.items() if value not in (None, "", [])})
    came_out = flat(record.summary or {}).items()
    shown_keys = {k: v for k, v in came_out if not k.startswith(_LEFT_OUT) and v is not None}
    _section("what came out", shown_keys)
    events = stage_events(record.folder.path)
    if events:
        print("\nwarnings")
    for event in events:
        stage = f"stage {event['stage']}, " if event["stage"] else ""
        node, seen, means, remedy = (event.get(k, "") for k in ("node", "seen", "means", "remedy"))
        first, last = event.get("first_step", event["step"]), event["step"]
        steps = f"steps {first} to {last}" if first != last else f"step {last}"
        print(visible(f"  {stage}{steps}, {node}: {seen}\n      {means}\n      remedy: {remedy}"))
    rows = [["metric", "first", "last", ""]]
    history = History(record.folder.path)
    for name in history.metrics:
        ys = history.series(name).ys
        if ys:
            rows.append([f"  {name}", value_text(ys[0]), value_text(ys[-1]), sparkline(ys)])
    if len(rows) > 1:
        print()
        print_table(rows)
    return 0


def _section(title: str, values: Mapping[str, Any]) -> None:
    if values:
        print(f"\n{title}")
        rows = [[f"  {key}", value_text(value)] for key, value in values.items()]
        print_table(rows, whole=True)


def diff_runs(arguments: Sequence[str]) -> int:
    words = split_words("runs diff", arguments, ("runs",), num_names=(2, "two runs, got {}"))
    one, other = (run_of(word, words.home) for word in words.names)
    then, now = one.origins, other.origins
    own = {"files": then.files, "models": then.models}, {"files": now.files, "models": now.models}
    parts: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("code", {"code": str(one.code)}, {"code": str(other.code)}),
        ("data", {"data": one.data}, {"data": other.data}),
        ("files and models", *own),
        ("packages", then.versions, now.versions),
        ("machine", then.hardware, now.hardware),
        ("configuration", one.config or {}, other.config or {}),
        ("what came out", one.summary or {}, other.summary or {}),
    )
    print(visible(f"{one.folder.id} and {other.folder.id}"))
    for title, before, after in parts:
        found = differences(before, after)
        if found:
            print(f"\n{title}")
            pairs = found.items()
            print_table([[f"  {key}", value_text(a), value_text(b)] for key, (a, b) in pairs])
    if all(before == after for _, before, after in parts):
        print(
            "are the same in code, data, models, packages, machine, configuration and what came out"
        )
    return 0


def reproduce_run(arguments: Sequence[str]) -> int:
    """Run it again in the folder of runs; 1 if other weights came out."""
    words = split_words("runs reproduce", arguments, ("into", "runs"), num_names=_ONE_RUN)
    before = run_of(words.names[0], words.home)
    if before.summary is None or before.summary.get("stopped"):
        raise ConfigError(
            f"run '{before.folder.id}' has not finished, so nothing can be compared with it\n"
            f"    go on with it: penstock run resume={before.folder.path}"
        )
    if before.changes:
        steps = ", ".join(str(change["step"]) for change in before.changes)
        raise ConfigError(
            f"the configuration of run '{before.folder.id}' changed on its way, after step {steps}"
            "\n    run it with its first configuration and resume it with each change of run.json"
        )
    for line in _differing(before):
        print(visible(f"differs: {line}"), flush=True)
    # Imported here: no other subcommand starts a run, or reads a configuration.
    from ..run_dir.resume import stored_config
    from .carry_out import carry_out_again

    config = stored_config(before.folder)
    config.pop("resume", None)
    into = words.option("into", words.option("runs", "runs"))
    folder = carry_out_again(before, {**config, "runs": into})
    now = record_of(folder)
    then, since = before.summary, now.summary or {}
    same = then.get("weights_sha256") == since.get("weights_sha256")
    print(visible(f"{now.folder.path}: {'the same' if same else 'other'} weights"))
    for key in _CAME_OUT:
        if then.get(key) != since.get(key):
            print(visible(f"  {key}: {then.get(key)} then and {since.get(key)} now"))
    return 0 if same else 1


def _differing(record: RunRecord) -> Iterator[str]:
    from ..placement.machine import machine_name  # here: it needs torch

    before, code = record.origins, code_version()
    models = [folder for folder in before.models if Path(folder).is_dir()]
    now = origins_now(models, machine_name())
    if record.not_reproducible:
        yield f"the run is not reproducible: {record.not_reproducible}"
    if record.code != code:
        yield f"code, {record.code} then and {code} now"
    elif code.dirty:
        yield f"code, perhaps: {code} both times, with changes that were not committed"
    if versions := changed_versions(before, now):
        yield f"packages, {versions}"
    for key, value in before.hardware.items():
        if now.hardware.get(key) != value:
            yield f"machine, {key}: {value} then and {now.hardware.get(key)} now"
    # Files that were not imported yet are compared where they lie.
    for path in changed_files(before, Origins()):
        there = "is not here" if not Path(path).exists() else "is another"
        yield f"your own file {path} {there}"
    for folder, found in now.models.items():
        if before.models[folder] != found:
            yield f"the model in {folder} is another"


def plot_runs(arguments: Sequence[str]) -> int:
    """Draw curves of sets of runs into a file, or one line each on the terminal."""
    keys = ("metric", "over", "by", "stage", "file", "runs")
    words = split_words("runs plot", arguments, keys, where=True)
    if "metric" not in words.options:
        raise ConfigError(
            "penstock runs plot: which metric?\n    give metric=NAME; penstock runs show RUN lists "
            "those that a run has"
        )
    over = chosen("over", words.option("over", "steps"), OVER)
    curves = _curves(words, words.option("metric").split(","), over)
    rows = [["metric", "set", "runs", over, "first", "last", ""]]
    named = titles(curves)
    for metric, sets in curves.items():
        for label, runs in sets.items():
            xs, means, _, _ = joined(runs)
            ends = [value_text(float(y)) for y in (xs[-1], means[0], means[-1])]
            rows.append([named[metric], label, str(len(runs)), *ends, sparkline(means.tolist())])
    print_table(rows)
    if "file" in words.options:
        draw(Path(words.option("file")), curves, over)
        print(visible(f"drawn in {words.option('file')}"))
    return 0


def _curves(words: Words, metrics: Sequence[str], over: Over) -> dict[str, dict[str, list[Series]]]:
    sets = sets_by(words.names, words.where, words.option("by"), words.home)
    curves: dict[str, dict[str, list[Series]]] = {metric: {} for metric in metrics}
    missing: dict[str, ConfigError] = {}
    for label, record in ((label, run.record) for label, runs in sets.items() for run in runs):
        stage = words.option("stage")
        folder = record.folder.stage(stage).path if stage else record.folder.path
        if not folder.is_dir():
            raise ConfigError(f"'stage': run '{record.folder.id}' has no stage '{stage}'")
        try:
            history = History(folder)
            found = [history.series(metric, over) for metric in metrics]
        except ConfigError as error:
            missing[record.folder.id] = error
            continue
        for metric, series in zip(metrics, found, strict=True):
            curves[metric].setdefault(label, []).append(series)
    for run, error in missing.items():
        if not any(curves.values()):
            raise error
        say(f"run '{run}' is left out: {error}")
    return curves


def compare_runs(arguments: Sequence[str]) -> int:
    """Print how much better one set of runs is than another, and how sure that is."""
    words = split_words("runs compare", arguments, ("key", "by", "report", "runs"), where=True)
    sets = sets_by(words.names, words.where, words.option("by"), words.home)
    if len(sets) != 2:
        labels = ", ".join(sets)
        raise ConfigError(
            f"penstock runs compare: expected two sets of runs, got {len(sets)}: {labels:.200}\n"
            "    name two, such as 'A*' 'B*', or give by=KEY, of which the runs have two values"
        )
    found = [compared(key, sets) for key in words.option("key", "accuracy_after_rl").split(",")]
    for number, one in enumerate(found):
        if number:
            print()
        print_table(one.rows())
        for line in one.remarks():
            print(visible(line))
    if "report" in words.options:
        path = Path(words.option("report"))
        write_text(path, comparison_markdown(found, sets))
        print(visible(f"reported in {path}"))
    return 0


def export_command(arguments: Sequence[str]) -> int:
    keys, two = ("checkpoints", "runs"), (2, "a run and a file, got {} words")
    words = split_words("runs export", arguments, keys, num_names=two)
    run, file = words.names
    whole = chosen("checkpoints", words.option("checkpoints", "false"), ("true", "false"))
    size_bytes = export_run(run_of(run, words.home), Path(file), checkpoints=whole == "true")
    print(visible(f"written to {file}: {size_bytes / 2**20:.1f} MiB"))
    return 0


def import_command(arguments: Sequence[str]) -> int:
    one = (1, "one file, got {}")
    words = split_words("runs import", arguments, ("as", "runs"), num_names=one)
    path, runs = Path(words.names[0]), Path(words.option("runs", "runs"))
    if not path.is_file():
        raise ConfigError(f"'{path}' is no file\n    give one that penstock runs export has made")
    if chosen("as", words.option("as", "archive"), ("archive", "csv")) == "csv":
        folders = import_curves(path, runs)
    else:
        folders = [import_run(path, runs)]
    for folder in folders:
        print(visible(f"imported as {folder.path}"))
    return 0


class _Action(NamedTuple):
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
    lines = [f"  {name:<10}{a.words}\n{'':12}{a.what}" for name, a in ACTIONS.items()]
    if _helped(arguments, _HELP.format(actions="\n".join(lines))):
        return 0
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    action = ACTIONS.get(name)
    if action is None:
        raise ConfigError(
            f"penstock runs: expected one of {', '.join(ACTIONS)}, got '{name:.40}'"
            f"{nearest(name, ACTIONS)}\n    penstock runs --help says what each takes"
        )
    return action.run(rest)
