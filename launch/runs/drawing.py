"""Curves of several sets of runs in one picture."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dataflow.errors import ConfigError
from ...dataflow.files import writing
from .comparison import mean_curve
from .sweep import Sweep
from .values import Series

FORMATS = (".svg", ".png")
_MOST_POINTS = 400  # of a curve: more are not seen, and make a large file

# Positions, the mean at each, and its interval's ends.
Curve = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


def joined(runs: Sequence[Series]) -> Curve:
    """Return the interquartile mean of several runs with its 95 % interval, as one curve.

    It reaches as far as every run does. Runs are read where any of them has points, and between
    two points of its own a run is taken to be on the line between them.
    """
    first, last = max(run.xs[0] for run in runs), min(run.xs[-1] for run in runs)
    xs = np.unique(np.concatenate([np.asarray(run.xs) for run in runs]))
    xs = xs[(xs >= first) & (xs <= last)]
    if not len(xs):
        raise ConfigError("these runs have no steps in common\n    plot them in sets of their own")
    if len(xs) > _MOST_POINTS:
        xs = xs[np.linspace(0, len(xs) - 1, _MOST_POINTS).round().astype(int)]
    means = [np.interp(xs, run.xs, run.ys) for run in runs]
    return (xs, *mean_curve(np.stack(means)))


def draw(path: Path, sets: Mapping[str, Mapping[str, Sequence[Series]]], over: str) -> None:
    """Draw a chart for each metric, with a curve and its band for each set of runs."""
    with _charts(path, len(sets)) as places:
        for place, (metric, curves) in zip(places, sets.items(), strict=True):
            for label, runs in curves.items():
                xs, means, lows, highs = joined(runs)
                num = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
                (line,) = place.plot(xs, means, label=_plain(f"{label} ({num})"), linewidth=1.5)
                if len(runs) > 1:
                    band = {"color": line.get_color(), "alpha": 0.2, "linewidth": 0}
                    place.fill_between(xs, lows, highs, **band)
            _label(place, over, metric)
            place.legend(frameon=False, fontsize="small")


def draw_sweep(path: Path, sweep: Sweep) -> None:
    """Draw the objective of each trial: in order with the best so far, and over each key."""
    found = np.asarray([trial.objective for trial in sweep.trials], dtype=np.float64)
    best = (np.maximum if sweep.direction == "maximize" else np.minimum).accumulate(found)
    numbers = np.arange(1, len(found) + 1)
    with _charts(path, 1 + len(sweep.keys)) as places:
        places[0].step(numbers, best, where="post", linewidth=1.5)
        places[0].xaxis.get_major_locator().set_params(integer=True)
        for place, name, values in zip(
            places,
            ["trial", *(key.name for key in sweep.keys)],
            [numbers, *([t.values[key.name] for t in sweep.trials] for key in sweep.keys)],
            strict=True,
        ):
            place.scatter(values, found, s=18, zorder=3)
            _label(place, name, sweep.metric)
        for place, key in zip(places[1:], sweep.keys, strict=True):
            if key.log:
                place.set_xscale("log")


@contextmanager
def _charts(path: Path, number: int) -> Generator[list[Any]]:
    if path.suffix not in FORMATS:
        raise ConfigError(f"'{path}': expected a name that ends in {' or '.join(FORMATS)}")
    # Imported here: it takes most of a second, and only a picture needs it.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "penstock", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 3.6 * number), layout="constrained")
        FigureCanvasAgg(figure)
        yield [*figure.subplots(number, squeeze=False).flat]
        with writing(path):
            figure.savefig(path, dpi=144, metadata={"Date": None} if path.suffix == ".svg" else {})


def _label(place: Any, x: str, y: str) -> None:
    place.set_xlabel(_plain(x))
    place.set_ylabel(_plain(y))
    place.grid(visible=True, color="#ddd")


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # which would begin a formula
