"""`penstock eval` and `export`: a run's checkpoint judged, or written as a folder for others.

`eval` says how good a policy is on held-out problems. With `run=FOLDER` it is the policy of that
run at a checkpoint, on the run's own suites; keys of `evaluation` on the command line are taken
instead of the run's. Otherwise it is the section `model`, on the section `task`.

`export` writes config, weights as safetensors, the tokenizer with its chat template, a generation
config and a model card into a folder, which is complete or is not there, and uploads it to a hub.

The run may be going on: its checkpoint is read, and nothing of its folder is touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ...configs.schema import EvalConfig, ExportConfig
from ...configs.validate import validated
from ...dataflow.errors import ConfigError, nearest
from ...workers.engines.registry import DEFAULT
from ...workers.models.hub import hub_folder
from ..inputs.data import load_data
from ..inputs.run import check_model, on_a_device, run_config
from ..inputs.suites import suites_of
from ..placement.machine import has_fast_bfloat16
from ..placement.models import local_model
from ..run_dir.evaluations import WHOLE, Change, Evaluations, Measured, example_text
from ..run_dir.files import output_file, write_output
from ..run_dir.resume import copy_value
from ..run_dir.stop import visible
from ..stages.evaluation import evaluate, held_out_losses
from ..stages.export import KeptCheckpoint, KeptRun, check_token, kept_run, push_folder, write_model
from ..stages.prepare import check_agents, check_suite_lengths
from ..stages.report import measured_text
from ..stages.worker_specs import first_model
from .hydra_app import given_overrides, refuse_resume

_OWN = ("run", "step", "output")  # keys of `eval` that are no part of a run's configuration
_TAKEN = ("evaluation", "executor")  # sections of which keys may be given with a run


def evaluate_policy(composed: dict[str, Any]) -> None:
    refuse_resume(composed, "eval")
    keys = validated(EvalConfig, {key: composed.pop(key, None) for key in _OWN})
    output_file("output", keys.output)
    if keys.run is not None:
        what, step, before, found = _of_run(keys.run, keys, composed)
    elif keys.step is not None:
        raise ConfigError("'step' is given without a run\n    give run=FOLDER as well")
    else:
        what, step, before, found = "model", None, dict[str, Any](), _of_model(composed)
    for measured in found.values():
        for one in measured.examples:
            print(visible(example_text(one)))
    print(f"{what}:")
    for name, measured in found.items():
        print(measured_text(name, measured))
        change = Change.between(before[name], measured) if name in before else None
        if change is not None:
            print(f"    since before training: accuracy {change}")
    if keys.output is not None:
        suites = {name: {**asdict(one), "values": one.values} for name, one in found.items()}
        content = {"what": what, "step": step, "suites": suites}
        write_output("output", keys.output, json.dumps(content, indent=2) + "\n")
        print(f"wrote {keys.output}")


def _of_run(
    path: str, keys: EvalConfig, composed: Mapping[str, Any]
) -> tuple[str, int | None, dict[str, Measured], dict[str, Measured]]:
    words = [word for word in given_overrides() if word.partition("=")[0] not in _OWN]
    kept = kept_run(path, lambda stored: _changed(path, words, composed, stored))
    run, stage = kept.run, kept.run.main
    rows = run.held_out_rows
    if not run.suites and rows is None:
        raise ConfigError(
            f"run '{kept.folder.id}' has no held-out problems to answer\n    give some: "
            "evaluation.suites.NAME.task.kind=..., or penstock eval model=... task=..."
        )
    point, policy = kept.policy(keys.step, rows.train.role if rows else None)
    at: dict[str, Any] = {
        "device": run.executor.device,
        "seed": stage.seed,
        "deadline_s": run.config.schedule.deadline_s,
    }
    found: dict[str, Measured] = {}
    with kept.reading(point):
        if run.suites:
            num_examples = run.config.evaluation.num_examples
            found = evaluate(policy, run.suites, num_examples, stage, **at)
        if rows is not None:
            losses = held_out_losses(rows, {**kept.specs(), rows.train.role or "": policy}, **at)
            found[WHOLE] = replace(found.get(WHOLE, Measured({})), losses=losses)
    records = Evaluations(kept.folder.path)
    before = records.read(0) if not words and 0 in records.steps() else {}
    what = f"{kept.folder.id} after {point.step} steps"
    return what, point.step, before, found


def _changed(
    path: str, words: Sequence[str], composed: Mapping[str, Any], stored: dict[str, Any]
) -> dict[str, Any]:
    for word in words:
        key = word.lstrip("+~").partition("=")[0].rpartition("@")[2].split(".")
        if key[0] not in _TAKEN or word.startswith("~"):
            raise ConfigError(
                f"run={path} comes with {word}\n    a run is evaluated as it is configured, but "
                f"for keys of {' and '.join(_TAKEN)}; leave the rest out"
            )
        copy_value(key, composed, stored)
    if words:  # other problems may have other metrics, and none is to be kept
        stored["evaluation"] |= {"keep_best": None, "stop_after": None}
    return stored


def _of_model(composed: Mapping[str, Any]) -> dict[str, Measured]:
    config = run_config(composed)
    check_model(config.model)
    device = on_a_device(config).device
    section = local_model(config.model, lambda: has_fast_bfloat16(device))
    lora = section.lora.resolved()
    data = load_data(config.task, section)
    suites = suites_of(config.evaluation, data) if data.has_text else ()
    if not suites:
        raise ConfigError(
            f"task '{data.task.task_id}' has no held-out problems to answer\n"
            "    raise task.num_held_out, or give others: evaluation.suites.NAME.task.kind=..."
        )
    if section.hub is not None:
        hub_folder(section.hub, section.revision, weights=True)
    model = first_model(section, data)
    check_agents([suite.data for suite in suites], {})
    if data.about_tools:
        print(data.about_tools)
    for suite in suites:
        if model.num_positions is not None:
            check_suite_lengths(suite, model.num_positions)
    return evaluate(
        DEFAULT.spec("policy")(
            model=model,
            end_ids=data.tokenizer.end.ids,
            num_words=data.tokenizer.vocab_size,
            tokenizer=data.tokenizer_spec,
            lora=lora,
        ),
        suites,
        config.evaluation.num_examples,
        device=device,
        seed=config.seed,
        deadline_s=config.schedule.deadline_s,
    )


# --- export


def export_model(composed: dict[str, Any]) -> None:
    keys = validated(ExportConfig, composed)
    check_token("push", keys.push)
    kept = kept_run(keys.run)
    role = _role(kept, keys.role)
    point = kept.checkpoint(keys.step)
    folder = target_folder(keys.output or f"{kept.folder.id}-step-{point.step}")
    digest = _write(kept, point, role, folder, adapter=keys.adapter)
    print(f"wrote {folder}: {role} of {kept.folder.id} after {point.step} steps")
    print(f"weights_sha256: {digest}")
    if keys.push is not None:
        message = f"{kept.folder.id}, step {point.step}"
        print(f"uploaded to {push_folder(folder, keys.push, message, private=keys.private)}")


def _role(kept: KeptRun, given: str | None) -> str:
    trained = list(kept.run.main.graph.trains_per_step)
    if given is None:
        return kept.run.main.policy or trained[0]
    if given not in trained:
        raise ConfigError(
            f"'role': run '{kept.folder.id}' trains no '{given}'{nearest(given, trained)}\n"
            f"    it trains: {', '.join(trained)}"
        )
    return given


def target_folder(given: str) -> Path:
    """The folder to write, which must be new or empty, so that no file is replaced."""
    folder = Path(given)
    if folder.is_dir() and not any(folder.iterdir()):
        return folder
    if folder.exists() or folder.is_symlink():
        what = "is not empty" if folder.is_dir() else "is no folder"
        raise ConfigError(
            f"'output': '{folder}' {what}\n    give a folder that is not there yet, or remove it"
        )
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"'output': '{folder}' cannot be written: there is no such folder")
    return folder


def _write(kept: KeptRun, point: KeptCheckpoint, role: str, folder: Path, *, adapter: bool) -> str:
    try:
        with kept.reading(point):
            specs = {role: kept.specs()[role]}
            return write_model(kept.run, kept.folder, specs, point, folder, adapter=adapter)
    except OSError as error:
        raise ConfigError(f"'output': '{folder}' cannot be written: {error.strerror}") from error
