"""The model of time against published seconds per PPO iteration, with the calibration fixed.

Each row of the file is an iteration whose heuristic plan is known in full (`planner_case` says
how), so the prediction is compared as it is, not as a ranking. Nothing is fitted here: the
constants are `PUBLISHED_H100` of `planner_case`, which `planner_fit.py` made from the rows that are
the default. Any file of that format will do: other sizes, clusters and lengths.

`--searched` also searches each row's best plan with the same constants and compares its predicted
time with the published time of the other system's own search, whose plans are not published. Ours
should not be slower; it may be faster, because it is the best of a larger space, found to the end.
Beside it stands the best plan in which the calls that evaluate a trained model share its layout and
devices with its training: what a layout for every call gains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import parser, report, table
from penstock.planner.cost.calibration import Constants
from penstock.planner.inputs.calls import Call
from penstock.planner.inputs.cluster import Mesh
from penstock.planner.inputs.layout import Layout
from penstock.planner.search.choices import sources_of
from penstock.planner.search.option_table import CallPlan, ModelTable, call_nodes
from penstock.planner.search.pins import Pins
from penstock.planner.search.search import search
from planner_case import PUBLISHED_H100, ROWS, Case, case, heuristic_s, read_rows

Column = Callable[[Case, Constants], Mapping[str, float]]

COLUMNS: dict[str, Column] = {"heuristic": heuristic_s}
"""Plan -> how its calls' seconds are predicted; its published times are the rows' `<plan>_s`."""


class OneLayout(ModelTable):
    """A table whose evaluations of a trained model run in the layout that trains it."""

    def _foreign(self, call: Call, mesh: Mesh, only: Mapping[str, Layout] | None) -> list[CallPlan]:
        return super()._foreign(call, mesh, only) if call.kind == "generate" else []


def compare(row: dict[str, Any], column: str, constants: Constants) -> dict[str, Any]:
    """One row's prediction under one plan, and how far off it is."""
    calls = COLUMNS[column](case(row), constants)
    predicted, published = sum(calls.values()), row[f"{column}_s"]
    return {
        f"{column}_s": published,
        f"predicted_{column}_s": round(predicted, 2),
        f"relative_error_{column}": round(predicted / published - 1, 4),
        f"calls_{column}_s": {name: round(seconds, 2) for name, seconds in calls.items()},
    }


def summary(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, float]:
    """Mean and largest error, without sign."""
    errors = [abs(row[f"relative_error_{column}"]) for row in rows]
    return {
        f"mean_abs_relative_error_{column}": round(sum(errors) / len(errors), 4),
        f"max_abs_relative_error_{column}": round(max(errors), 4),
    }


def searched(row: dict[str, Any], constants: Constants, deadline_s: float) -> dict[str, Any]:
    """Our best plan of a row beside the published searched time."""
    asked = case(row)
    table_ = ModelTable(asked.calls, constants)
    nodes = call_nodes(asked.calls)
    found = search(nodes, table_, asked.cluster, max_lag=0, deadline_s=deadline_s)
    sources = sources_of(nodes)
    reads = [c.call_group for c in asked.calls if c.follows_training and c.kind == "forward"]
    tied = search(
        nodes,
        OneLayout(asked.calls, constants),
        asked.cluster,
        max_lag=0,
        pins=Pins(together=tuple((name, sources[name]) for name in reads)),
        deadline_s=deadline_s,
    )
    devices = {
        name: (number, frozenset(group.devices))
        for number, group in enumerate(found.best.groups)
        for name in group.call_groups
    }
    return {
        "searched_s": row["searched_s"],
        "predicted_searched_s": round(found.step_time_s, 2),
        "relative_error_searched": round(found.step_time_s / row["searched_s"] - 1, 4),
        "search_gap": round(found.gap, 4),
        "search_time_s": round(found.search_time_s, 2),
        "plan": str(found.best),
        "layouts": {
            name: str(layout)
            for option in found.best.options.values()
            for name, layout in option.layouts.items()
        },
        "devices_differ_in_a_role": any(devices[n] != devices[s] for n, s in sources.items()),
        "one_layout_s": round(tied.step_time_s, 2),
        "gain_of_own_layouts": round(tied.step_time_s / found.step_time_s - 1, 4),
    }


def _cells(row: Mapping[str, Any], column: str) -> list[str]:
    seconds = (row[f"{column}_s"], row[f"predicted_{column}_s"])
    return [*(f"{value:.1f}" for value in seconds), f"{row[f'relative_error_{column}']:+.1%}"]


def main() -> None:
    """Predict every row, print a table, and write it."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument(
        "--rows", type=Path, default=ROWS, metavar="FILE", help="published times; see the default"
    )
    options.add_argument("--searched", action="store_true", help="search every row's best plan")
    options.add_argument("--deadline-s", type=float, default=30.0, help="per search")
    args = options.parse_args()
    names = ("actor_b", "critic_b", "gpus", "prompt_len", "gen_len", "batch_seqs")
    rows: list[dict[str, Any]] = []
    for row in read_rows(args.rows):
        rows.append({name: row[name] for name in names})
        for column in COLUMNS:
            rows[-1] |= compare(row, column, PUBLISHED_H100)
        if args.searched and "searched_s" in row:
            rows[-1] |= searched(row, PUBLISHED_H100, args.deadline_s)
    result: dict[str, Any] = {"calibration": PUBLISHED_H100.model_dump(), "num_rows": len(rows)}
    for column in COLUMNS:
        lines = [[row[name] for name in names] + _cells(row, column) for row in rows]
        print(table([*names, f"{column} s", "predicted s", "error"], lines))
        found = summary(rows, column)
        print(", ".join(f"{name} {value:.1%}" for name, value in found.items()))
        result |= found
    lines = [[row[name] for name in names] + _cells(row, "searched") for row in rows
             if "searched_s" in row]  # fmt: skip
    if lines:
        print(table([*names, "searched s", "ours s", "difference"], lines))
        worst = max(row["relative_error_searched"] for row in rows if "searched_s" in row)
        print(f"worst_searched_excess {worst:+.1%}")
        gains = [row["gain_of_own_layouts"] for row in rows if "searched_s" in row]
        differ = sum(row["devices_differ_in_a_role"] for row in rows if "searched_s" in row)
        print(f"a layout for every call gains {min(gains):.1%} to {max(gains):.1%}; in {differ} of "
              f"{len(gains)} plans two calls of a role have different devices")  # fmt: skip
        result["worst_searched_excess"] = worst
    report(result | {"rows": rows}, args.json)


if __name__ == "__main__":
    main()
