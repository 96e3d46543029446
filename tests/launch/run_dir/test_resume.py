"""What of a resumed run's configuration may change."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.run_dir.resume import Resumed, resumed_config
from penstock.launch.run_dir.run_folder import RunFolder, change_config, create_run, record_of

from ..cli.test_run import TINY, only_run, summary_of
from ..conftest import Penstock

NOW = datetime(2026, 11, 21, 3, 14, 54, tzinfo=UTC)
MAY_CHANGE = (
    "engine, rollout, executor, placement, task.max_restarts, task.step_limit_s, "
    "recovery.max_restarts, recovery.max_repeats, recovery.pause_s, checkpoint.mirror, progress, "
    "algorithm.num_steps, algorithm.optimizer.lr, algorithm.roles.ROLE.optimizer.lr"
)

STORED: dict[str, Any] = {
    "algorithm": {
        "num_steps": 200,
        "optimizer": {"lr": 1e-4, "schedule": "linear", "total_calls": 200},
        "roles": {"critic": {"optimizer": {"lr": 1e-3, "total_calls": 50}}, "actor": {}},
    },
    "seed": 3,
    "executor": {"kind": "ray", "groups": {"train": 1}, "tensor_parallel": {"train": 2}},
    "engine": {"kind": "megatron", "options": {"sequence_parallel": True}},
    "placement": "auto",
}


def resumed(runs: Path, *words: str) -> Resumed:
    """A run with that configuration, resumed with some words."""
    folder = create_run(runs, name="it", seed=3, config=yaml.safe_dump(STORED), data="", now=NOW)
    return again(folder, *words)


def again(folder: RunFolder, *words: str) -> Resumed:
    return resumed_config(folder.path, compose("run", list(words)), ["resume=it", *words])


def refused(folder: RunFolder, *words: str) -> str:
    with pytest.raises(ConfigError) as error:
        again(folder, *words)
    return str(error.value)


def test_a_resumed_run_goes_on_as_it_was(tmp_path: Path) -> None:
    found = resumed(tmp_path)
    assert found == Resumed(found.folder, STORED)


def test_a_key_changes_that_key_alone(tmp_path: Path) -> None:
    words = ("executor.tensor_parallel.train=1", "executor.pipeline_parallel.train=2")
    it = resumed(tmp_path, *words)
    assert it.moved
    assert it.noted
    found = it.config
    assert found["executor"] == {
        "kind": "ray",
        "groups": {"train": 1},
        "tensor_parallel": {"train": 1},
        "pipeline_parallel": {"train": 2},
    }
    assert {**found, "executor": None} == {**STORED, "executor": None}


def test_a_section_chosen_anew_replaces_the_runs(tmp_path: Path) -> None:
    it = resumed(tmp_path, "executor.num_threads=1", "executor=in_process", "engine=torch")
    assert it.moved
    assert it.config["executor"] == {"kind": "in_process", "device": "auto", "num_threads": 1}
    assert it.config["engine"] == {"kind": "torch"}


def test_everything_else_stays(tmp_path: Path) -> None:
    folder = resumed(tmp_path).folder
    words = ("executor=ray", "seed=4", "algorithm=ppo", "algorithm.roles.actor.start=model")
    assert refused(folder, *words) == (
        f"resume={folder.path} comes with seed=4, algorithm=ppo, "
        f"algorithm.roles.actor.start=model\n    a resumed run keeps its configuration but for "
        f"{MAY_CHANGE}; leave the rest out, or start a new run"
    )


def test_a_key_is_not_taken_away(tmp_path: Path) -> None:
    folder = resumed(tmp_path).folder
    assert refused(folder, "executor=ray", "~executor.device") == (
        f"resume={folder.path} comes with ~executor.device\n    keys of a run are not taken away; "
        "name the section anew, such as executor=ray, with all of its keys that are to differ from "
        "that option's own"
    )


# --- the number of steps and the learning rate ----------------------------------------------------


def test_learning_rate_and_number_of_steps_may_change(tmp_path: Path) -> None:
    words = (
        "algorithm.num_steps=300",
        "algorithm.optimizer.lr=5e-5",
        "algorithm.roles.critic.optimizer.lr=1e-5",
    )
    it = resumed(tmp_path, *words)
    assert (it.moved, it.noted, it.extended) == (False, True, False)
    assert it.config["algorithm"] == {
        "num_steps": 300,
        # A schedule that ended with the run still does; one that did not stays.
        "optimizer": {"lr": 5e-5, "schedule": "linear", "total_calls": 300},
        "roles": {"critic": {"optimizer": {"lr": 1e-5, "total_calls": 50}}, "actor": {}},
    }


def test_patience_is_for_this_process_alone(tmp_path: Path) -> None:
    it = resumed(tmp_path, "task.max_restarts=9")
    assert it.config["task"] == {"max_restarts": 9}
    assert not it.noted


def test_a_role_without_an_optimizer_of_its_own_has_no_learning_rate(tmp_path: Path) -> None:
    folder = resumed(tmp_path).folder
    assert refused(folder, "algorithm.roles.actor.optimizer.lr=1e-5") == (
        f"resume={folder.path} comes with algorithm.roles.actor.optimizer.lr, which the run does "
        "not have\n    a role without an optimizer of its own has the algorithm's: "
        "algorithm.optimizer.lr=..."
    )


def edited(folder: RunFolder, **keys: Any) -> None:
    folder.config.write_text(yaml.safe_dump({**yaml.safe_load(folder.config.read_text()), **keys}))


def test_an_edited_configuration_is_refused_by_its_keys(tmp_path: Path) -> None:
    folder = resumed(tmp_path).folder
    edited(folder, seed=4, placement=None, engine={**STORED["engine"], "kind": "torch"}, runs="x")
    assert refused(folder) == (
        f"{folder.config} was edited after the run wrote it: engine.kind is 'torch' and was "
        "'megatron', placement is None and was 'auto', seed is 4 and was 3, runs is 'x' and was "
        f"None\n    bring it back as it was; what may change ({MAY_CHANGE}) is given on the "
        f"command line, which notes it in the run: penstock run resume={folder.path} KEY=VALUE"
    )


def test_another_layout_of_the_file_is_no_edit(tmp_path: Path) -> None:
    folder = resumed(tmp_path).folder
    folder.config.write_text(f"# looked at\n{json.dumps(STORED)}\n")
    assert again(folder).config == STORED


@pytest.mark.slow
def test_an_edit_may_be_given_on_the_command_line_as_well(tmp_path: Path) -> None:
    """A process that stopped between writing the configuration and noting it left the same."""
    folder = resumed(tmp_path).folder
    edited(folder, placement="plan.json", engine={"kind": "torch"})
    it = again(folder, "placement=other.json", "engine=torch")
    assert it.config["placement"] == "other.json"
    algorithm = {**STORED["algorithm"], "num_steps": 300}
    edited(folder, placement="auto", engine=STORED["engine"], algorithm=algorithm)
    folder.write_summary({"num_steps": 200})
    assert again(folder, "algorithm.num_steps=300").extended


def test_a_change_that_was_not_noted_is_made_again_with_the_schedule_that_follows_it(
    tmp_path: Path,
) -> None:
    """A process stopped between writing the configuration and noting it, twice."""
    words = ("algorithm.num_steps=300",)
    it = resumed(tmp_path, *words)
    edited(it.folder, algorithm=it.config["algorithm"])
    assert again(it.folder, *words).config == it.config
    more = again(it.folder, "algorithm.num_steps=400").config["algorithm"]
    assert more["optimizer"]["total_calls"] == 400
    assert more["roles"]["critic"]["optimizer"]["total_calls"] == 50
    assert "algorithm.num_steps is 300 and was 200" in refused(it.folder)
    change_config(it.folder, yaml.safe_dump(it.config), step=100, now=NOW)
    assert record_of(it.folder).changes[0]["keys"] == {
        "algorithm.num_steps": [200, 300],
        "algorithm.optimizer.total_calls": [200, 300],
    }


def test_a_run_of_a_version_that_recorded_no_configuration_goes_on(tmp_path: Path) -> None:
    folder = resumed(tmp_path).folder
    about = json.loads(folder.about.read_text())
    del about["config"], about["changes"]
    folder.about.write_text(json.dumps(about))
    edited(folder, seed=4)
    assert again(folder).config["seed"] == 4
    assert record_of(folder).changes == ()


def test_what_changed_is_noted_with_its_step_and_time(tmp_path: Path) -> None:
    folder = resumed(tmp_path).folder
    first = {**STORED, "seed": float("inf"), "placement": "plan.json"}
    change_config(folder, yaml.safe_dump(first), step=50, now=NOW)
    change_config(folder, yaml.safe_dump(first), step=60, plan="{}", now=NOW)
    change_config(folder, yaml.safe_dump({**first, "engine": None}), step=70, now=NOW)
    record = record_of(folder)
    assert record.changes == (
        {
            "step": 50,
            "at": "2026-11-21T03:14:54+00:00",
            "keys": {"seed": [3, None], "placement": ["auto", "plan.json"]},
        },
        {
            "step": 70,
            "at": "2026-11-21T03:14:54+00:00",
            "keys": {"engine": [STORED["engine"], None]},
        },
    )
    assert folder.plan.read_text() == "{}"
    assert again(folder).config["placement"] == "plan.json"


SFT = ("algorithm=sft", *TINY, "algorithm.per_step.demos=8")


@pytest.mark.slow
def test_a_finished_run_that_is_given_more_steps_ends_as_one_that_had_them(
    penstock: Penstock,
) -> None:
    assert penstock("run", *SFT, "algorithm.num_steps=6", "runs=whole").code == 0
    assert penstock("run", *SFT).code == 0
    run = only_run()
    said = penstock("run", f"resume={run}", "algorithm.num_steps=6")
    assert said.code == 0, said.err
    summary = summary_of(run)
    assert summary["weights_sha256"] == summary_of(only_run(Path("whole")))["weights_sha256"]
    (change,) = summary["changes"]
    assert (change["step"], change["keys"]) == (4, {"algorithm.num_steps": [4, 6]})
    assert "\nchanged after 4 steps: algorithm.num_steps from 4 to 6\n" in said.err
    assert json.loads((run / "summary-4-steps.json").read_text())["num_steps"] == 4
    assert penstock("run", f"resume={run}").err == (
        f"penstock: run '{run.name}' has finished; its result is in {run / 'summary.json'}\n"
        "    start a new run, or go on with more steps: penstock run "
        f"resume={run} algorithm.num_steps=...\n"
    )
    (run / "summary.json").unlink()
    said = penstock("run", f"resume={run}", "algorithm.num_steps=5")
    assert said.code == 2
    assert said.err.endswith(
        f"penstock: run '{run.name}' has taken 6 steps already, which is more than "
        "algorithm.num_steps=5\n    give it at least 6\n"
    )
    said = penstock("run", f"resume={run}", "algorithm.num_steps=7", "algorithm.optimizer.lr=0.0")
    assert said.code == 0, said.err
    assert summary_of(run)["weights_sha256"] == summary["weights_sha256"], "it no longer learns"
    assert [change["step"] for change in summary_of(run)["changes"]] == [4, 6]


@pytest.mark.slow
def test_a_run_that_ran_ahead_is_not_extended_beyond_its_end(penstock: Penstock) -> None:
    ahead = ("algorithm.per_step.prompts=4", "algorithm.cfg.sampling.num_samples=2")
    words = (*TINY, *ahead, "algorithm.roles.actor.start=model", "schedule.max_lag=1")
    assert penstock("run", *words, "evaluation.num_prompts=0").code == 0
    run = only_run()
    before = (run / "config.yaml").read_bytes(), (run / "run.json").read_bytes()
    said = penstock("run", f"resume={run}", "algorithm.num_steps=6")
    assert said.code == 2
    assert f"run '{run.name}' cannot take more steps: cannot resume at step 4: '" in said.err
    assert said.err.endswith("\n    start a new run from its models instead\n")
    assert before == ((run / "config.yaml").read_bytes(), (run / "run.json").read_bytes())
    assert (run / "summary.json").is_file()
