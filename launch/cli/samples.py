"""`penstock samples`: what a run sampled, as conversations with what they earned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ...dataflow.errors import ConfigError
from ..run_dir.evaluations import Evaluations
from ..run_dir.run_folder import open_run, record_of
from ..run_dir.samples import (
    ORDERS,
    SORTS,
    Sample,
    read_samples,
    sample_steps,
    shown,
    sorted_samples,
)
from ..run_dir.stop import visible
from .evaluate import example_text
from .words import chosen, split_words, whole_number

_KEYS: Mapping[str, str] = {
    "run": "the folder of a run",
    "step": "a step, counted from 0; `last` (the default) or `all`",
    "sort": f"by: {', '.join(SORTS)}",
    "order": "highest (the default) or lowest first, of what `sort` names",
    "limit": "samples to show, 10 by default; 0 for all",
    "prompt": "only prompts that hold this text",
    "stage": "an earlier stage of the run",
}

_HELP = """\
usage: penstock samples run=FOLDER [key=value ...]

{keys}

The same from Python: penstock.launch.run_dir.samples.read_samples(FOLDER).
"""


def samples_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock samples`.

    Raises:
        ConfigError: If a key or its value is wrong, or there is nothing to show.
    """
    if {"-h", "--help"} & set(arguments):
        keys = "\n".join(f"  {name:<8}{what}" for name, what in _KEYS.items())
        print(_HELP.format(keys=keys), end="")
        return 0
    words = split_words("samples", arguments, (*_KEYS,))
    if words.names:
        raise ConfigError(f"penstock samples: expected KEY=VALUE, got '{words.names[0]:.80}'")
    given = words.options
    if "run" not in given:
        raise ConfigError("penstock samples: which run?\n    give run=FOLDER, such as runs/...")
    folder = open_run(Path(given["run"]))
    home = folder.stage(given["stage"]).path if "stage" in given else folder.path
    if not home.is_dir():
        raise ConfigError(f"'stage': run '{folder.id}' has no stage '{given['stage']}'")
    sort = chosen("sort", given.get("sort", SORTS[0]), SORTS)
    order = chosen("order", given.get("order", ORDERS[0]), ORDERS)
    wanted, limit = given.get("prompt", ""), whole_number("limit", given.get("limit", "10"))
    if not sample_steps(home) and not given.keys() - {"run", "stage", "limit"}:
        return _evaluated(home, limit)
    found = read_samples(home, _steps(home, given.get("step", "last")))
    found = [sample for sample in sorted_samples(found, sort, order) if wanted in sample.prompt]
    if not found:
        raise ConfigError(f"'prompt': no prompt of these samples holds {wanted!r}")
    _print(found[: limit or None], len(found), record_of(folder).not_reproducible)
    return 0


def _evaluated(home: Path, limit: int) -> int:
    """Show the responses of the newest evaluation: nothing is sampled to train on, as in `sft`."""
    evaluations = Evaluations(home)
    step = max(evaluations.steps(), default=None)
    measured = {} if step is None else evaluations.read(step)
    lines = [visible(example_text(one)) for each in measured.values() for one in each.examples]
    if not lines:
        _steps(home, "last")
    print(f"nothing is sampled to train on; responses of the evaluation after {step} steps:")
    print("\n".join(lines[: limit or None]))
    return 0


def _steps(home: Path, text: str) -> list[int] | None:
    """The steps asked for; None for all."""
    there = sample_steps(home)
    if not there:
        raise ConfigError(
            f"'{home}' has no samples: its run keeps none (samples.max_rows=0), trains on no "
            "responses, or has not taken a step yet"
        )
    if text == "all":
        return None
    return there[-1:] if text == "last" else [whole_number("step", text)]


def _print(samples: list[Sample], num_found: int, not_reproducible: str) -> None:
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not_reproducible:
        console.print(Text(f"this run is not reproducible: {not_reproducible}", "dim"))
    for sample in samples:
        console.print(shown(sample))
    if len(samples) < num_found:
        console.print(Text(f"{len(samples)} of {num_found} samples; limit=0 shows all", "dim"))
