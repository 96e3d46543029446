"""The configuration is resolved once, where it is composed."""

from __future__ import annotations

from pathlib import Path

import penstock.launch
import pytest
from penstock.configs.schema import RunConfig
from penstock.configs.validate import validated
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.executor import Recovery
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import check_model, dumped, resolve, resolved, run_config

LAUNCH = Path(str(penstock.launch.__file__)).parent


def composed(*words: str) -> dict[str, object]:
    made = compose("run", list(words))
    made.pop("resume")
    return made


def test_only_a_run_holds_the_whole_configuration() -> None:
    knowing = {
        file.relative_to(LAUNCH).as_posix()
        for file in LAUNCH.rglob("*.py")
        if "RunConfig" in file.read_text()
    }
    assert knowing == {"inputs/run.py", "cli/key_reference.py"}


def test_stages_are_recorded_in_order_with_their_seeds() -> None:
    run = resolved(composed("algorithm=ppo", "seed=4", "algorithm.before.sft.seed=7"))
    assert [(stage.name, stage.at, stage.seed) for stage in run.stages] == [
        ("sft", "algorithm.before.sft", 7),
        ("reward_modelling", "algorithm.before.reward_modelling", 4),
        ("ppo", "algorithm", 4),
    ]
    assert run.main.graph.name == "ppo"


def test_a_model_is_a_folder_or_an_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = resolved(composed(f"model.folder={tmp_path}"))
    with pytest.raises(ConfigError) as caught:
        check_model(run.model)
    assert str(caught.value) == (
        "'model' has both a folder and an architecture\n"
        "    to start from a folder, choose model=PATH; in an experiment's file, have 'override "
        "/model: folder' in its defaults and set model.folder"
    )


def test_stages_are_not_nested() -> None:
    inner = "{a: {step: 'penstock.algorithms.sft:sft_step', num_steps: 1, per_step: {demos: 1}}}"
    with pytest.raises(ConfigError) as caught:
        resolved(composed(f"algorithm.before.sft.before={inner}"))
    assert str(caught.value) == (
        "'algorithm.before.sft.before' is set, but stages cannot be nested\n"
        "    list all stages under algorithm.before, in order"
    )


def test_what_was_found_is_written_down() -> None:
    config = run_config(composed())
    run = resolve(config)
    found = run.model.model_copy(update={"architecture": {"model_type": "qwen2", "vocab_size": 9}})
    written = dumped(run.having(model=found))
    assert validated(RunConfig, written).model.architecture["vocab_size"] == 9
    assert "vocab_size" not in config.model.architecture


def test_a_misspelt_key_of_an_architecture_is_refused_by_every_command() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(composed("+model.architecture.hiden_size=64"))
    said = "there is no key 'model.architecture.hiden_size'; did you mean 'hidden_size'?\n    a "
    assert str(caught.value).startswith(said)
    resolved(composed("model=llama-7b"))  # without weights, to plan with


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize(
    "key",
    [
        "mismatch.warn_above",
        "mismatch.stop_above",
        "task.max_bad_fraction",
        "schedule.deadline_s",
        "algorithm.optimizer.lr",
        "algorithm.optimizer.eps",
        "algorithm.optimizer.weight_decay",
        "algorithm.optimizer.max_grad_norm",
        "+algorithm.cfg.sampling.temperature",
    ],
)
def test_numbers_are_finite(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match="expected (a finite number|.* 0)"):
        resolved(composed(f"{key}={value}"))


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("key", ["no_eos_score", "no_eos_penalty"])
def test_what_a_cut_off_response_costs_is_finite(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.: expected a finite number"):
        resolved(composed("algorithm=online_dpo", f"+algorithm.cfg.{key}={value}"))


@pytest.mark.slow
def test_what_is_said_of_deaths_is_carried_over() -> None:
    run = resolved(composed("executor=ray", "recovery.max_restarts=5"))
    assert run.config.recovery == Recovery(max_restarts=5)
