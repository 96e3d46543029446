"""`penstock runs export`, `import`, `tag`, `archive` and `delete`: what becomes of run folders."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ....dataflow.errors import ConfigError
from ...run_dir.atomic import write_json
from ...run_dir.run_folder import RunRecord
from ...run_dir.stop import visible
from ...runs.archive import export_run, import_run
from ...runs.exported_curves import import_curves
from ...runs.values import named_runs, run_of
from ..words import Words, chosen, split_words

_ARCHIVED = "archived"
"""Below the folder of runs, whose listing does not look into it."""


def export_command(arguments: Sequence[str]) -> int:
    """Write a run's archive."""
    words = split_words("runs export", arguments, ("checkpoints", "runs"))
    run, file = _two(words, "export", "a run and a file")
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


def tag_runs(arguments: Sequence[str]) -> int:
    """Give runs words, and take them away."""
    words = split_words("runs tag", arguments, ("add", "remove", "runs"))
    for record in _named(words, "tag"):
        gone = words.option("remove").split(",")
        tags = dict.fromkeys((*record.tags, *filter(None, words.option("add").split(","))))
        kept = [tag for tag in tags if tag not in gone]
        write_json(record.folder.tags, kept)
        print(visible(f"{record.folder.id}: {', '.join(kept) or 'no tags'}"))
    return 0


def archive_runs(arguments: Sequence[str]) -> int:
    """Move runs out of the listing."""
    words = split_words("runs archive", arguments, ("runs",))
    for record in _named(words, "archive"):
        target = record.folder.path.parent / _ARCHIVED / record.folder.id
        if target.exists():
            raise ConfigError(f"'{target}' is there\n    remove it first")
        with record.folder.locked():
            target.parent.mkdir(exist_ok=True)
            record.folder.path.rename(target)
        print(visible(f"moved to {target}"))
    return 0


def delete_runs(arguments: Sequence[str]) -> int:
    """Delete runs, or say which would be."""
    words = split_words("runs delete", arguments, ("sure", "runs"))
    sure = chosen("sure", words.option("sure", "false"), ("true", "false")) == "true"
    for record in _named(words, "delete"):
        folder = record.folder.path
        files = [path for path in folder.rglob("*") if path.is_file()]
        size = f"{sum(path.lstat().st_size for path in files) / 2**20:.1f} MiB"
        if not sure:
            print(visible(f"would delete {folder}: {len(files)} files, {size}"))
            continue
        with record.folder.locked():
            # First what makes it a run: one that is deleted halfway is none.
            record.folder.about.unlink()
            shutil.rmtree(folder)
        print(visible(f"deleted {folder}: {len(files)} files, {size}"))
    if not sure:
        print("nothing was deleted; give sure=true to delete")
    return 0


def _named(words: Words, action: str) -> list[RunRecord]:
    """The runs that are named, each once.

    Raises:
        ConfigError: If none is.
    """
    if not words.names:
        raise ConfigError(f"penstock runs {action}: which run?\n    name one, or several")
    found = [record for word in words.names for record in named_runs(word, words.home)]
    return [*{record.folder.path.resolve(): record for record in found}.values()]


def _two(words: Words, action: str, what: str) -> tuple[str, str]:
    if len(words.names) != 2:
        raise ConfigError(f"penstock runs {action}: expected {what}, got {len(words.names)} words")
    return words.names[0], words.names[1]
