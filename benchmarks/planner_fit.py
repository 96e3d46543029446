"""Fit the constants of the model of time to published seconds per PPO iteration.

Three constants are fitted to the heuristic column by least squares of the relative error: the
efficiency of matrix products, the latency of a ring's hop and that of a hand-over between pipeline
stages. `launch_s` is read off the other column: the searched plan that decodes fastest per layer
(of which two rows differ in the response's length only) can at best wait for launches alone. The
rows say nothing of the other three, which keep the analytic default or are 0: while decoding,
memory hides behind launches; the network's efficiency trades against that of matrix products; and
a fixed cost per call is not seen. `--check` fails unless the committed constants come out.

Leave-one-out fits say what to expect of rows that were never seen: all rows whose largest model is
of one size, or all of one cluster size, are predicted by constants fitted to the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench import parser, report, table
from numpy.typing import NDArray
from penstock.planner.cost.calibration import GPU_DEFAULTS, Constants
from planner_case import PUBLISHED_H100, ROWS, SIZES, Case, case, heuristic_s, read_rows

FITTED = ("matmul_efficiency", "hop_s", "stage_s")
START = {"matmul_efficiency": 0.2, "hop_s": 1e-5, "stage_s": 1e-3}
SOURCE = PUBLISHED_H100.source
GROUPS: dict[str, Callable[[dict[str, Any]], int]] = {
    "largest model": lambda row: max(row["actor_b"], row["critic_b"]),
    "gpus": lambda row: row["gpus"],
}

Vector = NDArray[np.float64]


def launch_s(rows: Sequence[dict[str, Any]]) -> float:
    """The least time per layer and decode step of any searched plan; the head counts as a layer."""
    found: list[float] = []
    for short in rows:
        for long in rows:
            same = all(short[key] == long[key] for key in ("actor_b", "critic_b", "gpus"))
            more = long["gen_len"] - short["gen_len"]
            if same and more > 0:
                layers = SIZES[short["actor_b"]][1] + 1
                found.append((long["searched_s"] - short["searched_s"]) / more / layers)
    return min(found)


def errors(constants: Constants, cases: Sequence[Case]) -> Vector:
    """Relative error of each row's iteration."""
    found = [sum(heuristic_s(c, constants).values()) / c.row["heuristic_s"] - 1 for c in cases]
    return np.array(found)


def fit(cases: Sequence[Case], start: Constants) -> Constants:
    """Levenberg and Marquardt's method over the logarithms of the fitted constants."""

    def at(logs: Vector) -> Constants:
        return start.replaced(**dict(zip(FITTED, np.exp(logs).tolist(), strict=True)))

    logs: Vector = np.log(np.array([getattr(start, name) for name in FITTED], np.float64))
    now, damping = errors(at(logs), cases), 1e-2
    for _ in range(60):
        slopes = np.array([(errors(at(logs + step), cases) - now) / 1e-4
                           for step in 1e-4 * np.eye(len(FITTED))]).T  # fmt: skip
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.eye(len(FITTED)), -slopes.T @ now)
        tried: Vector = np.clip(logs + np.clip(step, -1.0, 1.0), -20.0, 0.0)
        then = errors(at(tried), cases)
        if then @ then < now @ now:
            done = now @ now - then @ then < 1e-10
            logs, now, damping = tried, then, damping / 3
            if done:
                break
        else:
            damping *= 4
    return at(logs)


def left_out(cases: Sequence[Case], start: Constants) -> list[dict[str, Any]]:
    """Errors of rows that the fit did not see."""
    found: list[dict[str, Any]] = []
    for what, key in GROUPS.items():
        for value in sorted({key(c.row) for c in cases}):
            seen = [c for c in cases if key(c.row) != value]
            unseen = [c for c in cases if key(c.row) == value]
            off = np.abs(errors(fit(seen, start), unseen))
            found.append({"left_out": f"{what} {value}", "rows": len(unseen),
                          "mean_abs_relative_error": round(float(off.mean()), 4),
                          "max_abs_relative_error": round(float(off.max()), 4)})  # fmt: skip
    return found


def rounded(constants: Constants) -> Constants:
    """Three digits, as they are committed."""
    return constants.replaced(
        **{name: float(f"{value:.3g}") for name, value in constants if isinstance(value, float)}
    )


def main() -> None:
    """Fit, print, and compare with what is committed."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=Path, default=ROWS, metavar="FILE")
    options.add_argument("--check", action="store_true", help="fail if the committed ones differ")
    args = options.parse_args()
    rows = read_rows(args.rows)
    cases = [case(row) for row in rows]
    start = GPU_DEFAULTS.replaced(**START, launch_s=launch_s(rows), call_s=0.0, source=SOURCE)
    found = rounded(fit(cases, start))
    off = np.abs(errors(found, cases))
    print(table(["constant", "fitted"], [[name, value] for name, value in found]))
    print(f"mean error {off.mean():.2%}, largest {off.max():.2%}")
    if args.check:
        if found != PUBLISHED_H100:
            sys.exit(f"the committed constants are others: {PUBLISHED_H100!r}")
        return
    unseen = left_out(cases, start)
    print(table(list(unseen[0]), [list(group.values()) for group in unseen]))
    report({"constants": found.model_dump(), "left_out": unseen,
            "mean_abs_relative_error": round(float(off.mean()), 4),
            "max_abs_relative_error": round(float(off.max()), 4)}, args.json)  # fmt: skip


if __name__ == "__main__":
    main()
