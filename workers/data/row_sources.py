"""Sources of rows: a local JSONL or Parquet file, or a data set that `datasets` reads.

Loading a JSONL file with `datasets` alone fails as a whole on one malformed line, so lines are
parsed here, and `row_task` says which of them are good. Of a file nothing is downloaded, executed
or unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ...dataflow.errors import ConfigError, closest
from ...dataflow.files import check_folder_files, check_regular, opened
from ...dataflow.options import PositiveInt, option_class
from .row_stream import StreamedRowTask
from .row_task import RowSource, RowTask, RowTaskSpec, WrittenFloat
from .task import BadRow


def arrow_rows(table: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table or record batch, with None where a column is null."""
    types = {field.name: field.type for field in table.schema}
    for row in table.to_pylist():
        yield {name: _written(value, types[name]) for name, value in row.items()}


def _written(value: Any, of_type: Any) -> Any:
    import pyarrow as pa

    if value is None:
        return None
    if isinstance(of_type, pa.BaseExtensionType):
        is_json = of_type.extension_name == "arrow.json"
        return json.loads(value) if is_json else _written(value, of_type.storage_type)
    if pa.types.is_struct(of_type):
        fields = ((field.name, field.type) for field in of_type)
        return {n: _written(value[n], kind) for n, kind in fields if value[n] is not None}
    if pa.types.is_map(of_type):
        return {key: _written(item, of_type.item_type) for key, item in value}
    if pa.types.is_nested(of_type) and isinstance(value, list):
        return [_written(item, of_type.value_type) for item in value]
    return value


_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PARQUET_SUFFIXES = (".parquet", ".pq")
_MOST_BYTES = 16 << 20  # of a line
_MOST_PASSED_BYTES = 1 << 30  # of a line that is passed over because it is too long
_ROWS_AT_ONCE = 1024
_SAVED = ("state.json", "dataset_dict.json")  # files that only folders of `save_to_disk` have


@option_class
class FileTaskSpec(RowTaskSpec):
    """A file of problems and how to read it."""

    path: str
    """JSONL (.jsonl, .ndjson, .json: an object a line) or Parquet (.parquet, .pq)."""
    held_out_path: str | None = None
    """A file of problems kept for evaluation, read in the same way."""

    def build(self) -> RowTask:
        if self.held_out_path is not None and self.num_held_out:
            raise ConfigError(
                f"'{self.path}': both held_out_path and num_held_out={self.num_held_out} are "
                "given\n    give one of them"
            )
        path = self.held_out_path
        held_out = None if path is None else RowSource(path, file_rows(path))
        source = RowSource(self.path, file_rows(self.path))
        return RowTask(self, Path(self.path).stem, source, held_out)


def file_rows(path: str | Path) -> Iterator[tuple[str, Any]]:
    """The rows of a file, one after the other; blank lines of a JSONL file are skipped."""
    path = Path(path)
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        found = closest(path.name, beside)
        hint = f"; did you mean '{path.parent / found}'?" if found else ""
        raise ConfigError(
            f"there is no file '{path}'{hint}\n"
            "    give a JSONL or Parquet file, from the folder the run is started in"
        )
    if not path.is_file():
        raise ConfigError(f"'{path}' is not a file\n    give a JSONL or Parquet file")
    if path.suffix not in _JSON_SUFFIXES + _PARQUET_SUFFIXES:
        raise ConfigError(
            f"'{path}': the ending '{path.suffix}' says neither JSONL nor Parquet\n"
            f"    files end in {', '.join(_JSON_SUFFIXES + _PARQUET_SUFFIXES)}"
        )
    return _json_lines(path) if path.suffix in _JSON_SUFFIXES else _parquet_rows(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with opened(path) as file:
            for number in count(1):
                line = file.readline(_MOST_BYTES + 1)
                if not line:
                    return
                if len(line) > _MOST_BYTES:
                    length = len(line) + _passed_over(file, line, f"{path}:{number}")
                    yield f"{path}:{number}", BadRow("too long", f"{length} bytes")
                    continue
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if line.strip():
                    yield f"{path}:{number}", _parsed(line)
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror}") from error


