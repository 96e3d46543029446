"""What stands at which address of the page: its own files, and what is read of runs as JSON.

A target is `""`, `static/NAME` or `api/NAME?KEY=VALUE&...`. Names are looked up in tables, runs in
`KnownRuns`, stages in a run's own list, steps are whole numbers: nothing of a request is a path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from ...dataflow.errors import ConfigError
from ..run_dir.loopback_server import Answer
from ..run_dir.run_folder import RunFolder, plain
from ..run_dir.samples import SORTS, Sort, sample_steps
from .conversations import (
    differing,
    found_samples,
    same_prompt,
    sample_of,
    spoken,
    steps_with_prompt,
)
from .curve_points import Points, appended, metric_names, sampled
from .known_runs import Gone, KnownRuns, home_of
from .overview import overview
from .regular_file import opened
from .timeline import node_times, predicted_step_s, timeline

_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_STATIC = (
    *("index.html", "style.css", "uPlot.min.css", "uPlot.iife.min.js"),
    *("app.js", "dom.js", "curves.js", "conversations.js", "overview.js", "timeline.js"),
)
_SVG_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
_SORTS: Mapping[str, Sort] = {name: name for name in SORTS}
_MOST_SVG_BYTES = 4 << 20
_MOST_METRICS = 16
_MOST_POINTS = 5000
_MOST_SAMPLES = 100
_LOOK_THROUGH_S = 1.0


class Query:
    """The keys of a request, each with its first value unless it may have several."""

    def __init__(self, text: str) -> None:
        self._values = parse_qs(text, keep_blank_values=True, max_num_fields=64)

    def text(self, key: str, default: str = "") -> str:
        """A key's value as it was given."""
        return self._values.get(key, [default])[0]

    def texts(self, key: str) -> list[str]:
        """All values of a key."""
        return self._values.get(key, [])

    def number(self, key: str, default: int | None = None) -> int | None:
        """A key's value as a whole number of at least 0, or the default without one.

        Raises:
            Gone: If it is none.
        """
        text = self.text(key)
        if not text:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 18):
            raise Gone(f"'{key}': expected a whole number of at least 0")
        return int(text)

    def whole(self, key: str, default: int, most: int) -> int:
        """A key's value within 0 and a bound.

        Raises:
            Gone: If it is no whole number.
        """
        found = self.number(key, default)
        return min(default if found is None else found, most)


