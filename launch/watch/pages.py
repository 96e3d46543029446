"""The addresses of the page: its own files, and JSON of what is read of runs.

A target is `""`, `static/NAME` or `api/NAME?KEY=VALUE&...`. Names are looked up in tables, runs in
`KnownRuns`, stages in a run's own list, steps are whole numbers: nothing of a request is a path.
Samples of a step are one file, so however much a run keeps, only what is shown is read. All text is
handed on as it is: the page shows it as text and nothing else.
"""

from __future__ import annotations

import difflib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs

from ...dataflow.errors import ConfigError
from ..run_dir.files import plain
from ..run_dir.loopback_server import Answer
from ..run_dir.samples import SORTS, Order, Sample, Sort, read_samples, sample_key, sample_steps
from .curve_points import appended, metric_names, sampled
from .known_runs import Gone, KnownRuns, home_of, opened
from .overview import node_times, overview, predicted_step_s, timeline

_MOST_CHARACTERS = 200_000  # of one text; a response that is longer is cut, and says so
# beyond these, lines are compared instead of words: the time grows with their product
_MOST_WORDS = 3000
_MOST_LINES = 4000
_WORD = re.compile(r"\s+|\w+|[^\w\s]")

Segment = tuple[Literal["both", "left", "right"], str]  # who has a piece of text, and the piece


def found_samples(
    home: Path,
    step: int,
    *,
    search: str = "",
    sort: Sort = "step",
    order: Order = "highest",
    skip: int = 0,
    limit: int = 20,
) -> dict[str, Any]:
    """Return some samples of a step that hold a text, and how many there are."""

    def holds(sample: Sample, wanted: str) -> bool:
        texts = [sample.prompt, sample.response]
        texts += [text for turn in sample.turns for text in (turn.said, turn.shown)]
        return any(wanted in text.casefold() for text in texts)

    rows = list(enumerate(read_samples(home, [step])))
    wanted = search.casefold()
    rows = [row for row in rows if not wanted or holds(row[1], wanted)]
    key = sample_key(sort, order)
    rows.sort(key=lambda row: key(row[1]))
    shown = [_shown(number, sample) for number, sample in rows[skip : skip + limit]]
    return {"num_found": len(rows), "samples": shown}


def same_prompt(home: Path, step: int, prompt: str) -> list[dict[str, Any]]:
    """Return the samples of a step that answer this very prompt, the best first."""
    rows = enumerate(read_samples(home, [step]))
    same = [row for row in rows if row[1].prompt == prompt]
    best = sample_key("reward")
    same.sort(key=lambda row: best(row[1]))
    return [_shown(number, sample) for number, sample in same]


def sample_of(home: Path, step: int, number: int) -> Sample:
    rows = read_samples(home, [step])
    if not 0 <= number < len(rows):
        raise Gone("this step has no such sample any more")
    return rows[number]


def steps_with_prompt(home: Path, prompt: str, near: int, limit_s: float) -> dict[str, Any]:
    """Return the steps that answer a prompt, as far as they can be read within a time."""
    until = time.monotonic() + limit_s
    steps = sorted(sample_steps(home), key=lambda step: abs(step - near))
    found: list[int] = []
    num_read = 0
    for step in steps:
        if time.monotonic() > until:
            break
        found += [step] if same_prompt(home, step, prompt) else []
        num_read += 1
    return {"steps": sorted(found), "num_read": num_read, "num_steps": len(steps)}


def differing(left: str, right: str) -> list[Segment]:
    """Cut both texts into pieces that they share, or that only one of them has, in order.

    Words are compared, or lines where the texts are long. The pieces of "both" and "left" make the
    left text, those of "both" and "right" the right one, up to a bound on their length.
    """
    one, other = (_WORD.findall(text[:_MOST_CHARACTERS]) for text in (left, right))
    if max(len(one), len(other)) > _MOST_WORDS:
        one, other = (text[:_MOST_CHARACTERS].splitlines(keepends=True) for text in (left, right))
        one, other = one[:_MOST_LINES], other[:_MOST_LINES]
    segments: list[Segment] = []
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=len(one) * len(other) > 1_000_000)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            segments.append(("both", "".join(one[a:b])))
            continue
        pieces: tuple[Segment, ...] = (("left", "".join(one[a:b])), ("right", "".join(other[c:d])))
        segments += [piece for piece in pieces if piece[1]]
    return segments


def spoken(sample: Sample) -> str:
    """Return a response, or a conversation's turns, as one text to be compared."""
    if not sample.turns:
        return sample.response
    return "\n".join(f"{turn.said}\n{turn.shown}".rstrip() for turn in sample.turns)


def _shown(number: int, sample: Sample) -> dict[str, Any]:
    shown = {**asdict(sample), "number": number}
    shown["prompt"], shown["response"] = _cut(sample.prompt), _cut(sample.response)
    shown["turns"] = [
        {"said": _cut(turn.said), "reward": turn.reward, "shown": _cut(turn.shown)}
        for turn in sample.turns
    ]
    return shown


