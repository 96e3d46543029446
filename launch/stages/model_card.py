"""Files of a model folder beside its weights: a card, and how to generate with it.

The card is a `README.md` as the hub of Hugging Face shows it: where the model comes from, how it
was trained, what was measured of it, and the hash of its weights. All of it is read from the run's
folder as it is at that moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
import yaml

from ... import __version__
from ...dataflow.files import writing
from ...workers.models.architecture import quiet_transformers
from ...workers.models.hub import hub_name
from ...workers.models.lora import ADAPTER_SETTINGS
from ...workers.models.tokenizer import folder_end
from ..inputs.run import Run
from ..run_dir.evaluations import Evaluations, logged_name
from ..run_dir.run_folder import RunFolder, record_of
from ..run_dir.step_logs import read_metrics
from .headline import Headline
from .roles import MODEL

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of a step's sampling that a generation config has under the same name."""


def write_card(
    folder: Path, home: RunFolder, run: Run, role: str, step: int, weights_sha256: str
) -> None:
    """Write README.md into a model folder."""
    stage, model, record = run.main, run.model, record_of(home)
    base = stage.roles[role].start
    named = model.folder if base == MODEL else base
    known = hub_name(named) if named else None
    parts = Path(named).parts if named else (model.architecture.get("model_type"),)
    began = "/".join(map(str, parts[-3:] if parts[-2:-1] == ("models",) else parts[-1:]))
    began = began if known is None else known[0]
    about: dict[str, Any] = {"library_name": "transformers", "tags": ["penstock", stage.graph.name]}
    if (folder / ADAPTER_SETTINGS).exists():
        about["library_name"] = "peft"
    if known is not None:
        about["base_model"] = known[0]
    facts = {
        "algorithm": stage.graph.name,
        "stages": ", ".join(one.name for one in run.stages),
        "role": role,
        "began as": began,
        **({"LoRA rank": model.lora.rank} if model.lora.rank else {}),
        "data": f"{run.data.task.task_id} (fingerprint {run.data.fingerprint})",
        "steps": f"{step} of {stage.config.num_steps}",
        "seed": run.config.seed,
        "run": home.id,
        "code": record.code,
        **({"not reproducible": record.not_reproducible} if record.not_reproducible else {}),
        "weights_sha256": weights_sha256,
    }
    lines = [
        "---",
        yaml.safe_dump(about, sort_keys=False).strip(),
        "---",
        "",
        f"# {home.id}, step {step}",
        "",
        f"Trained with Penstock {__version__}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in facts.items()),
        "",
        *_rewards(home, run, step),
        *_evaluations(home, step),
    ]
    with writing(folder / "README.md"):
        (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n")


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _rewards(home: RunFolder, run: Run, step: int) -> list[str]:
    """The run's own headline metric in its first step and in the last one before this."""
    rows = [row for row in read_metrics(home.metrics) if row["step"] < step]
    metric = Headline(run.main).curve(rows[-1]) if rows else None
    if metric is None:
        return []
    first, last = (row.get(metric.name) for row in (rows[0], rows[-1]))
    if first is None or last is None:
        return []
    where = f"step {rows[0]['step'] + 1} | step {rows[-1]['step'] + 1}"
    return [
        f"| in training | {where} |",
        "|---|---|---|",
        f"| {metric.label} | {first:.4g} | {last:.4g} |",
        "",
    ]


def _evaluations(home: RunFolder, step: int) -> list[str]:
    kept = Evaluations(home.path)
    steps = [one for one in kept.steps() if one <= step]
    if not steps:
        return []
    first, last = (_values(kept, one) for one in (steps[0], steps[-1]))
    lines = [
        f"| on held-out problems | after {steps[0]} steps | after {steps[-1]} steps |",
        "|---|---|---|",
    ]
    for name, value in last.items():
        before = f"{first[name]:.4g}" if name in first else ""
        lines.append(f"| {_cell(name)} | {before} | {value:.4g} |")
    return [*lines, ""]


def _values(kept: Evaluations, step: int) -> dict[str, float]:
    return {
        logged_name(suite, name): value
        for suite, measured in kept.read(step).items()
        for name, value in measured.values.items()
    }


def write_generation_config(folder: Path, run: Run) -> None:
    """Write generation_config.json: what ends a response, and how training sampled."""
    sampling: Mapping[str, Any] = run.main.config.cfg.get("sampling", {})
    end = run.data.tokenizer.end
    end = end.sampled_by(run.main.sampling) if run.main.sampling else end
    # Zeros as well: without its key transformers takes top_k=50, or what the base model was given.
    given = {key: sampling[key] for key in _SAMPLING if key in sampling}
    if not given.get("temperature"):  # greedy: no word of the file says so
        given = {}
    tokenizer = run.data.tokenizer
    with quiet_transformers(), writing(folder / "generation_config.json"):
        try:
            config = transformers.GenerationConfig.from_pretrained(folder)
        except OSError:  # there is none
            config = transformers.GenerationConfig()
        found = folder_end(folder, end).as_generation_config()
        if config.pad_token_id is None:
            found["pad_token_id"] = tokenizer.pad_id
        if given:
            found |= {"do_sample": True, **given}
        config.update(**found)
        config.save_pretrained(folder)