class Pages:
    """Gives the answer to each target.

    Args:
        runs: What is shown.
    """

    def __init__(self, runs: KnownRuns) -> None:
        self._runs = runs
        self._views: Mapping[str, Callable[[Query], Any]] = {
            "runs": self._listed,
            "metrics": self._metrics,
            "curve": self._curve,
            "more": self._more,
            "steps": self._steps,
            "samples": self._samples,
            "elsewhere": self._elsewhere,
            "diff": self._diff,
            "overview": self._overview,
            "timeline": self._timeline,
        }

    def answer(self, target: str) -> Answer | None:
        """What stands at a target; None if there is nothing.

        What a run lacks, or no longer has, is an answer too: an object with `error`, which says so.
        """
        name, _, query = target.partition("?")
        if name == "":
            return _static("index.html")
        if name.startswith("static/"):
            return _static(name.removeprefix("static/"))
        if name == "graph":
            return self._graph(query)
        view = self._views.get(name.removeprefix("api/")) if name.startswith("api/") else None
        return None if view is None else _json(_safely(view, query))

    def _run(self, query: Query) -> RunFolder:
        return self._runs.folder(query.text("run"))

    def _listed(self, query: Query) -> Any:
        return {"runs": self._runs.listed()}

    def _metrics(self, query: Query) -> Any:
        return {"metrics": metric_names(home_of(self._run(query), query.text("stage")))}

    def _curve(self, query: Query) -> Any:
        points = sampled(
            home_of(self._run(query), query.text("stage")),
            query.texts("metric")[:_MOST_METRICS],
            num_points=query.whole("points", 1000, _MOST_POINTS),
            first_step=query.number("from"),
            last_step=query.number("to"),
        )
        return _points(points)

    def _more(self, query: Query) -> Any:
        points = appended(
            home_of(self._run(query), query.text("stage")),
            query.texts("metric")[:_MOST_METRICS],
            query.whole("offset", 0, 1 << 60),
            query.text("mark"),
        )
        return {"again": True} if points is None else _points(points)

    def _steps(self, query: Query) -> Any:
        steps = sample_steps(home_of(self._run(query), query.text("stage")))
        if not steps:
            raise Gone(
                "there are no samples: the run keeps none (samples.max_rows=0), trains on no "
                "responses, or has not taken a step yet"
            )
        return {"steps": steps}

    def _samples(self, query: Query) -> Any:
        sort = _SORTS.get(query.text("sort"), "step")
        return found_samples(
            home_of(self._run(query), query.text("stage")),
            query.whole("step", 0, 10**18),
            search=query.text("search"),
            sort=sort,
            order="lowest" if query.text("worst") == "1" else "highest",
            skip=query.whole("skip", 0, 10**9),
            limit=query.whole("limit", 20, _MOST_SAMPLES),
        )

    def _elsewhere(self, query: Query) -> Any:
        """The steps of a run, this one or another, that answer the prompt of a sample."""
        one = home_of(self._run(query), query.text("stage"))
        step = query.whole("step", 0, 10**18)
        prompt = sample_of(one, step, query.whole("number", 0, 10**9)).prompt
        other = self._runs.folder(query.text("run2") or query.text("run"))
        home = home_of(other, query.text("stage2"))
        return steps_with_prompt(home, prompt, step, _LOOK_THROUGH_S)

    def _diff(self, query: Query) -> Any:
        """A sample, and those of another step or run that answer the same prompt."""
        one = home_of(self._run(query), query.text("stage"))
        left = sample_of(one, query.whole("step", 0, 10**18), query.whole("number", 0, 10**9))
        other = self._runs.folder(query.text("run2"))
        home, step = home_of(other, query.text("stage2")), query.whole("step2", 0, 10**18)
        same = same_prompt(home, step, left.prompt)
        if not same:
            raise Gone(f"step {step} has no sample of this prompt")
        number = query.number("number2", same[0]["number"]) or 0
        right = sample_of(home, step, number)
        if right.prompt != left.prompt:
            raise Gone("the two samples answer different prompts")
        return {
            "segments": differing(spoken(left), spoken(right)),
            "others": [{"number": row["number"], "reward": row["reward"]} for row in same],
            "left": {"reward": left.reward, "step": left.step},
            "right": {"reward": right.reward, "step": right.step, "number": number},
        }

    def _overview(self, query: Query) -> Any:
        folder = self._run(query)
        return overview(folder, self._runs.record(folder))

    def _timeline(self, query: Query) -> Any:
        folder, stage = self._run(query), query.text("stage")
        shown = timeline(home_of(folder, stage), query.whole("steps", 3, 50))
        if stage:
            return {**shown, "nodes": {}}
        record = self._runs.record(folder)
        nodes = node_times(folder, record, shown)
        has_graph = folder.graph.is_file()
        predicted_s = predicted_step_s(folder)
        return {**shown, "nodes": nodes, "has_graph": has_graph, "predicted_step_s": predicted_s}

    def _graph(self, query: str) -> Answer | None:
        """The picture of a run's graph; its policy lets nothing in it run or load."""
        try:
            with opened(self._run(Query(query)).graph) as file:
                body = file.read(0, _MOST_SVG_BYTES)
        except (ConfigError, OSError, ValueError):
            return None
        return Answer(body, "image/svg+xml", policy=_SVG_POLICY)


def _safely(view: Callable[[Query], Any], query: str) -> Any:
    """What a view says, or in words why it says nothing: files may go or change at any moment."""
    try:
        return view(Query(query))
    except ConfigError as error:
        return {"error": str(error), "gone": isinstance(error, Gone)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return {"error": f"a file of this run cannot be read ({type(error).__name__}: {error})"}


def _points(points: Points) -> Any:
    return asdict(points)


def _json(value: Any) -> Answer:
    text = json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    return Answer(text.encode(), "application/json")


def _static(name: str) -> Answer | None:
    if name not in _STATIC:
        return None
    kind = _TYPES[name[name.rindex(".") :]]
    return Answer(files(__package__ or "").joinpath("static", name).read_bytes(), kind)
