"""Several rewards as one, and the mean of several models' weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.algorithms.papers.ensemble_ppo import (
    Ensemble,
    EnsemblePPO,
    EnsembleRule,
    ensemble_ppo_step,
    joined_score,
)
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.graph.tracer import build
from penstock.workers.models.model_folder import mean_folder, weight_mean
from penstock.workers.training.flat_parameters import read_tensors, write_tensors

from ..test_steps import ScriptedReward

SCORES = torch.tensor([[1.0, 2.0, 0.0], [1.4, -1.0, 0.0], [0.6, 2.0, 0.3]]).double()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"combination": "mean"}, [1, 1, 0.1]),
        ({"combination": "worst_case"}, [0.6, -1, 0]),
        ({"combination": "uncertainty_weighted"}, [0.984, 0.7, 0.097]),
        (
            {"combination": "uncertainty_weighted", "variance": "biased"},
            [0.989333, 0.8, 0.098],
        ),
    ],
)
def test_members_scores_become_one(options: dict[str, Any], expected: list[float]) -> None:
    score = joined_score(*SCORES, rule=EnsembleRule(**options))
    assert score.tolist() == pytest.approx(expected, abs=1e-6)


def test_an_ensemble_stands_for_a_reward() -> None:
    members = [ScriptedReward(row) for row in SCORES.tolist()]
    nothing = torch.zeros(3, 0)
    for rule in (EnsembleRule(combination="worst_case"), EnsembleRule(uncertainty_coef=0.5)):
        score = Ensemble(*members, rule=rule).score(nothing, nothing, nothing)
        assert torch.equal(score, joined_score(*SCORES, rule=rule))


def test_each_member_is_a_role_of_its_own() -> None:
    graph = build(ensemble_ppo_step, cfg=EnsemblePPO())
    asked = [ref.node for _, ref in graph["joined_score"].inputs]
    assert asked == ["reward.score", "reward_b.score", "reward_c.score"]


def test_bad_ensembles_are_refused() -> None:
    with pytest.raises(ValueError, match="combination"):
        EnsembleRule(combination="median")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="2 to 5 members, got 1"):
        Ensemble(ScriptedReward([1]), rule=EnsembleRule())


MODELS = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, -2.0])}]


@pytest.mark.parametrize(
    ("shares", "expected"), [([0.5, 0.5], [2, 0]), ([0.25, 0.75], [2.5, -1]), ([2, 6], [2.5, -1])]
)
def test_weights_are_averaged(shares: list[float], expected: list[float]) -> None:
    assert weight_mean(MODELS, shares)["w"].tolist() == pytest.approx(expected)


def test_only_equal_models_have_a_mean() -> None:
    with pytest.raises(ValueError, match="differ in 'v'"):
        weight_mean([*MODELS, {"w": torch.zeros(2), "v": torch.zeros(1)}], [1, 1, 1])
    with pytest.raises(ValueError, match="differ in 'w'"):
        weight_mean([*MODELS, {"w": torch.zeros(3)}], [1, 1, 1])


def test_a_mean_is_written_once_as_a_folder(tmp_path: Path) -> None:
    folders: dict[str, float] = {}
    for name, model in zip("ab", MODELS, strict=True):
        (tmp_path / name).mkdir()
        write_tensors(tmp_path / name / "model.safetensors", model)
        (tmp_path / name / "config.json").write_text(name)
        folders[str(tmp_path / name)] = 0.5
    made = mean_folder(folders, tmp_path)
    assert read_tensors(made / "model.safetensors")["w"].tolist() == [2, 0]
    assert (made / "config.json").read_text() == "a"
    (made / "config.json").write_text("kept")
    assert mean_folder(folders, tmp_path) == made
    assert (made / "config.json").read_text() == "kept"
    assert mean_folder({**folders, str(tmp_path / "a"): 0.25}, tmp_path) != made
    (tmp_path / "b" / "model.safetensors").rename(tmp_path / "b" / "other.safetensors")
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        mean_folder(folders, tmp_path)
