"""PPO whose KL coefficient follows the KL: the controller, and what the step does with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.algorithms.controllers import KLTarget
from penstock.algorithms.papers.adaptive_ppo import AdaptivePPO, adaptive_ppo_step
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.training.controllers import AdaptiveKL, KLControllerSpec

from .test_steps import run_ppo


def make() -> AdaptiveKL:
    return KLControllerSpec().build(WorkerContext("controller"))


def coefficient(worker: AdaptiveKL, first: float = 0.1) -> float:
    return float(worker.coefficient(torch.zeros(1, dtype=torch.float64), first)[0])


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        ([9.0, 9.0], 0.1 * (1 + 0.2 * 2 / 100)),  # the error is 0.5, of which 0.2 counts
        ([3.0, 3.0, 3.0], 0.1 * (1 - 0.2 * 3 / 100)),
        ([6.0, 6.6], 0.1 * (1 + 0.05 * 2 / 100)),
        ([6.0], 0.1),
    ],
)
def test_one_step_of_the_controller(kl: list[float], expected: float) -> None:
    worker, target = make(), KLTarget(target_kl=6.0, horizon=100)
    assert coefficient(worker) == pytest.approx(0.1)
    report = worker.follow(torch.tensor(kl), 0.1, target)
    assert coefficient(worker) == pytest.approx(expected, rel=1e-8)
    assert report.metrics["kl_coef"].value == pytest.approx(expected, rel=1e-8)
    assert report.metrics["observed_kl"].value == pytest.approx(sum(kl) / len(kl))


def test_a_saved_controller_goes_on_where_it_was(tmp_path: Path) -> None:
    one, other, target = make(), make(), KLTarget()
    one.follow(torch.full((7,), 20.0), 0.1, target)
    one.save_state(tmp_path / "c")
    other.load_state(tmp_path / "c")
    for worker in (one, other):
        worker.follow(torch.tensor([1.0, 2.0]), 0.1, target)
    assert one.export_weights() == other.export_weights()
    assert coefficient(one) == coefficient(other) != 0.1


def trained(step: Any, cfg: PPO, *more: Any) -> dict[str, Any]:
    """What PPO or the adaptive one trains actor and critic on."""
    actor, critic, _ = run_ppo(cfg, *more, step=step)
    return {
        "advantage": actor.trained["batch"].advantage,
        "target": critic.trained["batch"].value_target,
    }


def test_a_step_is_ppos_with_the_coefficient_it_began_with() -> None:
    options: dict[str, Any] = {"whiten_advantages": False, "kl_estimator": "k3"}
    expected = trained(ppo_step, PPO(kl_coef=0.3, **options))
    worker, target = make(), KLTarget(target_kl=0.001, horizon=10)
    found = trained(
        adaptive_ppo_step, AdaptivePPO(kl_coef=0.3, kl_target=target, **options), worker
    )
    for name, column in expected.items():
        torch.testing.assert_close(found[name], column, atol=1e-6, rtol=0)
    # The next step's is another one.
    assert coefficient(worker, 0.3) != pytest.approx(0.3)
    again = trained(
        adaptive_ppo_step, AdaptivePPO(kl_coef=0.3, kl_target=target, **options), worker
    )
    assert not torch.equal(again["advantage"], found["advantage"])


def test_a_coefficient_that_cannot_be_adapted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^kl_coef is 0, which stays 0 however it is adapted"):
        AdaptivePPO(kl_coef=0.0)
    with pytest.raises(ValueError, match=r"^max_change is 1.0; expected above 0 and below 1$"):
        KLTarget(max_change=1.0)
