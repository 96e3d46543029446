"""Tasks from data sets that `datasets.load_dataset` reads: a hub's, a folder's, or files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError
from ...dataflow.option_checks import check_range
from .row_task import RowSource, RowTask, RowTaskSpec


@dataclass(frozen=True, kw_only=True)
class HfTaskSpec(RowTaskSpec):
    """A data set and how to read it; the fields of its columns are those of a file's rows."""

    dataset: str
    """A hub id, such as `openai/gsm8k`, a local folder, or a format (`json`, `csv`, `parquet`) with
    `data_files`."""
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
    max_rows: int | None = None
    """Rows of each split to read at most, the first ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "max_rows", at_least=1)

    def build(self) -> RowTask:
        """Load the data set and the reward.

        Raises:
            ConfigError: If the data set cannot be loaded, too many of its rows are bad, too few
                prompts are left to hold out, or options contradict each other.
        """
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
            rows = islice(self._loaded(split), self.max_rows)
            for number, row in enumerate(rows, start=1):
                yield f"{self.dataset} {split} row {number}", row
        except (OSError, ValueError, RuntimeError) as error:  # the library's own are of these
            raise ConfigError(
                f"dataset '{self.dataset}', split '{split}', cannot be loaded: "
                f"{type(error).__name__}: {error}\n    give a hub id, a folder, or a format with "
                "data_files; without a network only what is in the cache can be had"
            ) from error

    def _loaded(self, split: str) -> Iterator[Mapping[str, Any]]:
        from datasets import load_dataset

        files = None if self.data_files is None else list(self.data_files)
        loaded: Any = load_dataset(
            self.dataset,
            self.config_name,
            data_files=files,
            split=split,
            revision=self.revision,
            streaming=self.streaming,
        )
        return iter(loaded)