def _cut(text: str) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_MOST_CHARACTERS]}\n[{len(text) - _MOST_CHARACTERS} more characters]"


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

    def text(self, key: str) -> str:
        return self.texts(key)[0] if self.texts(key) else ""

    def texts(self, key: str) -> list[str]:
        return self._values.get(key, [])

    def number(self, key: str) -> int | None:
        """Return a whole number of at least 0, or None without one; refuses all else."""
        text = self.text(key)
        if text and not (text.isascii() and text.isdecimal() and len(text) <= 18):
            raise Gone(f"'{key}': expected a whole number of at least 0")
        return int(text) if text else None

    def whole(self, key: str, default: int, most: int) -> int:
        found = self.number(key)
        return min(default if found is None else found, most)

    def step(self, which: str = "") -> int:
        return self.whole(f"step{which}", 0, 10**18)


class Pages:
    """Gives the answer to each target."""

    def __init__(self, runs: KnownRuns) -> None:
        self._runs = runs
        self._views: Mapping[str, Callable[[Query], Any]] = {
            "runs": lambda _: {"runs": self._runs.listed()},
            "metrics": lambda query: {"metrics": metric_names(self._home(query))},
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
        """Return what stands at a target; None if there is nothing.

        A run that lacks something, or no longer has it, is an answer too: an object with `error`.
        """
        name, _, query = target.partition("?")
        if name == "":
            return _static("index.html")
        if name.startswith("static/"):
            return _static(name.removeprefix("static/"))
        if name == "graph":
            return self._graph(query)
        view = self._views.get(name.removeprefix("api/")) if name.startswith("api/") else None
        if view is None:
            return None
        try:
            found = view(Query(query))
        except ConfigError as error:
            found = {"error": str(error), "gone": isinstance(error, Gone)}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            # Files may go or change at any moment.
            said = f"{type(error).__name__}: {error}"
            found = {"error": f"a file of this run cannot be read ({said})"}
        text = json.dumps(plain(found), allow_nan=False, separators=(",", ":"))
        return Answer(text.encode(), "application/json")

    def _home(self, query: Query, which: str = "") -> Path:
        """Return the folder of a run's stage, or of the second run that a request names."""
        folder = self._runs.folder(query.text(f"run{which}"))
        return home_of(folder, query.text(f"stage{which}"))

    def _curve(self, query: Query) -> Any:
        return asdict(
            sampled(
                self._home(query),
                query.texts("metric")[:_MOST_METRICS],
                num_points=query.whole("points", 1000, _MOST_POINTS),
                first_step=query.number("from"),
                last_step=query.number("to"),
            )
        )

    def _more(self, query: Query) -> Any:
        metrics, offset = query.texts("metric")[:_MOST_METRICS], query.whole("offset", 0, 1 << 60)
        points = appended(self._home(query), metrics, offset, query.text("mark"))
        return {"again": True} if points is None else asdict(points)

    def _steps(self, query: Query) -> Any:
        steps = sample_steps(self._home(query))
        if not steps:
            raise Gone(
                "there are no samples: the run keeps none (samples.max_rows=0), trains on no "
                "responses, or has not taken a step yet"
            )
        return {"steps": steps}

    def _samples(self, query: Query) -> Any:
        return found_samples(
            self._home(query),
            query.step(),
            search=query.text("search"),
            sort=_SORTS.get(query.text("sort"), "step"),
            order="lowest" if query.text("worst") == "1" else "highest",
            skip=query.whole("skip", 0, 10**9),
            limit=query.whole("limit", 20, _MOST_SAMPLES),
        )

    def _sample(self, query: Query) -> Sample:
        return sample_of(self._home(query), query.step(), query.whole("number", 0, 10**9))

    def _elsewhere(self, query: Query) -> Any:
        prompt = self._sample(query).prompt
        other = self._runs.folder(query.text("run2") or query.text("run"))
        home = home_of(other, query.text("stage2"))
        return steps_with_prompt(home, prompt, query.step(), _LOOK_THROUGH_S)

    def _diff(self, query: Query) -> Any:
        left, home, step = self._sample(query), self._home(query, "2"), query.step("2")
        same = same_prompt(home, step, left.prompt)
        if not same:
            raise Gone(f"step {step} has no sample of this prompt")
        number = query.number("number2")
        number = same[0]["number"] if number is None else number
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
        folder = self._runs.folder(query.text("run"))
        return overview(folder, self._runs.record(folder))

    def _timeline(self, query: Query) -> Any:
        shown = timeline(self._home(query), query.whole("steps", 3, 50))
        if query.text("stage"):
            return {**shown, "nodes": {}}
        folder = self._runs.folder(query.text("run"))
        return {
            **shown,
            "nodes": node_times(folder, self._runs.record(folder), shown),
            "has_graph": folder.graph.is_file(),
            "predicted_step_s": predicted_step_s(folder),
        }

    def _graph(self, query: str) -> Answer | None:
        try:
            with opened(self._runs.folder(Query(query).text("run")).graph) as file:
                body = file.read(0, _MOST_SVG_BYTES)
        except (ConfigError, OSError, ValueError):
            return None
        return Answer(body, "image/svg+xml", policy=_SVG_POLICY)  # nothing in it runs or loads


def _static(name: str) -> Answer | None:
    if name not in _STATIC:
        return None
    kind = _TYPES[name[name.rindex(".") :]]
    return Answer(files(__package__ or "").joinpath("static", name).read_bytes(), kind)
