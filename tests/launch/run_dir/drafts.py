"""Checkpoints that a test writes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from penstock.dataflow.files import writing
from penstock.launch.run_dir.checkpoint import CheckpointStore


@contextmanager
def written(store: CheckpointStore, step: int) -> Generator[Path]:
    """Makes a checkpoint of what the body writes into the folder."""
    draft = store.begin(step)
    try:
        with writing(draft):
            yield draft
    except BaseException:
        store.abandon(step)
        raise
    store.seal(step, {})
