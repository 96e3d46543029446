"""`penstock runs plot`, `compare` and `report`: how sets of runs went, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ....dataflow.errors import ConfigError
from ...run_dir.atomic import write_text
from ...run_dir.stop import say, visible
from ...runs.comparison import compared, comparison_markdown
from ...runs.drawing import draw, joined
from ...runs.figures import Figures
from ...runs.series import OVER, History, Over, Series, sparkline
from ...runs.values import sets_by, value_text
from ..words import Words, chosen, split_words
from .table import print_table

_KEY = "accuracy_after_rl"
_PLOT = ("metric", "over", "by", "stage", "file", "runs")
_COMPARE = ("key", "by", "report", "runs")


def plot_runs(arguments: Sequence[str]) -> int:
    """Curves of sets of runs: into a file, or one line each on the terminal."""
    words = split_words("runs plot", arguments, _PLOT, where=True)
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
    """Metric -> label -> a series of each run."""
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
    """How much better one set of runs came out than another, and how sure that is."""
    words = split_words("runs compare", arguments, _COMPARE, where=True)
    sets = sets_by(words.names, words.where, words.option("by"), words.home)
    if len(sets) != 2:
        labels = ", ".join(sets)
        raise ConfigError(
            f"penstock runs compare: expected two sets of runs, got {len(sets)}: {labels:.200}\n"
            "    name two, such as 'A*' 'B*', or give by=KEY, of which the runs have two values"
        )
    figures = {label: [Figures(run) for run in runs] for label, runs in sets.items()}
    found = [compared(key, figures) for key in words.option("key", _KEY).split(",")]
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
