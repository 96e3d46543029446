"""The trackers that come with Penstock; `trackers.Tracker` says when each method is called.

Packages are imported when a tracker starts: each takes up to seconds, and most runs do without.
None of them sends anything unless it is told to, reports of their own use included.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import re
import shlex
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from socket import gethostname
from typing import Any, Literal, cast, get_args

from ...dataflow.errors import ConfigError
from ...dataflow.files import read_bytes, writing
from .files import flat, plain
from .loopback_server import Answer, PageServer
from .samples import SAMPLES, Sample, sample_rows
from .stop import say
from .trackers import RunInfo

_STRING = 7  # `DT_STRING` of TensorBoard's `DataType`


class TensorBoardTracker:
    """Writes event files to `tensorboard/` in the folder of each stage; every start adds one."""

    def __init__(self) -> None:
        self._run: RunInfo | None = None
        self._writer: Any = None

    def start(self, run: RunInfo) -> str:
        self._run = run
        return f"tensorboard --logdir {[*run.folders.values()][-1]}"

    def rewind(self, step: int, stage: str) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._run is not None, "started before"
        self._messages: Any = event_pb2
        self.finish(None)
        folder = self._run.folders[stage] / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, which hold the second of their start:
        # wait, for a second at most, until the new one sorts behind those that are there.
        seconds = [int(file.name.split(".")[3]) for file in folder.glob("events.out.tfevents.*")]
        if max(seconds, default=0) >= int(time.time()):
            time.sleep(1.0)
        name = f"events.out.tfevents.{int(time.time())}.{gethostname()}.{os.getpid()}"
        self._path = folder / name
        # TensorBoard's own writer has a thread, which prints a traceback when the disk is full.
        self._writer = RecordWriter(self._path.open("xb"))
        self._write(0, file_version="brain.Event:2")
        if reason := self._run.not_reproducible:
            text = {
                "tag": "not reproducible",
                "metadata": {"plugin_data": {"plugin_name": "text"}},
                "tensor": {"dtype": _STRING, "string_val": [reason.encode()]},
            }
            self._write(step, summary={"value": [text]})
        if step:
            begin = self._messages.SessionLog(status=self._messages.SessionLog.START)
            self._write(step, session_log=begin)

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        values = [{"tag": name, "simple_value": float(x)} for name, x in metrics.items()]
        self._write(step, summary={"value": values})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with writing(self._path):
                writer.close()

    def _write(self, step: int, **content: Any) -> None:
        event = self._messages.Event(step=step, wall_time=time.time(), **content)
        with writing(self._path):
            self._writer.write(event.SerializeToString())
            self._writer.flush()


# --- Prometheus

_TARGET = "metrics"
_LEAST_CHARACTERS = 16  # fewest characters of a token that the user chose
_MOST_TOKEN_BYTES = 4096  # largest token file
_SERVER_DEADLINE_S = 10.0  # for the server's thread to end


class PrometheusTracker:
    """Serves a run's newest numbers on this machine: `http://127.0.0.1:PORT/TOKEN/metrics`.

    Nothing is kept and nothing is sent: Prometheus, or `curl`, asks. Every metric of every stage is
    one series,

        penstock_metric{run="...",stage="grpo",metric="actor.train/loss"} 0.25

    and `penstock_step` is the step that it is of. The address holds a token; see `loopback_server`.
    """

    def __init__(self, port: int = 0, token_file: str | None = None) -> None:
        if type(port) is not int or not 0 <= port < 65536:
            raise ConfigError(
                "'port' of tracker 'prometheus': expected a whole number from 0 to 65535, "
                f"got {port!r}"
            )
        self._port = port
        self._token = "" if token_file is None else _token(Path(token_file))
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, float]] = {}
        self._steps: dict[str, int] = {}
        self._run = ""
        self._server: PageServer | None = None

    def start(self, run: RunInfo) -> None:
        self._run = run.id
        server = PageServer(self._answer, self._port, self._token)
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no more threads: shutdown would wait for this one for ever
            server.server_close()
            raise
        self._server = server
        say(f"metrics for Prometheus: {server.url}{_TARGET}")

    def rewind(self, step: int, stage: str) -> None:
        with self._lock:
            self._values[stage] = {}
            self._steps.pop(stage, None)

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._values[stage] |= metrics
            self._steps[stage] = step

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join(_SERVER_DEADLINE_S)

    def _answer(self, target: str) -> Answer | None:
        if target != _TARGET:
            return None
        lines = [f"# TYPE penstock_{name} gauge" for name in ("metric", "step")]
        with self._lock:
            for stage, values in self._values.items():
                for name, value in values.items():
                    labels = _labels(run=self._run, stage=stage, metric=name)
                    lines.append(f"penstock_metric{{{labels}}} {_number(value)}")
            for stage, step in self._steps.items():
                lines.append(f"penstock_step{{{_labels(run=self._run, stage=stage)}}} {step}")
        content = "".join(f"{line}\n" for line in lines).encode()
        return Answer(content, "text/plain; version=0.0.4; charset=utf-8")


def _token(path: Path) -> str:
    try:
        token = read_bytes(path, _MOST_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'token_file' of tracker 'prometheus': {error}") from error
    if len(token) < _LEAST_CHARACTERS or not token.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(
            f"'token_file' of tracker 'prometheus': expected at least {_LEAST_CHARACTERS} letters "
            f"and digits in '{path}', got {len(token)} characters\n"
            f"    openssl rand -hex 32 > {path}"
        )
    return token


def _labels(**labels: str) -> str:
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


# --- stores of other packages


class _Store:
    """A tracker that needs a package, in whose names a stage before the main one is in front."""

    kind = ""

    def __init__(self) -> None:
        if importlib.util.find_spec(self.kind) is None:
            raise ConfigError(
                f"'tracker.kind': {self.kind} needs a package that is not installed\n"
                f"    pip install 'penstock-rl[{self.kind}]'"
            )
        self._main = ""

    def rewind(self, step: int, stage: str) -> None:
        """Nothing is taken back; each class says how steps that come again are told apart."""

    def _name(self, stage: str, name: str) -> str:
        return name if stage == self._main else f"{stage}/{name}"


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _came_out(summary: Mapping[str, Any] | None) -> dict[str, Any]:
    return {f"summary/{key}": value for key, value in flat(summary or {}).items()}


# in a request: metrics, parameters or tags; and of the text of one of these
_MOST_METRICS, _MOST_WORDS, _MOST_CHARACTERS = 1000, 100, 6000


class MlflowTracker(_Store):
    """Writes to an MLflow store: by default a SQLite file beside the runs, which all of them share.

    The main stage's metrics have their names; those of a stage before it have `stage/` in front.
    MLflow knows no `#`, so `ref.logprob#2` is `ref.logprob:2`. The configuration is in a run's
    parameters. What came out is in metrics `summary/...` and, where it is a text, in tags. Samples
    are tables among its artifacts.

    Numbers come back bit for bit, NaN included, but for two rules of that store: an infinity is the
    largest number of its sign, and -0.0 is 0.0. It forgets nothing either: a step that a resumed
    run does again is there twice, and the later time stamp is the one that counts.
    """

    kind = "mlflow"

    def __init__(
        self,
        experiment: str = "penstock",
        uri: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._experiment, self._uri, self._tags = experiment, uri, dict(tags or {})
        self._client: Any = None
        self._id = ""

    def start(self, run: RunInfo) -> str:
        # MLflow's documented variables, which are read when it is first imported. Without a pool no
        # file stays open.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of tables that it makes
        self._main, home = [*run.folders.items()][-1]
        runs = home.resolve().parent
        uri = self._uri or f"sqlite:///{runs / 'mlflow.db'}"
        web = uri if uri.startswith("http") else f"mlflow ui --backend-store-uri {shlex.quote(uri)}"
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment_id(
            None if self._uri else (runs / "mlflow-artifacts").as_uri()
        )
        known = f"attributes.run_name = '{run.id}'"
        found = self._client.search_runs([experiment], known, max_results=1) if run.resumed else []
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return web
        tags = dict(self._tags)
        if run.not_reproducible:
            tags["mlflow.note.content"] = f"not reproducible: {run.not_reproducible}"
        self._id = self._client.create_run(experiment, run_name=run.id, tags=tags).info.run_id
        self._log_words("params", flat(run.config))
        return web

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        self._log({self._name(stage, name): value for name, value in metrics.items()}, step)

    def log_samples(self, step: int, stage: str, samples: Sequence[Sample]) -> None:
        # Not by its `log_table`: that lists all tables in one tag, whose room is spent after 134.
        columns, rows = sample_rows(samples)
        table = json.dumps(plain({"columns": columns, "data": rows}), allow_nan=False)
        self._client.log_text(self._id, table, f"{SAMPLES}/{stage}-step-{step:06d}.json")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if not self._id:
            return
        came_out = _came_out(summary)
        self._log(_numbers(came_out), 0)
        self._log_words("tags", {k: v for k, v in came_out.items() if isinstance(v, str)})
        self._client.set_terminated(self._id, "FAILED" if summary is None else "FINISHED")
        self._id = ""

    def _experiment_id(self, files: str | None) -> str:
        from mlflow.exceptions import MlflowException

        try:
            return self._client.create_experiment(self._experiment, artifact_location=files)
        except MlflowException:  # this run or another has made it before
            found = self._client.get_experiment_by_name(self._experiment)
            if found is None:
                raise
            return found.experiment_id

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        each = (Metric(_known(k), float(v), now_ms, step) for k, v in numbers.items())
        self._log_batches("metrics", each, _MOST_METRICS)

    def _log_words(self, kind: Literal["params", "tags"], values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        make = Param if kind == "params" else RunTag
        each = (make(_known(key), _text(value)) for key, value in values.items())
        self._log_batches(kind, each, _MOST_WORDS)

    def _log_batches(self, kind: str, each: Iterator[Any], most: int) -> None:
        while batch := [*islice(each, most)]:
            self._client.log_batch(self._id, **{kind: batch})


def _known(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", ":", name)


def _text(value: Any) -> str:
    said = value if isinstance(value, str) else json.dumps(value, default=str)
    return said[:_MOST_CHARACTERS]


class TrackioTracker(_Store):
    """Writes to Trackio's store: a SQLite file for each project, in Trackio's own folder.

    That is `$TRACKIO_DIR`, or a folder in Hugging Face's cache. Trackio's `init` asks the hub for
    the user's name, and its threads drop what they cannot write, so rows are written here by the
    class that they use. Numbers come back bit for bit, NaN and the infinities included, and a step
    that a resumed run does again replaces what was there.

    Each stage is a run of Trackio, for its steps begin at 0: the main one has the run's name, and
    another has its own behind that. They make a group. What came out is in the metrics
    `summary/...` after the last step; samples are tables.
    """

    kind = "trackio"

    def __init__(self, project: str = "penstock", group: str | None = None) -> None:
        super().__init__()
        self._project, self._group = project, group
        self._run: RunInfo | None = None
        self._stage = ""
        self._config: dict[str, Any] | None = None
        self._next_step = 0
        self._store: Any = None

    def start(self, run: RunInfo) -> str:
        from trackio.sqlite_storage import SQLiteStorage

        self._store, self._run = SQLiteStorage, run
        self._main = [*run.folders][-1]
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
        # The time-out is for other processes that write to the project.
        with closing(sqlite3.connect(path, timeout=30.0)) as file, file:
            file.execute(
                "DELETE FROM metrics WHERE run_id = ? AND step >= ?", (self._id(stage), step)
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
        if numbers := _numbers(_came_out(summary)):
            self._write(self._next_step, self._stage, numbers)

    def _write(self, step: int, stage: str, values: Mapping[str, Any]) -> None:
        name, config, self._config = self._id(stage), self._config, None
        self._store.bulk_log(
            project=self._project,
            run=name,
            run_id=name,
            metrics_list=[dict(values)],
            steps=[step],
            config=config,
        )

    def _id(self, stage: str) -> str:
        assert self._run is not None, "started before"
        return self._run.id if stage == self._main else f"{self._run.id}/{stage}"


# for W&B's own process to start, to answer, and to send what is left at the end
_WANDB_DEADLINE_S = 60.0

Mode = Literal["offline", "online"]


class WandbTracker(_Store):
    """Writes to Weights & Biases: into the run's folder, or sent as the run goes on.

    By default nothing is sent and no login is needed: `wandb/` in the run's folder takes
    every metric, and `wandb sync` sends it when that is wanted. A run that is resumed goes
    on under the same name, with a file of its own; the steps that come again stand in both, at the
    same step of the stage's axis.

    The main stage's metrics have their names, with `step` as their axis; those of a stage before it
    have `stage/` in front, also of their step.
    """

    kind = "wandb"

    def __init__(
        self,
        project: str = "penstock",
        mode: Mode = "offline",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(
                f"'tracker.options.mode': expected one of {', '.join(get_args(Mode))}, got {mode!r}"
            )
        super().__init__()
        self._mode = mode
        self._where: Any = {"project": project, "entity": entity, "group": group, "tags": [*tags]}
        self._has_axis: set[str] = set()
        self._run: Any = None

    def start(self, run: RunInfo) -> str:
        # Reports of the package's own errors would leave the machine in both modes.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._main, home = [*run.folders.items()][-1]
        settings = wandb.Settings(
            silent=True,
            console="off",  # what a run prints is its own
            disable_git=True,
            save_code=False,
            init_timeout=_WANDB_DEADLINE_S,
            finish_timeout=_WANDB_DEADLINE_S,
            finish_timeout_raises=True,
            x_service_wait=_WANDB_DEADLINE_S,
        )
        # The package puts itself between a program and `sys.exit` for good, to learn how the run
        # ends, which `finish` says.
        exit_before, hook_before = sys.exit, sys.excepthook
        try:
            self._run = wandb.init(
                **self._where,
                id=run.id,
                name=run.id,
                dir=str(home),
                config=dict(run.config),
                notes=f"not reproducible: {run.not_reproducible}" if run.not_reproducible else None,
                mode=cast(Any, self._mode),
                resume="allow" if self._mode == "online" else None,
                settings=settings,
            )
        finally:
            sys.exit, sys.excepthook = exit_before, hook_before
        # `wandb` is what the package itself makes below the folder that it is given.
        written = Path(home, "wandb")
        return self._run.url if self._mode == "online" else f"wandb sync {written}/offline-run-*"

    def log(self, step: int, stage: str, metrics: Mapping[str, Any]) -> None:
        axis = self._name(stage, "step")
        row = {self._name(stage, name): value for name, value in metrics.items()}
        # One by one: of patterns that overlap, as `*` and `sft/*` do, the package may take either.
        for name in row:
            if name not in self._has_axis:
                self._run.define_metric(name, step_metric=axis)
                self._has_axis.add(name)
        self._run.log({**row, axis: step})

    def log_samples(self, step: int, stage: str, samples: Sequence[Sample]) -> None:
        import wandb

        columns, rows = sample_rows(samples)
        self.log(step, stage, {SAMPLES: wandb.Table([*columns], [*rows])})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        import wandb

        run, self._run = self._run, None
        if run is None:
            return
        try:
            # Conversations stay in the run's folder.
            came_out = {k: v for k, v in flat(summary or {}).items() if not isinstance(v, list)}
            run.summary.update(came_out)
            run.finish(exit_code=0 if summary is not None else 1)
        finally:
            wandb.teardown()
