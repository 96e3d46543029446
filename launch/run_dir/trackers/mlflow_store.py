"""Metrics in an MLflow store: by default a SQLite file beside the runs, which all of them share.

Nothing is sent, MLflow's own reports of its use included. Numbers come back bit for bit, NaN
included, but for two rules of that store: an infinity is the largest number of its sign, and -0.0
is 0.0. It forgets nothing either: a step that a resumed run does again is there twice, and the
later time stamp is the one that counts.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from ..files import flat, plain
from ..samples import SAMPLES, Sample, sample_rows
from .tracker import RunInfo, need_package

_PACKAGE = "mlflow"
_STORE, _FILES = "mlflow.db", "mlflow-artifacts"  # in the folder of runs

# of MLflow's documented variables, unless they are set; read when it is first imported
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",  # no file stays open
}

# in a request: metrics, parameters or tags; and of the text of one of these
_MOST_METRICS, _MOST_WORDS, _MOST_CHARACTERS = 1000, 100, 6000

_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")


class MlflowTracker:
    """Writes to MLflow; see `Tracker`.

    The main stage's metrics have their names; those of a stage before it have `stage/` in front.
    MLflow knows no `#`, so `ref.logprob#2` is `ref.logprob:2`. The configuration is in a run's
    parameters. What came out is in metrics `summary/...` and, where it is a text, in tags. Samples
    are tables among its artifacts.
    """

    def __init__(
        self,
        experiment: str = "penstock",
        uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        need_package("mlflow", _PACKAGE)
        self._experiment = experiment
        self._uri = uri
        self._tags = dict(tags or {})
        self._main = ""
        self._client: Any = None
        self._id = ""

    def start(self, run: RunInfo) -> str:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # here: it takes seconds, and most runs do without

        logging.getLogger(_PACKAGE).setLevel(logging.WARNING)  # it tells of tables that it makes
        self._main, home = [*run.folders.items()][-1]
        runs = home.resolve().parent
        uri = self._uri or f"sqlite:///{runs / _STORE}"
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment_id(None if self._uri else (runs / _FILES).as_uri())
        known = f"attributes.run_name = '{run.id}'"
        found = self._client.search_runs([experiment], known, max_results=1) if run.resumed else []
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return _command(uri)
        tags = dict(self._tags)
        if run.not_reproducible:
            tags["mlflow.note.content"] = f"not reproducible: {run.not_reproducible}"
        self._id = self._client.create_run(experiment, run_name=run.id, tags=tags).info.run_id
        self._log_words("params", flat(run.config))
        return _command(uri)

    def rewind(self, step: int, stage: str) -> None:
        """Nothing is taken back: what comes again has the same step and a later time stamp."""

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        self._log({self._name(stage, name): value for name, value in metrics.items()}, step)

    def log_samples(self, step: int, stage: str, samples: Sequence[Sample]) -> None:
        """Write a table of its own, which MLflow shows as text.

        Not by its `log_table`: that lists all tables in one tag, whose room is spent after 134.
        """
        columns, rows = sample_rows(samples)
        table = json.dumps(plain({"columns": columns, "data": rows}), allow_nan=False)
        self._client.log_text(self._id, table, f"{SAMPLES}/{stage}-step-{step:06d}.json")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if not self._id:
            return
        came_out = {f"summary/{key}": value for key, value in flat(summary or {}).items()}
        numbers = {
            key: value
            for key, value in came_out.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        words = {key: value for key, value in came_out.items() if isinstance(value, str)}
        self._log(numbers, 0)
        self._log_words("tags", words)
        self._client.set_terminated(self._id, "FAILED" if summary is None else "FINISHED")
        self._id = ""

    def _experiment_id(self, files: str | None) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return self._client.create_experiment(self._experiment, artifact_location=files)
            except MlflowException:
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        return found.experiment_id

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        each = iter(
            [Metric(_known(key), float(value), now_ms, step) for key, value in numbers.items()]
        )
        while batch := [*islice(each, _MOST_METRICS)]:
            self._client.log_batch(self._id, metrics=batch)

    def _log_words(self, kind: str, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        make = Param if kind == "params" else RunTag
        each = iter([make(_known(key), _text(value)) for key, value in values.items()])
        while batch := [*islice(each, _MOST_WORDS)]:
            self._client.log_batch(self._id, **{kind: batch})

    def _name(self, stage: str, name: str) -> str:
        return name if stage == self._main else f"{stage}/{name}"


def _known(name: str) -> str:
    return _NOT_IN_NAMES.sub(":", name)


def _text(value: Any) -> str:
    said = value if isinstance(value, str) else json.dumps(value, default=str)
    return said[:_MOST_CHARACTERS]


def _command(uri: str) -> str:
    return uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
