"""`penstock runs export` and `import`: a run as one file that can be sent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ....dataflow.errors import ConfigError
from ...run_dir.stop import visible
from ...runs.archive import export_run, import_run
from ...runs.exported_curves import import_curves
from ...runs.values import run_of
from ..words import chosen, split_words


def export_command(arguments: Sequence[str]) -> int:
    """Write a run's archive."""
    words = split_words("runs export", arguments, ("checkpoints", "runs"))
    if len(words.names) != 2:
        num = len(words.names)
        raise ConfigError(f"penstock runs export: expected a run and a file, got {num} words")
    run, file = words.names
    whole = chosen("checkpoints", words.option("checkpoints", "false"), ("true", "false"))
    size_bytes = export_run(run_of(run, words.home), Path(file), checkpoints=whole == "true")
    print(visible(f"written to {file}: {size_bytes / 2**20:.1f} MiB"))
    return 0


def import_command(arguments: Sequence[str]) -> int:
    """Unpack a run's archive, or make runs of somebody else's curves."""
    words = split_words("runs import", arguments, ("as", "runs"))
    if len(words.names) != 1:
        raise ConfigError(f"penstock runs import: expected one file, got {len(words.names)}")
    path, runs = Path(words.names[0]), Path(words.option("runs", "runs"))
    if not path.is_file():
        raise ConfigError(f"'{path}' is no file\n    give one that penstock runs export has made")
    if chosen("as", words.option("as", "archive"), ("archive", "csv")) == "csv":
        folders = import_curves(path, runs)
    else:
        folders = [import_run(path, runs)]
    for folder in folders:
        print(visible(f"imported as {folder.path}"))
    return 0
