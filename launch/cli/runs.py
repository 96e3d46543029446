"""`penstock runs`: what can be done with runs that exist, and the words of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError, nearest
from ..run_dir.files import differences, write_text
from ..run_dir.provenance import (
    Origins,
    changed_files,
    changed_versions,
    code_version,
    environment_now,
    origins_of,
    required,
    versions_text,
)
from ..run_dir.resume import stored_config
from ..run_dir.run_folder import RunRecord, list_runs, record_of
from ..run_dir.step_logs import stage_events
from ..run_dir.stop import say, visible
from ..runs.archive import export_run, import_curves, import_run
from ..runs.comparison import compared, comparison_markdown
from ..runs.drawing import draw, joined
from ..runs.values import (
    OVER,
    Figures,
    History,
    Over,
    Series,
    flat_values,
    run_of,
    selected,
    sets_by,
    sparkline,
    value_text,
)
from .words import Words, chosen, print_table, split_words, whole_number

# Figures of a listing, where any of the runs has them.
_SHOWN = ("state", "num_steps", "accuracy_after_rl", "wall_time_s")
# Beginnings of keys that `show` does not print; summary.json has them.
_LEFT_OUT = ("examples_", "changes", "nodes.")
_ONE_RUN = (1, "one run, got {}")
_CAME_OUT = ("weights_sha256", "roles_sha256", "num_steps", "accuracy_after_rl")


def list_command(arguments: Sequence[str]) -> int:
    """Print a line per run."""
    keys = ("sort", "show", "limit", "runs")
    words = split_words(
        "runs list", arguments, keys, where=True, num_names=(0, "KEY=VALUE, got {}")
    )
    limit = whole_number("limit", words.option("limit", "0"))
    found = selected(list_runs(words.home), words.where, words.option("sort"))
    if words.where and not found:
        conditions = ", ".join(f"{key}={value}" for key, value in words.where.items())
        print(visible(f"no run in '{words.home}' has {conditions:.200}"))
        return 0
    wanted = _SHOWN
    if "show" in words.options:
        wanted = tuple(words.option("show").split(","))
        known = {key for _, values in found for key in values}
        for key in wanted:
            if found and key not in known:
                raise ConfigError(f"'show': no run here has a key '{key}'{nearest(key, known)}")
    having = [key for key in wanted if any(values.get(key) is not None for _, values in found)]
    rows = [["run", *having]]
    for record, values in found[: limit or None]:
        rows.append([record.folder.id, *(value_text(values.get(key)) for key in having)])
    print_table(rows)
    for record, _ in found:
        if record.fault:
            print(visible(f"{record.folder.id}: {record.fault}"))
    return 0


def show_run(arguments: Sequence[str]) -> int:
    """Print what one run is, its results, and the course of each of its metrics."""
    words = split_words("runs show", arguments, ("runs",), num_names=_ONE_RUN)
    record = run_of(words.names[0], words.home)
    print(visible(str(record.folder.path)))
    _section("the run", _about(record))
    came_out = {
        key: value
        for key, value in flat_values(record, own=False).items()
        if not key.startswith(_LEFT_OUT) and value is not None
    }
    _section("what came out", came_out)
    _print_warnings(record)
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


def _print_warnings(record: RunRecord) -> None:
    found = stage_events(record.folder.path)
    if found:
        print("\nwarnings")
    for event in found:
        stage = f"stage {event['stage']}, " if event["stage"] else ""
        said = {name: str(event.get(name, "")) for name in ("node", "seen", "means", "remedy")}
        first, last = event.get("first_step", event["step"]), event["step"]
        steps = f"steps {first} to {last}" if first != last else f"step {last}"
        print(visible(f"  {stage}{steps}, {said['node']}: {said['seen']}"))
        print(visible(f"      {said['means']}\n      remedy: {said['remedy']}"))


def _about(record: RunRecord) -> dict[str, Any]:
    values = flat_values(record)
    about = {key: values[key] for key in ("state", "created", "seed", "code", "data")}
    versions, hardware = record.environment.versions, record.environment.hardware
    about["not reproducible"] = record.not_reproducible or None
    about["packages"] = ", ".join(
        f"{name} {versions[name]}" for name in ("python", *required()) if name in versions
    )
    about["machine"] = ", ".join(f"{key} {value_text(value)}" for key, value in hardware.items())
    return {key: value for key, value in about.items() if value not in (None, "", [])}


def _section(title: str, values: Mapping[str, Any]) -> None:
    if values:
        print(f"\n{title}")
        rows = [[f"  {key}", value_text(value)] for key, value in values.items()]
        print_table(rows, whole=True)


def diff_runs(arguments: Sequence[str]) -> int:
    """Print what two runs differ in, with both values."""
    words = split_words("runs diff", arguments, ("runs",), num_names=(2, "two runs, got {}"))
    one, other = (run_of(word, words.home) for word in words.names)
    parts = (
        ("code", {"code": str(one.code)}, {"code": str(other.code)}),
        ("data", {"data": one.data}, {"data": other.data}),
        ("files and models", asdict(one.origins), asdict(other.origins)),
        ("packages", one.environment.versions, other.environment.versions),
        ("machine", one.environment.hardware, other.environment.hardware),
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
    before = repeatable(words.names[0], words.home)
    for line in _differing(before):
        print(visible(f"differs: {line}"), flush=True)
    from .run import carry_out_again  # imported here: no other subcommand starts a run

    config = stored_config(before.folder)
    config.pop("resume", None)
    into = words.option("into", words.option("runs", "runs"))
    folder = carry_out_again(before, {**config, "runs": into})
    now = record_of(folder)
    then, since = before.summary or {}, now.summary or {}
    same = then.get("weights_sha256") == since.get("weights_sha256")
    print(visible(f"{now.folder.path}: {'the same' if same else 'other'} weights"))
    for key in _CAME_OUT:
        if then.get(key) != since.get(key):
            print(visible(f"  {key}: {then.get(key)} then and {since.get(key)} now"))
    return 0 if same else 1


def repeatable(word: str, home: Path) -> RunRecord:
    """Return the run that a word names, if it can be run again as it was."""
    record = run_of(word, home)
    if record.summary is None or record.summary.get("stopped"):
        raise ConfigError(
            f"run '{record.folder.id}' has not finished, so nothing can be compared with it\n"
            f"    go on with it: penstock run resume={record.folder.path}"
        )
    if record.changes:
        steps = ", ".join(str(change["step"]) for change in record.changes)
        raise ConfigError(
            f"the configuration of run '{record.folder.id}' changed on its way, after step {steps}"
            "\n    run it with its first configuration and resume it with each change of run.json"
        )
    return record


def _differing(record: RunRecord) -> Iterator[str]:
    from ..placement.machine import machine_name  # here: it needs torch

    code, now = code_version(), environment_now(machine_name())
    if record.not_reproducible:
        yield f"the run is not reproducible: {record.not_reproducible}"
    if record.code != code:
        yield f"code, {record.code} then and {code} now"
    elif code.dirty:
        yield f"code, perhaps: {code} both times, with changes that were not committed"
    versions = changed_versions(record.environment.versions, now.versions)
    if versions:
        yield f"packages, {versions_text(versions)}"
    for key, value in record.environment.hardware.items():
        if now.hardware.get(key) != value:
            yield f"machine, {key}: {value} then and {now.hardware.get(key)} now"
    # Files that were not imported yet are compared where they lie.
    for path in changed_files(record.origins, Origins()):
        there = "is not here" if not Path(path).exists() else "is another"
        yield f"your own file {path} {there}"
    models = {name: found for name, found in record.origins.models.items() if Path(name).is_dir()}
    for folder, found in origins_of(models).models.items():
        if models[folder] != found:
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
    for metric, sets in curves.items():
        for label, runs in sets.items():
            xs, means, _, _ = joined(runs)
            ends = [value_text(float(y)) for y in (xs[-1], means[0], means[-1])]
            rows.append([metric, label, str(len(runs)), *ends, sparkline(means.tolist())])
    print_table(rows)
    if "file" in words.options:
        draw(Path(words.option("file")), curves, over)
        print(visible(f"drawn in {words.option('file')}"))
    return 0


def _curves(words: Words, metrics: Sequence[str], over: Over) -> dict[str, dict[str, list[Series]]]:
    """Return metric -> label of a set -> a series of each of its runs."""
    sets = sets_by(words.names, words.where, words.option("by"), words.home)
    curves: dict[str, dict[str, list[Series]]] = {metric: {} for metric in metrics}
    for label, runs in sets.items():
        for record, _ in runs:
            stage = words.option("stage")
            folder = record.folder.stage(stage).path if stage else record.folder.path
            if not folder.is_dir():
                raise ConfigError(f"'stage': run '{record.folder.id}' has no stage '{stage}'")
            try:
                history = History(folder)
            except ConfigError as error:
                if len(runs) == 1:
                    raise
                say(f"run '{record.folder.id}' is left out: {error}")
                continue
            for metric in metrics:
                curves[metric].setdefault(label, []).append(history.series(metric, over))
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
    figures = {label: [Figures(run) for run in runs] for label, runs in sets.items()}
    found = [compared(key, figures) for key in words.option("key", "accuracy_after_rl").split(",")]
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
    """Write a run's archive."""
    keys, two = ("checkpoints", "runs"), (2, "a run and a file, got {} words")
    words = split_words("runs export", arguments, keys, num_names=two)
    run, file = words.names
    whole = chosen("checkpoints", words.option("checkpoints", "false"), ("true", "false"))
    size_bytes = export_run(run_of(run, words.home), Path(file), checkpoints=whole == "true")
    print(visible(f"written to {file}: {size_bytes / 2**20:.1f} MiB"))
    return 0


def import_command(arguments: Sequence[str]) -> int:
    """Unpack a run's archive, or make runs of curves that another program exported."""
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


@dataclass(frozen=True)
class _Action:
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
    """Run the command; `arguments` are the words after `penstock runs`."""
    if {"-h", "--help"} & set(arguments):
        lines = [f"  {name:<10}{a.words}\n{'':12}{a.what}" for name, a in ACTIONS.items()]
        print(_HELP.format(actions="\n".join(lines)), end="")
        return 0
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    action = ACTIONS.get(name)
    if action is None:
        raise ConfigError(
            f"penstock runs: expected one of {', '.join(ACTIONS)}, got '{name:.40}'"
            f"{nearest(name, ACTIONS)}\n    penstock runs --help says what each takes"
        )
    return action.run(rest)