def _passed_over(file: BinaryIO, begun: bytes, where: str) -> int:
    length, piece = 0, begun
    while piece and not piece.endswith(b"\n"):
        if length + len(begun) > _MOST_PASSED_BYTES:
            raise ConfigError(
                f"'{where}': the line has more than {_MOST_PASSED_BYTES >> 20} MiB\n"
                "    give a file with one JSON object a line"
            )
        piece = file.readline(_MOST_BYTES)
        length += len(piece)
    return length


def _parsed(line: bytes) -> Any:
    """The line's value, or the reason why it has none; a generator cannot raise and go on."""
    try:
        return json.loads(
            line.decode().rstrip("\r\n"),
            object_pairs_hook=_of_pairs,
            parse_float=WrittenFloat,
            parse_constant=_no_number,
        )
    except BadRow as bad:
        return bad
    except UnicodeDecodeError as error:
        return BadRow("malformed JSON", f"byte {error.start + 1} of the line is not UTF-8")
    except json.JSONDecodeError as error:
        return BadRow("malformed JSON", f"{error.msg} at column {error.colno}")
    except (RecursionError, ValueError):
        return BadRow("malformed JSON", "nested too deeply, or a number with too many digits")


def _of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise BadRow("malformed JSON", f"the key '{key:.80}' stands twice in an object")
        row[key] = value
    return row


def _no_number(name: str) -> NoReturn:
    raise BadRow("malformed JSON", f"{name} is no number of JSON's")


def parquet_batches(files: Iterable[str], start: int = 0) -> Iterator[Any]:
    """Batches of rows of Parquet files from one row on; groups of rows before it are not read.

    `datasets` reads a whole group of rows at once, which may be a million.
    """
    import fsspec
    from pyarrow.parquet import ParquetFile

    for path in files:
        is_local = Path(path).is_file()  # whose name may mean something else as an address
        with opened(Path(path)) if is_local else fsspec.open(path, "rb") as file:
            parquet = ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
            groups = [*range(parquet.metadata.num_row_groups)]
            while groups and start >= parquet.metadata.row_group(groups[0]).num_rows:
                start -= parquet.metadata.row_group(groups.pop(0)).num_rows
            batches: Any = parquet.iter_batches(_ROWS_AT_ONCE, row_groups=groups)
            for batch in batches:
                yield batch.slice(start)
                start = max(0, start - len(batch))


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowException

    try:
        check_regular(path)
        rows = (row for batch in parquet_batches([str(path)]) for row in arrow_rows(batch))
        for number, row in enumerate(rows, start=1):
            yield f"{path} row {number}", row
    except (OSError, ArrowException) as error:
        raise ConfigError(
            f"'{path}' cannot be read as Parquet: {error}\n    write the file again"
        ) from error


