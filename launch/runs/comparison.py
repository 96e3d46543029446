"""Sets of runs: their means, the difference, how sure it is, and their curves in one picture.

Interquartile means and bootstrap intervals after Agarwal et al. 2021, "Deep reinforcement learning
at the edge of the statistical precipice": sections 4.2 (bootstrap intervals) and 4.3 (interquartile
mean, probability of improvement).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dataflow.errors import ConfigError
from ...dataflow.files import writing
from ..run_dir.files import differences
from ..run_dir.topics import titles, with_unit
from .values import Figures, Series, value_text

FEW = 5  # fewer runs have a bootstrap's interval that is narrower than it says

_RESAMPLES, _CURVE_RESAMPLES = 10_000, 2_000
_PERCENTILES = (2.5, 97.5)
_SEED = 0  # the same runs have the same interval whenever they are asked for

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Figure:
    """A figure and the 95 % interval around it, which is NaN to NaN for a single run."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"{self.value:.4g} (one run)"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def interquartile_mean(values: Any, axis: int = -1) -> Any:
    """Mean of what is left without a quarter of the values, rounded down, at each end."""
    ordered: Values = np.sort(np.asarray(values, dtype=np.float64), axis=axis)
    num = ordered.shape[axis]
    kept = np.take(ordered, range(num // 4, num - num // 4), axis=axis)
    return kept.mean(axis=axis)


def summarized(values: Sequence[float]) -> Figure:
    """The interquartile mean of some runs, with its interval."""
    return _bootstrapped(interquartile_mean, [values])


def difference(one: Sequence[float], other: Sequence[float]) -> Figure:
    """Return how much higher the second runs' interquartile mean is; both are resampled apart."""

    def gain(lower: Values, higher: Values) -> Values:
        return interquartile_mean(higher) - interquartile_mean(lower)

    return _bootstrapped(gain, [one, other])


def probability_of_improvement(one: Sequence[float], other: Sequence[float]) -> Figure:
    """Return how likely a run of the second is above one of the first; a tie counts a half."""

    def share_above(lower: Values, higher: Values) -> Values:
        pairs = higher[:, :, None] - lower[:, None, :]
        return ((pairs > 0) + 0.5 * (pairs == 0)).mean(axis=(1, 2))

    return _bootstrapped(share_above, [one, other], _CURVE_RESAMPLES)


def _bootstrapped(
    statistic: Callable[..., Values], sets: Sequence[Sequence[float]], num: int = _RESAMPLES
) -> Figure:
    values = [np.asarray(one, dtype=np.float64) for one in sets]
    value = float(statistic(*(one[None] for one in values))[0])
    # Draws of a single run are all that run: an interval of width zero would look like certainty.
    if min(map(len, values)) < 2:
        return Figure(value, float("nan"), float("nan"))
    rng = np.random.default_rng(_SEED)
    drawn = [one[rng.integers(len(one), size=(num, len(one)))] for one in values]
    low, high = np.percentile(statistic(*drawn), _PERCENTILES)
    return Figure(value, float(low), float(high))


def mean_curve(curves: Any) -> tuple[Values, Values, Values]:
    """The interquartile mean of [runs, points] at each point, and its interval's low and high."""
    values: Values = np.asarray(curves, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    chosen = rng.integers(len(values), size=(_CURVE_RESAMPLES, len(values)))
    means: Values = interquartile_mean(values, axis=0)
    low, high = np.empty_like(means), np.empty_like(means)
    for at in range(values.shape[1]):  # point by point: all at once would take gigabytes
        drawn = interquartile_mean(values[:, at][chosen])
        low[at], high[at] = np.percentile(drawn, _PERCENTILES)
    return means, low, high


@dataclass(frozen=True)
class Comparison:
    """The figures of two sets of runs."""

    key: str
    values: Mapping[str, Mapping[str, float]]  # label of each set -> run -> its value
    means: Mapping[str, Figure]  # label -> interquartile mean over its runs
    difference: Figure  # how much higher the second's mean is
    improvement: Figure  # how likely a run of the second is above one of the first

    def rows(self) -> list[list[str]]:
        second = [*self.values][1]
        rows = [[self.key, "runs", "mean [95 % interval]", "of each run"]]
        for label, found in self.values.items():
            each = " ".join(value_text(value) for value in found.values())
            rows.append([label, str(len(found)), str(self.means[label]), each])
        rows.append([f"{second}: higher by", "", str(self.difference), ""])
        if min(map(len, self.values.values())) > 1:
            rows.append([f"{second}: probability of a higher run", "", str(self.improvement), ""])
        return rows

    def remarks(self) -> list[str]:
        fewest = min(map(len, self.values.values()))
        if fewest < 2:
            return [
                "a set has 1 run: nothing tells whether the difference is more than runs with "
                "other seeds vary by; run further seeds"
            ]
        if fewest < FEW:
            return [
                f"a set has {fewest} runs: too few to tell a difference from chance, and intervals "
                f"of fewer than {FEW} runs are narrower than 95 %; run {FEW} seeds of each"
            ]
        low, high = self.difference.low, self.difference.high
        sure = "is beyond" if low > 0 or high < 0 else "is within"
        return [f"the difference {sure} what these runs vary by"]


def compared(key: str, sets: Mapping[str, Sequence[Figures]]) -> Comparison:
    values = {
        label: {run.record.folder.id: run.number(key) for run in runs}
        for label, runs in sets.items()
    }
    one, other = ([*found.values()] for found in values.values())
    means = {label: summarized([*found.values()]) for label, found in values.items()}
    return Comparison(
        key, values, means, difference(one, other), probability_of_improvement(one, other)
    )


def comparison_markdown(found: Sequence[Comparison], sets: Mapping[str, Sequence[Figures]]) -> str:
    first, second = sets
    lines = [f"# {_escaped(second)} against {_escaped(first)}", ""]
    for one in found:
        head, *rows = one.rows()
        lines += [_row(head), _row(["---"] * len(head)), *map(_row, rows), ""]
        lines += [f"{line[0].upper()}{line[1:]}." for line in one.remarks()] + [""]
    lines += ["## What differs in every run", ""]
    lines += [_row(["key", first, second]), _row(["---"] * 3)]
    lines += [_row([key, *map(value_text, two)]) for key, two in _differing(sets).items()]
    lines += ["", "Values are interquartile means over runs, with intervals of 10,000 bootstrap"]
    lines += ["samples of runs (Agarwal et al. 2021).", "", "## Runs", ""]
    lines += [_row(["set", "run", "seed", "code"]), _row(["---"] * 4)]
    for label, runs in sets.items():
        for record in (run.record for run in runs):
            lines.append(_row([label, record.folder.id, str(record.seed), str(record.code)]))
    return "\n".join(lines) + "\n"


def _differing(sets: Mapping[str, Sequence[Figures]]) -> dict[str, tuple[Any, Any]]:
    """Return the keys that are the same in all runs of a set, and other in the other set."""
    one, other = ([run.record.config or {} for run in runs] for runs in sets.values())
    varying = {
        key
        for configs in (one, other)
        for config in configs[1:]
        for key in differences(configs[0], config)
    }
    found = differences(one[0], other[0])
    return {key: two for key, two in found.items() if key not in varying}


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


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
    named = titles(sets)
    with charts(path, len(sets)) as places:
        for place, (metric, curves) in zip(places, sets.items(), strict=True):
            for label, runs in curves.items():
                xs, means, lows, highs = joined(runs)
                num = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
                (line,) = place.plot(xs, means, label=_plain(f"{label} ({num})"), linewidth=1.5)
                if len(runs) > 1:
                    band = {"color": line.get_color(), "alpha": 0.2, "linewidth": 0}
                    place.fill_between(xs, lows, highs, **band)
            label_axes(place, over, metric)
            place.xaxis.get_major_locator().set_params(integer=over != "seconds")
            place.set_title(_plain(with_unit(named[metric])), fontsize="medium")
            several = any(len(runs) > 1 for runs in curves.values())
            said = "interquartile mean, 95 % interval" if several else None
            place.legend(frameon=False, fontsize="small", title=said, title_fontsize="small")


@contextmanager
def charts(path: Path, number: int) -> Generator[list[Any]]:
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


def label_axes(place: Any, x: str, y: str) -> None:
    place.set_xlabel(_plain(x))
    place.set_ylabel(_plain(y))
    place.grid(visible=True, color="#ddd")


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # which would begin a formula
