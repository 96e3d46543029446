"""Metrics in Trackio's store: a SQLite file for each project, in Trackio's own folder.

That is `$TRACKIO_DIR`, or a folder in Hugging Face's cache. Nothing is sent: Trackio's `init` asks
the hub for the user's name, and its threads drop what they cannot write, so rows are written here
by the class that they use. Numbers come back bit for bit, NaN and the infinities included, and a
step that a resumed run does again replaces what was there.
"""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from ..files import flat
from ..samples import SAMPLES, Sample, sample_rows
from .tracker import RunInfo, need_package

_PACKAGE = "trackio"
_DEADLINE_S = 30.0  # for whoever else writes to the project


class TrackioTracker:
    """Writes to Trackio; see `Tracker`.

    Each stage is a run of Trackio, for its steps begin at 0: the main one has the run's name, and
    another has its own behind that. They make a group. What came out is in the metrics
    `summary/...` after the last step; samples are tables.
    """

    def __init__(self, project: str = "penstock", group: str | None = None) -> None:
        need_package("trackio", _PACKAGE)
        self._project = project
        self._group = group
        self._run: RunInfo | None = None
        self._stage = ""
        self._config: dict[str, Any] | None = None
        self._next_step = 0
        self._store: Any = None

    def start(self, run: RunInfo) -> str:
        # Here: it takes seconds, and most runs do without.
        from trackio.sqlite_storage import SQLiteStorage

        self._store = SQLiteStorage
        self._run = run
        SQLiteStorage.validate_project_name(self._project)
        SQLiteStorage.init_db(self._project)
        return f"trackio show --project {shlex.quote(self._project)}"

    def rewind(self, step: int, stage: str) -> None:
        assert self._run is not None, "started before"
        self._stage, self._next_step = stage, step
        self._config = {
            **self._run.config,
            "not_reproducible": self._run.not_reproducible,
            "_Created": datetime.now(UTC).isoformat(),
            "_Group": self._group or self._run.id,
        }
        path = self._store.get_project_db_path(self._project)
        with closing(sqlite3.connect(path, timeout=_DEADLINE_S)) as file, file:
            file.execute(
                "DELETE FROM metrics WHERE run_id = ? AND step >= ?", (self._name(stage), step)
            )

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        self._write(step, stage, metrics)
        self._next_step = max(self._next_step, step + 1)

    def log_samples(self, step: int, stage: str, samples: Sequence[Sample]) -> None:
        from trackio import Table

        columns, rows = sample_rows(samples)
        cells = [dict(zip(columns, row, strict=True)) for row in rows]
        self._write(step, stage, {SAMPLES: {"_type": Table.TYPE, "_value": cells}})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        numbers = {
            f"summary/{key}": value
            for key, value in flat(summary or {}).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if numbers:
            self._write(self._next_step, self._stage, numbers)

    def _write(self, step: int, stage: str, values: Mapping[str, Any]) -> None:
        name, config, self._config = self._name(stage), self._config, None
        self._store.bulk_log(
            project=self._project,
            run=name,
            run_id=name,
            metrics_list=[dict(values)],
            steps=[step],
            config=config,
        )

    def _name(self, stage: str) -> str:
        assert self._run is not None, "started before"
        main = [*self._run.folders][-1]
        return self._run.id if stage == main else f"{self._run.id}/{stage}"
