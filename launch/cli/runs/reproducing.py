"""`penstock runs reproduce`: run what a run was once more, and say whether the same came out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ....dataflow.errors import ConfigError
from ...run_dir.environment import changed_versions, environment_now, versions_text
from ...run_dir.origins import Origins, changed_files, origins_of
from ...run_dir.resume import stored_config
from ...run_dir.run_folder import RunRecord, code_version, record_of
from ...run_dir.stop import visible
from ...runs.values import run_of
from ..words import split_words

_CAME_OUT = ("weights_sha256", "roles_sha256", "num_steps", "accuracy_after_rl")


def reproduce_run(arguments: Sequence[str]) -> int:
    """Run it again in the folder of runs; 1 if other weights came out."""
    words = split_words("runs reproduce", arguments, ("into", "runs"))
    if len(words.names) != 1:
        raise ConfigError(f"penstock runs reproduce: expected one run, got {len(words.names)}")
    before = repeatable(words.names[0], words.home)
    for line in _differing(before):
        print(visible(f"differs: {line}"), flush=True)
    from ..run import carry_out_again  # here: nothing else of this command starts a run

    config = stored_config(before.folder)
    config.pop("resume", None)
    into = words.option("into", words.option("runs", "runs"))
    folder = carry_out_again(before, {**config, "runs": into})
    return _compared(before, record_of(folder))


def repeatable(word: str, home: Path) -> RunRecord:
    """The run that a word names, if it can be run again as it was.

    Raises:
        ConfigError: If there is none, it has not finished, or its configuration changed on its way.
    """
    record = run_of(word, home)
    if record.summary is None or record.summary.get("stopped"):
        raise ConfigError(
            f"run '{record.folder.id}' has not finished, so nothing can be compared with it\n"
            f"    go on with it: penstock run resume={record.folder.path}"
        )
    if record.changes:
        steps = ", ".join(str(change["step"]) for change in record.changes)
        raise ConfigError(
            f"the configuration of run '{record.folder.id}' changed on its way, after step {steps}"
            "\n    run it with its first configuration and resume it with each change of run.json"
        )
    return record


def _differing(record: RunRecord) -> Iterator[str]:
    """What is known not to be as it was, before anything is run."""
    from ...placement.machine import machine_name  # here: it needs torch

    code, now = code_version(), environment_now(machine_name())
    if record.not_reproducible:
        yield f"the run is not reproducible: {record.not_reproducible}"
    if record.code != code:
        yield f"code, {record.code} then and {code} now"
    elif code.dirty:
        yield f"code, perhaps: {code} both times"
    versions = changed_versions(record.environment.versions, now.versions)
    if versions:
        yield f"packages, {versions_text(versions)}"
    for key, value in record.environment.hardware.items():
        if now.hardware.get(key) != value:
            yield f"machine, {key}: {value} then and {now.hardware.get(key)} now"
    # Files that were not imported yet are compared where they lie.
    for path in changed_files(record.origins, Origins()):
        there = "is not here" if not Path(path).exists() else "is another"
        yield f"your own file {path} {there}"
    models = {name: found for name, found in record.origins.models.items() if Path(name).is_dir()}
    for folder, found in origins_of(models).models.items():
        if models[folder] != found:
            yield f"the model in {folder} is another"


def _compared(before: RunRecord, now: RunRecord) -> int:
    then, since = before.summary or {}, now.summary or {}
    same = then.get("weights_sha256") == since.get("weights_sha256")
    print(visible(f"{now.folder.path}: {'the same' if same else 'other'} weights"))
    for key in _CAME_OUT:
        if then.get(key) != since.get(key):
            print(visible(f"  {key}: {then.get(key)} then and {since.get(key)} now"))
    return 0 if same else 1
