"""Every YAML of the package composes, validates and makes its graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import penstock.configs
import pytest
from penstock.configs.schema import RunConfig
from penstock.configs.validate import validated
from penstock.launch.cli.hydra_app import compose
from penstock.launch.cli.plan import OUTPUTS
from penstock.launch.inputs.run import dumped, resolve, resolved, run_config
from penstock.launch.placement.machine import MEASURED
from penstock.launch.placement.plan_request import plan_request
from penstock.launch.stages.prepare import build_stages

CONFIGS = Path(str(penstock.configs.__file__)).parent
OPTIONS = sorted(path.relative_to(CONFIGS).with_suffix("") for path in CONFIGS.glob("*/*.yaml"))
FETCHED = [
    *(Path("model/hub"), Path("model/smollm2-135m")),
    *(Path("experiment/smollm2"), Path("experiment/smollm2_agent")),
]
"""Models that are not there before a run fetches or converts them; see `test_models.py`."""
FOR_PLANS = [
    option
    for option in OPTIONS
    if (option.parent.name == "cluster" and option.name != MEASURED)
    or option.as_posix() == "schedule/auto"
    or (
        option.parent.name == "model"
        and option.name not in ("tiny", "mlp", "folder", *(path.name for path in FETCHED))
    )
]
"""What only `penstock plan` takes: clusters, a lag to be chosen, and shapes without weights."""
FOR_RUNS = [
    option
    for option in OPTIONS
    if option not in (*FOR_PLANS, *FETCHED) and option.as_posix() != f"cluster/{MEASURED}"
]
ALGORITHMS = sorted(path.stem for path in (CONFIGS / "algorithm").glob("*.yaml"))
ALGORITHMS.remove("own")  # it is complete only with a step


IN_ENVIRONMENTS = ["algorithm=env_ppo", "model=mlp"]


def model_folder(path: Path) -> Path:
    folder = path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def extra(option: Path, tmp_path: Path) -> list[str]:
    """What an option leaves to be given."""
    return {
        "algorithm/own": ["algorithm.step=penstock.algorithms.grpo:grpo_step"],
        "model/folder": [f"model.folder={model_folder(tmp_path)}"],
        "task/own": ["task.kind=penstock.workers.data.row_sources:FileTaskSpec", "task.path=a"],
        "task/file": ["task.path=problems.jsonl"],
        "task/hf": ["task.dataset=problems"],
        "task/mixture": ["task.tasks={sums: chain_sum}"],
        "task/gymnasium": ["task.id=CartPole-v1", *IN_ENVIRONMENTS],
        "task/cartpole": IN_ENVIRONMENTS,
        "task/acrobot": IN_ENVIRONMENTS,
        "task/pendulum": IN_ENVIRONMENTS,
        "task/cover": ["algorithm=mappo", "model=mlp"],
        "task/tic_tac_toe": ["algorithm=self_play", "model=mlp"],
        "task/connect_four": ["algorithm=self_play", "model=mlp"],
        "task/envpool_game": ["algorithm=self_play", "model=mlp", "task.id=Hex-v1"],
        "task/pettingzoo_game": ["algorithm=self_play", "model=mlp", "task.id=tictactoe_v3"],
        "task/gymnasium_text": ["task.env=penstock:Nothing"],
        "task/openenv": ["task.url=http://localhost:8000"],
        "task/program": ["task.command=[python, agent.py]"],
        "task/verifiers": ["task.env=nothing"],
        "executor/ray_split": ["schedule=one_step_off"],
        "schedule/in_flight": ["executor=ray_split"],
    }.get(option.as_posix(), [])


def composed(*overrides: str) -> dict[str, Any]:
    made = compose("run", list(overrides))
    made.pop("resume")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("option", FOR_PLANS, ids=str)
def test_every_option_that_is_only_planned_for_makes_a_request(option: Path) -> None:
    made = compose("plan", ["algorithm=ppo", f"{option.parent}={option.name}"])
    request = plan_request({key: made[key] for key in made.keys() - {"resume", *OUTPUTS}})
    assert all(shape is not None for shape in request.models.values())
    assert request.cluster.num_devices > 0


@pytest.mark.parametrize("option", FOR_RUNS, ids=str)
def test_every_other_option_makes_a_run(option: Path, tmp_path: Path) -> None:
    stages = build_stages(
        resolved(composed(f"{option.parent}={option.name}", *extra(option, tmp_path)))
    ).stages
    assert all(str(stage.graph) for stage in stages)


def keys_to_read(value: Any, at: str = "") -> set[str]:
    """The keys of a run with their values; what a stage repeats of another one is there once."""
    if not isinstance(value, dict) or not value:
        return {f"{at}={value}"}
    keys: set[str] = set()
    for key, below in value.items():
        stages = below.values() if key == "before" else ()
        keys = keys.union(*(keys_to_read(stage, f"{at}.before") for stage in stages))
        if key != "before":
            keys |= keys_to_read(below, f"{at}.{key}")
    return keys


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_has_fewer_than_60_keys(algorithm: str) -> None:
    # Three reward models that differ in their seeds have one more key each to read, not eight.
    assert len(keys_to_read(composed(f"algorithm={algorithm}"))) < 60


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_written_down_is_read_back_as_the_same_run(algorithm: str) -> None:
    config = run_config(composed(f"algorithm={algorithm}", "algorithm.optimizer.warmup_calls=3"))
    run = resolve(config)
    written = dumped(run)
    again = run_config(written)
    assert dumped(resolve(again)) == written
    graphs = [str(stage.graph) for stage in run.stages]
    assert [str(stage.graph) for stage in resolve(again).stages] == graphs


def test_a_key_of_a_nested_default_leaves_its_other_keys_alone() -> None:
    run = resolved(composed("algorithm=ppo", "algorithm.cfg.policy_loss.eps_high=0.3"))
    graph = run.main.graph
    assert "ClippedPolicyLoss(report_entropy=True, eps_high=0.3)" in str(graph)
    assert "Sampling(num_samples=8, max_new_tokens=5)" in str(graph)


def test_the_composition_itself_is_valid_without_launching() -> None:
    assert validated(RunConfig, composed()).schedule.max_lag == 0