@option_class
class HfTaskSpec(RowTaskSpec):
    """A data set and how to read it; the fields of its columns are those of a file's rows."""

    dataset: str
    """A hub id, such as `openai/gsm8k`, a local folder, of files or of `save_to_disk`, or a format
    (`json`, `csv`, `parquet`) with `data_files`."""
    config_name: str | None = None
    """Configuration of the data set: `main`."""
    split: str = "train"
    """The split to train on; slices such as `train[:1000]` are taken where nothing is streamed."""
    held_out_split: str | None = None
    """A split kept for evaluation; null to hold out `num_held_out` prompts of `split`."""
    data_files: tuple[str, ...] | None = None
    """Files of the data set, as paths or patterns."""
    revision: str | None = None
    """Commit, tag or branch of the hub's repository."""
    streaming: bool = False
    """Whether rows are read when they are needed, for sets that are larger than memory, instead of
    being downloaded first; with `max_rows` those rows alone, before the run starts."""
    buffer_rows: PositiveInt = 1024
    """Rows of a stream that are read, and shuffled with each other, at once."""
    max_rows: PositiveInt | None = None
    """Rows of each split to read at most, the first ones."""

    def build(self) -> RowTask:
        if self.held_out_split is not None and self.num_held_out:
            raise ConfigError(
                f"'{self.dataset}': both held_out_split and num_held_out={self.num_held_out} are "
                "given\n    give one of them"
            )
        task_id, name = Path(self.dataset).name, f"{self.dataset} {self.split}"
        streamed = self.streaming and self.max_rows is None
        held_out = None
        if self.held_out_split is not None:
            rows = islice(self._rows(self.held_out_split), self.buffer_rows if streamed else None)
            held_out = RowSource(f"{self.dataset} {self.held_out_split}", rows)
        if not streamed:
            return RowTask(self, task_id, RowSource(name, self._rows(self.split)), held_out)
        rows_from = partial(self._rows, self.split)
        return StreamedRowTask(self, task_id, name, rows_from, self.buffer_rows, held_out)

    def _rows(self, split: str, start: int = 0) -> Iterator[tuple[str, Any]]:
        try:
            tables = self._tables(split, start)
            rows = islice((row for table in tables for row in arrow_rows(table)), self.max_rows)
            for number, row in enumerate(rows, start=start + 1):
                yield f"{self.dataset} {split} row {number}", row
        except (OSError, ValueError, RuntimeError) as error:  # the library's own are of these
            raise ConfigError(
                f"dataset '{self.dataset}', split '{split}', cannot be loaded: "
                f"{type(error).__name__}: {error}\n    give a hub id, a folder, or a format with "
                "data_files; without a network only what is in the cache can be had"
            ) from error

    def _tables(self, split: str, start: int) -> Iterator[Any]:
        from datasets import config, load_dataset, load_dataset_builder

        folder = Path(self.dataset)
        check_folder_files(folder)
        for path in map(Path, self.data_files or ()):
            if path.exists():  # else a pattern, or an address
                check_regular(path)
        at_once = min(_ROWS_AT_ONCE, self.max_rows or _ROWS_AT_ONCE)
        if any((folder / name).is_file() for name in _SAVED):
            return self._saved(split).skip(start).with_format("arrow").iter(at_once)
        options: dict[str, Any] = {
            "name": self.config_name,
            "data_files": None if self.data_files is None else list(self.data_files),
            "revision": self.revision,
        }
        builder = load_dataset_builder(self.dataset, **options)
        found = builder.config.data_files or {}
        if self.streaming:
            if type(builder).__name__ == "Parquet" and split in found:
                return parquet_batches(map(str, found[split]), start)
            loaded: Any = builder.as_streaming_dataset(split=split)
            return (loaded.skip(start) if start else loaded).with_format("arrow").iter(at_once)
        files = sorted({Path(str(file)) for part in found.values() for file in part})
        if local := [file for file in files if file.is_file()]:
            # The library's cache knows local files by their times alone, which a copy may keep.
            digest = hashlib.sha256()
            for file in local:
                with opened(file) as content:
                    digest.update(hashlib.file_digest(content, "sha256").digest())
            cache = Path(config.HF_DATASETS_CACHE) / "penstock" / digest.hexdigest()[:16]
            options["cache_dir"] = str(cache)
        whole: Any = load_dataset(self.dataset, **options, split=split)
        return whole.with_format("arrow").iter(at_once)

    def _saved(self, split: str) -> Any:
        """Return a data set of `save_to_disk`; one without splits is all of `train`."""
        from datasets import DatasetDict, load_from_disk

        loaded = load_from_disk(self.dataset)
        splits = loaded if isinstance(loaded, DatasetDict) else {"train": loaded}
        if split not in splits:
            raise ValueError(f"Unknown split {split!r}; it has {', '.join(map(str, splits))}")
        return splits[split]
