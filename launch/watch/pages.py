"""The addresses of the page: its own files, and JSON of what is read of runs.

A target is `""`, `static/NAME` or `api/NAME?KEY=VALUE&...`. Names are looked up in tables, runs in
`KnownRuns.found`, stages in a run's own list, steps are whole numbers: nothing of a request is a
path, and what is in none of these is not there. Samples of a step are one file, so however much a
run keeps, only what is shown is read. All text is handed on as it is: the page shows it as text and
nothing else.
"""

from __future__ import annotations

import difflib
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs

from ...dataflow.errors import ConfigError
from ..run_dir.files import plain, read_object
from ..run_dir.loopback_server import Answer
from ..run_dir.run_folder import WHY, RunFolder, RunRecord, record_of
from ..run_dir.samples import SORTS, Order, Sample, Sort, read_samples, sample_key, sample_steps
from ..run_dir.step_logs import stage_events
from ..run_dir.topics import by_topic, titles, with_unit
from ..runs.values import about_values, seed_groups
from .log_files import Gone, appended, metric_names, opened, sampled, timeline


class KnownRuns:
    """The runs that a page shows: those that were given, or all that are there."""

    def __init__(self, folders: Sequence[Path], runs: Path) -> None:
        self._folders, self._runs = tuple(folders), runs
        self._records: dict[Path, tuple[Any, RunRecord]] = {}
        self._groups: tuple[list[RunRecord], dict[Path, str]] = ([], {})

    def found(self) -> dict[str, RunFolder]:
        """Folders by key: their names, with a number behind one that another has."""
        paths = self._folders
        if not paths and self._runs.is_dir():
            there = self._runs.iterdir()
            paths = tuple(sorted(path for path in there if (path / "run.json").is_file()))
        keys: dict[str, RunFolder] = {}
        for path in paths:
            key, number = path.name, 2
            while key in keys:
                key, number = f"{path.name} ({number})", number + 1
            keys[key] = RunFolder(path)
        return keys

    def folder(self, key: str) -> RunFolder:
        folder = self.found().get(key)
        if folder is None or not folder.about.is_file():
            raise Gone("this run is no longer there: its folder was removed or renamed")
        return folder

    def listed(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        found = self.found()
        groups = self._grouped([*found.values()])
        for key, folder in found.items():
            if not folder.about.is_file():
                lines.append({"key": key, "state": "gone", "why": WHY["gone"], "stages": []})
                continue
            record = self.record(folder)
            about = about_values(record)
            shown = {name: about[name] for name in ("name", "seed", "created", "state")}
            why = record.fault or WHY[about["state"]]
            known = {"key": key, "group": groups.get(folder.path, key), "why": why}
            lines.append({**known, **shown, "stages": folder.stage_names})
        return lines

    def _grouped(self, folders: Sequence[RunFolder]) -> dict[Path, str]:
        records = [self.record(folder) for folder in folders if folder.about.is_file()]
        if list(map(id, records)) != list(map(id, self._groups[0])):
            self._groups = records, seed_groups(records)
        return self._groups[1]

    def record(self, folder: RunFolder) -> RunRecord:
        """The run's record, which is read again if its files are others than before."""
        stamps = (_stamp(folder.about), _stamp(folder.summary))
        known = self._records.get(folder.path)
        if known is None or known[0] != stamps:
            known = self._records[folder.path] = (stamps, record_of(folder))
        return known[1]


def home_of(folder: RunFolder, stage: str) -> Path:
    """The folder of a stage, or of the main one for ""."""
    if stage and stage not in folder.stage_names:
        raise Gone("this run has no such stage")
    return folder.stage(stage).path if stage else folder.path


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


# --- the view of a run: each part is read from the file that holds it

_MOST_WARNINGS = 50
_RESTARTS = re.compile(r"restart|error|timeout|dropped|skipped|truncated", re.IGNORECASE)
# Entries of summary.json that have a part of their own, or are as long as a page.
_OF_SUMMARY = frozenset({"examples_after", "examples_before", "nodes", "suites"})


def run_parts(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    """Return all parts of what is shown of a run: what each holds, or `{"absent": why}`.

    A part whose file is not there, or cannot be read, is absent.
    """
    found: dict[str, Any] = {}
    for name, read in _PARTS.items():
        try:
            found[name] = read(folder, record)
        except (ConfigError, OSError) as error:
            found[name] = {"absent": str(error).split("\n")[0]}
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            said = f"what its files say of it is damaged ({type(error).__name__})"
            found[name] = {"absent": said}
    return found


def _about(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    if record.fault:
        return {"absent": record.fault}
    about = about_values(record)
    return {"state": about["state"], **about, "not_reproducible": record.not_reproducible}


def _placement(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    plan = read_object(folder.plan)
    if plan is None:
        return {"absent": "there is no plan.json: a version that wrote none made this run"}
    return {"groups": plan.get("groups", []), "nodes": plan.get("nodes", {})}


def _results(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    if record.summary is None:
        return {"absent": "there is no summary.json: it is written at the end"}
    return {name: value for name, value in record.summary.items() if name not in _OF_SUMMARY}


def _suites(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    if record.summary is None:
        return {"absent": "they are compared at the end"}
    suites = record.summary.get("suites")
    return dict(suites) if suites else {"absent": "this run evaluated nothing before and after"}


def _memory(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    # What the plan expects of each group's fullest device, and the peak. As
    # `planner.plan.prediction.GroupMemory` has it, without importing the planner.
    groups: dict[str, Any] = {}
    for name, group in (_prediction(folder).get("memory") or {}).items():
        resident = {role: sum(parts.values()) for role, parts in group["resident_bytes"].items()}
        transient = {call: sum(parts.values()) for call, parts in group["transient_bytes"].items()}
        groups[name] = {
            "resident_bytes": resident,
            "transient_bytes": transient,
            "peak_bytes": sum(resident.values()) + max(transient.values(), default=0),
            "capacity_bytes": group["capacity_bytes"],
        }
    measured = (record.summary or {}).get("peak_memory_bytes")
    if not groups and measured is None:
        return {"absent": "its plan was not predicted, and what was used is written at the end"}
    return {"groups": groups, "peak_memory_bytes": measured}


def _prediction(folder: RunFolder) -> dict[str, Any]:
    return (read_object(folder.plan) or {}).get("prediction") or {}


def _warnings(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    found = stage_events(folder.path)
    if not found:
        return {"absent": "it has warned of nothing"}
    shown = [
        {name: str(event.get(name, "")) for name in ("stage", "seen", "means", "remedy", "node")}
        | {"step": event["step"], "first_step": event.get("first_step", event["step"])}
        for event in found[-_MOST_WARNINGS:]
    ]
    return {"rows": shown, "num_warnings": len(found)}


def _events(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    summary: Mapping[str, Any] = record.summary or {}
    return {
        "changes": list(record.changes),
        "resumed": summary.get("resumed"),
        "stopped": summary.get("stopped"),
        "restarts": {name: value for name, value in summary.items() if _RESTARTS.search(name)},
    }


_PARTS: Mapping[str, Callable[[RunFolder, RunRecord], dict[str, Any]]] = {
    "about": _about,
    "placement": _placement,
    "results": _results,
    "suites": _suites,
    "memory": _memory,
    "warnings": _warnings,
    "events": _events,
}


def _node_times(record: RunRecord, predicted: Mapping[str, Any], shown: Any) -> dict[str, Any]:
    """Return the seconds of each node in a step: predicted, measured and in the steps shown.

    Measured is the median over a run that has ended, and `last_s` the mean over the steps shown of
    the slowest rank's sum over chunks.
    """
    sums: dict[tuple[str, int, int], float] = {}
    for one in shown["slices"]:
        key = one["node"], one["step"], one["track"]
        sums[key] = sums.get(key, 0.0) + one["duration_s"]
    slowest: dict[str, dict[int, float]] = {}
    for (node, step, _), seconds in sums.items():
        steps = slowest.setdefault(node, {})
        steps[step] = max(seconds, steps.get(step, 0.0))
    last = {node: statistics.fmean(steps.values()) for node, steps in slowest.items()}
    expected, measured = predicted.get("nodes") or {}, (record.summary or {}).get("nodes") or {}
    return {
        node: {
            "predicted_s": (expected.get(node) or {}).get("duration_s"),
            "measured_s": (measured.get(node) or {}).get("measured_s"),
            "last_s": last.get(node),
        }
        for node in dict.fromkeys([*last, *measured, *expected])
    }


# --- samples

_MOST_CHARACTERS = 200_000  # of one text; a response that is longer is cut, and says so
# beyond these, lines are compared instead of words: the time grows with their product
_MOST_WORDS = 3000
_MOST_LINES = 4000
_WORD = re.compile(r"\s+|\w+|[^\w\s]")

Segment = tuple[Literal["both", "left", "right"], str]  # who has a piece of text, and the piece


def same_prompt(home: Path, step: int, prompt: str) -> list[dict[str, Any]]:
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


# --- targets

_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
_STATIC = (
    *("index.html", "style.css", "uPlot.min.css", "uPlot.iife.min.js"),
    *("app.js", "dom.js", "charts.js", "overview.js", "curves.js", "conversations.js"),
    *("run.js", "timeline.js"),
)
_SVG_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
_SORTS: Mapping[str, Sort] = {name: name for name in SORTS}
_MOST_SVG_BYTES = 4 << 20
_MOST_METRICS = 40
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
            "metrics": self._metrics,
            "curve": self._curve,
            "more": self._more,
            "steps": self._steps,
            "samples": self._samples,
            "elsewhere": self._elsewhere,
            "diff": self._diff,
            "run": self._run,
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

    def _metrics(self, query: Query) -> Any:
        """Every metric of some runs with its title, and the topics of an overview in order."""
        names, missing = set[str](), list[ConfigError]()
        for key in query.texts("run"):
            try:
                names.update(metric_names(home_of(self._runs.folder(key), query.text("stage"))))
            except ConfigError as error:
                missing.append(error)
        if missing and not names:
            raise missing[0]
        topics = [
            {"title": with_unit(title), "lines": lines} for title, lines in by_topic(names).items()
        ]
        return {"titles": titles(sorted(names)), "topics": topics}

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
        def holds(sample: Sample) -> bool:
            texts = [sample.prompt, sample.response]
            texts += [text for turn in sample.turns for text in (turn.said, turn.shown)]
            return not wanted or any(wanted in text.casefold() for text in texts)

        wanted = query.text("search").casefold()
        samples = read_samples(self._home(query), [query.step()])
        rows = [row for row in enumerate(samples) if holds(row[1])]
        order: Order = "lowest" if query.text("worst") == "1" else "highest"
        key = sample_key(_SORTS.get(query.text("sort"), "step"), order)
        rows.sort(key=lambda row: key(row[1]))
        skip, limit = query.whole("skip", 0, 10**9), query.whole("limit", 20, _MOST_SAMPLES)
        shown = [_shown(number, sample) for number, sample in rows[skip : skip + limit]]
        return {"num_found": len(rows), "samples": shown}

    def _sample(self, query: Query) -> Sample:
        return sample_of(self._home(query), query.step(), query.whole("number", 0, 10**9))

    def _elsewhere(self, query: Query) -> Any:
        """The steps that answer a sample's prompt, as far as they can be read within a time."""
        prompt, near = self._sample(query).prompt, query.step()
        until_s = time.monotonic() + _LOOK_THROUGH_S
        other = self._runs.folder(query.text("run2") or query.text("run"))
        home = home_of(other, query.text("stage2"))
        steps = sorted(sample_steps(home), key=lambda step: abs(step - near))
        found: list[int] = []
        num_read = 0
        for step in steps:
            if time.monotonic() > until_s:
                break
            found += [step] if same_prompt(home, step, prompt) else []
            num_read += 1
        return {"steps": sorted(found), "num_read": num_read, "num_steps": len(steps)}

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

    def _run(self, query: Query) -> Any:
        folder = self._runs.folder(query.text("run"))
        return run_parts(folder, self._runs.record(folder))

    def _timeline(self, query: Query) -> Any:
        shown = timeline(self._home(query) / "trace.json", query.whole("steps", 3, 50))
        if query.text("stage"):
            return {**shown, "nodes": {}}
        folder = self._runs.folder(query.text("run"))
        predicted: dict[str, Any] = {}
        with suppress(ConfigError):
            predicted = _prediction(folder)
        step_s = predicted.get("step_time_s")
        return {
            **shown,
            "nodes": _node_times(self._runs.record(folder), predicted, shown),
            "has_graph": folder.graph.is_file(),
            "predicted_step_s": float(step_s) if isinstance(step_s, int | float) else None,
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
