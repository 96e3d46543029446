"""`penstock eval`: how good a policy is on held-out problems, of a run or of any model.

With `run=FOLDER` it is the policy of that run at a checkpoint, on the run's own suites; keys of
`evaluation` on the command line are taken instead of the run's. Otherwise it is the section
`model`, on the section `task`. Nothing is trained, and no run's folder is changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...dataflow.errors import ConfigError
from .hydra_app import given_overrides, hydra_app, refuse_resume
from .plan import output_file, write_output

if TYPE_CHECKING:
    from ...configs.schema import EvalConfig
    from ..run_dir.evaluations import Measured

_OWN = ("run", "step", "output")
_TAKEN = ("evaluation", "executor")  # sections of which keys may be given with a run


def eval_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock eval`."""
    hydra_app("eval", arguments, _eval)
    return 0


def _eval(composed: dict[str, Any]) -> None:
    # Imported here: torch and all that follows it take seconds, and `--help` needs none of it.
    from ...configs.schema import EvalConfig
    from ...configs.validate import validated

    refuse_resume(composed, "eval")
    keys = validated(EvalConfig, {key: composed.pop(key, None) for key in _OWN})
    output_file("output", keys.output)
    if keys.run is not None:
        what, step, before, found = _of_run(keys.run, keys, composed)
    elif keys.step is not None:
        raise ConfigError("'step' is given without a run\n    give run=FOLDER as well")
    else:
        what, step, before, found = "model", None, dict[str, Any](), _of_model(composed)
    _show(what, found, before)
    if keys.output is not None:
        from dataclasses import asdict

        suites = {name: {**asdict(one), "values": one.values} for name, one in found.items()}
        content = {"what": what, "step": step, "suites": suites}
        write_output("output", keys.output, json.dumps(content, indent=2) + "\n")
        print(f"wrote {keys.output}")


def _of_run(
    path: str, keys: EvalConfig, composed: Mapping[str, Any]
) -> tuple[str, int | None, dict[str, Measured], dict[str, Measured]]:
    from ..run_dir.evaluations import WHOLE, Evaluations, Measured
    from ..stages.evaluation import evaluate, held_out_losses, options_of_agent, rule_of
    from ..stages.kept_run import kept_run

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
            found = evaluate(
                policy,
                run.suites,
                run.config.evaluation.num_examples,
                rule=rule_of(stage),
                agent_options=options_of_agent(stage),
                **at,
            )
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
    from ..run_dir.resume import copy_value

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
    from ...workers.engines.registry import DEFAULT
    from ...workers.models.hub import hub_folder
    from ..inputs.compose import check_model, on_a_device, run_config
    from ..inputs.data import load_data
    from ..inputs.suites import suites_of
    from ..placement.machine import has_fast_bfloat16
    from ..placement.models import local_model, with_dtype
    from ..stages.evaluation import evaluate
    from ..stages.prepare import check_suite_lengths
    from ..stages.worker_specs import check_agents, first_model

    config = run_config(composed)
    check_model(config.model)
    device = on_a_device(config).device
    section = with_dtype(local_model(config.model), lambda: has_fast_bfloat16(device))
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


def _show(what: str, found: Mapping[str, Measured], before: Mapping[str, Measured]) -> None:
    from ..run_dir.evaluations import Change, example_text
    from ..run_dir.stop import visible
    from ..stages.report import measured_text

    for measured in found.values():
        for one in measured.examples:
            print(visible(example_text(one)))
    print(f"{what}:")
    for name, measured in found.items():
        print(measured_text(name, measured))
        change = Change.between(before[name], measured) if name in before else None
        if change is not None:
            print(f"    since before training: accuracy {change}")
