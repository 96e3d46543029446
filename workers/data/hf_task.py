"""Tasks from data sets that `datasets` reads: a hub's, a folder's, files, or one saved to disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError
from ...dataflow.files import check_folder_files, check_regular, opened
from ...dataflow.options import PositiveInt, option_class
from .file_task import arrow_rows
from .row_task import RowSource, RowTask, RowTaskSpec

_ROWS_AT_ONCE = 1024
_SAVED = ("state.json", "dataset_dict.json")  # files that only folders of `save_to_disk` have


@option_class
class HfTaskSpec(RowTaskSpec):
    """A data set and how to read it; the fields of its columns are those of a file's rows."""

    dataset: str
    """A hub id, such as `openai/gsm8k`, a local folder, of files or of `save_to_disk`, or a format
    (`json`, `csv`, `parquet`) with `data_files`."""
    config_name: str | None = None
    """Which configuration of the data set: `main`."""
    split: str = "train"
    """The split to train on; slices such as `train[:1000]` are taken where nothing is streamed."""
    held_out_split: str | None = None
    """A split kept for evaluation; null to hold out `num_held_out` prompts of `split`."""
    data_files: tuple[str, ...] | None = None
    """Files of the data set, as paths or patterns."""
    revision: str | None = None
    """Commit, tag or branch of the hub's repository."""
    streaming: bool = False
    """Whether rows are read one by one instead of being downloaded first; needs `max_rows`."""
    max_rows: PositiveInt | None = None
    """Rows of each split to read at most, the first ones."""

    def build(self) -> RowTask:
        if self.held_out_split is not None and self.num_held_out:
            raise ConfigError(
                f"'{self.dataset}': both held_out_split and num_held_out={self.num_held_out} are "
                "given\n    give one of them"
            )
        if self.streaming and self.max_rows is None:
            raise ConfigError(
                f"'{self.dataset}': it is streamed, and nothing says how many rows are read\n"
                "    give max_rows, or set streaming=false"
            )
        held_out = None if self.held_out_split is None else self._source(self.held_out_split)
        task_id = Path(self.dataset).name
        return RowTask(self, task_id, self._source(self.split), held_out)

    def _source(self, split: str) -> RowSource:
        return RowSource(f"{self.dataset} {split}", self._rows(split))

    def _rows(self, split: str) -> Iterator[tuple[str, Any]]:
        try:
            at_once = min(_ROWS_AT_ONCE, self.max_rows or _ROWS_AT_ONCE)
            tables = self._loaded(split).with_format("arrow").iter(at_once)
            rows = islice((row for table in tables for row in arrow_rows(table)), self.max_rows)
            for number, row in enumerate(rows, start=1):
                yield f"{self.dataset} {split} row {number}", row
        except (OSError, ValueError, RuntimeError) as error:  # the library's own are of these
            raise ConfigError(
                f"dataset '{self.dataset}', split '{split}', cannot be loaded: "
                f"{type(error).__name__}: {error}\n    give a hub id, a folder, or a format with "
                "data_files; without a network only what is in the cache can be had"
            ) from error

    def _loaded(self, split: str) -> Any:
        from datasets import config, load_dataset, load_dataset_builder

        folder = Path(self.dataset)
        check_folder_files(folder)
        for path in map(Path, self.data_files or ()):
            if path.exists():  # else a pattern, or an address
                check_regular(path)
        if any((folder / name).is_file() for name in _SAVED):
            return self._saved(split)
        options: dict[str, Any] = {
            "name": self.config_name,
            "data_files": None if self.data_files is None else list(self.data_files),
            "revision": self.revision,
        }
        if self.streaming:
            return load_dataset(self.dataset, **options, split=split, streaming=True)
        found = load_dataset_builder(self.dataset, **options).config.data_files or {}
        files = sorted({Path(str(file)) for part in found.values() for file in part})
        if local := [file for file in files if file.is_file()]:
            # The library's cache knows local files by their times alone, which a copy may keep.
            cache = Path(config.HF_DATASETS_CACHE) / "penstock" / _content_of(local)
            options["cache_dir"] = str(cache)
        return load_dataset(self.dataset, **options, split=split)

    def _saved(self, split: str) -> Any:
        """Return a data set of `save_to_disk`; one without splits is all of `train`."""
        from datasets import DatasetDict, load_from_disk

        loaded = load_from_disk(self.dataset)
        splits = loaded if isinstance(loaded, DatasetDict) else {"train": loaded}
        if split not in splits:
            raise ValueError(f"Unknown split {split!r}; it has {', '.join(map(str, splits))}")
        return splits[split]


def _content_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with opened(file) as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]
